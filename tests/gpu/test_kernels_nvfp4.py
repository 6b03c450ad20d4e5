"""The NVFP4 kernel against the reference, bit for bit.

A kernel is compiled for each set of options, dtype, layout and kind of row length (one, a multiple of 16, another),
so the lists here combine few of them, and what can has bfloat16, plain layout and a row length of the last kind.
"""

import pytest
import torch

import oracles
import oracles_nvfp4
from fullgraph import kernels, reference
from fullgraph.formats import BOTH, FourOverSix, Orientation
from oracles import assert_same_bits

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
NAN, INF = float("nan"), float("inf")
MAE, MSE = FourOverSix.MAE, FourOverSix.MSE

PLAIN = {}
SQUARES = {"four_over_six": MSE, "two_dimensional": True}
SEEDED = {"seed": (1 << 40) + 3, "hadamard": True, "row_scaled": True}
OPTIONS = [
    PLAIN,
    {"two_dimensional": True},
    {"hadamard": True},
    {"four_over_six": MAE},
    {"four_over_six": MSE},
    SQUARES,
    {"row_scaled": True},
    {"seed": 5},
    {"seed": -(1 << 62) - 3, "two_dimensional": True},
    SEEDED,
]
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
OTHER_DTYPES = [
    (torch.float32, PLAIN),
    (torch.float32, SQUARES),
    (torch.float32, SEEDED),
    (torch.float16, PLAIN),
]
RAGGED = [(7, 33), (65, 129), (13, 767), (200, 715)]  # a tile is 64 x 64

# Each option changes the arithmetic.
by_options = pytest.mark.parametrize("options", OPTIONS, ids=str)
# In squares and by rows, to nearest and by chance, transformed and not.
by_most_options = pytest.mark.parametrize("options", [PLAIN, SQUARES, SEEDED], ids=str)


