"""`fg.quantize` and the per-tensor quantizer: scales of odd amaxes, padding, specs, one's own quantizer, errors."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

import fullgraph as fg
import oracles
from fullgraph import reference
from fullgraph.customop.structured import flatten, to_spec
from fullgraph.errors import ConfigError, ShapeError
from fullgraph.quantizers import PerTensorQuantizer
from fullgraph.tensor import QuantizedParts
from linear_cases import E4M3, E5M2, batch, step, tensors
from oracles import assert_same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ORIENTATIONS = list(fg.Orientation)
QUANTIZERS = [
    E4M3,
    E5M2,
    PerTensorQuantizer(fg.Format.E4M3, power_of_two=True),
    PerTensorQuantizer(fg.Format.E5M2, power_of_two=True, amax_epsilon=1e-3),
    PerTensorQuantizer(fg.Format.E4M3, amax_epsilon=100.0),
]
by_name = {"ids": lambda o: o.name}
INF, NAN = float("inf"), float("nan")
LARGEST = {torch.float32: 3.4028234663852886e38, torch.bfloat16: 3.3895313892515355e38}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0.0, -0.0, INF, -INF, NAN])
def test_unusable_amax_means_scale_one(value, dtype):
    x = torch.tensor([0.5, value, -3.0 if value else 0.0], dtype=dtype)
    if value == 0:
        x = torch.full((3,), value, dtype=dtype)
    q = fg.quantize(x, E4M3, fg.BOTH)
    assert q.scale_inv.item() == 1.0
    saturated = x.float().clamp(-448, 448)
    assert torch.equal(q.dequantize().float().isnan(), x.isnan())
    got = q.dequantize().float()
    assert_same_bits(got[~x.isnan()], saturated[~x.isnan()])
    assert (q.data.view(torch.uint8)[x.isnan()] == 0x7F).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_overflowing_scale_is_the_largest_of_the_dtype(dtype):
    x = torch.tensor([1e-37, -5e-38, 0.0], dtype=dtype)
    q = fg.quantize(x, E4M3)
    assert_same_bits(q.scale_inv, np.float32(1) / np.float32(LARGEST[dtype]))
    codes = oracles.encode(x.float().numpy() * np.float32(LARGEST[dtype]), "E4M3")
    assert_same_bits(q.data.view(torch.uint8), codes)
    assert oracles.relative_error(q.dequantize(), x) < 0.06


@pytest.mark.parametrize("quantizer", [E4M3, E5M2], ids=lambda q: q.format.name)
def test_float16_never_overflows_its_own_scale(quantizer):
    x = torch.tensor([2.0**-24], dtype=torch.float16)
    q = fg.quantize(x, quantizer)
    scale = np.float32(oracles.FORMAT_MAX[quantizer.format.name] * 2.0**24)
    assert_same_bits(q.scale_inv, np.float32(1) / scale)
    assert_same_bits(q.dequantize(), x)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
@pytest.mark.parametrize("magnitude", [1.0, 1e-6, 1e6])
def test_options_reach_the_cast(quantizer, magnitude):
    x = torch.randn(16, 24) * magnitude
    q = fg.quantize(x, quantizer)
    codes, scale_inv = oracles.cast_per_tensor(
        x,
        x.abs().max().item(),
        quantizer.format.name,
        eps=quantizer.amax_epsilon,
        power_of_two=quantizer.power_of_two,
    )
    assert_same_bits(q.scale_inv, np.float32(scale_inv))
    assert_same_bits(q.data.view(torch.uint8), codes)
    if quantizer.power_of_two:
        assert math.frexp(q.scale_inv.item())[0] == 0.5


# What a quantizer promises to a plan.


@pytest.mark.parametrize("pad", [1, 16])
@pytest.mark.parametrize("orientation", ORIENTATIONS, **by_name)
@pytest.mark.parametrize("shape", [(24, 40), (16, 32), (1, 7), (7, 1), (0, 5), (5, 0)], ids=str)
def test_the_spec_is_what_comes(shape, orientation, pad):
    x = torch.randn(shape)
    real = E4M3.quantize(x, orientation, pad=pad)
    spec = E4M3.spec(shape, x.dtype, x.device, orientation, pad=pad)
    assert to_spec(real) == spec
    assert all(t.is_contiguous() for t in flatten(real))


@pytest.mark.parametrize("orientation", ORIENTATIONS, **by_name)
@pytest.mark.parametrize("shape", [(24,), (2, 3, 40), (2, 0, 3), (2, 3, 4, 5)], ids=str)
def test_the_spec_of_other_ranks(shape, orientation):
    x = torch.randn(shape)
    spec = E5M2.spec(shape, x.dtype, x.device, orientation)
    assert to_spec(E5M2.quantize(x, orientation)) == spec
    assert tuple(spec.shape) == shape


@pytest.mark.parametrize("pad", [1, 16])
@pytest.mark.parametrize("wanted", [fg.ROWWISE, fg.COLUMNWISE], **by_name)
@pytest.mark.parametrize("held", ORIENTATIONS, **by_name)
@pytest.mark.parametrize("shape", [(6, 40), (2, 3, 40), (40,)], ids=str)
def test_a_gemm_gets_the_copy_it_reads(shape, held, wanted, pad):
    x = torch.randn(shape)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    parts = E4M3.quantize(x, held)
    payload, scale_inv = E4M3.matrix(parts, wanted, pad=pad)
    codes = torch.from_numpy(oracles.cast_per_tensor(x, x.abs().max().item(), "E4M3")[0])
    codes = codes.view(rows, columns)
    expected = codes if wanted is fg.ROWWISE else codes.t()
    assert payload.is_contiguous()
    assert payload.shape[1] == -(-expected.shape[1] // pad) * pad
    assert_same_bits(payload[:, : expected.shape[1]], expected)
    assert not payload[:, expected.shape[1] :].any()
    assert scale_inv is parts.scale_inv


@pytest.mark.parametrize("orientation", ORIENTATIONS, **by_name)
@pytest.mark.parametrize("shape", [(24,), (6, 40), (2, 3, 40)], ids=str)
def test_every_copy_decodes_to_the_same(shape, orientation):
    x = tensors(shape)
    expected = fg.quantize(x, E4M3, fg.ROWWISE).dequantize()
    got = fg.quantize(x, E4M3, orientation).dequantize()
    assert got.shape == x.shape
    assert torch.equal(got, expected)


# The public function.


def test_strides_do_not_matter():
    wide = tensors((24, 80))
    misaligned = wide.flatten()[1:1901].view(19, 100)
    for x in (wide[:, ::2], wide.t(), wide[:1].expand(24, 80), misaligned):
        for ours, theirs in zip(
            flatten(fg.quantize(x, E4M3, fg.BOTH)),
            flatten(fg.quantize(x.contiguous(), E4M3, fg.BOTH)),
            strict=True,
        ):
            assert_same_bits(ours, theirs)


def test_a_quantized_input_is_decoded_first():
    q = fg.quantize(torch.randn(6, 16), E4M3)
    again = fg.quantize(q, E5M2)
    assert again.quantizer == E5M2
    assert_same_bits(
        again.data.view(torch.uint8), fg.quantize(q.dequantize(), E5M2).data.view(torch.uint8)
    )


@pytest.mark.parametrize("orientation", ORIENTATIONS, **by_name)
def test_the_gradient_passes_straight_through(orientation):
    x, grad_output = tensors((6, 16), (6, 16))
    x.requires_grad_()
    q = fg.quantize(x, E5M2, orientation)
    assert q.requires_grad
    q.backward(grad_output)
    assert_same_bits(x.grad, grad_output)


@pytest.mark.parametrize("orientation", ORIENTATIONS, **by_name)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager(backend, orientation):
    def both(x):
        q = fg.quantize(x, E4M3, orientation)
        return q, q.dequantize()

    compiled = torch.compile(both, backend=backend, fullgraph=True, dynamic=True)
    for shape in [(6, 16), (9, 40)]:
        results = []
        for function in (both, compiled):
            leaf = tensors(shape).requires_grad_() if not results else results[0][0]
            leaf = leaf.detach().requires_grad_()
            q, values = function(leaf)
            (values * 2).sum().backward()
            results.append((leaf, values.detach(), leaf.grad, *flatten(q)))
        for ours, theirs in zip(*results, strict=True):
            assert_same_bits(ours, theirs)
    assert counters["stats"]["unique_graphs"] == 1


@dataclasses.dataclass(frozen=True)
class MarginQuantizer:
    """A quantizer of one's own, registered nowhere: it leaves room above the amax."""

    format: fg.Format
    margin: int = 1

    @property
    def inner(self):
        return PerTensorQuantizer(self.format)

    def quantize(self, x, orientation, *, pad=1):
        amax = reference.amax(x) * 2**self.margin
        copies = reference.cast_per_tensor(x, amax, self.format, orientation=orientation, pad=pad)
        return QuantizedParts(*copies, self, x.dtype)

    def spec(self, shape, dtype, device, orientation, *, pad=1):
        spec = self.inner.spec(shape, dtype, device, orientation, pad=pad)
        return dataclasses.replace(spec, quantizer=self)

    def dequantize(self, parts):
        return self.inner.dequantize(parts)

    def matrix(self, parts, orientation, *, pad=1):
        return self.inner.matrix(parts, orientation, pad=pad)


