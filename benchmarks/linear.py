"""One Linear, forward + backward, on a GPU: fullgraph beside compiled bf16 and torchao, in one run.

    python -m benchmarks linear [--shapes 8192x4096x14336 ...] [--json FILE]

Weights are quantized anew in every step, no bias, bf16 in and out. The correctness of each timed variant is checked
against float32 GEMMs of the same tensors. `gemms` is the sum of the three native FP8 GEMMs per tensor alone, the
part of the time that no quantization can beat.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.util
import json
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fullgraph as fg
from benchmarks.timing import environment, interleaved_ms
from fullgraph import gemm
from fullgraph.formats import Format, Scaling

RECIPES = ("fp8-delayed", "fp8-current", "fp8-per-row", "fp8-block")
"""Those whose GEMMs a Hopper has."""
SHAPES = ("8192x4096x14336", "8192x14336x4096", "16384x8192x8192", "8192x4096x4096")


def providers() -> dict[str, Callable[[nn.Linear], nn.Module]]:
    """What turns an nn.Linear into a timed module, by name."""
    found: dict[str, Callable[[nn.Linear], nn.Module]] = {
        "bf16 compiled": lambda layer: layer,
    }
    for recipe in RECIPES:
        found[f"fullgraph {recipe} compiled"] = functools.partial(_ours, recipe=recipe)
    if importlib.util.find_spec("torchao"):
        for recipe in ("tensorwise", "rowwise"):
            found[f"torchao {recipe} compiled"] = functools.partial(_torchao, recipe=recipe)
    return found


def _ours(layer: nn.Linear, recipe: str) -> nn.Module:
    ours = fg.Linear(
        layer.in_features,
        layer.out_features,
        bias=False,
        device="cuda",
        dtype=torch.bfloat16,
        recipe=recipe,
    )
    ours.load_state_dict(layer.state_dict())
    return ours


def _torchao(layer: nn.Linear, recipe: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(nn.Sequential(layer), config=config)


def run_shape(m: int, k: int, n: int) -> dict[str, Any]:
    """Time and check every provider at one shape."""
    torch.manual_seed(0)
    base = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    want = _reference(x, base.weight, grad)
    steps: dict[str, Callable[[], object]] = {}
    errors: dict[str, list[float]] = {}
    for name, build in providers().items():
        torch._dynamo.reset()
        module = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
        module.load_state_dict(base.state_dict())
        module = build(module)
        compiled = torch.compile(module, fullgraph=True, dynamic=False)
        parameters = list(module.parameters())

        def step(compiled: Any = compiled, parameters: list[Tensor] = parameters) -> Tensor:
            x.grad = None
            for parameter in parameters:
                parameter.grad = None
            output = compiled(x)
            output.backward(grad)
            return output

        if isinstance(module, fg.Linear) and module.scaling_state.rule:
            step()
            fg.update_scales(
                module
            )  # wrong scales saturate, and GEMMs of saturated codes are faster
        output = step()
        got = (output.detach(), x.grad, parameters[0].grad)
        errors[name] = [relative_error(a, b) for a, b in zip(got, want, strict=True)]
        steps[name] = step
    del got, want, output
    steps["gemms"] = _three_gemms(m, k, n)
    times = interleaved_ms(steps)
    return {"ms": times, "errors": errors}


def _reference(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, grad = x.detach().float(), weight.detach().float(), grad.float()
    return x @ weight.t(), grad @ weight, grad.t() @ x


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error."""
    return ((actual.float() - expected).norm() / expected.norm()).item()


def _three_gemms(m: int, k: int, n: int) -> Callable[[], object]:
    def operand(rows: int, contraction: int, format: Format) -> gemm.Operand:
        data = torch.randn(rows, contraction, device="cuda").to(format.dtype).view(torch.uint8)
        return gemm.Operand(data, torch.ones((), device="cuda"), format, Scaling.TENSOR)

    fprop = (operand(m, k, Format.E4M3), operand(n, k, Format.E4M3))
    dgrad = (operand(m, n, Format.E5M2), operand(k, n, Format.E4M3))
    wgrad = (operand(n, m, Format.E5M2), operand(k, m, Format.E4M3))

    def run() -> None:
        for split, (a, b) in zip((False, True, True), (fprop, dgrad, wgrad), strict=True):
            gemm.gemm(gemm.GemmBackend.NATIVE, a, b, split_accumulator=split)

    return run


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks linear", description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), metavar="MxKxN")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        **environment(),
        "shapes": {},
    }
    print("  ".join(f"{k} {v}" for k, v in results.items() if k != "shapes"))
    for shape in options.shapes:
        row = results["shapes"][shape] = run_shape(*(int(size) for size in shape.split("x")))
        bf16 = row["ms"]["bf16 compiled"]["median"]
        for name, ms in row["ms"].items():
            errors = " ".join(f"{100 * e:.2f}%" for e in row["errors"].get(name, ()))
            spread = f"{ms['p10']:.3f}..{ms['p90']:.3f}"
            print(
                f"{shape:17} {name:32} {ms['median']:8.3f} ms ({spread})  {bf16 / ms['median']:5.2f}x  {errors}"
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
