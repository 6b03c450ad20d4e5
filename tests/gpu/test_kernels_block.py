"""The kernels of scales per row and per block against the reference, bit for bit."""

import functools

import pytest
import torch

from fullgraph import kernels, reference
from fullgraph.formats import BOTH, COLUMNWISE, ROWWISE, Format
from oracles import assert_same_bits
from oracles_block import BLOCK, INF, NAN, SAMPLES

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
FORMATS = [Format.E4M3, Format.E5M2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
CASTS = {
    "per row": ("cast_per_row", {}),
    "1x128": ("cast_block", {"two_dimensional": False}),
    "128x128": ("cast_block", {"two_dimensional": True}),
}
EXACT, POWER_OF_TWO = {"power_of_two": False}, {"power_of_two": True}

# Scales by row, by stretch and by square: other reductions, other places.
by_cast = pytest.mark.parametrize("cast", CASTS)
# The conversion instruction differs.
by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
# 16-bit and 32-bit tiles are loaded and transposed by different instructions.
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _kernels_run_here():
    if not kernels.available(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("the kernels need compute capability 9.0 and Triton")


def random_bits(shape, dtype):
    """Any bit pattern: NaNs of all payloads, infinities, subnormals, 76 orders of magnitude."""
    integers = INTEGERS[dtype]
    limits = torch.iinfo(integers)
    bits = torch.randint(limits.min, limits.max + 1, shape, dtype=torch.int64, device=GPU)
    return bits.to(integers).view(dtype)


def gaussian(shape, dtype=torch.bfloat16):
    return torch.randn(shape, device=GPU).to(dtype)


def all_samples(format, dtype):
    """Every sample in one matrix of one width, each in squares of its own: a new shape would be a new compilation."""
    samples = [make(format.name, dtype) for make in SAMPLES.values()]
    width = 3 * BLOCK
    squares = [
        torch.nn.functional.pad(x, (0, width - x.shape[1], 0, -x.shape[0] % BLOCK)) for x in samples
    ]
    return torch.cat(squares)


def run(backend, cast, x, format, **options):
    name, more = CASTS[cast]
    return getattr(backend, name)(x, format, **more, **options)


def assert_same_cast(cast, x, format=Format.E4M3, *, on_gpu=False, **options):
    """Kernel on the GPU = reference, on the CPU unless the matrix is large."""
    options = {"orientation": BOTH, **EXACT, **options}
    expected = run(reference, cast, x if on_gpu else x.cpu(), format, **options)
    actual = run(kernels, cast, x, format, **options)
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_same_bits(ours, theirs)
            assert ours.stride() == torch.empty(ours.shape).stride()


@by_cast
def test_a_wrong_byte_is_noticed(cast, monkeypatch):
    name, _ = CASTS[cast]
    right = getattr(reference, name)

    def off_by_one(*args, **options):
        results = right(*args, **options)
        results[1][1::4] += 1
        return results

    monkeypatch.setattr(kernels, name, off_by_one)
    with pytest.raises(AssertionError, match="16 of 64 differ, first at"):
        assert_same_cast(cast, gaussian((8, 8)))


@by_cast
@by_format
@by_dtype
def test_samples(cast, format, dtype):
    x = all_samples(format, dtype).to(GPU)
    assert_same_cast(cast, x, format)
    assert_same_cast(cast, x.t().contiguous(), format)


@by_cast
@pytest.mark.parametrize(
    ("format", "dtype", "options"),
    [
        (Format.E4M3, torch.bfloat16, POWER_OF_TWO),
        (Format.E4M3, torch.bfloat16, {"eps": 3.0}),
        (Format.E4M3, torch.float32, {"eps": 1e-12, **POWER_OF_TWO}),
        (Format.E5M2, torch.float32, {"eps": 1e-45}),
    ],
    ids=str,
)
def test_options(cast, format, dtype, options):
    x = all_samples(format, dtype).to(GPU)
    assert_same_cast(cast, x, format, **options)
    assert_same_cast(cast, x.t().contiguous(), format, **options)


@by_cast
# One element, one row, one column, ragged, both dimensions round, one of them.
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 300), (600, 1), (13, 767), (384, 640), (200, 640), (640, 200)], ids=str
)
def test_shapes_and_padding(cast, shape):
    for pad in (1, 16, 128):
        assert_same_cast(cast, gaussian(shape), pad=pad)


@by_cast
def test_more_of_the_same_shapes(cast):
    for shape in ((7, 33), (127, 129), (130, 260), (129, 1025), (1000, 4100), (777, 5)):
        assert_same_cast(cast, gaussian(shape))
    for shape in ((128, 128), (16, 16), (1024, 4096), (144, 2048 + 16)):
        assert_same_cast(cast, gaussian(shape))
    assert_same_cast(cast, gaussian((130, 260)), pad=512)


@by_cast
def test_nothing_to_cast(cast):
    for shape in ((0, 5), (16, 0), (0, 0)):
        assert_same_cast(cast, gaussian(shape), pad=16)
        assert_same_cast(cast, gaussian(shape), eps=3.0)


