"""`QuantizedTensor`: its bytes, its life as an ordinary tensor, as a parameter, and in a checkpoint."""

import copy
import gc
import io
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import fullgraph as fg
import oracles
from fullgraph.customop.structured import flatten
from fullgraph.errors import ConfigError
from linear_cases import E4M3, E5M2, Case, K, N, batch, oracle_cast, tensors
from oracles import assert_same_bits
from oracles_quantizers import QUANTIZERS, REPRESENTATIVES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ORIENTATIONS = list(fg.Orientation)
SHAPES = [(16,), (6, 16), (2, 3, 16), (2, 3, 4, 5), (1, 16), (6, 1), (0, 16), (6, 0)]


def layer_of(**options):
    """A layer with a quantized weight."""
    return Case("fp8-current", quantized_weight=True).layer(**options)


def parts_of(tensor):
    """The plain tensors of a quantized one."""
    return flatten(tensor)


def addresses(tensor):
    return [part.data_ptr() for part in parts_of(tensor)]


def assert_same_parts(actual, expected):
    """The same copies, byte for byte, of the same dtype and quantizer."""
    assert type(actual) is type(expected) is fg.QuantizedTensor
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert actual.quantizer == expected.quantizer
    assert actual.orientation is expected.orientation
    for ours, theirs in zip(parts_of(actual), parts_of(expected), strict=True):
        assert_same_bits(ours, theirs)


def requantized(value, like):
    """What writing `value` into a quantized tensor must leave there."""
    return fg.quantize(value.to(like.dtype), like.quantizer, like.orientation)


families = pytest.mark.parametrize("name", REPRESENTATIVES)
oriented = pytest.mark.parametrize("orientation", ORIENTATIONS, ids=lambda o: o.name)


def quantized(name, orientation=fg.BOTH, shape=(6, 48), dtype=torch.float32):
    """A tensor of one family, with blocks that do not fill the last one."""
    return fg.quantize(torch.randn(shape).to(dtype), QUANTIZERS[name], orientation)


# Bytes.


