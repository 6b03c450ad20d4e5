"""The reference for MXFP8, against the second oracle, bit for bit."""

import math

import numpy as np
import pytest
import torch

import oracles
import oracles_mx
from fullgraph import reference
from fullgraph.errors import ConfigError, ShapeError
from fullgraph.formats import BOTH, COLUMNWISE, ROWWISE, Format, MXScaleMode, Orientation
from fullgraph.reference.mx import cast_mx, decode_mx
from fullgraph.reference.swizzle import unswizzle
from oracles import assert_same_bits

FORMATS = [Format.E4M3, Format.E5M2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN, INF = float("nan"), float("inf")

# E4M3 and E5M2 differ in emax, mantissa and range.
by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
# 16-bit inputs have few mantissa bits; float16 has few exponents.
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Each rounds the exponent in its own way.
by_mode = pytest.mark.parametrize("mode", MXScaleMode, ids=lambda m: m.value)
# Blocks along a row, or squares.
by_dimensions = pytest.mark.parametrize("two_dimensional", [False, True], ids=["1-D", "2-D"])


def assert_same_cast(x, format, mode=MXScaleMode.RCEIL, *, two_dimensional=False, **options):
    """Both copies and their scales are those of the oracle, contiguous."""
    expected = oracles_mx.cast_both(x, format.name, mode.value, square=two_dimensional, **options)
    actual = cast_mx(
        x, format, scale_mode=mode, two_dimensional=two_dimensional, orientation=BOTH, **options
    )
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same_bits(ours, np.ascontiguousarray(theirs))
        assert ours.stride() == torch.empty(ours.shape).stride()
    return actual


def with_value(x, value):
    x = x.clone()
    x[3, 40] = value
    return x


def beside_powers_of_two(dtype):
    """In each row one amax: powers of two, format.max times them, and the numbers beside all of these."""
    low, high = math.frexp(torch.finfo(dtype).tiny)[1], math.frexp(torch.finfo(dtype).max)[1] - 1
    points = torch.tensor(
        [s * 2.0**e for e in range(low, high, 7) for s in (1, 1.25, 1.5, 1.75, 1.875)], dtype=dtype
    )
    ends = torch.tensor(0.0, dtype=dtype), torch.tensor(INF, dtype=dtype)
    amaxes = torch.cat([points, *(torch.nextafter(points, end) for end in ends)])
    smaller = torch.rand(len(amaxes), 4).to(dtype) * amaxes[:, None]
    return torch.cat([amaxes[:, None], smaller], 1)


def codes_and_ties(dtype):
    """Every finite value of both formats, every tie, and the numbers beside them, under an amax of format.max."""
    rows = []
    for format in FORMATS:
        table = torch.from_numpy(oracles.finite_values(format.name))
        ties = ((table[1:] + table[:-1]) / 2).to(dtype)
        up = torch.nextafter(ties, torch.full_like(ties, INF))
        down = torch.nextafter(ties, torch.zeros_like(ties))
        values = torch.cat([table.to(dtype), ties, up, down])
        for chunk in torch.cat([values, -values]).split(31):
            rows.append(torch.zeros(32, dtype=dtype))
            rows[-1][: len(chunk)] = chunk.where(chunk.abs() <= format.max, 0)
            rows[-1][31] = format.max
    return torch.stack(rows)


DATA = {
    "normal": lambda dtype: torch.randn(34, 44).to(dtype),
    "heavy-tailed": lambda dtype: torch.distributions.StudentT(1.5).sample((34, 44)).to(dtype),
    "many exponents": lambda dtype: (torch.randn(34, 44) * torch.rand(34, 44).mul(-90).exp()).to(
        dtype
    ),
    "zeros": lambda dtype: torch.zeros(5, 40, dtype=dtype),
    "minus zeros": lambda dtype: -torch.zeros(5, 40, dtype=dtype),
    "zero blocks": lambda dtype: torch.randn(34, 44).index_fill_(1, torch.arange(32), 0).to(dtype),
    "one outlier": lambda dtype: with_value(torch.randn(34, 44), 3e4).to(dtype),
    "subnormals of the dtype": lambda dtype: (
        torch.randn(34, 44).mul(torch.finfo(dtype).tiny / 4).to(dtype)
    ),
    "smallest of the dtype": lambda dtype: (
        torch.full((3, 4), torch.finfo(dtype).smallest_normal).mul(torch.finfo(dtype).eps).to(dtype)
    ),
    "largest of the dtype": lambda dtype: torch.full((3, 4), -torch.finfo(dtype).max, dtype=dtype),
    "largest beside small": lambda dtype: with_value(
        torch.randn(34, 44).to(dtype), torch.finfo(dtype).max
    ),
    "beside powers of two": beside_powers_of_two,
    "codes and ties": codes_and_ties,
    "infinite": lambda dtype: with_value(torch.randn(34, 44) * 1e4, -INF).to(dtype),
    "not a number": lambda dtype: with_value(torch.randn(34, 44) * 1e4, -NAN).to(dtype),
    "infinite and not a number": lambda dtype: torch.tensor(
        [[INF, NAN, -INF, 1.0, -0.0]], dtype=dtype
    ),
}
# Each kind of data takes another path through the rounding.
by_data = pytest.mark.parametrize("data", DATA)


@by_data
@by_format
@by_dtype
def test_cast(data, format, dtype):
    x = DATA[data](dtype)
    # All numbers are converted to float32 first, so one mode shows that 16-bit ones are.
    for mode in MXScaleMode if dtype is torch.float32 else [MXScaleMode.RCEIL]:
        assert_same_cast(x, format, mode)


@by_data
@by_format
def test_cast_of_squares(data, format):
    x = DATA[data](torch.float32)
    for mode in MXScaleMode:
        data, columnwise, scale_inv, columnwise_scale_inv = assert_same_cast(
            x, format, mode, two_dimensional=True
        )
        assert_same_bits(columnwise, data.t())
        rows, columns = (torch.arange(size) // 32 for size in x.shape)
        assert_same_bits(scale_inv[:, columns], columnwise_scale_inv[:, rows].t())


# amax, format: bytes for RCEIL, FLOOR, CEIL, EVEN. Worked out by hand.
BYTES = {
    (448.0, Format.E4M3): (127, 127, 128, 127),
    (449.0, Format.E4M3): (128, 127, 128, 127),
    (480.0, Format.E4M3): (128, 127, 128, 127),  # above format.max, where FLOOR and EVEN saturate
    (256.0, Format.E4M3): (127, 127, 127, 127),
    (1.0, Format.E4M3): (119, 119, 119, 119),
    (1.75, Format.E4M3): (119, 119, 120, 119),
    (1.875, Format.E4M3): (120, 119, 120, 119),
    (1.9375, Format.E4M3): (120, 119, 120, 120),  # the tie between 1.875 and 2
    (1.0, Format.E5M2): (112, 112, 112, 112),
    (1.75, Format.E5M2): (112, 112, 113, 112),
    (1.875, Format.E5M2): (113, 112, 113, 113),  # the tie between 1.75 and 2
    (57344.0, Format.E5M2): (127, 127, 128, 127),
    (3.4028234663852886e38, Format.E4M3): (247, 246, 247, 247),
    (3.3895313892515355e38, Format.E5M2): (240, 239, 240, 240),
    (2.0**-149, Format.E4M3): (0, 0, 0, 0),
    (2.0**-118, Format.E4M3): (1, 1, 1, 1),
    (448.0 * 2.0**-127, Format.E4M3): (0, 0, 1, 0),
    (449.0 * 2.0**-127, Format.E4M3): (1, 0, 1, 0),
    (0.0, Format.E5M2): (0, 0, 0, 0),
    (INF, Format.E4M3): (254, 254, 254, 254),
    (NAN, Format.E5M2): (255, 255, 255, 255),
}


@pytest.mark.parametrize(("amax", "format"), BYTES, ids=str)
def test_bytes_by_hand(amax, format):
    x = torch.tensor([[0.0, -amax]])
    for mode, byte in zip(
        (MXScaleMode.RCEIL, MXScaleMode.FLOOR, MXScaleMode.CEIL, MXScaleMode.EVEN),
        BYTES[amax, format],
        strict=True,
    ):
        assert cast_mx(x, format, scale_mode=mode)[2].tolist() == [[byte]], mode


@by_format
@by_mode
def test_scale_of_every_mantissa_of_16_bits(format, mode):
    """All positive float16 and bfloat16 numbers as amax."""
    bits = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        amaxes = bits.view(dtype)[::7].to(torch.float32)
        scale_inv = cast_mx(amaxes[:, None], format, scale_mode=mode)[2]
        expected = [oracles_mx.scale_byte(a, format.name, mode.value) for a in amaxes.numpy()]
        assert_same_bits(scale_inv[:, 0], np.array(expected, np.uint8))


@by_format
def test_rceil_is_the_smallest_that_does_not_saturate(format):
    x = torch.randn(4000, 1) * 2.0 ** torch.randint(-60, 60, (4000, 1))
    scale_inv = cast_mx(x, format)[2].double()
    ratio = x.double().abs() / 2 ** (scale_inv - 127)
    assert ((format.max / 2 < ratio) & (ratio <= format.max)).all()


@by_format
def test_nothing_saturates_but_where_the_mode_says_so(format):
    """In ulps of the largest code, how far the largest magnitude of a block is above it."""
    x = (torch.rand(4000, 1) + 1).where(torch.rand(4000, 1) > 0.01, 1.0)
    above = {}
    for mode in MXScaleMode:
        scale_inv = cast_mx(x, format, scale_mode=mode)[2].double()
        ratio = x.double() / 2 ** (scale_inv - 127)
        above[mode] = (ratio > format.max).any().item()
        assert (ratio < 2.0 ** (format.max_exponent + 1)).all()
    assert above == {
        MXScaleMode.RCEIL: False,
        MXScaleMode.FLOOR: True,
        MXScaleMode.CEIL: False,
        MXScaleMode.EVEN: True,
    }


@pytest.mark.parametrize("orientation", Orientation)
@by_dimensions
@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
def test_orientations_and_padding(orientation, two_dimensional, swizzled):
    # One element, one block, ragged, whole squares, more rows than a tile of scales, nothing.
    for shape in [(1, 1), (1, 32), (7, 33), (64, 96), (130, 40), (0, 5), (5, 0), (0, 0)]:
        x = torch.randn(shape)
        for pad in (1, 48):
            actual = cast_mx(
                x,
                Format.E4M3,
                two_dimensional=two_dimensional,
                orientation=orientation,
                pad=pad,
                swizzled=swizzled,
            )
            expected = oracles_mx.cast_both(
                x, "E4M3", square=two_dimensional, pad=pad, swizzled=swizzled
            )
            made = (ROWWISE, COLUMNWISE) * 2
            for ours, theirs, copy in zip(actual, expected, made, strict=True):
                assert (ours is not None) == (orientation in (copy, BOTH))
                if ours is not None:
                    assert_same_bits(ours, np.ascontiguousarray(theirs))
                    assert ours.stride() == torch.empty(ours.shape).stride()


@by_dimensions
def test_padding_is_zero_behind_a_block_of_nan(two_dimensional):
    x = torch.full((5, 40), NAN)
    for swizzled in (False, True):
        assert_same_cast(x, Format.E4M3, two_dimensional=two_dimensional, pad=64, swizzled=swizzled)


VIEWS = {
    "transposed": lambda: torch.randn(39, 43).t(),
    "sliced": lambda: torch.randn(80, 130)[3::2, 1:-4:3],
    "expanded": lambda: torch.randn(1, 43).expand(39, 43),
    "expanded columns": lambda: torch.randn(39, 1).expand(39, 43),
    "one row": lambda: torch.randn(9, 43)[3:4],
    "one column": lambda: torch.randn(39, 13)[:, 3:4],
    "one row of columns": lambda: torch.randn(43, 1).t(),
    "whole squares, transposed": lambda: torch.randn(32, 64).t(),
    "misaligned": lambda: torch.randn(39 * 43 + 1)[1:].view(39, 43),
}


@pytest.mark.parametrize("view", VIEWS)
@by_dimensions
# 1: the bytes as they are; 64: padded.
@pytest.mark.parametrize("pad", [1, 64])
def test_strides_do_not_matter(view, two_dimensional, pad):
    for dtype in (torch.float32, torch.bfloat16):
        x = VIEWS[view]().to(dtype)
        assert_same_cast(x, Format.E4M3, two_dimensional=two_dimensional, pad=pad)
        assert_same_cast(x, Format.E4M3, two_dimensional=two_dimensional, swizzled=True)


@pytest.mark.parametrize("shape", [(64, 128), (128, 128), (32, 32), (1, 32), (32, 1), (1, 1)])
@by_dimensions
@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
def test_results_share_no_storage(shape, two_dimensional, swizzled):
    x = torch.ones(shape)
    results = cast_mx(
        x, Format.E4M3, two_dimensional=two_dimensional, orientation=BOTH, swizzled=swizzled
    )
    tensors = [x, *results]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
    assert all(t.untyped_storage().nbytes() == t.numel() for t in results)
    assert torch.equal(x, torch.ones(shape))


def test_errors():
    with pytest.raises(ShapeError, match=r"cast_mx: a matrix is needed \(x: float32\[2, 3, 4\]\)"):
        cast_mx(torch.ones(2, 3, 4), Format.E4M3)
    for format in (Format.E2M1, Format.E8M0):
        with pytest.raises(ConfigError, match=f"must be E4M3 or E5M2, got {format.name}"):
            cast_mx(torch.ones(2, 3), format)


@by_format
def test_decode_of_every_code_and_scale(format):
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    actual = decode_mx(codes, scales, format)
    expected = torch.from_numpy(oracles_mx.decode(codes.numpy(), scales.numpy(), format.name))
    assert torch.equal(actual.isnan(), expected.isnan())
    assert actual[255].isnan().all()
    assert_same_bits(actual.nan_to_num(1.0, INF, -INF), expected.nan_to_num(1.0, INF, -INF))


@by_format
def test_decode_of_ragged_and_padded(format):
    for rows, columns, padded in ((3, 1, 1), (3, 33, 48), (2, 32, 128), (0, 5, 16), (4, 0, 32)):
        codes = torch.randint(0, 0x70, (rows, columns), dtype=torch.uint8)
        scales = torch.randint(100, 150, (rows, -(-columns // 32)), dtype=torch.uint8)
        actual = decode_mx(reference.pad_columns(codes, padded or 1), scales, format)
        expected = np.zeros(actual.shape, np.float32)
        expected[:, :columns] = oracles_mx.decode(codes.numpy(), scales.numpy(), format.name)
        assert_same_bits(actual, expected)
        assert actual.stride() == torch.empty(actual.shape).stride()


@by_format
@by_dimensions
def test_special_values_survive(format, two_dimensional):
    x = torch.randn(3, 96)
    x[0, 5], x[1, 40], x[2, 70], x[2, 71] = NAN, INF, -INF, 3.0
    codes, _, scale_inv, _ = cast_mx(x, format, two_dimensional=two_dimensional)
    values = decode_mx(codes, scale_inv, format)
    assert values[0, :32].isnan().all()
    assert values[:, 32:].isnan().sum() == 0
    assert (values[1, 40].item(), values[2, 70].item(), values[2, 71].item()) == (INF, -INF, 0)
    assert values[:, 32:].isinf().sum() == 2


@by_format
@pytest.mark.parametrize("orientation", [ROWWISE, COLUMNWISE])
def test_round_trip_error_is_that_of_the_format(format, orientation):
    x = torch.randn(256, 256)
    if orientation is COLUMNWISE:
        x = x.t()
    results = cast_mx(x, format, orientation=orientation, swizzled=True)
    codes, flat = (t for t in results if t is not None)
    values = decode_mx(codes, unswizzle(flat, 256, 8), format)
    error = oracles.relative_error(values, x if orientation is ROWWISE else x.t())
    typical = {Format.E4M3: 0.0267, Format.E5M2: 0.0529}[format]
    assert 0.97 * typical < error < 1.03 * typical


@by_mode
def test_codes_survive_a_round_trip(mode):
    """What was decoded is cast to itself, if its largest element has the exponent that the scale stands for."""
    x = torch.randn(64, 96)
    codes, _, scale_inv, _ = cast_mx(x, Format.E4M3, scale_mode=mode)
    values = decode_mx(codes, scale_inv, Format.E4M3)
    again, _, scale_again, _ = cast_mx(values, Format.E4M3, scale_mode=mode)
    assert_same_bits(decode_mx(again, scale_again, Format.E4M3), values)


# aot_eager shows a fault of tracing by itself; inductor makes C++ of it, which takes its time.
@pytest.mark.parametrize(
    ("backend", "two_dimensional", "orientation", "mode"),
    [
        ("aot_eager", False, BOTH, MXScaleMode.CEIL),
        ("aot_eager", True, BOTH, MXScaleMode.EVEN),
        ("inductor", False, ROWWISE, MXScaleMode.RCEIL),
        ("inductor", True, COLUMNWISE, MXScaleMode.FLOOR),
    ],
    ids=str,
)
def test_compiled_is_eager(backend, two_dimensional, orientation, mode):
    """One graph, no guard on values: the whole of it can be part of a compiled function."""

    def cast_and_decode(x):
        options = {"scale_mode": mode, "two_dimensional": two_dimensional, "pad": 48}
        results = cast_mx(x, Format.E4M3, orientation=orientation, **options)
        data, scale_inv = results[1::2] if orientation is COLUMNWISE else results[::2]
        return *(t for t in results if t is not None), decode_mx(data, scale_inv, Format.E4M3)

    compiled = torch.compile(cast_and_decode, fullgraph=True, backend=backend)
    # A block that infinity, one that NaN and one that both are in, none of them whole.
    special = torch.randn(40, 70)
    special[3, 5] = special[39, 69] = INF
    special[3, 40] = special[39, 68] = -NAN
    for x in (torch.randn(40, 70), special, torch.randn(40, 70) * 1e-37, torch.zeros(40, 70)):
        *ours, our_values = compiled(x)
        *theirs, their_values = cast_and_decode(x)
        for our, their in zip(ours, theirs, strict=True):
            assert_same_bits(our, their)
        assert torch.equal(our_values.isnan(), their_values.isnan())
        assert_same_bits(*(v.where(~v.isnan(), 7.0) for v in (our_values, their_values)))
