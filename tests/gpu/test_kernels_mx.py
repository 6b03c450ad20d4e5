"""The MXFP8 kernel against the reference, bit for bit."""

import pytest
import torch

import oracles
from fullgraph import kernels, reference
from fullgraph.formats import BOTH, Format, MXScaleMode, Orientation
from oracles import assert_same_bits

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
NAN, INF = float("nan"), float("inf")

FORMATS = [Format.E4M3, Format.E5M2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}

# One element, one block, one row, one column, ragged, one whole tile (64 x 128), one more each way, rows and columns that
# end in the lower half of a tile of swizzled scales, many.
SHAPES = [
    *((1, 1), (1, 32), (1, 300), (300, 1), (13, 767), (64, 128), (65, 129)),
    *((130, 160), (200, 712), (512, 1024)),
]
EMPTY = [(0, 5), (16, 0), (0, 0)]

# The conversion instruction differs.
by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
# 16-bit and 32-bit tiles are loaded and transposed by different instructions.
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Each is another kernel.
by_mode = pytest.mark.parametrize("mode", MXScaleMode, ids=lambda m: m.value)
by_dimensions = pytest.mark.parametrize("two_dimensional", [False, True], ids=["1-D", "2-D"])
by_order = pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])


@pytest.fixture(autouse=True)
def _kernels_run_here():
    if not kernels.available(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("the kernels need compute capability 9.0 and Triton")


def random_bits(shape, dtype):
    """Any bit pattern: infinities, subnormals, 76 orders of magnitude, and NaNs in few blocks."""
    integers = INTEGERS[dtype]
    limits = torch.iinfo(integers)
    bits = torch.randint(limits.min, limits.max + 1, shape, dtype=torch.int64, device=GPU)
    x = bits.to(integers).view(dtype)
    keep_nan = torch.rand(shape, device=GPU) < 0.03
    return torch.where(x.isnan() & ~keep_nan, 1.0, x)


def gaussian(shape, dtype):
    return torch.randn(shape, device=GPU).to(dtype)


def many_magnitudes(shape, dtype):
    """Blocks of very different amax, down to subnormals."""
    exponents = torch.randint(-60, 20, (shape[0], -(-shape[1] // 32)), device=GPU)
    exponents = exponents.repeat_interleave(32, 1)[:, : shape[1]]
    return (torch.randn(shape, device=GPU) * 2.0**exponents).to(dtype)


def assert_same_cast(x, format=Format.E4M3, *, orientation=BOTH, on_cpu=True, **options):
    """Kernel on the GPU = reference, on the CPU unless it would take too long."""
    expected = reference.cast_mx(
        x.cpu() if on_cpu else x, format, orientation=orientation, **options
    )
    actual = kernels.cast_mx(x, format, orientation=orientation, **options)
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_same_bits(ours, theirs)
            assert ours.stride() == torch.empty(ours.shape).stride()
    return actual


@pytest.mark.parametrize("result", range(4))
def test_a_wrong_byte_is_noticed(result, monkeypatch):
    def off_by_one(*args, **options):
        results = reference.cast_mx(*args, **options)
        results[result][1::4] += 1
        return results

    monkeypatch.setattr(kernels, "cast_mx", off_by_one)
    with pytest.raises(AssertionError, match="differ, first at"):
        assert_same_cast(gaussian((8, 8), torch.float32))


@by_format
@by_dtype
@by_dimensions
def test_shapes(format, dtype, two_dimensional):
    for shape in [*SHAPES, *EMPTY]:
        x = gaussian(shape, dtype)
        for pad in (1, 32):
            assert_same_cast(x, format, two_dimensional=two_dimensional, pad=pad)
            assert_same_cast(x, format, two_dimensional=two_dimensional, pad=pad, swizzled=True)


@pytest.mark.parametrize("orientation", Orientation)
@by_dimensions
@by_order
def test_orientations(orientation, two_dimensional, swizzled):
    for shape in ((48, 160), (65, 129), (0, 5)):
        x = gaussian(shape, torch.bfloat16)
        for pad in (1, 16, 32, 256):
            assert_same_cast(
                x,
                orientation=orientation,
                two_dimensional=two_dimensional,
                swizzled=swizzled,
                pad=pad,
            )


@by_format
@by_dtype
@by_mode
@by_dimensions
def test_modes(format, dtype, mode, two_dimensional):
    for x in (many_magnitudes((200, 300), dtype), random_bits((512, 640), dtype)):
        assert_same_cast(x, format, scale_mode=mode, two_dimensional=two_dimensional)


@by_format
@by_mode
def test_scale_of_every_positive_16_bit_number(format, mode):
    bits = torch.arange(1 << 15, dtype=torch.int32, device=GPU).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = bits.view(dtype).view(-1, 1)
        assert_same_cast(x, format, scale_mode=mode, orientation=Orientation.ROWWISE)


@by_format
@by_mode
def test_scale_beside_powers_of_two(format, mode):
    points = torch.tensor(
        [s * 2.0**e for e in range(-148, 128) for s in (1, 1.25, 1.75, 1.875, 1.9375)]
    )
    ends = torch.tensor(0.0), torch.tensor(INF)
    amaxes = torch.cat([points, *(torch.nextafter(points, end) for end in ends)])
    x = amaxes[:, None] * torch.tensor([1.0, -0.5, 0.75, 2.0**-8, 2.0**-13])
    assert_same_cast(x.to(GPU), format, scale_mode=mode, orientation=Orientation.ROWWISE)


@by_format
@by_dtype
def test_ties(format, dtype):
    """Every tie between two codes and the numbers next to it, under an amax of format.max."""
    table = torch.from_numpy(oracles.finite_values(format.name))
    ties = ((table[1:] + table[:-1]) / 2).to(dtype)
    up = torch.nextafter(ties, torch.full_like(ties, INF))
    down = torch.nextafter(ties, torch.zeros_like(ties))
    x = torch.stack([up, -ties, ties, down, torch.full_like(ties, format.max)], 1).to(GPU)
    assert_same_cast(x, format)
    for exponent in (-100, 60) if dtype is torch.float32 else ():
        assert_same_cast(x * 2.0**exponent, format)


@by_dtype
@by_dimensions
@by_mode
def test_special_values(dtype, two_dimensional, mode):
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    for special in (NAN, -NAN, INF, -INF, -0.0, largest, -largest, tiny, tiny / 4):
        for background in (0.0, 1.0):
            x = torch.full((70, 150), background, dtype=dtype, device=GPU)
            x[3, 5] = x[69, 149] = special
            options = {"scale_mode": mode, "two_dimensional": two_dimensional}
            assert_same_cast(x, **options, pad=32, swizzled=True)
    x = torch.tensor([[INF, NAN, 3e4, -0.0]], dtype=dtype, device=GPU)
    assert_same_cast(x, scale_mode=mode, two_dimensional=two_dimensional, pad=128)


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
@by_dimensions
def test_strides_do_not_matter(view, dtype, two_dimensional):
    for shape in ((128, 256), (70, 150), (1, 150), (70, 1)):
        x = VIEWS[view](gaussian(shape, dtype))
        assert_same_cast(x, two_dimensional=two_dimensional, pad=32)


@by_format
@by_dtype
@by_dimensions
def test_large(format, dtype, two_dimensional):
    """Byte for byte over thousands of tiles: the place of a known silent miscompile."""
    for shape in ((4096, 4096), (2048 + 16, 2048 + 48), (2050, 1030)):
        for x in (gaussian(shape, dtype), random_bits(shape, dtype)):
            data, columnwise_data, *_ = assert_same_cast(
                x, format, two_dimensional=two_dimensional, pad=32, on_cpu=False, swizzled=True
            )
            if two_dimensional:
                rows, columns = shape
                assert_same_bits(columnwise_data[:, :rows], data[:, :columns].t())


@by_format
@by_dtype
@by_mode
def test_reference_is_the_same_on_both_devices(format, dtype, mode):
    for x in (gaussian((33, 65), dtype), random_bits((257, 129), dtype), gaussian((0, 4), dtype)):
        options = {"scale_mode": mode, "orientation": BOTH, "pad": 32, "swizzled": True}
        here = reference.cast_mx(x, format, **options)
        there = reference.cast_mx(x.cpu(), format, **options)
        for ours, theirs in zip(here, there, strict=True):
            assert_same_bits(ours, theirs)


@by_format
def test_decoding_is_the_same_on_both_devices(format):
    codes = torch.arange(256, dtype=torch.uint8, device=GPU).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8, device=GPU)[:, None].repeat(1, 8)
    here = reference.decode_mx(codes, scales, format).cpu()
    there = reference.decode_mx(codes.cpu(), scales.cpu(), format)
    assert torch.equal(here.isnan(), there.isnan())
    assert_same_bits(here.where(~here.isnan(), 1.0), there.where(~there.isnan(), 1.0))


def test_more_than_2_to_the_31_elements():
    rows, columns = (1 << 16) + 32, 1 << 15
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free GPU memory")
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device=GPU)
    x[-1, -1] = -300.0
    data, columnwise_data, scale_inv, columnwise_scale_inv = kernels.cast_mx(
        x, Format.E4M3, orientation=BOTH
    )
    for part in (slice(0, 64), slice(rows - 64, rows)):
        expected = reference.cast_mx(x[part], Format.E4M3, orientation=BOTH)
        assert_same_bits(data[part], expected[0])
        assert_same_bits(columnwise_data[:, part], expected[1])
        assert_same_bits(scale_inv[part], expected[2])
        blocks = slice(part.start // 32, part.stop // 32)
        assert_same_bits(columnwise_scale_inv[:, blocks], expected[3])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_neither_waits_for_the_gpu_nor_breaks_a_graph():
    x = gaussian((100, 200), torch.bfloat16)

    def cast():
        return kernels.cast_mx(x, Format.E4M3, orientation=BOTH, pad=32, swizzled=True)

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
