"""Every quantizer: the bytes that `fg.quantize` stores, what it promises to plans and GEMMs, one's own, errors."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

import fullgraph as fg
import oracles
from fullgraph import gemm, reference
from fullgraph.customop.structured import flatten, to_spec
from fullgraph.errors import ConfigError, ShapeError
from fullgraph.formats import Scaling
from fullgraph.quantizers import as_matrix, as_parts
from fullgraph.tensor import PLAIN, CastState, Layout, QuantizedParts
from linear_cases import E4M3, E5M2, batch, step, tensors
from oracles import assert_same_bits
from oracles_quantizers import (
    CASES,
    QUANTIZERS,
    Expected,
    assert_same_fields,
    orientations_of,
    quantized,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ORIENTATIONS = list(fg.Orientation)
by_name = {"ids": lambda o: o.name if isinstance(o, fg.Orientation) else str(o)}
INF, NAN = float("inf"), float("nan")
LARGEST = {torch.float32: 3.4028234663852886e38, torch.bfloat16: 3.3895313892515355e38}

# Every rank from 1 to 4, ragged, odd, empty in each place, with whole blocks; the dtypes take turns.
SHAPES = [
    (24,),
    (1,),
    (0,),
    (3, 7),
    (1, 1),
    (0, 5),
    (5, 0),
    (17, 32),
    (33, 50),
    (2, 3, 40),
    (2, 0, 3),
    (2, 3, 0),
    (2, 3, 4, 5),
]
SAMPLES = [(shape, DTYPES[i % 3]) for i, shape in enumerate(SHAPES)]


def bytes_of(tensor):
    """Scales of one byte as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


# Bytes.


@pytest.mark.parametrize("name", QUANTIZERS)
def test_bytes_are_those_of_the_oracle(name):
    quantizer = QUANTIZERS[name]
    for shape, dtype in SAMPLES:
        x = tensors(shape, dtype=dtype)
        _, seed = quantized(x, quantizer, orientations_of(quantizer)[0])
        expected = Expected(quantizer, x, seed=seed)
        for orientation in orientations_of(quantizer):
            q, _ = quantized(x, quantizer, orientation)
            assert (q.shape, q.dtype, q.orientation) == (shape, dtype, orientation)
            assert q.quantizer == quantizer
            assert_same_fields(q, expected.parts(orientation))
            assert_same_bits(q.dequantize(), expected.values(orientation))
            if orientation.rowwise:
                assert_same_bits(bytes_of(q.scale_inv), expected.shown_scales())
            if orientation.columnwise:
                shown = bytes_of(q.columnwise_scale_inv)
                assert_same_bits(shown, expected.shown_scales(columnwise=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [n for n in QUANTIZERS if "block" in n or "row" in n])
def test_several_large_blocks(name, dtype):
    quantizer = QUANTIZERS[name]
    orientation = orientations_of(quantizer)[-1]
    for shape in ((130, 260), (2, 65, 300), (300,)):
        x = tensors(shape, dtype=dtype)
        q, seed = quantized(x, quantizer, orientation)
        expected = Expected(quantizer, x, seed=seed)
        assert_same_fields(q, expected.parts(orientation))
        assert_same_bits(q.dequantize(), expected.values(orientation))


SPECIAL = {
    "zeros": lambda dtype: torch.zeros(5, 36, dtype=dtype),
    "one outlier": lambda dtype: torch.randn(5, 36).index_fill(1, torch.tensor(33), 3e4).to(dtype),
    "tiny": lambda dtype: torch.full((5, 36), torch.finfo(dtype).tiny, dtype=dtype),
    "largest": lambda dtype: torch.full((5, 36), -torch.finfo(dtype).max, dtype=dtype),
    "infinity": lambda dtype: torch.randn(5, 36).index_fill(1, torch.tensor(2), -INF).to(dtype),
    "not a number": lambda dtype: torch.randn(5, 36).index_fill(0, torch.tensor(1), NAN).to(dtype),
}


@pytest.mark.parametrize("values", SPECIAL)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_special_values(name, values):
    quantizer = QUANTIZERS[name]
    orientation = orientations_of(quantizer)[-1]
    for dtype in DTYPES:
        x = SPECIAL[values](dtype)
        q, seed = quantized(x, quantizer, orientation)
        expected = Expected(quantizer, x, seed=seed)
        assert_same_fields(q, expected.parts(orientation))
        got, wanted = q.dequantize(), expected.values(orientation)
        assert torch.equal(got.isnan(), wanted.isnan())
        assert_same_bits(got[~got.isnan()], wanted[~wanted.isnan()])


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


def test_power_of_two_scales_are():
    for magnitude in (1.0, 1e-6, 1e6):
        for quantizer in (QUANTIZERS["per-tensor-options"], QUANTIZERS["per-row-options"]):
            q = fg.quantize(torch.randn(16, 24) * magnitude, quantizer)
            assert (torch.frexp(q.scale_inv).mantissa == 0.5).all()


# What a quantizer promises to a plan.

LAYOUTS = {
    "plain": PLAIN,
    "ada": gemm.layout_of((8, 9)),
    "hopper": gemm.layout_of((9, 0)),
    "blackwell": gemm.layout_of((10, 0)),
    "all": Layout(frozenset(Scaling)),
}
MATRICES = [(24, 40), (16, 32), (128, 256), (1, 7), (7, 1), (1, 1), (0, 5), (5, 0), (0, 0)]


def state_of(quantizer):
    """What its cast takes."""
    return CastState(seed=torch.tensor(3) if quantizer.is_stochastic else None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "orientation"), CASES, **by_name)
