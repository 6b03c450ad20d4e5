"""The layout that native GEMMs ask for, on the CPU: padding and swizzled scales must change no value."""

import pytest
import torch

import fullgraph as fg
from fullgraph import gemm
from fullgraph.customop import token
from fullgraph.formats import Scaling
from fullgraph.recipes import BackwardOverride, Role
from fullgraph.tensor import Layout

SHAPES = [(0, 16, 16), (1, 1, 1), (13, 48, 7), (2, 3, 33, 17, 5), (24, 712, 31), (5, 767)]
RECIPES = [name for name in fg.recipes.BY_NAME if name != "bf16"]
NATIVE = Layout(frozenset(Scaling))


@pytest.fixture(autouse=True)
def no_plans_of_another_layout():
    """Plans are kept for good, by token: a device does not change its layout. Here one does."""
    yield
    forget_plans()


def forget_plans():
    for cache in token.CACHES:
        cache.clear()


def results(recipe, shape, quantized_input=False, quantized_weight=False):
    torch.manual_seed(0)
    *leading, k, n = shape
    layer = fg.Linear(k, n, dtype=torch.bfloat16, recipe=recipe, quantized_weight=quantized_weight)
    x = torch.randn(*leading, k, dtype=torch.bfloat16, requires_grad=True)
    quantizer = layer.recipe.quantizer(Role.INPUT)
    if quantizer.is_delayed:
        quantizer = fg.PerTensorQuantizer(quantizer.format)
    output = layer(fg.quantize(x, quantizer) if quantized_input else x)
    output.backward(torch.randn_like(output))
    return output.detach(), x.grad, layer.weight.grad, layer.bias.grad


def watched(monkeypatch):
    """All scalings in the layout of native GEMMs, multiplied by the reference; the operands that it was given."""
    operands, multiply = [], gemm.gemm

    def watching(backend, a, b, **options):
        operands.append((a, b))
        return multiply(backend, a, b, **options)

    forget_plans()
    monkeypatch.setattr(gemm, "layout", lambda device: NATIVE)
    monkeypatch.setattr(gemm, "gemm", watching)
    return operands


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("quantized_weight", [False, True])
@pytest.mark.parametrize("quantized_input", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_padded_operands_give_the_same_values(
    monkeypatch, shape, quantized_input, quantized_weight, recipe
):
    expected = results(recipe, shape, quantized_input, quantized_weight)
    operands = watched(monkeypatch)
    actual = results(recipe, shape, quantized_input, quantized_weight)
    for ours, want in zip(actual, expected, strict=True):
        assert torch.equal(ours, want)  # by value: a sum over more zeros may turn -0 into 0
    assert len(operands) == 3
    for a, b in operands:
        contractions = [o.data.shape[1] * o.format.codes_per_byte for o in (a, b)]
        assert contractions[0] == contractions[1]
        assert contractions[0] % max(o.scaling.alignment for o in (a, b)) == 0
        for operand in (a, b):
            if operand.scaling in (Scaling.BLOCK_1X32, Scaling.BLOCK_1X16):
                assert operand.scale_inv.dim() == 1  # swizzled


def step_of_microbatches(recipe, shape, override, options):
    """Two microbatches of a layer with a cached weight: outputs and gradients, deferred ones computed."""
    torch.manual_seed(0)
    *leading, k, n = shape
    if override is not None:
        recipe = type(fg.recipes.get(recipe))(backward_override=override)
    layer = fg.Linear(k, n, dtype=torch.bfloat16, recipe=recipe, **options)
    found = []
    for is_first in (True, False):
        x = torch.randn(*leading, k, dtype=torch.bfloat16, requires_grad=True)
        output = layer(x, is_first_microbatch=is_first)
        output.backward(torch.randn_like(output))
        if layer.wgrad.deferred:
            layer.backward_dw()
        found += [output.detach(), x.grad]
    return [*found, layer.weight.grad, layer.bias.grad]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"wgrad": fg.Wgrad(deferred=True)},
        {"save_input": fg.Save.ORIGINAL, "save_weight": fg.Save.ORIGINAL},
    ],
    ids=["plain", "deferred", "originals"],
)
@pytest.mark.parametrize("override", [None, *BackwardOverride])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_kept_is_padded_too(monkeypatch, recipe, override, options):
    if override is not None and recipe == "fp8-delayed":
        with pytest.raises(fg.errors.ConfigError, match="backward_override"):
            fg.recipes.DelayedScaling(backward_override=override)
        return
    for shape in ((13, 48, 7), (2, 3, 33, 17, 5), (24, 712, 31), (1, 1, 1)):
        expected = step_of_microbatches(recipe, shape, override, options)
        with monkeypatch.context() as patch:
            watched(patch)
            actual = step_of_microbatches(recipe, shape, override, options)
        forget_plans()
        for ours, want in zip(actual, expected, strict=True):
            assert torch.equal(ours, want)


@pytest.mark.parametrize("override", list(BackwardOverride))
@pytest.mark.parametrize("recipe", [n for n in RECIPES if n != "fp8-delayed"])
def test_a_backward_pass_in_high_precision_is_not_padded(monkeypatch, recipe, override):
    """What it reads was saved as it was, or decodes to what fprop multiplied."""
    changed = type(fg.recipes.get(recipe))(backward_override=override)
    for shape in ((13, 48, 7), (2, 3, 33, 17, 5), (1, 1, 1)):
        expected = results(changed, shape)
        with monkeypatch.context() as patch:
            operands = watched(patch)
            actual = results(changed, shape)
        forget_plans()
        assert len(operands) == 1
        for ours, want in zip(actual, expected, strict=True):
            assert torch.equal(ours, want)


MIXTURES = [
    fg.HybridQuantizer(fg.NVFP4Quantizer(), fg.MXQuantizer()),
    fg.HybridQuantizer(fg.BlockQuantizer(), fg.NVFP4Quantizer(hadamard=True)),
    fg.HybridQuantizer(fg.MXQuantizer(), fg.PerRowQuantizer()),
    fg.HybridQuantizer(fg.PerTensorQuantizer(fg.Format.E4M3), fg.BlockQuantizer()),
    fg.HybridQuantizer(None, fg.NVFP4Quantizer()),
    fg.HybridQuantizer(fg.NVFP4Quantizer(row_scaled=True), None),
]


@pytest.mark.parametrize("devices", ["all", "hopper", "blackwell"])
@pytest.mark.parametrize("quantizer", MIXTURES, ids=str)
def test_hybrid_operands_in_the_layout_of_a_device(monkeypatch, quantizer, devices):
    """Copies that are padded or swizzled beside copies that are not."""
    weight = fg.MXQuantizer() if quantizer.rotates else quantizer
    recipe = fg.recipes.CustomRecipe(
        lambda role: weight if role.tensor is Role.WEIGHT else quantizer
    )
    layouts = {"hopper": gemm.layout_of((9, 0)), "blackwell": gemm.layout_of((10, 0))}
    for shape in ((13, 48, 7), (2, 3, 33, 17, 5), (1, 1, 1), (0, 16, 16)):
        expected = results(recipe, shape)
        with monkeypatch.context() as patch:
            operands = watched(patch)
            patch.setattr(gemm, "layout", lambda device: layouts.get(devices, NATIVE))
            actual = results(recipe, shape)
        forget_plans()
        has_rowwise, has_columnwise = (
            quantizer.rowwise is not None,
            quantizer.columnwise is not None,
        )
        assert len(operands) == has_rowwise + has_columnwise + (has_rowwise and has_columnwise)
        for ours, want in zip(actual, expected, strict=True):
            assert torch.equal(ours, want)
