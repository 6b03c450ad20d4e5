"""The reference for one scale per row, against the second oracle, bit for bit."""

import pytest
import torch

import oracles
import oracles_block
from fullgraph import reference
from fullgraph.errors import ShapeError
from fullgraph.formats import BOTH, COLUMNWISE, ROWWISE, Format, Orientation
from oracles import assert_same_bits
from oracles_block import INF, NAN, SAMPLES

FORMATS = [Format.E4M3, Format.E5M2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS = [
    {},
    {"power_of_two": True},
    {"eps": 1e-12},
    {"eps": 3.0},
    {"eps": 1e-12, "power_of_two": True},
]

# E4M3 and E5M2 differ in range, subnormals and infinity.
by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
# The input's dtype bounds an overflowing scale.
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Each kind of data takes another path through the scale or the rounding.
by_sample = pytest.mark.parametrize("sample", SAMPLES)


def assert_cast(x, format, *, orientation=BOTH, **options):
    actual = reference.cast_per_row(x, format, orientation=orientation, **options)
    expected = oracles_block.cast_per_row(
        x,
        format.name,
        rowwise=orientation in (ROWWISE, BOTH),
        columnwise=orientation in (COLUMNWISE, BOTH),
        **options,
    )
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_same_bits(ours, theirs)
            assert ours.stride() == torch.empty(ours.shape).stride()


@by_sample
@by_format
@by_dtype
def test_cast(sample, format, dtype):
    x = SAMPLES[sample](format.name, dtype)
    for options in OPTIONS:
        assert_cast(x, format, **options)


def test_an_example():
    x = torch.tensor([[448.0, -224.0], [0.0, 0.0], [1.0, -2.0]])
    data, columnwise_data, scale_inv, columnwise_scale_inv = reference.cast_per_row(
        x, Format.E4M3, orientation=BOTH, power_of_two=True, pad=4
    )
    # 0x7E = 448, 0x76 = 224, 0x70 = 128, 0x78 = 256.
    assert data.tolist() == [[0x7E, 0xF6, 0, 0], [0, 0, 0, 0], [0x70, 0xF8, 0, 0]]
    assert scale_inv.tolist() == [1.0, 1.0, 1 / 128]
    # Columns: amax 448 and 224.
    assert columnwise_data.tolist() == [[0x7E, 0, 0x38, 0], [0xFE, 0, 0xC8, 0]]
    assert columnwise_scale_inv.tolist() == [1.0, 0.5]


def test_one_bad_row_spoils_no_other():
    x = torch.randn(4, 50)
    x[1, 3], x[2, 4] = NAN, INF
    data, _, scale_inv, _ = reference.cast_per_row(x, Format.E4M3)
    assert scale_inv[1:3].tolist() == [1.0, 1.0]
    assert data[1, 3] == Format.E4M3.nan_code
    assert data[2, 4] == Format.E4M3.max_code
    for row in (0, 3):
        alone = reference.cast_per_row(x[row : row + 1], Format.E4M3)
        assert_same_bits(data[row : row + 1], alone[0])
        assert_same_bits(scale_inv[row : row + 1], alone[2])


@pytest.mark.parametrize("orientation", Orientation)
@pytest.mark.parametrize("pad", [1, 16, 128])
def test_orientations_and_padding(orientation, pad):
    for shape in [(7, 33), (16, 32), (128, 256), (1, 1), (1, 40), (40, 1), (0, 5), (5, 0), (0, 0)]:
        for options in ({}, {"eps": 2.0}):
            x = torch.randn(shape)
            assert_cast(x, Format.E4M3, orientation=orientation, pad=pad, **options)


VIEWS = {
    "transposed": lambda: torch.randn(9, 13).t(),
    "sliced": lambda: torch.randn(20, 30)[3::2, 1:-4:3],
    "expanded rows": lambda: torch.randn(1, 13).expand(9, 13),
    "expanded columns": lambda: torch.randn(9, 1).expand(9, 13),
    "one row": lambda: torch.randn(9, 13)[3:4],
    "one column": lambda: torch.randn(9, 13)[:, 3:4],
    "one row of columns": lambda: torch.randn(13, 1).t(),
    "misaligned": lambda: torch.randn(9 * 13 + 1)[1:].view(9, 13),
}


@pytest.mark.parametrize("view", VIEWS)
# 1: the bytes as they are; 16: padded.
@pytest.mark.parametrize("pad", [1, 16])
def test_strides_do_not_matter(view, pad):
    assert_cast(VIEWS[view](), Format.E4M3, pad=pad)


@by_format
def test_columnwise_is_rowwise_of_the_transpose(format):
    x = torch.randn(33, 20)
    _, columnwise_data, _, columnwise_scale_inv = reference.cast_per_row(
        x, format, orientation=COLUMNWISE
    )
    data, _, scale_inv, _ = reference.cast_per_row(x.t().contiguous(), format)
    assert_same_bits(columnwise_data, data)
    assert_same_bits(columnwise_scale_inv, scale_inv)


@pytest.mark.parametrize("shape", [(4, 4), (1, 4), (4, 1), (1, 1)])
def test_results_share_no_storage(shape):
    x = torch.ones(shape)
    tensors = [x, *reference.cast_per_row(x, Format.E4M3, orientation=BOTH)]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)
    assert torch.equal(x, torch.ones(shape))


def test_only_matrices():
    with pytest.raises(ShapeError, match=r"cast_per_row: a matrix is needed \(x: float32\[2, 3, 4"):
        reference.cast_per_row(torch.ones(2, 3, 4), Format.E4M3)


@by_format
def test_round_trip_error_is_that_of_the_format(format):
    x = torch.randn(256, 256)
    data, _, scale_inv, _ = reference.cast_per_row(x, format)
    error = oracles.relative_error(reference.decode(data, format) * scale_inv[:, None], x)
    typical = {Format.E4M3: 0.0265, Format.E5M2: 0.0527}[format]
    assert 0.9 * typical < error < 1.1 * typical


@pytest.mark.parametrize("power_of_two", [False, True])
def test_compiled_is_eager(power_of_two):
    def cast(x):
        return reference.cast_per_row(
            x, Format.E4M3, orientation=BOTH, power_of_two=power_of_two, pad=16
        )

    compiled = torch.compile(cast, fullgraph=True, dynamic=False)
    for factor in (0.0, 1.0, 1e-30, INF):
        x = (torch.randn(7, 33) * factor).bfloat16()
        for ours, theirs in zip(compiled(x), cast(x), strict=True):
            assert_same_bits(ours, theirs)
