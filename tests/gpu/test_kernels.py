"""The Triton kernels of per-tensor scaling against the reference, bit for bit."""

import pytest
import torch

import oracles
from fullgraph import kernels, reference
from fullgraph.formats import BOTH, Format, Orientation
from oracles import assert_same_bits

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
NAN, INF = float("nan"), float("inf")

FORMATS = [Format.E4M3, Format.E5M2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}

# One element, one row, one column, ragged, one whole tile (64 x 128), just over a tile, many.
SHAPES = [(1, 1), (1, 300), (300, 1), (13, 767), (64, 128), (65, 129), (200, 712), (1000, 4096)]
EMPTY = [(0, 5), (16, 0), (0, 0)]
AMAXES = [0.0, 3.3, 448.0, 1.4e-45, 1e-39, 1.3e-36, 1.8e-34, 3.4e38, INF, NAN]

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


def gaussian(shape, dtype):
    return torch.randn(shape, device=GPU).to(dtype)


def assert_same_cast(x, amax, format, **options):
    """Kernel on the GPU = reference on the CPU; and the transpose = the rowwise copy."""
    expected = reference.cast_per_tensor(x.cpu(), amax.cpu(), format, **options)
    actual = kernels.cast_per_tensor(x, amax, format, **options)
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_same_bits(ours, theirs)
            assert ours.stride() == torch.empty(ours.shape).stride()
    rowwise, columnwise, _ = actual
    if rowwise is not None and columnwise is not None:
        rows, columns = x.shape
        assert_same_bits(columnwise[:, :rows], rowwise[:, :columns].t())


def test_a_wrong_byte_is_noticed(monkeypatch):
    def off_by_one(*args, **options):
        rowwise, columnwise, scale_inv = reference.cast_per_tensor(*args, **options)
        columnwise[1::4] += 1
        return rowwise, columnwise, scale_inv

    monkeypatch.setattr(kernels, "cast_per_tensor", off_by_one)
    x = gaussian((8, 8), torch.float32)
    with pytest.raises(AssertionError, match="16 of 64 differ, first at"):
        assert_same_cast(x, reference.amax(x), Format.E4M3, orientation=BOTH)


@by_dtype
def test_amax(dtype):
    for shape in [*SHAPES, *EMPTY, (), (7,), (3, 5, 7), (1 << 21,)]:
        for x in (gaussian(shape, dtype), random_bits(shape, dtype)):
            assert_same_bits(kernels.amax(x), reference.amax(x.cpu()))


@by_dtype
def test_amax_of_one_special_element(dtype):
    for special in (NAN, -NAN, INF, -INF, -0.0, torch.finfo(dtype).min, torch.finfo(dtype).tiny):
        for place in (0, 12345, -1):
            x = torch.zeros(200, 300, dtype=dtype, device=GPU)
            x.view(-1)[place] = special
            assert_same_bits(kernels.amax(x), reference.amax(x.cpu()))


@by_format
@by_dtype
def test_cast_over_shapes(format, dtype):
    for shape in [*SHAPES, *EMPTY]:
        x = gaussian(shape, dtype)
        for pad in (1, 16):
            assert_same_cast(x, kernels.amax(x), format, orientation=BOTH, pad=pad)


@pytest.mark.parametrize("orientation", Orientation)
def test_cast_over_orientations(orientation):
    for shape in ((48, 160), (65, 129), (0, 5)):
        x = gaussian(shape, torch.bfloat16)
        for pad in (1, 16):
            assert_same_cast(x, kernels.amax(x), Format.E4M3, orientation=orientation, pad=pad)


@by_format
@by_dtype
def test_cast_over_bit_patterns(format, dtype):
    x = random_bits((1024, 2048), dtype)
    for amax in (format.max, 3.3, 1e30):
        assert_same_cast(x, torch.tensor(amax, device=GPU), format, orientation=BOTH)


@by_format
def test_cast_of_every_16_bit_number(format):
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device=GPU).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = bits.view(dtype).reshape(256, 256)
        assert_same_cast(x, torch.tensor(format.max, device=GPU), format, orientation=BOTH)


