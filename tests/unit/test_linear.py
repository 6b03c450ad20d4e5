"""`fg.Linear` in eager mode: values against float64 and a second oracle, shapes, dtypes, what is computed at all."""

import dataclasses
import itertools
from collections import Counter

import pytest
import torch
from linear_cases import (
    E4M3,
    E5M2,
    ROUNDING,
    Case,
    K,
    N,
    assert_linear_in_budget,
    batch,
    oracle_linear,
    plain,
    step,
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


ROWS = [(1,), (13,), (24,), (50,), ()]
FEATURES = [*itertools.product((712, 767, 2), repeat=2), (256, 256)]


@pytest.mark.parametrize("quantized_weight", [False, True], ids=["plain", "quantized-weight"])
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), FEATURES)
def test_error_budget_of_odd_shapes(rows, in_features, out_features, quantized_weight):
    original = nn.Linear(in_features, out_features, dtype=torch.bfloat16)
    layer = Case("fp8-current", quantized_weight=quantized_weight).layer(in_features, out_features)
    layer.load_state_dict(original.state_dict())
    x, grad_output = tensors((*rows, in_features), (*rows, out_features))
    results = step(layer, x, grad_output * 1e-3)
    assert_linear_in_budget(results, original, x, grad_output * 1e-3)


@pytest.mark.parametrize("wrong", ["output", "grad_input", "grad_weight", "grad_bias"])
def test_the_budget_can_be_missed(wrong):
    layer = FP8.layer()
    x, grad_output = batch(24)
    good = step(layer, x, grad_output)
    exact = step(Case("bf16").layer(), x, grad_output)
    assert_linear_in_budget(good, layer, x, grad_output)
    with pytest.raises(AssertionError, match="error"):
        assert_linear_in_budget({**good, wrong: good[wrong] * 1.1}, layer, x, grad_output)


@pytest.mark.parametrize("case", [FP8, Case("bf16")], ids=str)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_tokens(case, shape, dtype):
    layer = case.layer(dtype=dtype)
    x, grad_output = tensors((*shape, K), (*shape, N), dtype=dtype)
    results = step(layer, x, grad_output)
    assert results["output"].shape == (*shape, N)
    assert results["grad_input"].shape == x.shape
    assert_same_bits(results["grad_weight"], torch.zeros(N, K, dtype=dtype))
    assert_same_bits(results["grad_bias"], torch.zeros(N, dtype=dtype))
    assert {r.dtype for r in results.values()} == {dtype}