@pytest.mark.parametrize("orientation", ORIENTATIONS, ids=lambda o: o.name)
@pytest.mark.parametrize("quantizer", [E4M3, E5M2], ids=lambda q: q.format.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_the_oracle(shape, dtype, quantizer, orientation):
    x = tensors(shape, dtype=dtype)
    q = fg.quantize(x, quantizer, orientation)
    amax = x.abs().max().float().item() if x.numel() else 0.0
    codes, scale_inv = oracles.cast_per_tensor(x, amax, quantizer.format.name)
    assert q.shape == x.shape
    assert q.dtype == dtype
    assert q.orientation is orientation
    assert_same_bits(q.scale_inv, np.float32(scale_inv))
    if orientation.rowwise:
        assert q.data.dtype == quantizer.format.dtype
        assert_same_bits(q.data.view(torch.uint8), codes)
    if orientation.columnwise:
        assert q.columnwise_data.dtype == quantizer.format.dtype
        assert q.columnwise_data.is_contiguous()
        assert_same_bits(q.columnwise_data.view(torch.uint8), np.moveaxis(codes, -1, 0).copy())
    assert_same_bits(q.dequantize(), oracle_cast(x, quantizer).to(torch.float32).to(dtype))


def test_copies_share_no_memory():
    for shape in SHAPES[:6]:
        q = fg.quantize(torch.randn(shape), E4M3, fg.BOTH)
        assert len({t.untyped_storage().data_ptr() for t in parts_of(q)}) == 3


@families
@pytest.mark.parametrize("orientation", [fg.ROWWISE, fg.COLUMNWISE], ids=lambda o: o.name)
def test_a_missing_copy_is_an_error(orientation, name):
    q = quantized(name, orientation, (3, 3))  # square: scales of the other copy would fit
    missing, prefix = (
        ("columnwise", "columnwise_") if orientation is fg.ROWWISE else ("rowwise", "")
    )
    for attribute in ("data", "scale_inv"):
        if name == "per-tensor" and attribute == "scale_inv":
            assert torch.equal(getattr(q, prefix + attribute), q.part_scale_inv)  # serves both
            continue
        with pytest.raises(ConfigError, match=f"no {missing} copy, only {orientation.value}"):
            getattr(q, prefix + attribute)
    assert getattr(q, f"{prefix}tensor_scale_inv") is None


def test_scales_of_a_copy_that_stays_in_high_precision():
    q = fg.quantize(torch.ones(3, 3), fg.HybridQuantizer(E4M3, None))
    assert q.scale_inv.shape == ()
    for attribute in ("columnwise_data", "columnwise_scale_inv"):
        with pytest.raises(ConfigError, match="no columnwise copy, only rowwise"):
            getattr(q, attribute)


# dtypes and shapes of data, columnwise_data, scale_inv and columnwise_scale_inv of a tensor [2, 3, 40].
FP8, BYTES, ONE = torch.float8_e4m3fn, torch.uint8, torch.float32
SHOWN = {
    "per-tensor": [(FP8, (2, 3, 40)), (FP8, (40, 2, 3)), (ONE, ()), (ONE, ())],
    "per-row": [(FP8, (2, 3, 40)), (FP8, (40, 2, 3)), (ONE, (2, 3)), (ONE, (40,))],
    "block": [(FP8, (2, 3, 40)), (FP8, (40, 2, 3)), (ONE, (2, 3, 1)), (ONE, (40, 1))],
    "block-2d": [(FP8, (2, 3, 40)), (FP8, (40, 2, 3)), (ONE, (1, 1)), (ONE, (1, 1))],
    "mx": [
        (FP8, (2, 3, 40)),
        (FP8, (40, 2, 3)),
        (torch.float8_e8m0fnu, (2, 3, 2)),
        (torch.float8_e8m0fnu, (40, 1)),
    ],
    "nvfp4": [(BYTES, (2, 3, 20)), (BYTES, (40, 3)), (FP8, (2, 3, 3)), (FP8, (40, 1))],
    "hybrid-nvfp4-mx": [
        (BYTES, (2, 3, 20)),
        (FP8, (40, 2, 3)),
        (FP8, (2, 3, 3)),
        (torch.float8_e8m0fnu, (40, 1)),
    ],
}


@families
def test_what_is_shown(name):
    q = quantized(name, shape=(2, 3, 40))
    shown = [q.data, q.columnwise_data, q.scale_inv, q.columnwise_scale_inv]
    assert [(t.dtype, tuple(t.shape)) for t in shown] == SHOWN[name]
    second_level = "nvfp4" in name
    assert (q.tensor_scale_inv is not None) == second_level
    assert (q.columnwise_tensor_scale_inv is not None) == (name == "nvfp4")
    if second_level:
        assert (q.tensor_scale_inv.dtype, q.tensor_scale_inv.shape) == (ONE, ())
    by_row = fg.quantize(torch.randn(2, 3, 40), QUANTIZERS["nvfp4-rows"], fg.BOTH)
    assert by_row.tensor_scale_inv.shape == (6,)
    assert by_row.columnwise_tensor_scale_inv.shape == ()


def test_repr_shows_no_data():
    q = fg.quantize(torch.full((2, 3), 7.0), E4M3)
    text = repr(q)
    assert text.startswith("QuantizedTensor((2, 3), quantizer=PerTensorQuantizer(format=")
    assert "7" not in text.replace("bias=7", "")
    assert repr(nn.Parameter(q)) == text
    assert repr(fg.quantize(torch.ones(1, device="meta"), E4M3))


# An ordinary tensor.


@pytest.mark.parametrize("orientation", ORIENTATIONS, ids=lambda o: o.name)
@pytest.mark.parametrize("shape", [(2, 3, 16), (3, 2, 16), (1, 6, 16), (-1, 16), (6, -1)], ids=str)
def test_views_of_leading_dimensions_keep_the_bytes(shape, orientation):
    x = torch.randn(6, 16)
    q = fg.quantize(x, E4M3, orientation)
    for viewed in (q.view(shape), q.reshape(shape)):
        assert_same_parts(viewed, fg.quantize(x.view(shape), E4M3, orientation))
        assert addresses(viewed) == addresses(q)
    assert_same_parts(q.view(2, 3, 16).view(6, 16), q)
    assert_same_parts(q.view(2, 3, 16).flatten(0, 1), q)


@families
@oriented
@pytest.mark.parametrize(
    "shape", [(2, 3, 48), (3, 2, 48), (1, 6, 1, 48), (-1, 48), (6, -1)], ids=str
)
def test_views_keep_the_bytes_of_every_family(shape, orientation, name):
    x = torch.randn(6, 48)
    q = fg.quantize(x, QUANTIZERS[name], orientation)
    viewed = q.view(shape)
    assert_same_parts(viewed, fg.quantize(x.view(shape), QUANTIZERS[name], orientation))
    assert addresses(viewed) == addresses(q)
    assert_same_parts(viewed.view(6, 48), q)
    assert_same_parts(viewed.flatten(0, -2), q)
    one = fg.quantize(x[0], QUANTIZERS[name], orientation)
    assert_same_parts(
        one.view(1, 1, 48), fg.quantize(x[0].view(1, 1, 48), QUANTIZERS[name], orientation)
    )
    assert_same_parts(one.view(1, 48).view(48), one)
    # What is a view is written to through the view.
    viewed.zero_()
    assert not q.dequantize().any()


def test_views_of_the_last_dimension_decode():
    q = fg.quantize(torch.randn(6, 16), E4M3, fg.BOTH)
    for viewed in (q.view(96), q.view(12, 8), q.t(), q[1:], q[0], q.unsqueeze(0)):
        assert type(viewed) is torch.Tensor
    assert_same_bits(q.view(12, 8), q.dequantize().view(12, 8))


OPERATIONS = {
    "add": lambda q, x: q + x,
    "radd": lambda q, x: x + q,
    "scalar": lambda q, x: 2 * q - 1,
    "matmul": lambda q, x: q @ x.t(),
    "rmatmul": lambda q, x: x.t() @ q,
    "linear": lambda q, x: nn.functional.linear(x, q),
    "embedding": lambda q, x: nn.functional.embedding(torch.tensor([1, 2]), q),
    "both": lambda q, x: q * q,
    "cat": lambda q, x: torch.cat([q, x]),
    "sum": lambda q, x: q.sum(-1),
    "compare": lambda q, x: q > x,
    "where": lambda q, x: torch.where(x > 0, q, 0),
    "relu": lambda q, x: torch.relu(q),
    "index": lambda q, x: q[:, ::2],
    "float64": lambda q, x: q.double(),
    "int": lambda q, x: q.to(torch.int32),
    "clone-add": lambda q, x: q.clone().add(1),
    "einsum": lambda q, x: torch.einsum("mk,nk->mn", q, x),
    "zeros_like": lambda q, x: torch.zeros_like(q),
    "ones_like": lambda q, x: torch.ones_like(q),
    "new_zeros": lambda q, x: q.new_zeros(3),
    "full_like": lambda q, x: torch.full_like(q, 3, dtype=torch.float64),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operations_decode(name, dtype):
    x = tensors((6, 16), dtype=dtype)
    q = fg.quantize(x, E4M3, fg.BOTH)
    got = OPERATIONS[name](q, x)
    expected = OPERATIONS[name](q.dequantize(), x)
    assert type(got) is torch.Tensor
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


def test_the_gradient_of_dequantize_passes_straight_through():
    x, grad_output = tensors((6, 16), (6, 16))
    x.requires_grad_()
    fg.quantize(x, E4M3).dequantize().backward(grad_output)
    assert_same_bits(x.grad, grad_output)
    leaf = fg.quantize(x.detach(), E4M3).requires_grad_()
    leaf.dequantize().backward(grad_output)
    assert type(leaf.grad) is torch.Tensor
    assert_same_bits(leaf.grad, grad_output)


def test_arithmetic_is_differentiable():
    x, y = tensors((6, 16), (6, 16))
    x.requires_grad_()
    q = fg.quantize(x, E4M3)
    (q * y).sum().backward()
    assert_same_bits(x.grad, y)


def test_views_are_differentiable():
    x, grad_output = tensors((6, 16), (2, 3, 16))
    x.requires_grad_()
    fg.quantize(x, E4M3).view(2, 3, 16).dequantize().backward(grad_output)
    assert_same_bits(x.grad, grad_output.view(6, 16))


@families
@oriented
def test_moves_of_every_family(orientation, name):
    q = quantized(name, orientation, dtype=torch.bfloat16)
    wide = q.float()
    assert (type(wide), wide.dtype) == (fg.QuantizedTensor, torch.float32)
    for ours, theirs in zip(parts_of(wide), parts_of(q), strict=True):
        assert_same_bits(ours, theirs)
    assert_same_bits(wide.dequantize().bfloat16(), q.dequantize())
    meta = q.to("meta")
    assert (type(meta), meta.device.type, meta.shape) == (fg.QuantizedTensor, "meta", q.shape)
    assert [t.shape for t in parts_of(meta)] == [t.shape for t in parts_of(q)]
    assert meta.dequantize().shape == q.shape
    back = torch.empty_like(meta, device="cpu").copy_(q)
    assert_same_parts(back, q)
    shared = q.clone().share_memory_()
    assert shared.is_shared()
    assert_same_parts(shared, q)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_another_high_precision_dtype_keeps_the_bytes(source, dtype):
    q = fg.quantize(tensors((6, 16), dtype=source), E4M3, fg.BOTH)
    moved = q.to(dtype)
    assert type(moved) is fg.QuantizedTensor
    assert moved.dtype == dtype
    for ours, theirs in zip(parts_of(moved), parts_of(q), strict=True):
        assert_same_bits(ours, theirs)
    values = (q.data.float() * q.scale_inv).to(dtype)
    assert_same_bits(moved.dequantize(), values)


def test_a_change_of_dtype_is_differentiable():
    x, grad_output = tensors((6, 16), (6, 16))
    x.requires_grad_()
    fg.quantize(x, E4M3).float().dequantize().backward(grad_output.float())
    assert_same_bits(x.grad, grad_output)


def test_other_devices():
    q = fg.quantize(torch.randn(6, 16), E4M3, fg.BOTH)
    assert q.cpu() is q
    meta = q.to("meta")
    assert type(meta) is fg.QuantizedTensor
    assert meta.device.type == "meta"
    assert [t.shape for t in parts_of(meta)] == [t.shape for t in parts_of(q)]


# Changes in place.


IN_PLACE = {
    "add_": lambda t: t.add_(1),
    "mul_": lambda t: t.mul_(3),
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(2),
    "clamp_": lambda t: t.clamp_(-1, 1),
    "copy_-plain": lambda t: t.copy_(torch.arange(96.0).view(6, 16)),
    "copy_-row": lambda t: t.copy_(torch.arange(16.0)),
    "copy_-bf16": lambda t: t.copy_(torch.arange(96).view(6, 16).bfloat16() / 7),
    "copy_-scalar": lambda t: t.copy_(torch.tensor(3.0)),
    "lerp_": lambda t: t.lerp_(torch.ones(6, 16), 0.25),
    "addcmul_": lambda t: t.addcmul_(torch.ones(6, 16), torch.full((6, 16), 3.0), value=0.5),
    "masked_fill_": lambda t: t.masked_fill_(torch.eye(6, 16).bool(), 9),
    "assign-row": lambda t: t.__setitem__(1, torch.ones(16)),
    "assign-column": lambda t: t.__setitem__((slice(None), slice(2, 5)), 0.5),
    "assign-mask": lambda t: t.__setitem__(torch.eye(6, 16).bool(), 9),
    "assign-indices": lambda t: t.__setitem__((torch.tensor([0, 2]), torch.tensor([1, 3])), 9),
    "iadd": lambda t: t.__iadd__(1),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("orientation", ORIENTATIONS, ids=lambda o: o.name)
def test_changes_in_place_requantize_into_the_same_memory(name, orientation):
    q = fg.quantize(torch.randn(6, 16), E4M3, orientation)
    before = addresses(q)
    value = q.dequantize()
    IN_PLACE[name](value)
    result = IN_PLACE[name](q)
    assert result is None or result is q
    assert addresses(q) == before
    assert_same_parts(q, requantized(value, q))


FAMILY_CHANGES = ("mul_", "copy_-row", "assign-column", "assign-mask", "iadd")


@families
@oriented
@pytest.mark.parametrize("change", FAMILY_CHANGES)
def test_changes_in_place_of_every_family(change, orientation, name):
    q = fg.quantize(torch.randn(6, 16), QUANTIZERS[name], orientation)
    before, value = addresses(q), q.dequantize()
    IN_PLACE[change](value)
    IN_PLACE[change](q)
    assert addresses(q) == before
    assert_same_parts(q, requantized(value, q))


@families
@oriented
def test_copies_between_tensors_of_every_family(orientation, name):
    target = quantized(name, orientation)
    same, other = quantized(name, orientation), quantized("per-tensor", fg.ROWWISE)
    before = addresses(target)
    target.copy_(same)
    assert_same_parts(target, same)
    target.copy_(other)
    assert_same_parts(target, requantized(other.dequantize(), target))
    target.copy_(torch.arange(48.0))
    assert_same_parts(target, requantized(torch.arange(48.0).expand(6, 48), target))
    assert addresses(target) == before


@families
@oriented
@pytest.mark.parametrize("shape", [(1, 6), (6,), (6, 1), (1, 1)], ids=str)
def test_copies_broadcast_values_not_bytes(shape, orientation, name):
    """In a columnwise copy the dimensions are the other way round, and bytes may hold two codes."""
    target, source = quantized(name, orientation, (6, 6)), quantized(name, orientation, shape)
    assert target.copy_(source) is target
    assert_same_parts(target, requantized(source.dequantize().expand(6, 6), target))


@pytest.mark.parametrize(
    ("source", "source_orientation", "same_layout"),
    [
        (E4M3, fg.BOTH, True),
        (E4M3, fg.ROWWISE, False),
        (E4M3, fg.COLUMNWISE, False),
        (E5M2, fg.BOTH, False),
    ],
    ids=["same-layout", "rowwise", "columnwise", "another-format"],
)
def test_copies_from_a_quantized_tensor(source, source_orientation, same_layout):
    target = fg.quantize(torch.randn(6, 16), E4M3, fg.BOTH)
    origin = fg.quantize(torch.randn(6, 16), source, source_orientation)
    before = addresses(target)
    assert target.copy_(origin) is target
    assert addresses(target) == before
    expected = origin if same_layout else requantized(origin.dequantize(), target)
    assert_same_parts(target, expected)


def test_copies_of_the_same_layout_are_bytes_not_values():
    """Zeros have any scale: only copied bytes keep it."""
    origin = fg.quantize(torch.zeros(6, 16), E4M3, fg.BOTH)
    origin.part_scale_inv.fill_(3)
    target = fg.quantize(torch.randn(6, 16), E4M3, fg.BOTH)
    assert target.copy_(origin).scale_inv.item() == 3


def test_a_plain_tensor_can_be_overwritten_by_a_quantized_one():
    q = fg.quantize(torch.randn(6, 16), E4M3)
    for dtype in DTYPES:
        assert_same_bits(torch.zeros(6, 16, dtype=dtype).copy_(q), q.dequantize().to(dtype))


def test_a_view_shares_changes():
    q = fg.quantize(torch.randn(6, 16), E4M3, fg.BOTH)
    q.view(2, 3, 16).zero_()
    assert q.dequantize().abs().max() == 0


def test_copies_of_a_wrong_shape_are_refused():
    q = fg.quantize(torch.randn(6, 16), E4M3, fg.BOTH)
    with pytest.raises(RuntimeError, match="expanded size"):
        q.copy_(torch.ones(5, 16))


def test_changes_are_noticed_by_autograd():
    q = fg.quantize(torch.randn(6, 16), E4M3, fg.BOTH)
    for change in (lambda: q.add_(1), lambda: q.copy_(torch.ones(6, 16))):
        versions = [t._version for t in (q, *parts_of(q))]
        change()
        assert all(t._version > v for t, v in zip((q, *parts_of(q)), versions, strict=True))


def test_inference_tensors_can_be_changed():
    with torch.inference_mode():
        q = fg.quantize(torch.ones(6, 16), E4M3)
        q.mul_(2)
        assert_same_bits(q.dequantize(), torch.full((6, 16), 2.0))


# A parameter.


def test_a_quantized_weight_is_a_parameter():
    layer = layer_of()
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, fg.QuantizedTensor)
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.orientation is fg.BOTH
    assert dict(layer.named_parameters()).keys() == {"weight", "bias"}
    assert dict(layer.named_parameters())["weight"] is weight
    weight.requires_grad_(False)
    assert not layer.weight.requires_grad
    torch.manual_seed(1)
    layer = layer_of()
    torch.manual_seed(1)
    assert_same_parts(
        layer.weight.detach(),
        fg.quantize(nn.Linear(K, N, dtype=torch.bfloat16).weight.detach(), E4M3, fg.BOTH),
    )


def test_a_weight_has_the_quantizer_of_its_recipe():
    recipe = fg.recipes.Float8CurrentScaling(forward_format=fg.Format.E5M2, power_of_two=True)
    layer = fg.Linear(K, N, recipe=recipe, quantized_weight=True)
    assert layer.weight.quantizer == fg.PerTensorQuantizer(fg.Format.E5M2, power_of_two=True)
    with fg.autocast(recipe):
        layer = fg.Linear(K, N, quantized_weight=True)
    assert layer.weight.quantizer == fg.PerTensorQuantizer(fg.Format.E5M2, power_of_two=True)
    assert layer.recipe is None
    assert fg.Linear(K, N, quantized_weight=True).weight.quantizer == E4M3


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=10.0, foreach=False),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=10.0, foreach=True),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=10.0, momentum=0.9, foreach=False),
    "sgd-momentum-foreach": lambda p: torch.optim.SGD(p, lr=10.0, momentum=0.9, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1, foreach=True),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}
