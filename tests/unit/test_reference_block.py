"""The reference for one scale per 1x128 or 128x128, against the second oracle, bit for bit."""

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
    {"power_of_two": False},
    {"eps": 1e-12},
    {"eps": 3.0, "power_of_two": False},
]

# E4M3 and E5M2 differ in range, subnormals and infinity.
by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
# The input's dtype bounds an overflowing scale.
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Each kind of data takes another path through the scale or the rounding.
by_sample = pytest.mark.parametrize("sample", SAMPLES)
# Stretches and squares are stored differently.
by_dimension = pytest.mark.parametrize("two_dimensional", [False, True], ids=["1x128", "128x128"])


def assert_cast(x, format, *, orientation=BOTH, **options):
    actual = reference.cast_block(x, format, orientation=orientation, **options)
    expected = oracles_block.cast_block(
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
@by_dimension
def test_cast(sample, format, dtype, two_dimensional):
    x = SAMPLES[sample](format.name, dtype)
    for options in OPTIONS:
        assert_cast(x, format, two_dimensional=two_dimensional, **options)


def test_an_example_in_stretches():
    x = torch.zeros(2, 130)
    x[0, 0], x[0, 1], x[0, 129], x[1, 129] = 448.0, -1.0, 3.0, 7.0
    data, columnwise_data, scale_inv, columnwise_scale_inv = reference.cast_block(
        x, Format.E4M3, orientation=BOTH
    )
    assert scale_inv.tolist() == [[1.0, 1.0], [1 / 128, 1 / 64]]
    # 0x7E = 448, 0xB8 = -1, 0x7C = 3 * 128, 0x7E = 7 * 64.
    places = data.nonzero().tolist()
    assert places == [[0, 0], [0, 1], [0, 129], [1, 129]]
    assert [data[m, k].item() for m, k in places] == [0x7E, 0xB8, 0x7C, 0x7E]
    # 0xF8 = -256; the last column is 3 * 64, 7 * 64.
    assert columnwise_data[[0, 1, 129]].tolist() == [[0x7E, 0], [0xF8, 0], [0x74, 0x7E]]
    assert columnwise_scale_inv[0, [0, 1, 2, 129]].tolist() == [1.0, 1 / 256, 1.0, 1 / 64]


def test_an_example_in_squares():
    x = torch.zeros(130, 300)
    x[0, 0], x[129, 128], x[128, 299] = 448.0, 7.0, -14.0
    data, columnwise_data, scale_inv, columnwise_scale_inv = reference.cast_block(
        x, Format.E4M3, two_dimensional=True, orientation=BOTH
    )
    assert scale_inv.tolist() == [[1.0, 1.0, 1.0, 0.0], [1.0, 1 / 64, 1 / 32, 0.0]]
    assert columnwise_scale_inv.tolist() == [
        [1.0, 1.0, 0.0, 0.0],
        [1.0, 1 / 64, 0.0, 0.0],
        [1.0, 1 / 32, 0.0, 0.0],
    ]
    assert data.nonzero().tolist() == [[0, 0], [128, 299], [129, 128]]
    assert [data[0, 0].item(), data[129, 128].item(), data[128, 299].item()] == [0x7E, 0x7E, 0xFE]
    assert_same_bits(columnwise_data, data.t())


@by_dimension
def test_one_bad_block_spoils_no_other(two_dimensional):
    x = torch.randn(256, 384)
    expected = reference.cast_block(x, Format.E4M3, two_dimensional=two_dimensional)
    x[130, 5], x[140, 140], x[141, 140] = NAN, INF, -INF
    data, _, scale_inv, _ = reference.cast_block(x, Format.E4M3, two_dimensional=two_dimensional)
    assert data[[130, 140, 141], [5, 140, 140]].tolist() == [0x7F, 0x7E, 0xFE]
    changed = (scale_inv != expected[2]).nonzero()
    assert scale_inv[tuple(changed.t())].tolist() == [1.0] * len(changed)
    blocks = [[1, 0], [1, 1]] if two_dimensional else [[0, 130], [1, 140], [1, 141]]
    assert changed.tolist() == blocks
    assert_same_bits(data[:128], expected[0][:128])
    assert_same_bits(data[:, 256:], expected[0][:, 256:])


@by_dimension
@pytest.mark.parametrize("orientation", Orientation)
@pytest.mark.parametrize("pad", [1, 16, 128, 512])
def test_orientations_and_padding(two_dimensional, orientation, pad):
    shapes = [(7, 33), (128, 128), (130, 260), (1, 1), (1, 300), (300, 1), (256, 512)]
    for shape in [*shapes, (0, 5), (5, 0), (0, 0), (0, 300), (300, 0)]:
        x = torch.randn(shape)
        assert_cast(
            x, Format.E4M3, two_dimensional=two_dimensional, orientation=orientation, pad=pad
        )


VIEWS = {
    "transposed": lambda: torch.randn(140, 13).t(),
    "transposed blocks": lambda: torch.randn(256, 128).t(),
    "sliced": lambda: torch.randn(20, 600)[3::2, 1:-4:3],
    "expanded rows": lambda: torch.randn(1, 130).expand(9, 130),
    "expanded columns": lambda: torch.randn(9, 1).expand(9, 130),
    "one row": lambda: torch.randn(9, 130)[3:4],
    "one column": lambda: torch.randn(130, 13)[:, 3:4],
    "one row of columns": lambda: torch.randn(128, 1).t(),
    "misaligned": lambda: torch.randn(9 * 130 + 1)[1:].view(9, 130),
}


@by_dimension
@pytest.mark.parametrize("view", VIEWS)
# 1: the bytes as they are; 16: padded.
@pytest.mark.parametrize("pad", [1, 16])
def test_strides_do_not_matter(two_dimensional, view, pad):
    assert_cast(VIEWS[view](), Format.E4M3, two_dimensional=two_dimensional, pad=pad)


@by_format
@by_dimension
def test_columnwise_is_rowwise_of_the_transpose(format, two_dimensional):
    x = torch.randn(133, 270)
    _, columnwise_data, _, columnwise_scale_inv = reference.cast_block(
        x, format, two_dimensional=two_dimensional, orientation=COLUMNWISE
    )
    data, _, scale_inv, _ = reference.cast_block(
        x.t().contiguous(), format, two_dimensional=two_dimensional
    )
    assert_same_bits(columnwise_data, data)
    assert_same_bits(columnwise_scale_inv, scale_inv)


@by_dimension
@pytest.mark.parametrize("shape", [(4, 4), (1, 4), (4, 1), (1, 1), (512, 128), (512, 512)])
def test_results_share_no_storage(two_dimensional, shape):
    x = torch.ones(shape)
    results = reference.cast_block(
        x, Format.E4M3, two_dimensional=two_dimensional, orientation=BOTH
    )
    tensors = [x, *results]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)
    assert torch.equal(x, torch.ones(shape))


