"""Seconds to the first step: compiling one layer, a stack of blocks at once, and the same stack block by block.

    python -m benchmarks compile_time [--device cuda] [--blocks 24] [--recipes ...] [--uses ...] [--json FILE]

Each number is from a process of its own: from the first call, forward and backward, to its end, without the import and
without a second step. `cold` begins with an empty cache directory, `warm` is the same again with the directory that it
left. `torch` is the same model with `torch.nn.Linear` in bf16. `graphs` are those that Dynamo made.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import environment

USES = ("layer", "whole", "regional")
"""One layer; all blocks in one graph; a graph for a block, `block.compile()` for each."""
RECIPES = ("torch", "bf16", "fp8-current", "fp8-delayed")


class Block(nn.Module):
    """Two layers and a residual."""

    def __init__(self, make: Callable[[int, int], nn.Module], width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, dtype=torch.bfloat16)
        self.up, self.down = make(width, 4 * width), make(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, make: Callable[[int, int], nn.Module], width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(make, width) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def maker(recipe: str) -> Callable[[int, int], nn.Module]:
    """How a layer of this recipe is made."""
    if recipe == "torch":
        return lambda k, n: nn.Linear(k, n, dtype=torch.bfloat16)
    import fullgraph as fg

    return lambda k, n: fg.Linear(k, n, dtype=torch.bfloat16, recipe=recipe)


def first_step(use: str, recipe: str, device: str, blocks: int, width: int) -> dict[str, float]:
    """Seconds of the first step and of the second one, and the graphs that were made; for a process of its own."""
    from torch._dynamo.utils import counters

    make = maker(recipe)
    with torch.device(device):
        model = make(width, width) if use == "layer" else Stack(make, width, blocks)
        x = torch.randn(128, width, dtype=torch.bfloat16, requires_grad=True)
        grad = torch.ones(128, width, dtype=torch.bfloat16)
    function: Any = model
    if use == "regional":
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(fullgraph=True)
    else:
        function = torch.compile(model, fullgraph=True)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        function(x).backward(grad)
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    graphs = counters["stats"]["unique_graphs"]
    return {"first": seconds[0], "second": seconds[1], "graphs": graphs}


def in_process(arguments: list[str], cache: str) -> dict[str, float]:
    """`first_step` in a process that finds this cache directory."""
    out = subprocess.run(
        [sys.executable, "-m", "benchmarks", "compile_time", "--one", *arguments],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    if out.returncode:
        sys.exit(out.stderr)
    return json.loads(out.stdout.splitlines()[-1])


def measure(use: str, recipe: str, options: argparse.Namespace) -> dict[str, float]:
    """Cold and warm seconds of one use of one recipe."""
    arguments = [use, recipe, options.device, str(options.blocks), str(options.width)]
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = (in_process(arguments, cache) for _ in range(2))
    return {"cold": cold["first"], "warm": warm["first"], "graphs": cold["graphs"]}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write a JSON file if asked to."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--one"]:
        use, recipe, device, blocks, width = arguments[1:]
        print(json.dumps(first_step(use, recipe, device, int(blocks), int(width))))
        return
    parser = argparse.ArgumentParser(prog="benchmarks compile_time", description=__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--uses", nargs="*", default=list(USES), choices=USES)
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers here")
    options = parser.parse_args(arguments)

    found: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'seconds':10s}{'':14s}{'cold':>8s}{'warm':>8s}{'graphs':>8s}")
    for use in options.uses:
        found[use] = {}
        for recipe in options.recipes:
            row = found[use][recipe] = measure(use, recipe, options)
            print(
                f"{use:10s}{recipe:14s}{row['cold']:8.1f}{row['warm']:8.1f}{row['graphs']:8d}",
                flush=True,
            )
    if options.json:
        result = {
            "date": datetime.date.today().isoformat(),
            **environment(),
            "options": {n: getattr(options, n) for n in ("device", "blocks", "width")},
            "seconds": found,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