# How often an optimizer writes a weight in a step, so how often it is quantized.
WRITES = {"adamw": 2, "adamw-foreach": 2}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_a_quantized_weight(name):
    """As they would step a plain weight, rounded to its format after each of their writes."""
    layer = layer_of()
    weight = layer.weight
    shadow = nn.Parameter(weight.detach().dequantize().clone())
    optimizers = OPTIMIZERS[name]([weight]), OPTIMIZERS[name]([shadow])
    before = addresses(weight)
    start = shadow.detach().clone()
    for _ in range(3):
        gradient = tensors((N, K)) * 1e-2
        weight.grad, shadow.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
        if WRITES.get(name, 1) == 1:
            shadow.data = requantized(shadow.detach(), weight).dequantize()
            assert_same_bits(weight.detach().dequantize(), shadow.detach())
        else:  # the rounding between two writes is not seen from outside
            error = oracles.relative_error(weight.dequantize(), shadow)
            assert error < 0.06
            shadow.data = weight.detach().dequantize().clone()
    assert addresses(weight) == before
    assert layer.weight is weight
    assert not torch.equal(start, weight.dequantize())
    state = optimizers[0].state[weight]
    assert {type(v) for v in state.values() if torch.is_tensor(v)} <= {torch.Tensor}
    wide = [v for v in state.values() if torch.is_tensor(v) and v.shape == weight.shape]
    assert all(v.dtype == torch.bfloat16 for v in wide)


