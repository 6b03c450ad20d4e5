"""Host time of one op, on the CPU: `fullgraph.customop` beside other ways to make an op, in one run.

    python -m benchmarks host_overhead [--rounds N] [--json FILE]

Every op has the same trivial body, one allocation, so what is timed is the way to it. Inside compiled code it is the
slope between a chain of a few and one of many ops, for the inference and for a forward + backward pair; in eager
mode the time over a direct call of the implementation. All variants take turns, and the least of many rounds counts:
other work on the machine only ever adds.

- `aten.mm`: an op of torch itself, 4 x 4;
- `fixed slots`: what a hand-written op can do at best: one tensor in, one out, its own dispatcher entries;
- `custom_op`: `torch.library.custom_op` with `register_autograd`, as its documentation has it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import pathlib
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import environment
from fullgraph.customop import Pass, Plan, define

FEW, MANY = 10, 60
TARGETS = {"compiled inference": 6.0, "compiled pair": 15.0, "eager inference": 25.0}
"""Microseconds: an op, a forward + backward pair, an eager call over a direct one."""


@dataclasses.dataclass
class Forward:
    x: Tensor
    factor: float | None = None
    needs: tuple[str, ...] = ()


@dataclasses.dataclass
class Backward:
    grad_output: Tensor
    factor: float
    needs: tuple[str, ...] = ()


def execute(plan: Plan, a: Forward) -> dict[str, Tensor]:
    return {"output": torch.empty_like(a.x)}


def execute_backward(plan: Plan, a: Backward) -> dict[str, Tensor]:
    return {"x": torch.empty_like(a.grad_output)}


def ours() -> Callable[[Tensor], Tensor]:
    """The op of this library: dataclass arguments and a token."""
    op = define(
        "benchmarks::ours",
        forward=Pass(Forward, lambda a: Plan({"output": a.x}), execute),
        backward=Pass(Backward, lambda a: Plan({"x": a.grad_output}), execute_backward),
        gradients=("x",),
    )
    token = op.encode(factor=0.5)
    return lambda x: op(Forward(x), token=token)


def fixed_slots() -> Callable[[Tensor], Tensor]:
    """The same three ops by hand, for one tensor and a string and nothing else."""
    library = torch.library.Library("benchmarks_fixed", "DEF")

    def allocate(x: Tensor, meta: str) -> Tensor:
        return torch.empty_like(x)

    for name in ("forward", "backward"):
        library.define(f"{name}(Tensor x, str meta) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, allocate, "CompositeExplicitAutograd")
        torch.library.register_fake(f"benchmarks_fixed::{name}", allocate, lib=library)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, meta: str) -> Tensor:
            ctx.meta = meta
            return torch.ops.benchmarks_fixed.forward(x, meta)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return torch.ops.benchmarks_fixed.backward(grad, ctx.meta), None

    library.define("front(Tensor x, str meta) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("front", Function.apply, "CompositeImplicitAutograd")
    _kept.append(library)
    return lambda x: torch.ops.benchmarks_fixed.front(x, "factor=0.5")


_kept: list[torch.library.Library] = []  # a library takes its ops along when it goes


def custom_op() -> Callable[[Tensor], Tensor]:
    """`torch.library.custom_op`, as its documentation has it."""

    def allocate(x: Tensor, meta: str) -> Tensor:
        return torch.empty_like(x)

    backward = torch.library.custom_op("benchmarks::custom_backward", allocate, mutates_args=())
    backward.register_fake(allocate)
    forward = torch.library.custom_op("benchmarks::custom_forward", allocate, mutates_args=())
    forward.register_fake(allocate)
    forward.register_autograd(lambda ctx, grad: (backward(grad, "factor=0.5"), None))
    return lambda x: forward(x, "factor=0.5")


def aten_mm() -> Callable[[Tensor], Tensor]:
    """A small op of torch itself."""
    weight = torch.eye(4)
    return lambda x: torch.mm(x, weight)


VARIANTS = {
    "fullgraph.customop": ours,
    "fixed slots": fixed_slots,
    "custom_op": custom_op,
    "aten.mm": aten_mm,
}


def compiled_chain(function: Callable[[Tensor], Tensor], length: int) -> Callable[[Tensor], Tensor]:
    """`length` ops, one after the other, in one compiled graph."""

    def chain(x: Tensor) -> Tensor:
        for _ in range(length):
            x = function(x)
        return x

    return torch.compile(chain, fullgraph=True)


def without_gradient(function: Callable[[Tensor], Tensor]) -> Callable[[], object]:
    """One inference."""
    x = torch.randn(4, 4)

    def run() -> object:
        with torch.no_grad():
            return function(x)

    return run


def forward_only(function: Callable[[Tensor], Tensor]) -> Callable[[], object]:
    """One forward pass that records its backward pass."""
    x = torch.randn(4, 4, requires_grad=True)
    return lambda: function(x)


def forward_and_backward(function: Callable[[Tensor], Tensor]) -> Callable[[], object]:
    """One forward and one backward pass."""
    x, grad = torch.randn(4, 4, requires_grad=True), torch.ones(4, 4)

    def run() -> object:
        x.grad = None
        return function(x).backward(grad)

    return run


def least_us(functions: dict[Any, Callable[[], object]], rounds: int) -> dict[Any, float]:
    """Least time of one call of each, in microseconds; they take turns."""
    for function in functions.values():
        for _ in range(20):
            function()
    least = dict.fromkeys(functions, float("inf"))
    gc.disable()
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(10):
                function()
            least[name] = min(least[name], (time.perf_counter() - start) / 10 * 1e6)
    gc.enable()
    return least


def compiled_us(rounds: int) -> dict[str, dict[str, float]]:
    """Variant -> time of one op, and of one forward + backward pair, inside compiled code."""
    torch._dynamo.config.recompile_limit = 8 * len(VARIANTS)
    chains: dict[Any, Callable[[], object]] = {}
    for name, function in _variants().items():
        for length in (FEW, MANY):
            chains[name, "inference", length] = without_gradient(compiled_chain(function, length))
            chains[name, "pair", length] = forward_and_backward(compiled_chain(function, length))
    times = least_us(chains, rounds)
    return {
        name: {
            kind: (times[name, kind, MANY] - times[name, kind, FEW]) / (MANY - FEW)
            for kind in ("inference", "pair")
        }
        for name in VARIANTS
    }


def eager_us(rounds: int) -> dict[str, dict[str, float]]:
    """Variant -> time of one call over a direct call of the implementation."""
    calls: dict[Any, Callable[[], object]] = {}
    for name, function in _variants().items():
        calls[name, "inference"] = without_gradient(function)
        calls[name, "forward"] = forward_only(function)
        calls[name, "pair"] = forward_and_backward(function)
    x, plan = torch.randn(4, 4), Plan({})
    calls["direct", "inference"] = without_gradient(lambda x: execute(plan, Forward(x)))
    calls["direct", "forward"] = lambda: execute(plan, Forward(x))
    calls["direct", "backward"] = lambda: execute_backward(plan, Backward(x, 0.5))
    times = least_us(calls, rounds)
    direct = {kind: times["direct", kind] for kind in ("inference", "forward")}
    direct["pair"] = times["direct", "forward"] + times["direct", "backward"]
    return {name: {kind: times[name, kind] - direct[kind] for kind in direct} for name in VARIANTS}


_made: dict[str, Callable[[Tensor], Tensor]] = {}


def _variants() -> dict[str, Callable[[Tensor], Tensor]]:
    if not _made:
        _made.update({name: make() for name, make in VARIANTS.items()})
    return _made


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write a JSON file if asked to."""
    parser = argparse.ArgumentParser(prog="benchmarks host_overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="the least of so many counts")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    compiled, eager = compiled_us(options.rounds), eager_us(options.rounds)

    print(f"{'microseconds':20s}{'compiled':>22s}{'eager, over a direct call':>34s}")
    print(f"{'':20s}{'inference':>12s}{'pair':>10s}{'inference':>14s}{'forward':>10s}{'pair':>10s}")
    for name in VARIANTS:
        c, e = compiled[name], eager[name]
        print(
            f"{name:20s}{c['inference']:12.1f}{c['pair']:10.1f}"
            f"{e['inference']:14.1f}{e['forward']:10.1f}{e['pair']:10.1f}"
        )
    mine = {
        "compiled inference": compiled["fullgraph.customop"]["inference"],
        "compiled pair": compiled["fullgraph.customop"]["pair"],
        "eager inference": eager["fullgraph.customop"]["inference"],
    }
    for name, limit in TARGETS.items():
        print(f"target: {name} <= {limit:g}: {'met' if mine[name] <= limit else 'missed'}")
    if options.json:
        found = {"compiled": compiled, "eager": eager, "targets": TARGETS}
        found["environment"] = {**environment(), "cpu": platform.processor() or platform.machine()}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