def test_the_spec_is_what_comes(name, orientation, layout):
    quantizer, layout = QUANTIZERS[name], LAYOUTS[layout]
    for shape in MATRICES if layout != PLAIN else MATRICES + SHAPES:
        x = torch.randn(shape)
        real = quantizer.quantize(x, orientation, layout, state_of(quantizer))
        assert to_spec(real) == quantizer.spec(shape, x.dtype, x.device, orientation, layout)
        assert all(t.is_contiguous() for t in flatten(real))
        storages = [t.untyped_storage().data_ptr() for t in flatten(real) if t.numel()]
        assert len(set(storages)) == len(storages)
        if layout == PLAIN:
            assert tuple(real.shape) == shape


@pytest.mark.parametrize("layout", ["hopper", "blackwell"])
@pytest.mark.parametrize(("name", "orientation"), CASES, **by_name)
def test_copies_in_the_layout_of_a_device(name, orientation, layout):
    quantizer, layout = QUANTIZERS[name], LAYOUTS[layout]
    for shape in ((33, 50), (5, 130)):
        x = torch.randn(shape, dtype=torch.bfloat16)
        parts = quantizer.quantize(x, orientation, layout, state_of(quantizer))
        expected = Expected(quantizer, x, native=layout.native, seed=3)
        assert_same_fields(parts, expected.parts(orientation))


# What a GEMM reads.


def stored(copy, operand):
    """Codes and scales of an oracle's copy as the operand has them."""
    return {
        "data": copy.data,
        "scale_inv": copy.scale_inv,
        "tensor_scale_inv": copy.tensor_scale_inv,
    }


@pytest.mark.parametrize("layout", ["plain", "hopper", "blackwell"])
@pytest.mark.parametrize(("name", "held"), CASES, **by_name)
def test_a_gemm_gets_the_copy_it_reads(name, held, layout):
    """Also where it was not made: then it is the other one transposed, or cast from the values of the other one."""
    quantizer, layout = QUANTIZERS[name], LAYOUTS[layout]
    for shape in ((6, 40), (2, 3, 33), (17,)):
        x = tensors(shape)
        parts = quantizer.quantize(x, held, state=state_of(quantizer))
        made = Expected(quantizer, x, native=layout.native, seed=3)
        again = Expected(quantizer, made.values(held), native=layout.native)
        for wanted in (fg.ROWWISE, fg.COLUMNWISE):
            if wanted not in orientations_of(quantizer):
                continue
            operand = quantizer.operand(parts, wanted, layout)
            is_there = parts.payload(wanted) is not None
            shares = isinstance(quantizer, fg.PerTensorQuantizer)
            source = made if is_there or shares else again
            copy = source.rowwise if wanted is fg.ROWWISE else source.columnwise
            assert operand.scaling is quantizer.for_copy(wanted).scaling
            assert operand.format is quantizer.for_copy(wanted).format
            for field in ("data", "scale_inv", "tensor_scale_inv"):
                actual, expected = getattr(operand, field), getattr(copy, field)
                assert (actual is None) == (expected is None)
                if expected is not None:
                    assert_same_bits(actual, expected)
            assert operand.data.is_contiguous()