@families
@pytest.mark.parametrize("optimizer", ["sgd-momentum-foreach", "rmsprop"])
def test_optimizers_step_a_weight_of_every_family(optimizer, name):
    weight = nn.Parameter(quantized(name))
    shadow = nn.Parameter(weight.detach().dequantize().clone())
    optimizers = OPTIMIZERS[optimizer]([weight]), OPTIMIZERS[optimizer]([shadow])
    before, start = addresses(weight), shadow.detach().clone()
    for _ in range(2):
        gradient = torch.randn(6, 48) * 1e-2
        weight.grad, shadow.grad = gradient.clone(), gradient.clone()
        for each in optimizers:
            each.step()
        wanted = requantized(shadow.detach(), weight)
        assert_same_parts(weight.detach(), wanted)
        shadow.data = wanted.dequantize()
    assert addresses(weight) == before
    assert not torch.equal(start, shadow)


@families
def test_weights_of_every_family_train(name):
    """A layer whose weight is kept quantized: its own recipe, gradients, and a checkpoint."""
    recipe = fg.recipes.CustomRecipe(lambda role: QUANTIZERS[name])
    layer = fg.Linear(K, N, recipe=recipe, quantized_weight=True)
    assert layer.weight.quantizer == QUANTIZERS[name]
    x = torch.randn(5, K)
    layer(x).square().sum().backward()
    assert type(layer.weight.grad) is torch.Tensor
    torch.optim.SGD(layer.parameters(), lr=0.01).step()
    loaded = fg.Linear(K, N, recipe=recipe, quantized_weight=True)
    loaded.load_state_dict(saved_and_loaded(layer.state_dict()))
    assert_same_parts(loaded.weight.detach(), layer.weight.detach())
    assert torch.equal(loaded(x), layer(x))
    original = nn.Linear(K, N)
    loaded.load_state_dict(original.state_dict())
    assert_same_parts(loaded.weight.detach(), requantized(original.weight.detach(), layer.weight))
    empty = fg.Linear(K, N, recipe=recipe, quantized_weight=True, device="meta")
    empty.to_empty(device="cpu").load_state_dict(layer.state_dict())
    assert_same_parts(empty.weight.detach(), layer.weight.detach())