@by_cast
@pytest.mark.parametrize("orientation", [ROWWISE, COLUMNWISE], ids=str)
def test_one_copy(cast, orientation):
    assert_same_cast(cast, gaussian((160, 304)), orientation=orientation)
    assert_same_cast(cast, gaussian((65, 129)), orientation=orientation, pad=16)


VIEWS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every second": lambda x: torch.stack([x, -x], 2)[:, :, 0],
    "misaligned rows": lambda x: torch.cat([x, x], 1)[:, 3 : 3 + x.shape[1]],
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    "expanded rows": lambda x: x[:1].expand_as(x),
    "expanded columns": lambda x: x[:, :1].expand_as(x),
}


@by_cast
@pytest.mark.parametrize("view", VIEWS)
def test_strides_do_not_matter(cast, view):
    assert_same_cast(cast, VIEWS[view](gaussian((144, 272))))


@by_cast
@by_dtype
def test_bit_patterns(cast, dtype):
    """Rows of one magnitude, so that their amax is not always a NaN or the largest of the dtype."""
    x = random_bits((1024, 2048), dtype)
    assert_same_cast(cast, x, on_gpu=True)
    assert_same_cast(cast, x.nan_to_num(0.0, 1.0, -1.0).clamp(-9.0, 9.0), on_gpu=True)


@by_cast
def test_scales_are_divided_exactly(cast):
    """2048 rows, stretches and squares, each with an amax of its own; a division one unit off shows in many."""
    x = gaussian((2048, 128), torch.float32)
    assert_same_cast(cast, x)
    assert_same_cast(cast, gaussian((4096, 4096), torch.float32), on_gpu=True)


@by_cast
@by_format
@by_dtype
def test_large(cast, format, dtype):
    """Byte for byte over thousands of tiles: the place of a known silent miscompile of transposed stores."""
    shape = (8192, 4096) if dtype is torch.bfloat16 else (2048 + 16, 4096 + 16)
    x = gaussian(shape, dtype)
    assert_same_cast(cast, x, format, on_gpu=True)
    _, columnwise_data, _, columnwise_scale_inv = run(
        kernels, cast, x, format, orientation=BOTH, **EXACT
    )
    data, _, scale_inv, _ = run(
        kernels, cast, x.t().contiguous(), format, orientation=BOTH, **EXACT
    )
    assert_same_bits(columnwise_data, data)
    assert_same_bits(columnwise_scale_inv, scale_inv)


@by_cast
@by_format
@by_dtype
def test_reference_is_the_same_on_both_devices(cast, format, dtype):
    samples = all_samples(format, dtype).to(GPU)
    for x in (samples, random_bits((257, 129), dtype), gaussian((0, 4), dtype)):
        here = run(reference, cast, x, format, orientation=BOTH, pad=16)
        there = run(reference, cast, x.cpu(), format, orientation=BOTH, pad=16)
        for ours, theirs in zip(here, there, strict=True):
            assert_same_bits(ours, theirs)


@pytest.mark.parametrize("two_dimensional", [False, True])
def test_decoding_is_the_same_on_both_devices(two_dimensional):
    decode = functools.partial(
        reference.decode_block, format=Format.E4M3, two_dimensional=two_dimensional
    )
    data, _, scale_inv, _ = kernels.cast_block(
        gaussian((130, 260)), Format.E4M3, two_dimensional=two_dimensional, pad=512, **EXACT
    )
    assert_same_bits(decode(data, scale_inv), decode(data.cpu(), scale_inv.cpu()))


@by_cast
def test_more_than_2_to_the_31_elements(cast):
    rows, columns = (1 << 16) + 16, 1 << 15
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free GPU memory")
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device=GPU)
    x[0] = 300.0  # the amax of every column
    results = run(kernels, cast, x, Format.E4M3, orientation=BOTH, **EXACT)
    data, columnwise_data, scale_inv, columnwise_scale_inv = results
    # The first block of rows and the last, which is ragged.
    kept = torch.cat([torch.arange(BLOCK), torch.arange(rows - 16, rows)]).to(GPU)
    blocks = torch.tensor([0, rows // BLOCK], device=GPU)
    expected = run(reference, cast, x[kept], Format.E4M3, orientation=BOTH, **EXACT)
    assert_same_bits(data[kept], expected[0])
    assert_same_bits(columnwise_data[:, kept], expected[1])
    if cast == "per row":
        assert_same_bits(scale_inv[kept], expected[2])
        assert_same_bits(columnwise_scale_inv, expected[3])
    elif cast == "1x128":
        assert_same_bits(scale_inv[:, kept], expected[2])
        assert_same_bits(columnwise_scale_inv[blocks], expected[3])
    else:
        assert_same_bits(scale_inv[blocks], expected[2])
        assert_same_bits(columnwise_scale_inv[:, blocks], expected[3][:, :2])


@by_cast
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_neither_waits_for_the_gpu_nor_breaks_a_graph(cast):
    x = gaussian((100, 200))

    def both():
        return run(kernels, cast, x, Format.E4M3, orientation=BOTH, pad=16)

    both()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for factor in (3.0, NAN, INF, 0.0, 0.1):
        x.copy_(factor * gaussian((100, 200)))
        graph.replay()
        for ours, theirs in zip(captured, both(), strict=True):
            assert_same_bits(ours, theirs)