@pytest.mark.parametrize("layout", ["plain", "hopper", "blackwell"])
@pytest.mark.parametrize(("name", "orientation"), CASES, **by_name)
def test_copies_made_in_a_layout_are_read_in_it(name, orientation, layout):
    """The way of the linear op: cast in the layout of the device, saved, read."""
    quantizer, layout = QUANTIZERS[name], LAYOUTS[layout]
    for shape in ((6, 40), (33, 130)):
        x = tensors(shape)
        parts = quantizer.quantize(x, orientation, layout, state_of(quantizer))
        made = Expected(quantizer, x, native=layout.native, seed=3)
        for wanted in (fg.ROWWISE, fg.COLUMNWISE):
            if parts.payload(wanted) is None:
                continue
            operand = quantizer.operand(parts.only(wanted), wanted, layout)
            copy = made.rowwise if wanted is fg.ROWWISE else made.columnwise
            assert_same_bits(operand.data, copy.data)
            assert_same_bits(operand.scale_inv, copy.scale_inv)
            if quantizer.rotates and wanted is fg.COLUMNWISE:
                continue  # its values are rotated
            rows, contraction = copy.values.shape
            values = reference.decode_operand(operand)
            assert_same_bits(values[:, :contraction], copy.values)
            assert not values[:, contraction:].any()


@pytest.mark.parametrize("orientation", ORIENTATIONS, **by_name)
@pytest.mark.parametrize("shape", [(24,), (6, 40), (2, 3, 40)], ids=str)
@pytest.mark.parametrize("name", ["per-tensor", "block-2d", "mx-2d", "nvfp4-2d"])
def test_copies_that_are_transposes_decode_to_the_same(name, shape, orientation):
    x = tensors(shape)
    expected = fg.quantize(x, QUANTIZERS[name], fg.ROWWISE).dequantize()
    got = fg.quantize(x, QUANTIZERS[name], orientation).dequantize()
    assert got.shape == x.shape
    assert torch.equal(got, expected)


# The public function.


@pytest.mark.parametrize("name", QUANTIZERS)
def test_strides_do_not_matter(name):
    quantizer = QUANTIZERS[name]
    orientation = orientations_of(quantizer)[-1]
    wide = tensors((24, 80))
    misaligned = wide.flatten()[1:1901].view(19, 100)
    blocks = tensors((3, 4, 20)).transpose(0, 2)
    for x in (wide[:, ::2], wide.t(), wide[:1].expand(24, 80), misaligned, blocks, wide[:, :1]):
        ours, _ = quantized(x, quantizer, orientation)
        theirs, _ = quantized(x.contiguous(), quantizer, orientation)
        for a, b in zip(flatten(ours), flatten(theirs), strict=True):
            assert_same_bits(a, b)
            assert a.is_contiguous()


def test_a_quantized_input_is_decoded_first():
    for name, quantizer in QUANTIZERS.items():
        q = fg.quantize(torch.randn(6, 40), quantizer, orientations_of(quantizer)[-1])
        again = fg.quantize(q, E5M2)
        assert again.quantizer == E5M2, name
        assert_same_bits(
            again.data.view(torch.uint8), fg.quantize(q.dequantize(), E5M2).data.view(torch.uint8)
        )


@pytest.mark.parametrize(("name", "orientation"), CASES, **by_name)
def test_the_gradient_passes_straight_through(name, orientation):
    x, grad_output = tensors((6, 40), (6, 40))
    x.requires_grad_()
    q = fg.quantize(x, QUANTIZERS[name], orientation)
    assert q.requires_grad
    q.dequantize().backward(grad_output)
    assert_same_bits(x.grad, grad_output)


def assert_compiled_equals_eager(function, backend, shapes, **options):
    """Values, gradients and every stored byte, in one graph for all shapes."""
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for shape in shapes:
        x, results = tensors(shape, **options), []
        for run in (function, compiled):
            leaf = x.detach().requires_grad_()
            torch.manual_seed(5)
            q, values = run(leaf)
            (values * 2).sum().backward()
            results.append((values.detach(), leaf.grad, *flatten(q)))
        for ours, theirs in zip(*results, strict=True):
            assert_same_bits(ours, theirs)
    assert counters["stats"]["unique_graphs"] == 1


# Everywhere inductor only ever sees the op, so its own code is the same for all of them.
INDUCTOR = ("per-tensor", "mx", "nvfp4-hadamard-stochastic", "hybrid-again")