def test_a_fused_optimizer_steps_a_quantized_weight():
    weight = nn.Parameter(fg.quantize(torch.randn(N, K), E4M3, fg.BOTH))
    shadow = nn.Parameter(weight.detach().dequantize())
    for parameter in (weight, shadow):
        parameter.grad = torch.ones(N, K)
        torch.optim.AdamW([parameter], lr=0.05, fused=True).step()
    assert_same_parts(weight.detach(), requantized(shadow.detach(), weight))


def test_gradients_accumulate():
    layer = layer_of()
    x, grad_output = batch(24)
    layer(x).backward(grad_output)
    first = layer.weight.grad.clone()
    layer(x).backward(grad_output)
    assert type(layer.weight.grad) is torch.Tensor
    assert_same_bits(layer.weight.grad, first + first)
    layer.zero_grad(set_to_none=False)
    assert layer.weight.grad.abs().max() == 0


def test_gradient_hooks_run():
    layer, seen = layer_of(), []
    layer.weight.register_hook(lambda g: seen.append(g.shape))
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(type(p)))
    layer(batch(3)[0]).sum().backward()
    assert seen == [(N, K), fg.QuantizedTensor]


def test_gradient_clipping():
    layer = layer_of()
    layer(batch(3)[0]).sum().backward()
    nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
    norms = torch.stack([p.grad.float().norm() for p in layer.parameters()])
    assert norms.norm().item() == pytest.approx(0.1, rel=1e-2)