def test_only_matrices():
    with pytest.raises(ShapeError, match=r"cast_block: a matrix is needed \(x: float32\[2, 3, 4"):
        reference.cast_block(torch.ones(2, 3, 4), Format.E4M3)


@by_format
@by_dimension
# 512: blocks that are nothing but padding and have no scale.
@pytest.mark.parametrize("pad", [1, 16, 512])
def test_decode(format, two_dimensional, pad):
    for shape in ((3, 300), (130, 9), (1, 1), (5, 128), (0, 7), (7, 0)):
        x = torch.randn(shape)
        data, columnwise_data, scale_inv, columnwise_scale_inv = reference.cast_block(
            x,
            format,
            power_of_two=False,
            two_dimensional=two_dimensional,
            orientation=BOTH,
            pad=pad,
        )
        for codes, scales in ((data, scale_inv), (columnwise_data, columnwise_scale_inv)):
            decoded = reference.decode_block(codes, scales, format, two_dimensional=two_dimensional)
            expected = oracles_block.decode_block(
                codes.numpy(), scales.numpy(), format.name, two_dimensional=two_dimensional
            )
            assert_same_bits(decoded, expected)
            assert decoded.stride() == torch.empty(decoded.shape).stride()
            assert not decoded[:, shape[codes is columnwise_data] :][shape[1] :].count_nonzero()