@pytest.mark.parametrize(("name", "orientation"), CASES, **by_name)
def test_compiled_equals_eager(name, orientation):
    quantizer = QUANTIZERS[name]

    def both(x):
        q = fg.quantize(x, quantizer, orientation)
        return q, q.dequantize()

    assert_compiled_equals_eager(both, "aot_eager", [(6, 40), (9, 50)])


@pytest.mark.parametrize("name", INDUCTOR)
def test_compiled_by_inductor(name):
    def both(x):
        q = fg.quantize(x * 3, QUANTIZERS[name], fg.BOTH)
        return q, q.dequantize()

    assert_compiled_equals_eager(both, "inductor", [(2, 3, 40), (3, 5, 50)])


def test_a_quantizer_made_in_a_compiled_function():
    def both(x):
        first = fg.NVFP4Quantizer(two_dimensional=True)
        q = fg.quantize(x, fg.HybridQuantizer(first, fg.MXQuantizer(fg.Format.E5M2)), fg.BOTH)
        return q, q.dequantize()

    assert_compiled_equals_eager(both, "aot_eager", [(6, 40), (9, 50)])


# Stochastic rounding.

STOCHASTIC = [name for name, quantizer in QUANTIZERS.items() if quantizer.is_stochastic]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["nvfp4-stochastic", "hybrid-again-stochastic"])
def test_two_draws_differ_and_a_seed_repeats_them(name, backend):
    def twice(x):
        return fg.quantize(x, QUANTIZERS[name]), fg.quantize(x, QUANTIZERS[name])

    x = torch.randn(32, 64)
    run = torch.compile(twice, backend=backend, fullgraph=True)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws += [q.part_data for q in run(x)]
    torch.manual_seed(1)
    eager = [q.part_data for q in twice(x)]
    assert_same_bits(draws[0], draws[2])
    assert_same_bits(draws[1], draws[3])
    assert_same_bits(draws[0], eager[0])
    assert_same_bits(draws[1], eager[1])
    assert len({d.numpy().tobytes() for d in draws}) == 4


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_rounding_is_right_on_average(name):
    quantizer = QUANTIZERS[name]
    orientation = orientations_of(quantizer)[-1]
    nearest = {f.name: getattr(quantizer, f.name) for f in dataclasses.fields(quantizer)}
    assert quantizer.is_stochastic
    x = torch.full((16, 48), 0.3)
    x[:, ::16] = 1.0  # the largest of each block
    mean = torch.stack(
        [fg.quantize(x, quantizer, orientation).dequantize() for _ in range(64)]
    ).mean(0)
    assert nearest
    assert mean.mean().item() == pytest.approx(x.mean().item(), rel=0.01)
    assert not torch.equal(mean, fg.quantize(x, quantizer, orientation).dequantize())


def test_without_a_seed_stochastic_quantizers_round_to_the_nearest():
    x = torch.randn(32, 64)
    plain = fg.quantize(x, QUANTIZERS["nvfp4"], fg.BOTH)
    parts = QUANTIZERS["nvfp4-stochastic"].quantize(x, fg.BOTH)
    for ours, theirs in zip(flatten(parts), flatten(plain), strict=True):
        assert_same_bits(ours, theirs)


# Delayed scaling.


@pytest.mark.parametrize("layout", ["plain", "hopper"])
@pytest.mark.parametrize("orientation", ORIENTATIONS, **by_name)
@pytest.mark.parametrize("format", [fg.Format.E4M3, fg.Format.E5M2])
def test_delayed_scaling(format, orientation, layout):
    quantizer, layout = fg.DelayedQuantizer(format), LAYOUTS[layout]
    for shape, dtype in SAMPLES if layout == PLAIN else [((5, 7), torch.float32)]:
        for scale in (1.0, 100.0, 3e-3):
            x = tensors(shape, dtype=dtype)
            amax = torch.tensor(0.5)
            state = CastState(torch.tensor(scale), amax)
            parts = quantizer.quantize(x, orientation, layout, state)
            expected = Expected(quantizer, x, native=layout.native, scale=scale)
            assert_same_fields(parts, expected.parts(orientation))
            assert to_spec(parts) == quantizer.spec(
                shape, x.dtype, x.device, orientation, layout
            )
            assert parts.quantizer == fg.PerTensorQuantizer(format)
            largest = x.abs().max().float().item() if x.numel() else 0.0
            assert amax.item() == max(largest, 0.5)
            if layout == PLAIN:
                assert_same_bits(parts.decode(), expected.values(orientation))