INITIALISERS = {
    "kaiming_uniform_": {},
    "kaiming_normal_": {},
    "xavier_uniform_": {},
    "xavier_normal_": {},
    "normal_": {"std": 0.02},
    "uniform_": {},
    "orthogonal_": {},
    "constant_": {"val": 0.5},
    "zeros_": {},
    "ones_": {},
    "eye_": {},
}


@pytest.mark.parametrize("name", INITIALISERS)
def test_initialisers(name):
    initialise = getattr(nn.init, name)
    weight = layer_of(dtype=torch.float32).weight
    before = addresses(weight)
    plain = torch.empty(N, K)
    for tensor in (weight, plain):
        torch.manual_seed(1)
        assert initialise(tensor, **INITIALISERS[name]) is tensor
    assert addresses(weight) == before
    assert_same_bits(weight.dequantize().detach(), requantized(plain, weight).dequantize())


def test_truncated_normal():
    """It writes several times, so it rounds several times; the bounds hold up to a rounding all the same."""
    weight = layer_of(dtype=torch.float32).weight
    nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04)
    values = weight.detach().dequantize()
    assert values.abs().max() <= 0.04 * (1 + 2**-4)
    assert values.std().item() == pytest.approx(0.0176, rel=0.1)


def test_sparse_initialiser():
    """It writes element by element, so it rounds often; what it makes zero is zero."""
    weight = layer_of(dtype=torch.float32).weight
    nn.init.sparse_(weight, sparsity=0.5)
    values = weight.detach().dequantize()
    assert_same_bits((values == 0).sum(0), torch.full((K,), N // 2))
    assert values.std().item() == pytest.approx(0.01 / 2**0.5, rel=0.1)


def test_reset_parameters():
    layer = layer_of()
    before = addresses(layer.weight)
    torch.manual_seed(1)
    layer.reset_parameters()
    torch.manual_seed(1)
    original = nn.Linear(K, N, dtype=torch.bfloat16)
    assert addresses(layer.weight) == before
    assert_same_parts(layer.weight.detach(), requantized(original.weight.detach(), layer.weight))


def test_moving_average_of_weights():
    layer = layer_of()
    average = copy.deepcopy(layer)
    other = layer_of()
    before = addresses(average.weight)
    with torch.no_grad():
        average.weight.lerp_(other.weight, 0.25)
    expected = torch.lerp(
        layer.weight.detach().dequantize(), other.weight.detach().dequantize(), 0.25
    )
    assert addresses(average.weight) == before
    assert_same_parts(average.weight.detach(), requantized(expected, layer.weight))


def test_averaged_model():
    layer = layer_of()
    average = torch.optim.swa_utils.AveragedModel(
        layer, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    average.update_parameters(layer)
    start = layer.weight.detach().dequantize().clone()
    with torch.no_grad():
        layer.weight.mul_(2)
    average.update_parameters(layer)
    assert oracles.relative_error(average.module.weight.dequantize(), start * 1.5) < 0.04


def test_tied_weights():
    first, second = layer_of(out_features=K), layer_of(out_features=K)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    assert [n for n, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.bias"]
    model(batch(3)[0]).sum().backward()
    copied = copy.deepcopy(model)
    assert copied[0].weight is copied[1].weight
    assert copied[0].weight is not first.weight
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded[0].weight is loaded[1].weight


def test_tied_with_an_embedding():
    layer = layer_of()
    embedding = nn.Embedding(N, K, dtype=torch.bfloat16)
    embedding.weight = layer.weight
    layer(embedding(torch.tensor([1, 2]))).sum().backward()
    assert layer.weight.grad.shape == (N, K)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_modules_change_the_dtype(dtype):
    layer = layer_of()
    weight, before = layer.weight, addresses(layer.weight)
    codes = weight.part_data.clone()
    weight.grad = torch.ones(N, K, dtype=torch.bfloat16)
    if dtype == torch.float32:
        layer.float()
    elif dtype == torch.float16:
        layer.half()
    else:
        assert layer.bfloat16().weight is weight
        assert addresses(weight) == before
    assert isinstance(layer.weight, nn.Parameter)
    assert isinstance(layer.weight, fg.QuantizedTensor)
    assert layer.weight.requires_grad
    assert layer.weight.dtype == layer.bias.dtype == layer.weight.grad.dtype == dtype
    assert_same_bits(layer.weight.part_data, codes)
    x, grad_output = batch(24, dtype=dtype)
    layer(x).backward(grad_output)
    assert layer.weight.grad.dtype == dtype


def test_modules_cannot_go_to_double_precision():
    layer = layer_of()
    with pytest.raises(ConfigError, match=r"\.data cannot be assigned"):
        layer.double()
    with pytest.raises(ConfigError, match=r"\.data cannot be assigned"):
        nn.utils.vector_to_parameters(torch.zeros(N * K + N), layer.parameters())


def test_modules_leave_the_meta_device_quantized():
    layer = layer_of(device="meta")
    assert type(layer.weight) is fg.QuantizedTensor
    layer.to_empty(device="cpu")
    assert type(layer.weight) is fg.QuantizedTensor
    assert isinstance(layer.weight, nn.Parameter)
    torch.manual_seed(1)
    layer.reset_parameters()
    torch.manual_seed(1)
    original = nn.Linear(K, N, dtype=torch.bfloat16)
    assert_same_parts(layer.weight.detach(), fg.quantize(original.weight.detach(), E4M3, fg.BOTH))
    assert layer(batch(3)[0]).device.type == "cpu"
    assert layer_of().to("meta").weight.device.type == "meta"


# Copies and checkpoints.


def test_deepcopy():
    layer = layer_of()
    layer(batch(3)[0]).sum().backward()
    layer.weight.main_grad = torch.ones(3)
    layer.weight.requires_grad_(False)
    copied = copy.deepcopy(layer)
    assert isinstance(copied.weight, nn.Parameter)
    assert not copied.weight.requires_grad
    assert_same_parts(copied.weight, layer.weight)
    assert not set(addresses(copied.weight)) & set(addresses(layer.weight))
    assert_same_bits(copied.weight.grad, layer.weight.grad)
    assert copied.weight.grad is not layer.weight.grad
    assert_same_bits(copied.weight.main_grad, torch.ones(3))


@families
@oriented
def test_copies_of_every_family(orientation, name):
    q = nn.Parameter(quantized(name, orientation))
    for made in (
        copy.deepcopy(q),
        pickle.loads(pickle.dumps(q)),
        saved_and_loaded(q),
        nn.Parameter(q.detach().clone()),
    ):
        assert isinstance(made, nn.Parameter)
        assert_same_parts(made.detach(), q.detach())
        assert not set(addresses(made)) & {a for a in addresses(q) if a}
        assert made.requires_grad
        assert_same_bits(made.dequantize().detach(), q.dequantize().detach())


def test_shallow_copy_shares_memory():
    q = fg.quantize(torch.randn(6, 16), E4M3)
    assert addresses(copy.copy(q)) == addresses(q)


@pytest.mark.parametrize("orientation", ORIENTATIONS, ids=lambda o: o.name)
def test_pickle(orientation):
    q = nn.Parameter(fg.quantize(torch.randn(6, 16), E5M2, orientation), requires_grad=False)
    q.note = "kept"
    loaded = pickle.loads(pickle.dumps(q))
    assert isinstance(loaded, nn.Parameter)
    assert loaded.note == "kept"
    assert not loaded.requires_grad
    assert_same_parts(loaded.detach(), q.detach())


def saved_and_loaded(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_save_and_load_weights_only():
    layer = layer_of()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05)
    layer(batch(3)[0]).sum().backward()
    optimizer.step()
    saved = saved_and_loaded({"model": layer.state_dict(), "optimizer": optimizer.state_dict()})
    assert list(saved["model"]) == ["weight", "bias"]
    assert_same_parts(saved["model"]["weight"], layer.weight.detach())
    resumed = layer_of()
    before = addresses(resumed.weight)
    resumed.load_state_dict(saved["model"], strict=True)
    assert addresses(resumed.weight) == before
    other = torch.optim.AdamW(resumed.parameters(), lr=0.05)
    other.load_state_dict(saved["optimizer"])
    gradient = tensors((N, K))
    for model, step in ((layer, optimizer), (resumed, other)):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model.weight.grad = gradient.clone()
        step.step()
    assert_same_parts(resumed.weight.detach(), layer.weight.detach())


def test_checkpoints_of_nn_linear_load():
    original = nn.Linear(K, N, dtype=torch.bfloat16)
    for layer in (layer_of(), Case("fp8-current").layer()):
        layer.load_state_dict(saved_and_loaded(original.state_dict()), strict=True)
        assert_same_bits(layer.bias.detach(), original.bias.detach())
    assert_same_bits(layer.weight.detach(), original.weight.detach())
    layer = layer_of()
    layer.load_state_dict(original.state_dict(), strict=True)
    assert_same_parts(layer.weight.detach(), fg.quantize(original.weight.detach(), E4M3, fg.BOTH))
    wide = nn.Linear(K, N)
    layer.load_state_dict(wide.state_dict(), strict=True)
    assert_same_parts(
        layer.weight.detach(), fg.quantize(wide.weight.detach().bfloat16(), E4M3, fg.BOTH)
    )


def test_checkpoints_load_into_nn_linear():
    for layer in (layer_of(), Case("fp8-current").layer()):
        original = nn.Linear(K, N, dtype=torch.bfloat16)
        original.load_state_dict(saved_and_loaded(layer.state_dict()), strict=True)
        assert type(original.weight) is nn.Parameter
        weight = layer.weight.detach()
        values = weight.dequantize() if isinstance(weight, fg.QuantizedTensor) else weight
        assert_same_bits(original.weight.detach(), values)
        assert_same_bits(original.bias.detach(), layer.bias.detach())


def test_checkpoints_of_wrong_shape_are_refused():
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        layer_of().load_state_dict(nn.Linear(K, N + 1, dtype=torch.bfloat16).state_dict())


def test_memory_is_freed():
    q = fg.quantize(torch.randn(6, 16), E4M3, fg.BOTH)
    watched = [weakref.ref(t) for t in parts_of(q)]
    q.view(2, 3, 16), q.dequantize()
    del q
    gc.collect()
    assert [w() for w in watched] == [None] * 3


def test_payloads_refuse_to_be_written():
    weight = nn.Parameter(fg.quantize(torch.randn(4, 16), E4M3, fg.BOTH))
    before = weight.dequantize().detach().clone()
    for write in (lambda d: d.copy_(torch.zeros(4, 16)), lambda d: d.zero_(), lambda d: d.fill_(1)):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            write(weight.data)
    assert_same_bits(weight.dequantize(), before)
