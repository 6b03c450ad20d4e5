"""Every quantizer: the bytes and values of `fg.quantize`, stochastic rounding, delayed and hybrid quantizers, errors.

What quantizers promise to plans and GEMMs is in test_quantizer_layouts.py, one's own in test_quantizer_own.py.
"""

import numpy as np
import pytest
import torch

import fullgraph as fg
import oracles
from fullgraph.customop.structured import flatten, to_spec
from fullgraph.errors import ConfigError, ShapeError
from fullgraph.formats import Scaling
from fullgraph.tensor import PLAIN, CastState, Layout
from linear_cases import E4M3, E5M2, tensors
from oracles import assert_same_bits
from oracles_quantizers import (
    CASES,
    DTYPES,
    QUANTIZERS,
    SAMPLES,
    Expected,
    assert_same_fields,
    expected,
    orientations_of,
    quantized,
    sample,
)

ORIENTATIONS = list(fg.Orientation)
by_name = {"ids": lambda o: o.name if isinstance(o, fg.Orientation) else str(o)}
INF, NAN = float("inf"), float("nan")
LARGEST = {torch.float32: 3.4028234663852886e38, torch.bfloat16: 3.3895313892515355e38}


def bytes_of(tensor):
    """Scales of one byte as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


# Bytes.


@pytest.mark.parametrize("name", QUANTIZERS)
def test_bytes_are_those_of_the_oracle(name):
    quantizer = QUANTIZERS[name]
    for shape, dtype in SAMPLES:
        x, wanted = sample(shape, dtype), expected(name, shape, dtype)
        for orientation in orientations_of(quantizer):
            q = quantized(x, quantizer, orientation)
            assert (q.shape, q.dtype, q.orientation) == (shape, dtype, orientation)
            assert q.quantizer == quantizer
            assert_same_fields(q, wanted.parts(orientation))
            assert_same_bits(q.dequantize(), wanted.values(orientation))
            if orientation.rowwise:
                assert_same_bits(bytes_of(q.scale_inv), wanted.shown_scales())
            if orientation.columnwise:
                shown = bytes_of(q.columnwise_scale_inv)
                assert_same_bits(shown, wanted.shown_scales(columnwise=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [n for n in QUANTIZERS if n.startswith(("block", "per"))])
def test_several_large_blocks(name, dtype):
    for shape in ((130, 260), (2, 65, 300), (300,)):
        q = quantized(sample(shape, dtype), QUANTIZERS[name])
        wanted = expected(name, shape, dtype)
        assert_same_fields(q, wanted.parts())
        assert_same_bits(q.dequantize(), wanted.values())
        assert_same_bits(q.columnwise_scale_inv, wanted.shown_scales(columnwise=True))


SPECIAL = {
    "zeros": lambda dtype: torch.zeros(3, 34, dtype=dtype),
    "one outlier": lambda dtype: torch.randn(3, 34).index_fill(1, torch.tensor(33), 3e4).to(dtype),
    "tiny": lambda dtype: torch.full((3, 34), torch.finfo(dtype).tiny, dtype=dtype),
    "largest": lambda dtype: torch.full((3, 34), -torch.finfo(dtype).max, dtype=dtype),
    "infinity": lambda dtype: torch.randn(3, 34).index_fill(1, torch.tensor(2), -INF).to(dtype),
    "not a number": lambda dtype: torch.randn(3, 34).index_fill(0, torch.tensor(1), NAN).to(dtype),
}


@pytest.mark.parametrize("values", SPECIAL)
@pytest.mark.parametrize("name", [n for n, q in QUANTIZERS.items() if not q.is_stochastic])
def test_special_values(name, values):
    """All that the casts meet is in their own tests; here: that decoding does not make it worse."""
    quantizer = QUANTIZERS[name]
    orientation = orientations_of(quantizer)[-1]
    dtype = DTYPES[len(values) % 3]
    x = SPECIAL[values](dtype)
    q, wanted = fg.quantize(x, quantizer, orientation), Expected(quantizer, x)
    assert_same_fields(q, wanted.parts(orientation))
    got, wanted = q.dequantize(), wanted.values(orientation)
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


# The public function.


@pytest.mark.parametrize("name", QUANTIZERS)
def test_strides_do_not_matter(name):
    quantizer = QUANTIZERS[name]
    orientation = orientations_of(quantizer)[-1]
    wide = tensors((24, 80))
    misaligned = wide.flatten()[1:1901].view(19, 100)
    blocks = tensors((3, 4, 20)).transpose(0, 2)
    for x in (wide[:, ::2], wide.t(), wide[:1].expand(24, 80), misaligned, blocks, wide[:, :1]):
        ours = quantized(x, quantizer, orientation)
        theirs = quantized(x.contiguous(), quantizer, orientation)
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


# Stochastic rounding.


@pytest.mark.parametrize("name", ["nvfp4-stochastic", "hybrid-again-stochastic"])
def test_two_draws_differ_and_a_seed_repeats_them(name):
    x, draws = torch.randn(32, 64), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws += [fg.quantize(x, QUANTIZERS[name]).part_data for _ in range(2)]
    assert_same_bits(draws[0], draws[2])
    assert_same_bits(draws[1], draws[3])
    assert len({d.numpy().tobytes() for d in draws}) == 4


@pytest.mark.parametrize(("name", "orientation"), CASES, **by_name)
def test_stochastic_rounding_is_right_on_average(name, orientation):
    """The error of a mean of 32 draws is less than half of that of one; what is not stochastic repeats itself."""
    quantizer, x = QUANTIZERS[name], torch.randn(32, 48)
    copy = fg.ROWWISE if orientation.rowwise else fg.COLUMNWISE
    draws = [fg.quantize(x, quantizer, orientation).dequantize() for _ in range(32)]
    again = getattr(quantizer, "columnwise_from_rowwise", False)
    if not (quantizer.for_copy(copy).is_stochastic or (again and quantizer.is_stochastic)):
        assert torch.equal(draws[0], draws[1])
        return
    error = oracles.relative_error(draws[0], x)
    assert 0.1 < error < 0.2
    assert oracles.relative_error(torch.stack(draws).mean(0), x) < error / 2


def test_without_a_seed_stochastic_quantizers_round_to_the_nearest():
    x = torch.randn(32, 64)
    plain = fg.quantize(x, QUANTIZERS["nvfp4"], fg.BOTH)
    parts = QUANTIZERS["nvfp4-stochastic"].quantize(x, fg.BOTH)
    for ours, theirs in zip(flatten(parts), flatten(plain), strict=True):
        assert_same_bits(ours, theirs)


# Delayed scaling.


@pytest.mark.parametrize("layout", [PLAIN, Layout(frozenset(Scaling))], ids=["plain", "native"])
@pytest.mark.parametrize("orientation", ORIENTATIONS, **by_name)
@pytest.mark.parametrize("format", [fg.Format.E4M3, fg.Format.E5M2])
def test_delayed_scaling(format, orientation, layout):
    quantizer = fg.DelayedQuantizer(format)
    for shape, dtype in SAMPLES if layout == PLAIN else [((5, 7), torch.float32)]:
        for scale in (1.0, 100.0, 3e-3):
            x = tensors(shape, dtype=dtype)
            amax = torch.tensor(0.5)
            state = CastState(torch.tensor(scale), amax)
            parts = quantizer.quantize(x, orientation, layout, state)
            wanted = Expected(quantizer, x, native=layout.native, scale=scale)
            assert_same_fields(parts, wanted.parts(orientation))
            assert to_spec(parts) == quantizer.spec(shape, x.dtype, x.device, orientation, layout)
            assert parts.quantizer == fg.PerTensorQuantizer(format)
            largest = x.abs().max().float().item() if x.numel() else 0.0
            assert amax.item() == max(largest, 0.5)
            if layout == PLAIN:
                assert_same_bits(parts.decode(), wanted.values(orientation))


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
    assert_same_bits(q.columnwise_data.view(torch.uint8), second.columnwise_data.view(torch.uint8))
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
        (
            (fg.HybridQuantizer(None, E4M3), E4M3),
            "rowwise must be a quantizer of one kind, or None",
        ),
        ((E4M3, fg.DelayedQuantizer(fg.Format.E4M3)), "columnwise must be a quantizer of one kind"),
        (("E4M3", E4M3), "rowwise must be a quantizer of one kind, or None, got 'E4M3'"),
    ],
)
def test_hybrids_that_are_none(arguments, message):
    with pytest.raises(ConfigError, match=f"HybridQuantizer: {message}"):
        fg.HybridQuantizer(*arguments)


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
        ConfigError, match=f"{kind.__name__}: the format must be E4M3 or E5M2, got {format!r}"
    ):
        kind(format)


@pytest.mark.parametrize("epsilon", [-1.0, INF, NAN, "0", None])
@pytest.mark.parametrize("kind", [fg.PerTensorQuantizer, fg.PerRowQuantizer, fg.BlockQuantizer])
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


@pytest.mark.parametrize("value", ["no", 1, None], ids=repr)
@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        (fg.PerRowQuantizer, "power_of_two"),
        (fg.BlockQuantizer, "two_dimensional"),
        (fg.NVFP4Quantizer, "row_scaled"),
        (fg.recipes.Float8CurrentScaling, "allow_emulation"),
        (fg.recipes.DelayedScaling, "reduce_amax"),
        (fg.recipes.MXFP8BlockScaling, "weight_two_dimensional"),
    ],
    ids=str,
)
def test_flags_are_true_or_false(kind, flag, value):
    with pytest.raises(ConfigError, match=f"{kind.__name__}: {flag} must be True or False, got"):
        kind(**{flag: value})


@pytest.mark.parametrize("orientation", list(fg.Orientation), ids=lambda o: o.value)
@pytest.mark.parametrize("hadamard", [False, True])
def test_strides_of_a_single_element(hadamard, orientation):
    q = fg.quantize(torch.ones(1, 1), fg.NVFP4Quantizer(hadamard=hadamard), orientation)
    assert q.dequantize().stride() == (1, 1)
