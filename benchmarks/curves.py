"""Loss curves of `fullgraph train`, every recipe over bf16: the numbers and the picture of the documentation.

    python -m benchmarks curves [--recipes bf16 nvfp4 ...] [--size 100m] [--steps N] [--device D] [--out DIR]
        [--draw-only]

Each recipe trains the GPT of `fullgraph train` from the same weights on the same batches, one after the other, as
`fullgraph train --recipe R --compare bf16` does with two at a time. `loss.json` is complete after each of them, and
recipes that are not asked for keep their curves, so a run can be interrupted and continued.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import tempfile
from typing import Any

import torch

from benchmarks.timing import environment
from fullgraph.cli.curves import smoothed
from fullgraph.cli.gpt import SIZES
from fullgraph.cli.train import TrainOptions, train
from fullgraph.recipes import BY_NAME

BASELINE = "bf16"
DIGITS = 4
KEPT = (
    "steps",
    "num_parameters",
    "text_bytes",
    "compiler",
    "device",
    "seed",
    "recompiles",
    "graph_breaks",
    "forward_nodes",
    "backward_nodes",
)


def main(arguments: list[str]) -> None:
    """Train, write loss.json and loss.png, print the table."""
    options = _options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "loss.json"
    results = json.loads(file.read_text()) if file.exists() else {"runs": {}}
    for recipe in () if options.draw_only else options.recipes:
        results["runs"][recipe] = run(recipe, options.steps, options.device, options.size)
        file.write_text(_as_json(results))
    runs = {name: results["runs"][name] for name in BY_NAME if name in results["runs"]}
    if BASELINE in runs:
        draw(options.out / "loss.png", {name: one["loss"] for name, one in runs.items()})
        print(table(runs))


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks curves", description=__doc__)
    parser.add_argument("--recipes", nargs="*", default=list(BY_NAME), choices=list(BY_NAME))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--size", default="small", choices=list(SIZES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/curves"))
    parser.add_argument("--draw-only", action="store_true", help="only draw what is there")
    return parser.parse_args(arguments)


def run(recipe: str, steps: int, device: str, size: str) -> dict[str, Any]:
    """Train in one recipe; what is kept of the result."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as out:
        options = TrainOptions(
            recipe, steps=steps, device=device, out=pathlib.Path(out), size=SIZES[size]
        )
        result = train(options)
    if result["interrupted"]:
        raise KeyboardInterrupt
    return {
        "date": datetime.date.today().isoformat(),
        **environment(),
        **{key: result[key] for key in KEPT},
        "final_loss": round(result["final_loss"], DIGITS),
        "loss": [round(loss, DIGITS) for loss in result["loss"]],
    }


def _as_json(results: dict[str, Any]) -> str:
    """A line for each run."""
    runs = ",\n".join([f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in results["runs"].items()])
    return f'{{"runs": {{\n{runs}\n}}}}\n'


def table(runs: dict[str, dict[str, Any]]) -> str:
    """The final losses as Markdown."""
    lines = ["| recipe | final loss | against bf16 |", "| --- | --- | --- |"]
    baseline = runs[BASELINE]["final_loss"]
    for name, one in runs.items():
        difference = "" if name == BASELINE else f"{one['final_loss'] / baseline - 1:+.2%}"
        lines.append(f"| `{name}` | {one['final_loss']:.3f} | {difference} |")
    return "\n".join(lines)


def draw(path: pathlib.Path, losses: dict[str, list[float]]) -> None:
    """Running means of all recipes, and below how far each is from the baseline."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    baseline = smoothed(losses[BASELINE])
    for index, (name, values) in enumerate(losses.items()):
        mean = smoothed(values)
        steps = range(1, len(mean) + 1)
        style = {"color": "black" if name == BASELINE else f"C{index}", "linewidth": 1.3}
        above.plot(steps, mean, label=name, **style)
        part = [100 * (a / b - 1) for a, b in zip(mean, baseline, strict=False)]
        below.plot(steps[: len(part)], part, **style)
    above.set(ylabel="loss (nats per byte)", title="Byte-level GPT, running mean of 20 steps")
    above.legend()
    below.set(xlabel="step", ylabel=f"against {BASELINE} (%)")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    FigureCanvasAgg(figure).print_png(path)
