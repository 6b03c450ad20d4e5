"""The MXFP8 kernel against the reference, bit for bit.

Triton compiles a kernel anew for each set of options and for sizes that are 1, multiples of 16, or neither. Most tests
here take sizes that are multiples of 16 and share those compiled for `CASES`.
"""

import pytest
import torch

import oracles
from fullgraph import kernels, reference
from fullgraph.formats import BOTH, COLUMNWISE, ROWWISE, Format, MXScaleMode
from oracles import assert_same_bits

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
NAN, INF = float("nan"), float("inf")

FORMATS = [Format.E4M3, Format.E5M2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}

# Each mode is another rule, each format another conversion, each dtype another transpose; squares another reduction.
CASES = [
    *((torch.float32, f, {"scale_mode": mode}) for f in FORMATS for mode in MXScaleMode),
    *((dtype, f, {}) for f in FORMATS for dtype in DTYPES[1:]),
    *((dtype, f, {"two_dimensional": True}) for f in FORMATS for dtype in DTYPES),
]
by_case = pytest.mark.parametrize(("dtype", "format", "options"), CASES, ids=str)
by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_mode = pytest.mark.parametrize("mode", MXScaleMode, ids=lambda m: m.value)
by_dimensions = pytest.mark.parametrize("two_dimensional", [False, True], ids=["1-D", "2-D"])