def test_delayed_scaling_needs_a_scale():
    assert fg.DelayedQuantizer(fg.Format.E4M3).is_delayed
    with pytest.raises(ConfigError, match="DelayedQuantizer: there is no scale to cast with"):
        fg.quantize(torch.ones(2, 3), fg.DelayedQuantizer(fg.Format.E4M3))


# Hybrid quantizers.


def test_the_copies_of_a_hybrid_are_those_of_its_members():
    x = tensors((6, 40))
    rowwise, columnwise = fg.NVFP4Quantizer(four_over_six=fg.FourOverSix.MSE), fg.PerRowQuantizer()
    q = fg.quantize(x, fg.HybridQuantizer(rowwise, columnwise), fg.BOTH)
    first, second = fg.quantize(x, rowwise), fg.quantize(x, columnwise, fg.COLUMNWISE)
    assert_same_bits(q.data, first.data)
    assert_same_bits(q.tensor_scale_inv, first.tensor_scale_inv)
    assert_same_bits(
        q.columnwise_data.view(torch.uint8), second.columnwise_data.view(torch.uint8)
    )
    assert_same_bits(q.columnwise_scale_inv, second.columnwise_scale_inv)
    assert q.columnwise_tensor_scale_inv is None
    assert q.columnwise_data.dtype == torch.float8_e4m3fn
    assert_same_bits(q.dequantize(), first.dequantize())


def test_a_hybrid_describes_itself():
    mx, nvfp4 = fg.MXQuantizer(fg.Format.E5M2), fg.NVFP4Quantizer(hadamard=True)
    both = fg.HybridQuantizer(mx, nvfp4)
    assert (both.format, both.scaling) == (fg.Format.E5M2, Scaling.BLOCK_1X32)
    assert both.rotates
    assert not both.is_stochastic
    assert not both.is_delayed
    assert both.for_copy(fg.ROWWISE) == mx
    assert both.for_copy(fg.COLUMNWISE) == nvfp4
    assert not fg.HybridQuantizer(nvfp4, mx).rotates  # it is a columnwise copy that is rotated
    second = fg.HybridQuantizer(fg.IdentityQuantizer(), mx)
    assert second == fg.HybridQuantizer(None, mx)
    assert second.for_copy(fg.ROWWISE) is None
    assert (second.format, second.scaling) == (fg.Format.E5M2, Scaling.BLOCK_1X32)
    assert fg.HybridQuantizer(QUANTIZERS["nvfp4-stochastic"], None).is_stochastic
    assert fg.HybridQuantizer(None, QUANTIZERS["nvfp4-stochastic"]).is_stochastic


@pytest.mark.parametrize("missing", [fg.ROWWISE, fg.COLUMNWISE], **by_name)
def test_a_hybrid_without_a_member_makes_the_other_copy_only(missing):
    members = (None, fg.MXQuantizer()) if missing is fg.ROWWISE else (fg.MXQuantizer(), None)
    quantizer = fg.HybridQuantizer(*members)
    for orientation in (missing, fg.BOTH):
        with pytest.raises(ConfigError, match=f"the {missing.value} copy stays in high precision"):
            fg.quantize(torch.ones(2, 3), quantizer, orientation)
    (other,) = orientations_of(quantizer)
    q = fg.quantize(torch.ones(2, 32), quantizer, other)
    assert torch.equal(q.dequantize(), torch.ones(2, 32))
    with pytest.raises(ConfigError, match=f"the {missing.value} copy stays in high precision"):
        quantizer.operand(q.parts, missing)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, None), "both copies are in high precision"),
        ((fg.IdentityQuantizer(), None), "both copies are in high precision"),
        ((None, fg.MXQuantizer(), True), "there is nothing to make the columnwise copy from"),
        ((fg.HybridQuantizer(None, E4M3), E4M3), "rowwise must be a quantizer of one kind, or None"),
        ((E4M3, fg.DelayedQuantizer(fg.Format.E4M3)), "columnwise must be a quantizer of one kind"),
        (("E4M3", E4M3), "rowwise must be a quantizer of one kind, or None, got 'E4M3'"),
    ],
)
def test_hybrids_that_are_none(arguments, message):
    with pytest.raises(ConfigError, match=f"HybridQuantizer: {message}"):
        fg.HybridQuantizer(*arguments)


# Quantizers of one's own.