@by_format
@by_dimension
def test_decode_every_code(format, two_dimensional):
    data = torch.arange(256, dtype=torch.uint8).view(2, 128)
    scale_inv = torch.tensor([[0.3, 0.0, 0.0, 0.0]] if two_dimensional else [[0.3, 7.0]])
    actual = reference.decode_block(data, scale_inv, format, two_dimensional=two_dimensional)
    expected = torch.from_numpy(
        oracles_block.decode_block(
            data.numpy(), scale_inv.numpy(), format.name, two_dimensional=two_dimensional
        )
    )
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_same_bits(actual.nan_to_num(1.0), expected.nan_to_num(1.0))


@by_dimension
def test_padding_of_ruined_blocks_decodes_to_zero(two_dimensional):
    for special in (NAN, INF, -torch.finfo(torch.float32).max, 1e-45):
        x = torch.full((3, 130), special)
        data, _, scale_inv, _ = reference.cast_block(
            x, Format.E4M3, two_dimensional=two_dimensional, power_of_two=False, pad=512
        )
        decoded = reference.decode_block(
            data, scale_inv, Format.E4M3, two_dimensional=two_dimensional
        )
        assert decoded.shape == (3, 512)
        assert_same_bits(decoded[:, 130:], torch.zeros(3, 382))


@by_format
@by_dimension
def test_round_trip_error_is_that_of_the_format(format, two_dimensional):
    x = torch.randn(256, 256)
    data, _, scale_inv, _ = reference.cast_block(x, format, two_dimensional=two_dimensional)
    decoded = reference.decode_block(data, scale_inv, format, two_dimensional=two_dimensional)
    typical = {Format.E4M3: 0.0265, Format.E5M2: 0.0527}[format]
    assert 0.9 * typical < oracles.relative_error(decoded, x) < 1.1 * typical


def bits(x):
    """The bytes of a result; NaNs may differ in sign."""
    return torch.where(x.isnan(), NAN, x) if x.is_floating_point() else x


@by_dimension
def test_compiled_is_eager(two_dimensional):
    def cast(x):
        options = {"two_dimensional": two_dimensional}
        results = reference.cast_block(
            x, Format.E4M3, power_of_two=False, orientation=BOTH, pad=16, **options
        )
        data, columnwise_data, scale_inv, columnwise_scale_inv = results
        decoded = (
            reference.decode_block(data, scale_inv, Format.E4M3, **options),
            reference.decode_block(columnwise_data, columnwise_scale_inv, Format.E4M3, **options),
        )
        return *results, decoded[0][:, : x.shape[1]], decoded[1][:, : x.shape[0]]

    compiled = torch.compile(cast, fullgraph=True, dynamic=False)
    for factor in (0.0, 1.0, 1e-30, INF):
        x = (torch.randn(139, 140) * factor).bfloat16()
        for ours, theirs in zip(compiled(x), cast(x), strict=True):
            assert_same_bits(bits(ours), bits(theirs))


def test_compiled_loses_no_ragged_rest():
    """Values cut to 140 after they were decoded: 140 is no whole number of loops of 128."""

    def decode(data, scale_inv):
        values = reference.decode_block(data, scale_inv, Format.E4M3, two_dimensional=False)
        return values[:, :140] + 1.0

    data, _, scale_inv, _ = reference.cast_block(torch.randn(9, 140), Format.E4M3, pad=128)
    compiled = torch.compile(decode, fullgraph=True, dynamic=False)
    assert_same_bits(compiled(data, scale_inv), decode(data, scale_inv))


def test_traces_with_symbolic_sizes():
    def cast(x):
        return reference.cast_block(x, Format.E5M2, two_dimensional=True, pad=16)

    compiled = torch.compile(cast, fullgraph=True, backend="eager", dynamic=True)
    for shape in ((7, 133), (140, 300)):
        x = torch.randn(shape)
        actual, expected = compiled(x), cast(x)
        for place in (0, 2):
            assert_same_bits(actual[place], expected[place])
