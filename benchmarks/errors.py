"""What each recipe costs in accuracy: measured errors of a Linear's three GEMMs beside the budget.

    python -m benchmarks errors [--recipes fp8-block ...] [--seeds N] [--contraction N] [--json FILE]

Relative Frobenius error, in percent, of output, input gradient and weight gradient of an `fg.Linear` in bf16 against
float64 GEMMs of the same bf16 tensors; mean over seeds. The GEMM in question contracts 4096 elements, the other two
sizes are 256. x ~ N(0, 1), W ~ 0.02 N(0, 1), grad_output ~ 1e-3 N(0, 1); "heavy" draws all of them from Student's t
with 3 degrees of freedom instead. Rounding the output to bf16, 0.17 %, is in all numbers.

The budget, in parentheses, is the same error of the quantized operands multiplied in float64, from an independent
implementation in NumPy. Measured values must lie between 0.7 and 1.25 times it: less means that something was not
quantized.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys

import torch
from torch import Tensor

import fullgraph as fg
from fullgraph.formats import Format, FourOverSix, MXScaleMode
from fullgraph.recipes import (
    BackwardOverride,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8PerRowScaling,
    HighPrecision,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

OTHER = 256
GEMMS = ("fprop", "dgrad", "wgrad")
DATA = ("normal", "heavy")
LOWEST, HIGHEST = 0.7, 1.25
"""How far a measured error may be from its budget, as factors."""

Triple = tuple[float, float, float]
TENSOR_HYBRID = ((3.72, 5.90, 5.91), (3.75, 5.89, 5.87))
POWER_OF_TWO = ((3.76, 3.77, 3.78), (3.75, 3.76, 3.76))
POWER_OF_TWO_HYBRID = ((3.76, 5.93, 5.91), (3.75, 5.96, 5.94))


@dataclasses.dataclass(frozen=True)
class Row:
    """A recipe with some options, and the errors that it may have in percent.

    Args:
        name: of the recipe.
        options: what differs from its defaults.
        recipe: the recipe.
        budget: errors of fprop, dgrad and wgrad with normal values, then with heavy tails; None if there is none.
    """

    name: str
    options: str
    recipe: Recipe
    budget: tuple[Triple, Triple] | None = None


_E5M2, _E4M3 = Format.E5M2, Format.E4M3
ROWS = (
    Row("bf16", "", HighPrecision()),
    Row("fp8-delayed", "amax unchanged since the last step", DelayedScaling(), TENSOR_HYBRID),
    Row("fp8-current", "", Float8CurrentScaling(), TENSOR_HYBRID),
    Row(
        "fp8-current", "power_of_two", Float8CurrentScaling(power_of_two=True), POWER_OF_TWO_HYBRID
    ),
    Row(
        "fp8-current",
        "backward_format=E4M3",
        Float8CurrentScaling(backward_format=_E4M3),
        ((3.72, 3.76, 3.74), (3.75, 3.73, 3.73)),
    ),
    Row(
        "fp8-current",
        "backward_override=HIGH_PRECISION",
        Float8CurrentScaling(backward_override=BackwardOverride.HIGH_PRECISION),
    ),
    Row(
        "fp8-current",
        "backward_override=DEQUANTIZED",
        Float8CurrentScaling(backward_override=BackwardOverride.DEQUANTIZED),
    ),
    Row("fp8-per-row", "", Float8PerRowScaling(), POWER_OF_TWO),
    Row(
        "fp8-per-row",
        "power_of_two=False",
        Float8PerRowScaling(power_of_two=False),
        ((3.74, 3.75, 3.75), (3.60, 3.58, 3.57)),
    ),
    Row(
        "fp8-per-row",
        "high_precision_wgrad",
        Float8PerRowScaling(high_precision_wgrad=True),
        ((3.76, 3.77, 0.0), (3.75, 3.76, 0.0)),
    ),
    Row("fp8-block", "", Float8BlockScaling(), POWER_OF_TWO),
    Row(
        "fp8-block",
        "power_of_two=False",
        Float8BlockScaling(power_of_two=False),
        ((3.69, 3.70, 3.64), (3.43, 3.42, 3.16)),
    ),
    Row("mxfp8", "", MXFP8BlockScaling(), POWER_OF_TWO),
    Row(
        "mxfp8",
        "weight_two_dimensional",
        MXFP8BlockScaling(weight_two_dimensional=True),
        POWER_OF_TWO,
    ),
    Row(
        "mxfp8",
        "scale_mode=FLOOR",
        MXFP8BlockScaling(scale_mode=MXScaleMode.FLOOR),
        ((4.16, 4.13, 4.15), (4.86, 4.77, 4.88)),
    ),
    Row("mxfp8", "scale_mode=CEIL", MXFP8BlockScaling(scale_mode=MXScaleMode.CEIL)),
    Row("mxfp8", "scale_mode=EVEN", MXFP8BlockScaling(scale_mode=MXScaleMode.EVEN)),
    Row(
        "mxfp8",
        "backward_format=E5M2",
        MXFP8BlockScaling(backward_format=_E5M2),
        POWER_OF_TWO_HYBRID,
    ),
    Row("nvfp4", "", NVFP4BlockScaling(), ((14.6, 17.6, 16.6), (20.3, 22.6, 17.2))),
    Row(
        "nvfp4",
        "without stochastic_rounding",
        NVFP4BlockScaling(stochastic_rounding=False),
        ((14.6, 14.6, 13.4), (20.3, 20.4, 13.9)),
    ),
    Row(
        "nvfp4",
        "without stochastic_rounding, hadamard",
        NVFP4BlockScaling(stochastic_rounding=False, hadamard=False),
        ((14.6, 14.6, 13.4), (20.3, 20.4, 12.8)),
    ),
    Row(
        "nvfp4",
        "without weight_two_dimensional",
        NVFP4BlockScaling(weight_two_dimensional=False),
        ((13.4, 16.7, 16.6), (12.9, 16.2, 17.2)),
    ),
    Row(
        "nvfp4",
        "without any of the three",
        NVFP4BlockScaling(stochastic_rounding=False, hadamard=False, weight_two_dimensional=False),
        ((13.4, 13.5, 13.4), (12.9, 12.8, 12.8)),
    ),
    Row(
        "nvfp4",
        "without any of the three, four_over_six=MAE",
        NVFP4BlockScaling(
            stochastic_rounding=False,
            hadamard=False,
            weight_two_dimensional=False,
            four_over_six=FourOverSix.MAE,
        ),
    ),
    Row("nvfp4", "row_scaled_input", NVFP4BlockScaling(row_scaled_input=True)),
)


def draw(data: str, shape: tuple[int, int], factor: float) -> Tensor:
    """Random values in bf16, from the generator of torch."""
    values = torch.randn(shape)
    if data == "heavy":  # Student's t: a normal value over the root of a mean of three squares
        values /= torch.randn((*shape, 3)).square().mean(-1).sqrt()
    return (factor * values).to(torch.bfloat16)


def errors(row: Row, data: str, seed: int, contraction: int) -> list[float]:
    """Relative errors of fprop, dgrad and wgrad, each with its own contraction as the long one."""
    return [_error(row.recipe, gemm, data, seed, contraction) for gemm in GEMMS]


def _error(recipe: Recipe, gemm: str, data: str, seed: int, contraction: int) -> float:
    torch.manual_seed(seed)
    sizes = {"fprop": "K", "dgrad": "N", "wgrad": "M"}
    m, n, k = (contraction if sizes[gemm] == size else OTHER for size in "MNK")
    x = draw(data, (m, k), 1.0).requires_grad_(gemm == "dgrad")
    weight = draw(data, (n, k), 0.02)
    grad_output = draw(data, (m, n), 1e-3)
    layer = fg.Linear(k, n, bias=False, dtype=torch.bfloat16, recipe=recipe)
    with torch.no_grad():
        layer.weight.copy_(weight)
    layer.weight.requires_grad_(gemm == "wgrad")
    output = layer(x)
    if output.requires_grad:
        output.backward(grad_output)
    if recipe.scaling_rule_text:  # the first step only told what the scales should be
        fg.nn.update_scales(layer)
        x.grad = layer.weight.grad = None
        output = layer(x)
        if output.requires_grad:
            output.backward(grad_output)
    actual = {"fprop": output, "dgrad": x.grad, "wgrad": layer.weight.grad}[gemm]
    assert actual is not None
    x, weight, grad_output = (t.detach().double() for t in (x, weight, grad_output))
    exact = {
        "fprop": lambda: x @ weight.t(),
        "dgrad": lambda: grad_output @ weight,
        "wgrad": lambda: grad_output.t() @ x,
    }[gemm]()
    return ((actual.detach().double() - exact).norm() / exact.norm()).item()


def measure(rows: list[Row], seeds: int, contraction: int) -> list[dict]:
    """Percentages of each row: "normal" and "heavy", three numbers each."""
    found = []
    for row in rows:
        percent = {}
        for data in DATA:
            runs = [errors(row, data, seed, contraction) for seed in range(seeds)]
            percent[data] = [100 * statistics.mean(gemm) for gemm in zip(*runs, strict=True)]
        found.append({"recipe": row.name, "options": row.options, **percent})
        print(f"{row.name} {row.options}", file=sys.stderr)
    return found


def table(rows: list[Row], measured: list[dict]) -> str:
    """Measured errors in percent with the budget in parentheses, as Markdown."""
    columns = [*GEMMS, *[f"{gemm}, heavy" for gemm in GEMMS]]
    lines = [f"| recipe | options | {' | '.join(columns)} |", "| --- " * (2 + len(columns)) + "|"]
    for row, found in zip(rows, measured, strict=True):
        values = [*found["normal"], *found["heavy"]]
        budget = [None] * len(values) if row.budget is None else [*row.budget[0], *row.budget[1]]
        cells = [
            _digits(value) + ("" if limit is None else f" ({_digits(limit)})")
            for value, limit in zip(values, budget, strict=True)
        ]
        lines.append(f"| `{row.name}` | {row.options} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _digits(percent: float) -> str:
    return f"{percent:.1f}" if percent >= 10 else f"{percent:.2f}"


def outside(rows: list[Row], measured: list[dict]) -> list[str]:
    """What is not within the budget, as sentences."""
    found = []
    for row, one in zip(rows, measured, strict=True):
        for data, budget in zip(DATA, row.budget or (), strict=False):
            for gemm, value, limit in zip(GEMMS, one[data], budget, strict=True):
                if limit and not LOWEST * limit <= value <= HIGHEST * limit:
                    found.append(
                        f"{row.name} {row.options}: {gemm}, {data}: {value:.2f} % for a budget of {limit} %"
                    )
    return found


def main(arguments: list[str]) -> None:
    """Measure and print the table; exits with 1 if anything lies outside of its budget."""
    parser = argparse.ArgumentParser(
        prog="benchmarks errors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = list(dict.fromkeys(row.name for row in ROWS))
    parser.add_argument("--recipes", nargs="*", default=names, choices=names)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--contraction", type=int, default=4096)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    rows = [row for row in ROWS if row.name in options.recipes]
    measured = measure(rows, options.seeds, options.contraction)
    print(table(rows, measured))
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1) + "\n")
    problems = outside(rows, measured)
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main(sys.argv[1:])