@dataclasses.dataclass(frozen=True)
class MarginRecipe(fg.recipes.Recipe):
    """A recipe of one's own that uses it."""

    margin: int = 1

    def quantizer(self, role):
        return MarginQuantizer(fg.Format.E4M3, self.margin)


def test_a_quantizer_of_ones_own():
    quantizer = MarginQuantizer(fg.Format.E4M3, margin=3)
    x = tensors((6, 16))
    q = fg.quantize(x, quantizer, fg.BOTH)
    assert q.quantizer == quantizer
    assert q.scale_inv.item() == pytest.approx(8 * x.abs().max().item() / 448)
    compiled = torch.compile(
        lambda x: fg.quantize(x, quantizer, fg.BOTH),
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    for ours, theirs in zip(flatten(compiled(x)), flatten(q), strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_recipe_of_ones_own(where):
    layer = fg.Linear(40, 24, dtype=torch.bfloat16)
    x, grad_output = batch(19, 40, 24)

    def function(x):
        if where == "outside":
            return layer(x)
        with fg.autocast(MarginRecipe(margin=2)):
            return layer(x)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    with fg.autocast(MarginRecipe(margin=2)):
        results = [step(layer, x, grad_output, f) for f in (function, compiled)]
    for name, value in results[0].items():
        assert_same_bits(results[1][name], value)
    margin = MarginQuantizer(fg.Format.E4M3, 2)
    expected = layer(x)  # in high precision
    assert 0.02 < oracles.relative_error(results[0]["output"], expected) < 0.06
    quantized = fg.quantize(x, margin).dequantize(), fg.quantize(layer.weight, margin).dequantize()
    expected = quantized[0].double() @ quantized[1].double().t() + layer.bias.double()
    assert oracles.relative_error(results[0]["output"], expected) < 4e-3
    with fg.autocast(MarginRecipe(margin=12)):  # so much room that values underflow
        changed = not torch.equal(compiled(x), results[1]["output"])
    assert changed == (where == "outside")


# Errors.


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int32, torch.bool, torch.float8_e4m3fn], ids=str
)
def test_dtypes_that_cannot_be_quantized(dtype):
    with pytest.raises(ConfigError, match=r"must be float32, bfloat16 or float16, got \w+\[2, 3\]"):
        fg.quantize(torch.zeros(2, 3).to(dtype), E4M3)


