"""`fg.Linear` in eager mode: values against float64 and a second oracle, shapes, dtypes, what is computed at all."""

import dataclasses
from collections import Counter

import pytest
import torch
from linear_cases import (
    BACKWARD_ERROR,
    E4M3,
    E5M2,
    FPROP_ERROR,
    Case,
    assert_in_budget,
    assert_same_results,
    batch,
    exact_linear,
    gradients,
    oracle_linear,
    plain,
    run,
    tensors,
)
from oracles import assert_same_bits, relative_error
from torch import nn

import fullgraph as fg
from fullgraph import gemm, reference
from fullgraph.errors import ConfigError, ShapeError
from fullgraph.recipes import Recipe, Role

FP8 = Case("fp8-current")
ALL_RECIPES = list(fg.recipes.BY_NAME)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The rounding of the result, and nothing else: half a unit in the last place at most, and room for the sums.
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}


@dataclasses.dataclass(frozen=True)
class PerRole(Recipe):
    """A recipe with any quantizer for any role."""

    input: object = None
    weight: object = None
    grad_output: object = None

    def quantizer(self, role):
        return {
            Role.INPUT: self.input,
            Role.WEIGHT: self.weight,
            Role.OUTPUT: self.input,
            Role.GRAD_OUTPUT: self.grad_output,
        }[role]


def step(layer, x, grad_output, **options):
    """One forward and backward: the output, the gradient of the input and those of the parameters."""
    layer.zero_grad()
    leaf = x.detach().requires_grad_()
    output = layer(leaf, **options)
    plain(output).backward(grad_output)
    return {"output": plain(output).detach(), "grad_input": leaf.grad, **gradients(layer)}


# Values.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "quantizers",
    [
        (E4M3, E4M3, E5M2),
        (E4M3, E4M3, E4M3),
        (E5M2, E4M3, E5M2),
        (dataclasses.replace(E4M3, power_of_two=True), E5M2, E5M2),
        (None, E4M3, E5M2),
        (E4M3, None, E5M2),
        (E4M3, E4M3, None),
        (E4M3, None, None),
        (None, None, E5M2),
        (None, None, None),
    ],
    ids=lambda qs: "-".join(q.format.name if q else "none" for q in qs),
)
def test_each_gemm_reads_what_the_recipe_says(quantizers, dtype):
    quantizers = dict(zip(("input", "weight", "grad_output"), quantizers, strict=True))
    layer = fg.Linear(40, 24, dtype=dtype, recipe=PerRole(**quantizers))
    x, grad_output = batch(19, 40, 24, dtype=dtype)
    got = step(layer, x, grad_output)
    expected = oracle_linear(x, layer.weight, layer.bias, grad_output, quantizers)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == dtype
        assert relative_error(got[name], value) < ROUNDING[dtype], name


FEATURES = [(k, n) for k in (712, 767, 2) for n in (712, 767, 2)]


@pytest.mark.parametrize("quantized_weight", [False, True], ids=["plain", "quantized-weight"])
@pytest.mark.parametrize("rows", [(1,), (13,), (24,), (50,), ()], ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), [*FEATURES, (256, 256)])
def test_error_budget_of_odd_shapes(rows, in_features, out_features, quantized_weight):
    layer = fg.Linear(in_features, out_features, dtype=torch.bfloat16, recipe="fp8-current")
    exact_layer = nn.Linear(in_features, out_features, dtype=torch.bfloat16)
    layer.load_state_dict(exact_layer.state_dict())
    if quantized_weight:
        layer.weight = nn.Parameter(fg.quantize(layer.weight.detach(), E4M3, fg.BOTH))
    x, grad_output = batch(rows, in_features, out_features) if 0 else (
        tensors((*rows, in_features)),
        tensors((*rows, out_features)) * 1e-3,
    )
    got, exact = step(layer, x, grad_output), exact_linear(exact_layer, x, grad_output)
    assert got.keys() == exact.keys()
    for name, value in exact.items():
        assert got[name].shape == value.shape
        assert got[name].dtype == torch.bfloat16
    sizes = {"input": x.numel(), "weight": layer.weight.numel(), "grad_output": grad_output.numel()}
    for name, error, a, b in (
        ("output", FPROP_ERROR, "input", "weight"),
        ("grad_input", BACKWARD_ERROR, "grad_output", "weight"),
        ("grad_weight", BACKWARD_ERROR, "grad_output", "input"),
    ):
        assert_in_budget(got[name], exact[name], error, sample=min(sizes[a], sizes[b]))
    assert relative_error(got["grad_bias"], exact["grad_bias"]) < ROUNDING[torch.bfloat16]