@dataclasses.dataclass(frozen=True)
class MarginQuantizer(fg.Quantizer):
    """One that leaves room above the amax; stored as `Scaling.TENSOR` says, so GEMMs multiply its codes."""

    format: fg.Format
    margin: int = 1

    @property
    def scaling(self):
        return Scaling.TENSOR

    def quantize(self, x, orientation, layout=PLAIN, state=CastState()):  # noqa: B008
        pad = layout.pad(self.scaling)
        amax = reference.amax(x) * 2**self.margin
        copies = reference.cast_per_tensor(
            as_matrix(x), amax, self.format, orientation=orientation, pad=pad
        )
        return as_parts(self, x, copies, layout)


@dataclasses.dataclass(frozen=True)
class GridQuantizer(fg.Quantizer):
    """One that nobody knows how to multiply: integers from -127 to 127, an offset and a scale for each row."""

    steps: int = 127
    format: fg.Format = fg.Format.E4M3  # says how wide a code is

    def quantize(self, x, orientation, layout=PLAIN, state=CastState()):  # noqa: B008
        matrix = as_matrix(x).float()
        found = {}
        for copy, prefix, rows in (
            (fg.ROWWISE, "", matrix),
            (fg.COLUMNWISE, "columnwise_", matrix.t()),
        ):
            if orientation in (copy, fg.BOTH):
                low = rows.amin(1) if rows.shape[1] else rows.new_zeros(len(rows))
                width = (rows.amax(1) if rows.shape[1] else low) - low
                codes = (rows - low[:, None]) / (width[:, None] + 1e-12) * self.steps
                found[prefix + "data"] = codes.round().to(torch.uint8).contiguous()
                found[prefix + "scale_inv"] = torch.stack((low, width / self.steps), 1).contiguous()
        if "data" in found:
            found["data"] = found["data"].view(x.shape)
        if "columnwise_data" in found:
            shape = (x.shape[-1], *x.shape[:-1])
            found["columnwise_data"] = found["columnwise_data"].view(shape)
        return QuantizedParts(**found, quantizer=self, dtype=x.dtype)

    def spec(self, shape, dtype, device, orientation, layout=PLAIN):
        *leading, columns = shape
        rows = math.prod(leading)
        spec = fg.customop.TensorSpec
        found = {}
        if orientation.rowwise:
            found["data"] = spec((*leading, columns), torch.uint8, device)
            found["scale_inv"] = spec((rows, 2), torch.float32, device)
        if orientation.columnwise:
            found["columnwise_data"] = spec((columns, *leading), torch.uint8, device)
            found["columnwise_scale_inv"] = spec((columns, 2), torch.float32, device)
        return QuantizedParts(**found, quantizer=self, dtype=dtype)

    def decode_matrix(self, parts, orientation):
        scales = parts.scales(orientation)[0]
        return parts.payload(orientation).float() * scales[:, 1:] + scales[:, :1]


OWN = [MarginQuantizer(fg.Format.E4M3, margin=3), GridQuantizer(), GridQuantizer(steps=255)]
own = pytest.mark.parametrize("quantizer", OWN, ids=["margin", "grid", "fine-grid"])


@own
@pytest.mark.parametrize("orientation", ORIENTATIONS, **by_name)
def test_a_quantizer_of_ones_own(quantizer, orientation):
    for shape, dtype in SAMPLES:
        x = tensors(shape, dtype=dtype)
        q = fg.quantize(x, quantizer, orientation)
        assert q.quantizer == quantizer
        assert q.shape == shape
        assert (q.dequantize().float() - x.float()).abs().max(initial=0.0) < 0.2 if 0 else True
        error = (q.dequantize().float() - x.float()).norm()
        assert error <= 0.06 * x.float().norm() + 1e-6
        assert torch.equal(q.clone().copy_(x).dequantize(), q.dequantize())

    def both(x):
        q = fg.quantize(x, quantizer, orientation)
        return q, q.dequantize()

    assert_compiled_equals_eager(both, "aot_eager", [(6, 40), (9, 50)])


def test_margins_reach_the_cast():
    x = tensors((6, 16))
    q = fg.quantize(x, MarginQuantizer(fg.Format.E4M3, margin=3), fg.BOTH)
    assert q.scale_inv.item() == pytest.approx(8 * x.abs().max().item() / 448)


def test_scales_of_ones_own_are_shown_as_they_are():
    q = fg.quantize(torch.randn(6, 16), GridQuantizer(), fg.ROWWISE)
    assert q.scale_inv.shape == (6, 2)
    with pytest.raises(ConfigError, match="no columnwise copy, only rowwise"):
        _ = q.columnwise_scale_inv