def test_a_scalar_cannot_be_quantized():
    with pytest.raises(
        ShapeError, match=r"at least one dimension, got a scalar[^$]*Do: use x.reshape\(1\)"
    ):
        fg.quantize(torch.tensor(1.0), E4M3)


@pytest.mark.parametrize("format", [fg.Format.E2M1, fg.Format.E8M0, "E4M3", None])
def test_formats_that_do_not_fit(format):
    with pytest.raises(ConfigError, match="the format must be E4M3 or E5M2"):
        PerTensorQuantizer(format)


def test_arguments_of_the_wrong_kind():
    x = torch.zeros(2, 3)
    with pytest.raises(ConfigError, match=r"must be a fullgraph.Orientation, got 'rowwise'"):
        fg.quantize(x, E4M3, "rowwise")
    with pytest.raises(ConfigError, match="a quantizer is needed, got 'E4M3'"):
        fg.quantize(x, "E4M3")


def test_parts_hold_what_was_asked_for():
    for orientation in ORIENTATIONS:
        parts = E4M3.quantize(torch.zeros(2, 3), orientation)
        assert isinstance(parts, QuantizedParts)
        assert parts.orientation is orientation
        assert parts.only(fg.ROWWISE).columnwise_data is None
        assert parts.only(fg.COLUMNWISE).data is None
