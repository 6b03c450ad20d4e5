"""The reference for one scale per tensor, against the second oracle, bit for bit."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import oracles
from fullgraph import reference
from fullgraph.errors import ShapeError
from fullgraph.formats import BOTH, COLUMNWISE, ROWWISE, Format, Orientation
from oracles import assert_same_bits

FORMATS = [Format.E4M3, Format.E5M2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS = [
    {},
    {"power_of_two": True},
    {"eps": 1e-12},
    {"eps": 3.0},
    {"eps": 1e-12, "power_of_two": True},
]
NAN, INF = float("nan"), float("inf")
AMAXES = [0.0, 1.0, 3.3, 448.0, 1e-12, 7e-5, 1.4e-45, 1e-39, 1.3e-36, 1.8e-34, 3.4e38, INF, NAN]

# E4M3 and E5M2 differ in range, subnormals and infinity.
by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
# The input's dtype bounds an overflowing scale.
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Each option changes the scale.
by_options = pytest.mark.parametrize("options", OPTIONS, ids=str)


def all_codes_and_midpoints(format):
    """Every finite value of the format and every tie between two of them, of both signs."""
    table = torch.from_numpy(oracles.finite_values(format.name))
    positive = torch.cat([table, (table[1:] + table[:-1]) / 2])
    return torch.cat([positive, -positive]).reshape(-1, 2)


def neighbours_of_midpoints(format, dtype):
    """The two numbers of a dtype on each side of every tie."""
    table = torch.from_numpy(oracles.finite_values(format.name))
    ties = ((table[1:] + table[:-1]) / 2).to(dtype)
    up = torch.nextafter(ties, torch.full_like(ties, INF))
    down = torch.nextafter(ties, torch.zeros_like(ties))
    return torch.stack([up, down], 1)


DATA = {
    "normal": lambda f, dtype: torch.randn(33, 20).to(dtype),
    "heavy-tailed": lambda f, dtype: torch.distributions.StudentT(3.0).sample((33, 20)).to(dtype),
    "zeros": lambda f, dtype: torch.zeros(5, 8, dtype=dtype),
    "minus zeros": lambda f, dtype: -torch.zeros(5, 8, dtype=dtype),
    "one outlier": lambda f, dtype: (
        torch.randn(33, 20).index_fill_(0, torch.tensor(3), 3e4).to(dtype)
    ),
    "codes and ties": lambda f, dtype: all_codes_and_midpoints(f).to(dtype),
    "beside ties": neighbours_of_midpoints,
    "subnormals of the dtype": lambda f, dtype: (
        torch.randn(9, 16).mul(torch.finfo(dtype).tiny / 4).to(dtype)
    ),
    "largest of the dtype": lambda f, dtype: torch.full(
        (3, 4), -torch.finfo(dtype).max, dtype=dtype
    ),
    "infinite": lambda f, dtype: torch.tensor([[INF, 1.0, -INF, -0.0, 1e4]], dtype=dtype),
    "not a number": lambda f, dtype: torch.tensor([[NAN, -NAN, INF, -1.0, 3e4]], dtype=dtype),
    "empty": lambda f, dtype: torch.empty(0, 4, dtype=dtype),
}
# Each kind of data takes another path through the rounding.
by_data = pytest.mark.parametrize("data", DATA)


@by_data
@by_dtype
def test_amax(data, dtype):
    x = DATA[data](Format.E4M3, dtype)
    largest = np.abs(x.to(torch.float32).numpy()).max(initial=0.0)
    assert_same_bits(reference.amax(x), np.float32(np.nan if np.isnan(largest) else largest))


def test_amax_has_one_nan():
    nans = torch.tensor([0x7F800001, -1, 0x7FFFFFFF, 0x7FC00000], dtype=torch.int32)
    for x in nans.view(torch.float32):
        assert_same_bits(reference.amax(torch.stack([x, x.new_tensor(3.0)])), np.float32(np.nan))


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4), (0,), (3, 0, 2)])
def test_amax_of_any_rank(shape):
    x = torch.randn(shape)
    expected = np.abs(x.numpy()).max(initial=0.0).astype(np.float32)
    assert_same_bits(reference.amax(x), expected)


def test_amax_of_float64_is_rounded():
    assert_same_bits(reference.amax(torch.tensor([-1 / 3], dtype=torch.float64)), np.float32(1 / 3))


@by_format
@by_dtype
@by_options
def test_scale(format, dtype, options):
    actual = reference.scale_from_amax(torch.tensor(AMAXES), format, dtype, **options)
    expected = [oracles.scale_from_amax(a, format.name, dtype, **options) for a in AMAXES]
    assert_same_bits(actual, np.stack(expected))


@by_format
def test_scale_is_correctly_rounded(format):
    amaxes = torch.rand(2000) * 2.0 ** torch.randint(-30, 30, (2000,))
    scales = reference.scale_from_amax(amaxes, format, torch.float32)
    for amax, scale in zip(amaxes.tolist(), scales.numpy(), strict=True):
        exact = Fraction(format.max) / Fraction(amax)
        off = abs(Fraction(float(scale)) - exact)
        for towards in (0, np.inf):
            other = np.nextafter(scale, np.float32(towards))
            assert off <= abs(Fraction(float(other)) - exact)


@by_format
def test_power_of_two_is_the_next_below(format):
    amaxes = torch.rand(2000) + 0.5
    exact = reference.scale_from_amax(amaxes, format, torch.float32)
    rounded = reference.scale_from_amax(amaxes, format, torch.float32, power_of_two=True)
    mantissa, _ = torch.frexp(rounded)
    assert torch.equal(mantissa, torch.full_like(mantissa, 0.5))
    assert ((rounded <= exact) & (exact < 2 * rounded)).all()


@by_data
@by_format
@by_dtype
def test_cast(data, format, dtype):
    x = DATA[data](format, dtype)
    amax = reference.amax(x)
    for options in OPTIONS:
        rowwise, columnwise, scale_inv = reference.cast_per_tensor(x, amax, format, **options)
        data, decode = oracles.cast_per_tensor(x, amax.item(), format.name, **options)
        assert columnwise is None
        assert_same_bits(rowwise, data)
        assert_same_bits(scale_inv, decode)


@by_data
@by_format
@by_dtype
def test_cast_with_another_amax(data, format, dtype):
    x = DATA[data](format, dtype)
    for amax in AMAXES:
        rowwise, _, scale_inv = reference.cast_per_tensor(x, torch.tensor(amax), format)
        data, decode = oracles.cast_per_tensor(x, amax, format.name)
        assert_same_bits(rowwise, data)
        assert_same_bits(scale_inv, decode)


@by_format
def test_every_float16_and_bfloat16(format):
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = bits.view(dtype).reshape(256, 256)
        for amax in (format.max, 3.3):
            rowwise, _, _ = reference.cast_per_tensor(x, torch.tensor(amax), format)
            assert_same_bits(rowwise, oracles.cast_per_tensor(x, amax, format.name)[0])


@pytest.mark.parametrize("orientation", Orientation)
@pytest.mark.parametrize("pad", [1, 4, 16])
@pytest.mark.parametrize("shape", [(7, 33), (16, 32), (1, 1), (0, 5), (5, 0), (0, 0)])
def test_orientations_and_padding(orientation, pad, shape):
    x = torch.randn(shape)
    rowwise, columnwise, _ = reference.cast_per_tensor(
        x, reference.amax(x), Format.E4M3, orientation=orientation, pad=pad
    )
    (rows, columns), (padded_rows, padded_columns) = (
        shape,
        (-(-size // pad) * pad for size in shape),
    )
    expected = torch.zeros((padded_rows, padded_columns), dtype=torch.uint8)
    data, _ = oracles.cast_per_tensor(x, reference.amax(x).item(), "E4M3")
    expected[:rows, :columns] = torch.from_numpy(data)
    assert (rowwise is not None, columnwise is not None) == (
        orientation in (ROWWISE, BOTH),
        orientation in (COLUMNWISE, BOTH),
    )
    if rowwise is not None:
        assert_same_bits(rowwise, expected[:rows])
    if columnwise is not None:
        assert_same_bits(columnwise, expected[:, :columns].t())


VIEWS = {
    "transposed": lambda: torch.randn(9, 13).t(),
    "sliced": lambda: torch.randn(20, 30)[3::2, 1:-4:3],
    "expanded": lambda: torch.randn(1, 13).expand(9, 13),
    "one row": lambda: torch.randn(9, 13)[3:4],
    "one column": lambda: torch.randn(9, 13)[:, 3:4],
    "one row of columns": lambda: torch.randn(13, 1).t(),
    "misaligned": lambda: torch.randn(9 * 13 + 1)[1:].view(9, 13),
}


@pytest.mark.parametrize("view", VIEWS)
# 1: the bytes as they are; 16: padded.
@pytest.mark.parametrize("pad", [1, 16])
def test_strides_do_not_matter(view, pad):
    x = VIEWS[view]()
    plain = x.clone(memory_format=torch.contiguous_format)
    amax = reference.amax(x)
    assert_same_bits(amax, reference.amax(plain))
    actual = reference.cast_per_tensor(x, amax, Format.E4M3, orientation=BOTH, pad=pad)
    expected = reference.cast_per_tensor(plain, amax, Format.E4M3, orientation=BOTH, pad=pad)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same_bits(ours, theirs)
        assert ours.stride() == torch.empty(ours.shape).stride()


@pytest.mark.parametrize("shape", [(4, 4), (1, 4), (4, 1), (1, 1)])
def test_results_share_no_storage(shape):
    x = torch.ones(shape)
    amax = reference.amax(x)
    tensors = [x, amax, *reference.cast_per_tensor(x, amax, Format.E4M3, orientation=BOTH)]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
    assert tensors[-1].untyped_storage().nbytes() == 4
    assert torch.equal(x, torch.ones(shape))


def test_only_matrices():
    with pytest.raises(ShapeError, match=r"a matrix is needed \(x: float32\[2, 3, 4\]\)"):
        reference.cast_per_tensor(torch.ones(2, 3, 4), torch.tensor(1.0), Format.E4M3)


@by_format
@by_dtype
def test_dequantize(format, dtype):
    data = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    scale_inv = torch.tensor(0.3)
    actual = reference.dequantize_per_tensor(data, scale_inv, format, dtype)
    values = np.array([format.decode(code) for code in range(256)], np.float32)
    expected = torch.from_numpy(values * scale_inv.numpy()).reshape(16, 16).to(dtype)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_same_bits(actual.nan_to_num(1.0, 2.0, 3.0), expected.nan_to_num(1.0, 2.0, 3.0))


@by_format
def test_round_trip_error_is_that_of_the_format(format):
    x = torch.randn(256, 256)
    rowwise, _, scale_inv = reference.cast_per_tensor(x, reference.amax(x), format)
    error = oracles.relative_error(
        reference.dequantize_per_tensor(rowwise, scale_inv, format, torch.float32), x
    )
    typical = {Format.E4M3: 0.0265, Format.E5M2: 0.0527}[format]
    assert 0.9 * typical < error < 1.1 * typical


@by_format
def test_codes_survive_a_round_trip(format):
    codes = torch.arange(256, dtype=torch.uint8)
    values = reference.decode(codes, format)
    finite = values.isfinite()
    assert_same_bits(reference.encode(values, format)[finite], codes[finite])
    assert set(reference.encode(values, format)[values.isnan()].tolist()) == {format.nan_code}


def test_traces_without_data():
    """One graph, no guard on values: the whole of it can be part of a compiled function."""

    def cast(x):
        return reference.cast_per_tensor(
            x, reference.amax(x), Format.E4M3, orientation=BOTH, power_of_two=True, pad=16
        )

    compiled = torch.compile(cast, fullgraph=True, backend="aot_eager")
    for scale in (0.0, 1.0, INF):
        x = torch.randn(7, 33) * scale
        for ours, theirs in zip(compiled(x), cast(x), strict=True):
            assert_same_bits(ours, theirs)