@by_format
@by_dtype
def test_cast_over_ties(format, dtype):
    """Every tie between two codes, and the numbers next to it."""
    table = torch.from_numpy(oracles.finite_values(format.name))
    ties = ((table[1:] + table[:-1]) / 2).to(dtype)
    up = torch.nextafter(ties, torch.full_like(ties, INF))
    down = torch.nextafter(ties, torch.zeros_like(ties))
    x = torch.stack([up, -ties, ties, down], 1).to(GPU)
    assert_same_cast(x, torch.tensor(format.max, device=GPU), format, orientation=BOTH)


@by_format
@by_dtype
def test_scale_over_amaxes_and_options(format, dtype):
    x = torch.tensor([[1.0, -1e-30, INF, NAN, 0.0, -0.0, 1e-44, 6e4]], device=GPU).to(dtype)
    for options in ({}, {"power_of_two": True}, {"eps": 1e-12}, {"eps": 3.5}):
        for amax in AMAXES:
            assert_same_cast(x, torch.tensor(amax, device=GPU), format, **options)


@by_format
def test_scale_is_divided_exactly(format):
    """A division that is one unit off shows in some of these scales and bytes."""
    x = gaussian((8, 64), torch.float32)
    for amax in (torch.rand(200, device=GPU) + 0.5).unbind():
        assert_same_cast(x, amax, format)


VIEWS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every second": lambda x: torch.stack([x, -x], 2)[:, :, 0],
    "misaligned rows": lambda x: torch.cat([x, x], 1)[:, 3 : 3 + x.shape[1]],
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    "expanded rows": lambda x: x[:1].expand_as(x),
    "expanded columns": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_do_not_matter(view, dtype):
    for shape in ((128, 256), (70, 150)):
        x = VIEWS[view](gaussian(shape, dtype))
        amax = kernels.amax(x)
        assert_same_bits(amax, reference.amax(x.cpu()))
        assert_same_cast(x, amax, Format.E4M3, orientation=BOTH, pad=16)


@by_format
@by_dtype
def test_transpose_of_a_large_matrix(format, dtype):
    """Byte for byte over thousands of tiles: the place of a known silent miscompile."""
    for shape in ((4096, 4096), (2048 + 16, 4096 + 16), (2050, 1030)):
        for x in (gaussian(shape, dtype), random_bits(shape, dtype)):
            amax = torch.tensor(4.0, device=GPU)
            rowwise, columnwise, _ = kernels.cast_per_tensor(
                x, amax, format, orientation=BOTH, pad=16
            )
            rows, columns = shape
            assert_same_bits(columnwise[:, :rows], rowwise[:, :columns].t())
            assert not columnwise[:, rows:].count_nonzero()
            on_gpu = reference.cast_per_tensor(x, amax, format, pad=16)
            assert_same_bits(rowwise, on_gpu[0])


@by_format
@by_dtype
def test_reference_is_the_same_on_both_devices(format, dtype):
    for x in (gaussian((33, 65), dtype), random_bits((257, 129), dtype), gaussian((0, 4), dtype)):
        amax = reference.amax(x)
        assert_same_bits(amax, reference.amax(x.cpu()))
        here = reference.cast_per_tensor(x, amax, format, orientation=BOTH, pad=16)
        there = reference.cast_per_tensor(x.cpu(), amax.cpu(), format, orientation=BOTH, pad=16)
        for ours, theirs in zip(here, there, strict=True):
            assert_same_bits(ours, theirs)


def test_more_than_2_to_the_31_elements():
    rows, columns = (1 << 16) + 16, 1 << 15
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free GPU memory")
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device=GPU)
    x[-1, -1] = -300.0
    amax = kernels.amax(x)
    assert amax.item() == 300
    rowwise, columnwise, _ = kernels.cast_per_tensor(x, amax, Format.E4M3, orientation=BOTH)
    for part in (slice(0, 64), slice(rows - 64, rows)):
        expected, _, _ = reference.cast_per_tensor(x[part], amax, Format.E4M3)
        assert_same_bits(rowwise[part], expected)
        assert_same_bits(columnwise[:, part], expected.t())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_neither_waits_for_the_gpu_nor_breaks_a_graph():
    x = gaussian((100, 200), torch.bfloat16)

    def cast():
        return kernels.cast_per_tensor(x, kernels.amax(x), Format.E4M3, orientation=BOTH, pad=16)

    cast()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        cast()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cast()
    for _ in range(2):
        x.copy_(3 * gaussian((100, 200), torch.bfloat16))
        graph.replay()
        for ours, theirs in zip(captured, cast(), strict=True):
            assert_same_bits(ours, theirs)
