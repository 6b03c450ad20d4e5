"""Quantizing one matrix on a GPU, for every recipe: time, bytes, memory, and whether the bytes are the reference's.

    python -m benchmarks quantize [--recipes mxfp8 ...] [--shapes 8192x4096 ...] [--out DIR] [--device cpu]

For the quantizer of each tensor of a layer and each choice of copies:

- `device ms`: `quantizer.quantize(x, copies, layout, state)`, what the op of a layer calls, in a CUDA graph: what the
  kernels take, with no Python between them. The layout is that of the GEMMs of the device.
- `eager ms`: the same call without a graph. Where it is longer, Python and launches are what takes the time.
- `fg.quantize ms`: the public function with both copies, eager; it makes the plain layout. Delayed scaling has none.
- `share`: the bytes that must be moved (the input read once, each output written once) over `device ms`, as a share of
  what `copy_` of the same matrix reaches in the same run. Where the first element can only be cast once the amax of
  the whole tensor is known (current scaling, NVFP4) or of a whole row, the input is read twice: at most 56 to 67 %.
- `memory`: the peak above the input, outputs included, in multiples of the input.
- `equal`: codes, scales and amaxes have the bits of `fullgraph.reference` on the same device.

Medians of interleaved calls, CUDA events, L2 flushed before each, inputs in turn. Without a GPU, `--device cpu` runs
the reference by the clock on the wall: a test of this program, no measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fullgraph as fg
from benchmarks.timing import environment, interleaved_ms
from fullgraph import gemm, quantizers, reference
from fullgraph.customop.structured import flatten
from fullgraph.formats import Orientation
from fullgraph.recipes import BY_NAME
from fullgraph.tensor import CastState, Quantizer

SHAPES = ("8192x4096", "8192x14336")
ROLES = ("input", "weight", "grad_output")
COPIES = (fg.ROWWISE, fg.COLUMNWISE, fg.BOTH)
NUM_INPUTS = 3
COLUMNS = {
    "recipe": "recipe",
    "roles": "tensors",
    "copies": "copies",
    "device_ms": "device ms",
    "share": "share",
    "eager_ms": "eager ms",
    "api_ms": "fg.quantize ms",
    "memory": "memory",
    "equal": "equal",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One quantizer, and the tensors that a recipe casts with it."""

    recipe: str
    roles: str
    quantizer: Quantizer

    def state(self, device: torch.device) -> CastState:
        """What the cast takes besides the tensor; an amax of its own each time."""
        quantizer = self.quantizer
        return CastState(
            torch.tensor(64.0, device=device) if quantizer.is_delayed else None,
            torch.zeros((), device=device) if quantizer.is_delayed else None,
            torch.tensor(7, device=device) if quantizer.is_stochastic else None,
        )


def cases(recipes: list[str]) -> list[Case]:
    """The quantizers of the recipes; tensors that are cast alike are one case."""
    found = []
    for recipe in recipes:
        numerics = BY_NAME[recipe].linear_numerics()
        roles: dict[Quantizer, list[str]] = {}
        for role in ROLES:
            quantizer = getattr(numerics, role)
            if quantizer is not None:
                roles.setdefault(quantizer, []).append(role)
        found += [Case(recipe, ", ".join(names), q) for q, names in roles.items()]
    return found


def run_case(case: Case, inputs: list[Tensor], rounds: int) -> list[dict[str, Any]]:
    """Time, measure and check one quantizer: a row for each choice of copies."""
    device, quantizer = inputs[0].device, case.quantizer
    layout = gemm.layout(device)
    state = case.state(device)
    rotating = itertools.cycle(inputs)
    target = torch.empty_like(inputs[0])
    functions: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(next(rotating))}
    rows = []
    for copies in COPIES:

        def eager(copies: Orientation = copies) -> object:
            return quantizer.quantize(next(rotating), copies, layout, state)

        equal = is_equal_to_reference(case, inputs[0], copies)  # compiles, too
        peak = peak_bytes(eager, device)
        outputs = flatten(quantizer.quantize(inputs[0], copies, layout, state))
        moved = inputs[0].nbytes + sum(t.nbytes for t in outputs)
        functions[f"{copies.value} eager"] = eager
        if device.type == "cuda":
            functions[f"{copies.value} device"] = captured(eager)
        rows.append(
            {
                "recipe": case.recipe,
                "roles": case.roles,
                "copies": copies.value,
                "bytes": moved,
                "memory": None if peak is None else peak / inputs[0].nbytes,
                "equal": equal,
            }
        )
    if not quantizer.is_delayed:
        functions["both api"] = lambda: fg.quantize(next(rotating), quantizer, fg.BOTH)
    times = interleaved_ms(functions, rounds=rounds, warmup=2, device=str(device))
    bandwidth = 2 * target.nbytes / times["copy"]["median"]
    for row in rows:
        for kind in ("device", "eager", "api"):
            taken = times.get(f"{row['copies']} {kind}")
            row[f"{kind}_ms"] = None if taken is None else taken["median"]
        best = row["eager_ms"] if row["device_ms"] is None else row["device_ms"]
        row["share"] = row["bytes"] / best / bandwidth
        row["copy_gb_per_s"] = bandwidth / 1e6
    return rows