@pytest.fixture(autouse=True)
def _kernels_run_here():
    if not kernels.available(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("the kernels need compute capability 9.0 and Triton")


def cast(backend, x, options):
    if options.get("seed") is not None:
        options = options | {"seed": torch.tensor(options["seed"], device=x.device)}
    return backend.cast_nvfp4(x, **options)


def assert_same(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_same_bits(ours, theirs)
            assert ours.stride() == torch.empty(ours.shape).stride()


def assert_same_cast(x, **options):
    """Kernel on the GPU = reference on the CPU."""
    assert_same(cast(kernels, x, options), cast(reference, x.cpu(), options))


def gaussian(shape, dtype=torch.bfloat16):
    return torch.randn(shape, device=GPU).to(dtype)


def random_bits(shape, dtype):
    """Any bit pattern: NaNs of all payloads, infinities, subnormals, 76 orders of magnitude."""
    integers = INTEGERS[dtype]
    limits = torch.iinfo(integers)
    bits = torch.randint(limits.min, limits.max + 1, shape, dtype=torch.int64, device=GPU)
    return bits.to(integers).view(dtype)


def test_a_wrong_byte_is_noticed(monkeypatch):
    def off_by_one(x, **options):
        results = reference.cast_nvfp4(x, **options)
        results[1][1::4] += 1
        return results

    monkeypatch.setattr(kernels, "cast_nvfp4", off_by_one)
    with pytest.raises(AssertionError, match="8 of 32 differ, first at"):
        assert_same_cast(gaussian((8, 8)), orientation=BOTH)


@by_options
def test_ragged_shapes(options):
    for shape in RAGGED:
        assert_same_cast(gaussian(shape), orientation=BOTH, **options)


@pytest.mark.parametrize(("dtype", "options"), OTHER_DTYPES, ids=str)
def test_other_dtypes(dtype, options):
    for shape in RAGGED:
        assert_same_cast(gaussian(shape, dtype), orientation=BOTH, **options)


@by_most_options
def test_whole_tiles(options):
    for shape in ((16, 16), (64, 128), (1008, 208)):
        assert_same_cast(gaussian(shape), orientation=BOTH, **options)


@by_most_options
def test_sizes_of_one_and_none(options):
    for shape in ((1, 75), (0, 5)):
        assert_same_cast(gaussian(shape), orientation=BOTH, **options)


def test_rows_of_one_and_none():
    for shape in ((1, 1), (75, 1), (5, 0), (0, 0)):
        assert_same_cast(gaussian(shape), orientation=BOTH, **SEEDED)


@pytest.mark.parametrize("orientation", Orientation)
@pytest.mark.parametrize("options", [SQUARES, SEEDED], ids=str)
def test_orientations(orientation, options):
    for shape in ((33, 50), (65, 129)):
        assert_same_cast(gaussian(shape), orientation=orientation, **options)


def test_row_scaled_copies():
    """Each copy has its amax from another place."""
    for orientation in Orientation:
        for options in ({"row_scaled": True}, {"hadamard": True}):
            assert_same_cast(gaussian((65, 129)), orientation=orientation, **options)


@pytest.mark.parametrize(("pad", "swizzled"), [(16, False), (32, True)])
def test_layouts(pad, swizzled):
    for shape in ((33, 50), (131, 270)):
        assert_same_cast(gaussian(shape), orientation=BOTH, pad=pad, swizzled=swizzled)


VIEWS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every second": lambda x: torch.stack([x, -x], 2)[:, :, 0],
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    "expanded rows": lambda x: x[:1].expand_as(x),
    "expanded columns": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strides_do_not_matter(view):
    assert_same_cast(VIEWS[view](gaussian((70, 150))), orientation=BOTH)


def test_a_transposed_matrix_by_rows_and_transformed():
    assert_same_cast(gaussian((150, 70)).t(), orientation=BOTH, **SEEDED)


BFLOAT16 = [(torch.bfloat16, options) for options in (PLAIN, SQUARES, SEEDED)]


@pytest.mark.parametrize(("dtype", "options"), BFLOAT16 + OTHER_DTYPES, ids=str)
def test_bit_patterns(dtype, options):
    x = random_bits((201, 715), dtype)
    finite = x.nan_to_num(1.0)
    halves = torch.cat([gaussian((201, 357), dtype), x[:, 357:]], 1)
    for y in (x, finite, finite * 1e-30, halves):
        assert_same_cast(y, orientation=BOTH, **options)


@by_most_options
def test_special_elements(options):
    dtype = torch.float32
    for special in (NAN, -NAN, INF, -INF, -0.0, torch.finfo(dtype).min, torch.finfo(dtype).tiny):
        x = gaussian((33, 50), dtype)
        x[17, 40] = special
        assert_same_cast(x, orientation=BOTH, **options)
        assert_same_cast(torch.zeros_like(x).copysign(x) + special, orientation=BOTH, **options)


@by_most_options
def test_wide_ranges(options):
    x = gaussian((201, 715), torch.float32)
    for y in (
        x * torch.logspace(0, -8, 201, device=GPU)[:, None],  # scales that are subnormal and zero
        x * torch.logspace(-44, -30, 715, device=GPU),
        x.sign() * 3e38,
        torch.distributions.StudentT(2.0).sample((201, 715)).to(GPU),
    ):
        assert_same_cast(y, orientation=BOTH, **options)


def with_ties(table):
    """Numbers, the ties between them, and the numbers of the dtype on both sides of every tie."""
    ties = (table[1:] + table[:-1]) / 2
    beside = [torch.nextafter(ties, torch.full_like(ties, to)) for to in (INF, 0.0)]
    return torch.cat([table, ties, *beside])


def test_ties_between_codes():
    """Every tie, and the numbers beside it, in blocks with scale 1."""
    values = with_ties(torch.from_numpy(oracles_nvfp4.CODES).bfloat16())
    values = torch.cat([values, -values])
    blocks = torch.nn.functional.pad(values, (0, -len(values) % 15)).view(-1, 15)
    blocks = torch.cat([blocks, blocks.new_full((len(blocks), 1), 6.0)], 1)
    for bound, options in ((448, PLAIN), (256, {"four_over_six": MAE}), (448, {"seed": 5})):
        first = blocks.new_full((1, 16), 6.0 * bound)
        # One more column, so that the row length is of the usual kind.
        x = torch.nn.functional.pad(torch.cat([first, blocks]), (0, 1))
        assert_same_cast(x.to(GPU), orientation=BOTH, **options)


def test_ties_between_scales():
    amaxes = 6 * with_ties(torch.from_numpy(oracles.finite_values("E4M3")).bfloat16())
    amaxes = torch.cat([amaxes, amaxes.new_tensor([2688.0])])
    x = amaxes[:, None] * torch.linspace(-1, 1, 17, dtype=torch.bfloat16)
    for options in (PLAIN, {"four_over_six": MAE}):
        assert_same_cast(x.to(GPU), orientation=BOTH, **options)


def test_every_16_bit_number():
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device=GPU).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        # One more column, so that the row length is of the usual kind.
        x = torch.nn.functional.pad(bits.view(dtype).reshape(256, 256), (0, 1))
        for y in (x, x.nan_to_num(0.0, 0.0, 0.0)):
            assert_same_cast(y, orientation=BOTH)


def test_divisions_are_exact():
    """A division or product that is one unit off shows in some of these scales and codes."""
    for factor in (torch.rand(50) + 0.5).tolist():
        assert_same_cast(gaussian((17, 65), torch.float32) * factor, orientation=BOTH)


@by_most_options
def test_a_large_matrix(options):
    """Byte for byte over thousands of tiles, against the reference on the GPU."""
    for x in (gaussian((4096, 4096)), random_bits((2050, 4112), torch.bfloat16).nan_to_num(1.0)):
        settings = {"orientation": BOTH, "pad": 32, "swizzled": True, **options}
        assert_same(cast(kernels, x, settings), cast(reference, x, settings))


@by_options
def test_reference_is_the_same_on_both_devices(options):
    settings = {"orientation": BOTH, "pad": 32, "swizzled": True, **options}
    for x in (gaussian((33, 65)), random_bits((40, 129), torch.float32), gaussian((0, 4))):
        assert_same(cast(reference, x, settings), cast(reference, x.cpu(), settings))


def test_more_than_2_to_the_31_elements():
    rows, columns = (1 << 16) + 16, 1 << 15
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free GPU memory")
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device=GPU)
    x[0, 0], x[-1, -1] = 300.0, -300.0  # the amax of both parts that are compared
    results = kernels.cast_nvfp4(x, orientation=BOTH)
    data, columnwise_data, scale_inv, columnwise_scale_inv, *outer = results
    for part in (slice(0, 64), slice(rows - 64, rows)):
        expected = reference.cast_nvfp4(x[part], orientation=BOTH)
        halves = slice(part.start // 2, part.stop // 2)
        blocks = slice(part.start // 16, part.stop // 16)
        parts = data[part], columnwise_data[:, halves].contiguous()
        scales = scale_inv[part], columnwise_scale_inv[:, blocks].contiguous()
        assert_same((*parts, *scales, *outer), expected)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_neither_waits_for_the_gpu_nor_breaks_a_graph():
    x = gaussian((100, 200))
    seed = torch.tensor(3, device=GPU)

    for backend in (kernels, reference):
        for options in (SQUARES, SEEDED | {"seed": seed}):

            def cast_both(backend=backend, options=options):
                return backend.cast_nvfp4(x, orientation=BOTH, **options)

            cast_both()
            torch.cuda.synchronize()
            try:
                torch.cuda.set_sync_debug_mode("error")
                cast_both()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = cast_both()
            for _ in range(2):
                x.copy_(3 * gaussian((100, 200)))
                seed.add_(1)
                graph.replay()
                assert_same(captured, cast_both())