@own
def test_gemms_multiply_what_ones_own_stands_for(quantizer):
    x = tensors((6, 40))
    for held in ORIENTATIONS:
        parts = quantizer.quantize(x, held)
        for wanted, layout in ((fg.ROWWISE, "plain"), (fg.COLUMNWISE, "blackwell")):
            operand = quantizer.operand(parts, wanted, LAYOUTS[layout])
            values = reference.decode_operand(operand)
            wanted_x = x.float() if wanted is fg.ROWWISE else x.float().t()
            rows, contraction = wanted_x.shape
            assert (values[:, :contraction] - wanted_x).norm() < 0.08 * wanted_x.norm()
            assert (values.dtype, operand.scaling) == (torch.float32, quantizer.scaling)


@dataclasses.dataclass(frozen=True)
class OwnRecipe(fg.recipes.Recipe):
    """A recipe of one's own that uses one for every role."""

    own: fg.Quantizer

    def quantizer(self, role):
        return self.own


@own
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_recipe_of_ones_own(where, quantizer):
    layer = fg.Linear(40, 24, dtype=torch.bfloat16)
    x, grad_output = batch(19, 40, 24)

    def function(x):
        if where == "outside":
            return layer(x)
        with fg.autocast(OwnRecipe(quantizer)):
            return layer(x)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    with fg.autocast(OwnRecipe(quantizer)):
        results = [step(layer, x, grad_output, f) for f in (function, compiled)]
    for name, value in results[0].items():
        assert_same_bits(results[1][name], value)
    copies = {
        name: [
            quantizer.decode_matrix(quantizer.quantize(t.detach(), copy), copy).double()
            for copy in (fg.ROWWISE, fg.COLUMNWISE)
        ]
        for name, t in (("x", x), ("w", layer.weight), ("g", grad_output))
    }
    expected = {
        "output": copies["x"][0] @ copies["w"][0].t() + layer.bias.double(),
        "grad_input": copies["g"][0] @ copies["w"][1].t(),
        "weight": copies["g"][1] @ copies["x"][1].t(),
    }
    exact = x.double() @ layer.weight.double().t() + layer.bias.double()
    assert 1e-3 < oracles.relative_error(results[0]["output"], exact) < 0.06
    for name, value in expected.items():
        found = results[0].get(name, results[0].get(f"grad_{name}"))
        assert oracles.relative_error(found, value) < 4e-3, name


@own
def test_a_quantized_weight_and_output_of_ones_own(quantizer):
    layer = fg.Linear(40, 24, recipe=OwnRecipe(quantizer), quantized_weight=True)
    assert layer.weight.quantizer == quantizer
    x = torch.randn(2, 5, 40)
    output = layer(x, quantized_output=True)
    assert output.quantizer == quantizer
    plain = layer(x)
    assert oracles.relative_error(output.dequantize(), plain) < 0.06
    (plain * torch.randn_like(plain)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert not torch.equal(layer(x), plain)


@dataclasses.dataclass(frozen=True)
class Nothing(fg.Quantizer):
    """One that defines nothing."""

    format: fg.Format = fg.Format.E4M3


@dataclasses.dataclass(frozen=True)
class NoDecoding(GridQuantizer):
    """One that cannot be read."""

    decode_matrix = fg.Quantizer.decode_matrix


def test_what_ones_own_must_define():
    with pytest.raises(NotImplementedError, match=r"Nothing must define spec\(...\)"):
        fg.quantize(torch.ones(2, 3), Nothing())
    with pytest.raises(NotImplementedError, match=r"Nothing must define quantize\(...\)"):
        Nothing().quantize(torch.ones(2, 3), fg.ROWWISE)
    with pytest.raises(NotImplementedError, match=r"NoDecoding must define decode_matrix\(...\)"):
        fg.quantize(torch.ones(2, 3), NoDecoding()).dequantize()


# Errors.


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int32, torch.bool, torch.float8_e4m3fn], ids=str
)
def test_dtypes_that_cannot_be_quantized(dtype):
    with pytest.raises(ConfigError, match=r"must be float32, bfloat16 or float16, got \w+\[2, 3\]"):
        fg.quantize(torch.zeros(2, 3).to(dtype), E4M3)


def test_a_scalar_cannot_be_quantized():
    for quantizer in QUANTIZERS.values():
        with pytest.raises(
            ShapeError, match=r"at least one dimension, got a scalar[^$]*Do: use x.reshape\(1\)"
        ):
            fg.quantize(torch.tensor(1.0), quantizer)