def captured(function: Callable[[], object]) -> Callable[[], object]:
    """The function as the replay of a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def peak_bytes(function: Callable[[], object], device: torch.device) -> int | None:
    """How far memory rises while the function runs; None where nobody counts."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


def is_equal_to_reference(case: Case, x: Tensor, copies: Orientation) -> bool:
    """Whether codes, scales and what was recorded have the bits of the reference."""
    results = []
    for casts in (contextlib.nullcontext(), the_reference()):
        state = case.state(x.device)
        with casts:
            parts = case.quantizer.quantize(x, copies, gemm.layout(x.device), state)
        results.append([*flatten(parts), *([] if state.amax is None else [state.amax])])
    ours, theirs = results
    return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))


@contextlib.contextmanager
def the_reference() -> Iterator[None]:
    """Inside, quantizers cast with the reference on every device."""
    with mock.patch.object(quantizers, "casts_for", return_value=reference):
        yield


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bytes."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of one shape as Markdown."""
    lines = [f"| {' | '.join(COLUMNS.values())} |", "| --- " * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(_shown(key, row[key]) for key in COLUMNS)} |" for row in rows]
    return "\n".join(lines)


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "equal":
        return "yes" if value else "NO"
    if key == "share":
        return f"{value:.0%}"
    return (
        value if isinstance(value, str) else f"{value:.3f}" if key[-2:] == "ms" else f"{value:.2f}"
    )


def report(results: dict[str, Any]) -> str:
    """All of it as a page."""
    lines = ["# Quantizing a matrix", ""]
    head = [results[key] for key in ("date", "device")]
    head += [f"{key} {results[key]}" for key in ("torch", "triton", "fullgraph")]
    lines += [f"{', '.join(head)}, casts: {results['casts']}. `python -m benchmarks quantize`", ""]
    assert __doc__ is not None
    lines += [__doc__.partition("choice of copies:\n\n")[2].strip(), ""]
    for shape, rows in results["shapes"].items():
        speed = sorted(row["copy_gb_per_s"] for row in rows)[len(rows) // 2]
        lines += [f"## {shape}, bf16", "", f"`copy_`: {speed:,.0f} GB/s.", "", table(rows), ""]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Run the benchmark, print and write tables; exits with 1 if bytes differ, with 2 without a GPU."""
    options = _options(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.stderr.write(
            "quantize: there is no CUDA device here.\nWhy: it times kernels against the bandwidth of a GPU.\n"
            "Do: run it on one; --device cpu --shapes 64x96 only shows that the program works.\n"
        )
        sys.exit(2)
    device = torch.device(options.device)
    results = _environment(device)
    begin = time.perf_counter()
    for shape in options.shapes:
        rows, columns = (int(size) for size in shape.split("x"))
        torch.manual_seed(0)
        inputs = [
            torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
            for _ in range(NUM_INPUTS)
        ]
        found = results["shapes"][shape] = []
        for case in cases(options.recipes):
            found += run_case(case, inputs, options.rounds)
            taken = time.perf_counter() - begin
            print(f"{taken:6.1f} s  {shape}  {case.recipe}: {case.roles}", file=sys.stderr)
    page = report(results)
    print(page)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        name = f"quantize_{_slug(results['device'])}_{results['date']}"
        (options.out / f"{name}.md").write_text(page)
        (options.out / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    if not all(row["equal"] for rows in results["shapes"].values() for row in rows):
        sys.exit("quantize: bytes differ from the reference; see the column `equal`")


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks quantize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [name for name in BY_NAME if name != "bf16"]
    parser.add_argument("--recipes", nargs="*", default=names, choices=names)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), metavar="MxK")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path(__file__).parent / "results",
        help="folder for the tables and the JSON",
    )
    return parser.parse_args(arguments)


def _environment(device: torch.device) -> dict[str, Any]:
    try:
        import triton
    except ImportError:
        triton = None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        **environment(),
        "date": datetime.date.today().isoformat(),
        "device": name,
        "triton": getattr(triton, "__version__", "none"),
        "casts": quantizers.casts_for(device).__name__.rpartition(".")[2],
        "shapes": {},
    }


def _slug(device: str) -> str:
    return device.lower().removeprefix("nvidia ").replace(" ", "-")


if __name__ == "__main__":
    main(sys.argv[1:])