@pytest.fixture(autouse=True)
def _kernels_run_here():
    if not kernels.available(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("the kernels need compute capability 9.0 and Triton")


def random_bits(shape, dtype):
    """Any bit pattern: subnormals, 76 orders of magnitude; infinities and NaNs in few blocks."""
    integers = INTEGERS[dtype]
    limits = torch.iinfo(integers)
    bits = torch.randint(limits.min, limits.max + 1, shape, dtype=torch.int64, device=GPU)
    x = bits.to(integers).view(dtype)
    return torch.where(x.isfinite() | (torch.rand(shape, device=GPU) < 0.02), x, 1.0)


def gaussian(shape, dtype):
    return torch.randn(shape, device=GPU).to(dtype)


def many_magnitudes(shape, dtype):
    """Blocks of very different amax."""
    exponents = torch.randint(-120, 20, (-(-shape[0] // 32), -(-shape[1] // 32)), device=GPU)
    exponents = exponents.repeat_interleave(32, 0).repeat_interleave(32, 1)
    return (torch.randn(shape, device=GPU) * 2.0 ** exponents[: shape[0], : shape[1]]).to(dtype)


def assert_same_cast(x, format=Format.E4M3, *, orientation=BOTH, on_cpu=True, **options):
    """Kernel on the GPU = reference, on the CPU unless it would take too long."""
    there = x.cpu() if on_cpu else x
    expected = reference.cast_mx(there, format, orientation=orientation, **options)
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


@by_case
def test_magnitudes_and_bit_patterns(dtype, format, options):
    assert_same_cast(many_magnitudes((208, 304), dtype), format, **options)
    assert_same_cast(random_bits((512, 640), dtype), format, **options, pad=256)


@by_case
def test_special_values(dtype, format, options):
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    for special in (NAN, -NAN, INF, -INF, -0.0, largest, -largest, tiny, tiny / 4):
        for background in (0.0, 1.0):
            x = torch.full((80, 176), background, dtype=dtype, device=GPU)
            x[3, 5] = x[79, 175] = special
            assert_same_cast(x, format, **options, pad=64)
    x = torch.zeros(80, 176, dtype=dtype, device=GPU)
    x[79, 172:] = torch.tensor([INF, NAN, 3e4, -0.0], device=GPU)
    assert_same_cast(x, format, **options, pad=64)


@by_case
def test_large(dtype, format, options):
    """Byte for byte over thousands of tiles: the place of a known silent miscompile."""
    for shape in ((2048, 4096), (1024 + 16, 2048 + 48)):
        for x in (gaussian(shape, dtype), random_bits(shape, dtype)):
            data, columnwise_data, *_ = assert_same_cast(x, format, **options, pad=32, on_cpu=False)
            if "two_dimensional" in options:
                rows, columns = shape
                assert_same_bits(columnwise_data[:, :rows], data[:, :columns].t())


# One element, one row, one column, ragged, one whole tile (64 x 128), and sizes that end in the lower and in the upper
# half of a tile of swizzled scales.
SHAPES = [(1, 1), (1, 300), (300, 1), (13, 767), (64, 128), (130, 160), (448, 1056)]
EMPTY = [(0, 5), (16, 0), (0, 0)]


@by_dimensions
def test_shapes(two_dimensional):
    for shape in [*SHAPES, *EMPTY]:
        x = gaussian(shape, torch.bfloat16)
        for pad in (1, 32):
            assert_same_cast(x, two_dimensional=two_dimensional, pad=pad, swizzled=True)


@pytest.mark.parametrize("orientation", [ROWWISE, COLUMNWISE])
@by_dimensions
def test_one_copy(orientation, two_dimensional):
    for shape in ((65, 129), (0, 5)):
        x = gaussian(shape, torch.bfloat16)
        for pad in (1, 256):
            assert_same_cast(
                x,
                orientation=orientation,
                two_dimensional=two_dimensional,
                swizzled=not two_dimensional,
                pad=pad,
            )


@by_format
@by_mode
def test_scales(format, mode):
    """All positive 16-bit numbers, and what lies beside powers of two and beside format.max times them."""
    bits = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16)
    points = torch.tensor(
        [s * 2.0**e for e in range(-148, 128) for s in (1, 1.25, 1.75, 1.875, 1.9375)]
    )
    ends = torch.tensor(0.0), torch.tensor(INF)
    beside = [torch.nextafter(points, end) for end in ends]
    halves = [bits.view(dtype).to(torch.float32) for dtype in (torch.bfloat16, torch.float16)]
    amaxes = torch.cat([points, *beside, *halves])
    x = torch.zeros(-(-len(amaxes) // 16) * 16, 32)
    x[: len(amaxes), 7] = -amaxes
    x[: len(amaxes), 8:11] = amaxes[:, None] * torch.tensor([0.75, 2.0**-8, 2.0**-13])
    assert_same_cast(x.to(GPU), format, scale_mode=mode)


@by_format
@by_dtype
def test_ties(format, dtype):
    """Every tie between two codes and the numbers next to it, under an amax of format.max."""
    table = torch.from_numpy(oracles.finite_values(format.name))
    ties = ((table[1:] + table[:-1]) / 2).to(dtype)
    up = torch.nextafter(ties, torch.full_like(ties, INF))
    down = torch.nextafter(ties, torch.zeros_like(ties))
    x = torch.zeros(128, 16, dtype=dtype)
    x[: len(ties), :5] = torch.stack([up, -ties, ties, down, torch.full_like(ties, format.max)], 1)
    for exponent in (0, -100, 60) if dtype is torch.float32 else (0,):
        assert_same_cast((x * 2.0**exponent).to(GPU), format)


VIEWS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every second": lambda x: torch.stack([x, -x], 2)[:, :, 0],
    "misaligned rows": lambda x: torch.cat([x, x], 1)[:, 3 : 3 + x.shape[1]],
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    "expanded rows": lambda x: x[:1].expand_as(x),
    "expanded columns": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strides_do_not_matter(view):
    assert_same_cast(VIEWS[view](gaussian((128, 256), torch.bfloat16)), pad=32)
    x = VIEWS[view](gaussian((70, 150), torch.float32))
    assert_same_cast(x, two_dimensional=True, pad=32)


@by_case
def test_reference_is_the_same_on_both_devices(dtype, format, options):
    for x in (gaussian((33, 65), dtype), random_bits((257, 129), dtype), gaussian((0, 4), dtype)):
        both = {**options, "orientation": BOTH, "pad": 32, "swizzled": True}
        here = reference.cast_mx(x, format, **both)
        there = reference.cast_mx(x.cpu(), format, **both)
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
    x = gaussian((112, 208), torch.bfloat16)

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
        x.copy_(3 * gaussian((112, 208), torch.bfloat16))
        graph.replay()
        for ours, theirs in zip(captured, cast(), strict=True):
            assert_same_bits(ours, theirs)