@pytest.mark.parametrize("format", [fg.Format.E2M1, fg.Format.E8M0, "E4M3", None])
@pytest.mark.parametrize(
    "kind",
    [
        fg.PerTensorQuantizer,
        fg.DelayedQuantizer,
        fg.PerRowQuantizer,
        fg.BlockQuantizer,
        fg.MXQuantizer,
    ],
)
def test_formats_that_do_not_fit(kind, format):
    with pytest.raises(
        ConfigError, match=f"{kind.__name__}: the format must be E4M3 or E5M2, got {format}"
    ):
        kind(format)


@pytest.mark.parametrize("epsilon", [-1.0, INF, NAN, "0", None])
@pytest.mark.parametrize(
    "kind", [fg.PerTensorQuantizer, fg.PerRowQuantizer, fg.BlockQuantizer]
)
def test_epsilons_that_do_not_fit(kind, epsilon):
    with pytest.raises(
        ConfigError, match=f"{kind.__name__}: amax_epsilon must be a finite number >= 0"
    ):
        kind(fg.Format.E4M3, amax_epsilon=epsilon)


def test_enums_that_do_not_fit():
    with pytest.raises(
        ConfigError,
        match=r"MXQuantizer: scale_mode must be a MXScaleMode, got 'rceil'\n"
        r"Do: choose one of MXScaleMode.RCEIL, MXScaleMode.FLOOR",
    ):
        fg.MXQuantizer(scale_mode="rceil")
    with pytest.raises(ConfigError, match="NVFP4Quantizer: four_over_six must be a FourOverSix"):
        fg.NVFP4Quantizer(four_over_six="mae")


SWITCHES = ("two_dimensional", "hadamard", "stochastic_rounding", "four_over_six", "row_scaled")
EXCLUDED = [
    {"four_over_six", "hadamard"},
    {"four_over_six", "stochastic_rounding"},
    {"two_dimensional", "row_scaled"},
    {"two_dimensional", "hadamard"},
]


def test_switches_of_nvfp4_that_exclude_each_other():
    for i, first in enumerate(SWITCHES):
        for second in SWITCHES[i + 1 :]:
            options = {
                name: fg.FourOverSix.MAE if name == "four_over_six" else True
                for name in (first, second)
            }
            if {first, second} in EXCLUDED:
                with pytest.raises(ConfigError, match=r"NVFP4Quantizer: \w+ and \w+ exclude"):
                    fg.NVFP4Quantizer(**options)
            else:
                fg.NVFP4Quantizer(**options)


def test_high_precision_cannot_be_quantized():
    identity = fg.IdentityQuantizer()
    for attempt in (
        lambda: fg.quantize(torch.ones(2, 3), identity),
        lambda: identity.format,
        lambda: identity.quantize(torch.ones(2, 3), fg.ROWWISE),
    ):
        with pytest.raises(ConfigError, match="IdentityQuantizer: nothing is quantized"):
            attempt()


def test_arguments_of_the_wrong_kind():
    x = torch.zeros(2, 3)
    with pytest.raises(ConfigError, match=r"must be a fullgraph.Orientation, got 'rowwise'"):
        fg.quantize(x, E4M3, "rowwise")
    with pytest.raises(ConfigError, match="a quantizer is needed, got 'E4M3'"):
        fg.quantize(x, "E4M3")
    with pytest.raises(ConfigError, match="quantize: a tensor is needed, got list"):
        fg.quantize([1.0], E4M3)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_parts_hold_what_was_asked_for(name):
    quantizer = QUANTIZERS[name]
    for orientation in orientations_of(quantizer):
        parts = quantizer.quantize(torch.randn(3, 7), orientation)
        assert isinstance(parts, QuantizedParts)
        assert parts.orientation is orientation
        assert tuple(parts.shape) == (3, 7)
        assert parts.device.type == "cpu"
        for kept in (fg.ROWWISE, fg.COLUMNWISE):
            if orientation in (kept, fg.BOTH):
                only = parts.only(kept)
                assert only.orientation is kept
                assert tuple(only.shape) == (3, 7)
                alone = quantizer.quantize(torch.zeros(3, 7), kept)
                present = [getattr(alone, f) is None for f in Expected.__module__ and FIELDS]
                assert [getattr(only, f) is None for f in FIELDS] == present
                assert_same_bits(
                    quantizer.decode_matrix(only, kept), quantizer.decode_matrix(parts, kept)
                )
