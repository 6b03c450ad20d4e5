"""The reference for NVFP4 against the second oracle, bit for bit."""

import itertools

import numpy as np
import pytest
import torch

import oracles
import oracles_nvfp4
from fullgraph import reference
from fullgraph.errors import ConfigError, ShapeError
from fullgraph.formats import BOTH, Format, FourOverSix, Orientation
from oracles import assert_same_bits

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MAE, MSE = FourOverSix.MAE, FourOverSix.MSE
OPTIONS = [
    {},
    {"two_dimensional": True},
    {"hadamard": True},
    {"four_over_six": MAE},
    {"four_over_six": MSE},
    {"four_over_six": MAE, "two_dimensional": True},
    {"four_over_six": MSE, "two_dimensional": True},
    {"row_scaled": True},
    {"row_scaled": True, "four_over_six": MSE},
    {"seed": 5},
    {"seed": -(1 << 62) - 3, "two_dimensional": True},
    {"seed": 1 << 40, "hadamard": True, "row_scaled": True},
]

# Each option changes the arithmetic.
by_options = pytest.mark.parametrize("options", OPTIONS, ids=str)
# The input's dtype sets the range.
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def cast(x, **options):
    if options.get("seed") is not None:
        options["seed"] = torch.tensor(options["seed"], device=x.device)
    return reference.cast_nvfp4(x, **options)


def expected_cast(x, *, orientation=Orientation.ROWWISE, four_over_six=None, **options):
    return oracles_nvfp4.cast_nvfp4(
        x,
        rowwise=orientation.rowwise,
        columnwise=orientation.columnwise,
        four_over_six=None if four_over_six is None else four_over_six.value,
        **options,
    )


def assert_same(actual, expected):
    assert len(actual) == len(expected) == 6
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_same_bits(ours, theirs)


def dequantized(copies, shape, *, hadamard=False):
    """What both copies stand for."""
    data, columnwise_data, scale_inv, columnwise_scale_inv, outer, columnwise_outer = copies
    rows, columns = shape
    rowwise = reference.decode_nvfp4(data, scale_inv, columns) * outer.reshape(-1, 1)
    columnwise = reference.decode_nvfp4(columnwise_data, columnwise_scale_inv) * columnwise_outer
    if hadamard:
        columnwise = reference.inverse_hadamard_rows(columnwise)
    return rowwise, columnwise[:, :rows].t()


def ties(step):
    """The values midway between two codes, those beside them, and the codes, as blocks with an amax of 6.

    The first block has the amax that makes the tensor's scale 1, so that these blocks have scale 1 too.
    """
    table = torch.from_numpy(oracles_nvfp4.CODES)
    middle = ((table[1:] + table[:-1]) / 2).float()
    beside = [torch.nextafter(middle, torch.full_like(middle, to)) for to in (INF, 0.0)]
    values = torch.cat([table.float(), middle, *beside])
    values = torch.cat([values, -values, torch.zeros(-2 * len(values) % 15)])
    sixes = torch.full((values.numel() // 15, 1), 6.0)
    blocks = torch.cat([sixes, values.view(-1, 15)], 1)
    return torch.cat([torch.full((1, 16), step * 6.0), blocks])


def scale_ties():
    """One block for every tie between two scales and for the numbers beside it."""
    table = torch.from_numpy(oracles.finite_values("E4M3")).float()
    middle = (table[1:] + table[:-1]) / 2 * 6
    beside = [torch.nextafter(middle, torch.full_like(middle, to)) for to in (INF, 0.0)]
    amaxes = torch.cat([torch.tensor([2688.0]), middle, *beside])
    return amaxes[:, None] * torch.linspace(-1, 1, 5)


def outlier(shape):
    x = torch.randn(shape)
    x[1, 3] = 3e4
    return x


def with_one(value):
    x = torch.randn(17, 21)
    x[2, 20] = value
    return x


DATA = {
    "normal": lambda dtype: torch.randn(17, 21),
    "heavy-tailed": lambda dtype: torch.distributions.StudentT(3.0).sample((17, 21)),
    "zeros": lambda dtype: torch.zeros(3, 17),
    "minus zeros": lambda dtype: -torch.zeros(3, 17),
    "zero blocks": lambda dtype: torch.cat([torch.zeros(17, 32), torch.randn(17, 5)], 1),
    "one outlier": lambda dtype: outlier((17, 21)),
    "blocks that underflow": lambda dtype: torch.randn(17, 21) * torch.logspace(0, -6, 17)[:, None],
    "subnormals of the dtype": lambda dtype: torch.randn(18, 18) * torch.finfo(dtype).tiny / 4,
    "one smallest number": lambda dtype: torch.eye(3, 20) * torch.finfo(dtype).smallest_normal,
    "largest of the dtype": lambda dtype: torch.randn(9, 20).sign() * torch.finfo(dtype).max,
    "ties": lambda dtype: ties(448),
    "ties, four over six": lambda dtype: ties(256),
    "one element": lambda dtype: torch.tensor([[-3.3]]),
    "one block": lambda dtype: torch.randn(1, 16),
    "one column": lambda dtype: torch.randn(33, 1),
    "infinite": lambda dtype: with_one(-INF),
    "not a number": lambda dtype: with_one(NAN),
    "negative not a number": lambda dtype: with_one(-NAN),
    "nothing else": lambda dtype: torch.full((2, 18), NAN),
}


@pytest.mark.parametrize("data", DATA)
@by_dtype
def test_cast(data, dtype):
    x = DATA[data](dtype).to(dtype)
    # 16-bit inputs take the same way once they are float32.
    for options in OPTIONS if dtype is torch.float32 else OPTIONS[2::3]:
        actual = cast(x, orientation=BOTH, **options)
        assert_same(actual, expected_cast(x, orientation=BOTH, **options))


def test_ties_between_scales():
    x = scale_ties()
    for options in OPTIONS[:2]:
        assert_same(cast(x, **options), expected_cast(x, **options))


@pytest.mark.parametrize("seed", [None, 3])
def test_every_float16_and_bfloat16(seed):
    """Each once in a tensor whose scale is 1, beside a 6."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = bits.view(dtype)
        x = x[x.abs() <= 6]
        x = torch.nn.functional.pad(x, (0, -len(x) % 15)).view(-1, 15)
        x = torch.cat([x.new_full((len(x), 1), 6.0), x], 1)
        x = torch.cat([x, x.new_full((1, 16), 2688.0)])
        actual, expected = cast(x, seed=seed), expected_cast(x, seed=seed)
        assert_same(actual, expected)
        assert actual[2].tolist() == [[0x38]] * (len(x) - 1) + [[0x7E]]


def test_a_row_by_hand():
    # The amax of the tensor is 2688, so its scale is 1; that of the second block is 12, so its scale is 2, which is
    # 0x40 in E4M3; that of the first is 448, 0x7E.
    first = [2688.0] + [0.0] * 15
    second = [12, -12, 1, 0.5, 0.6, 2.5, 3.5, 5, 7, 9.9, 10.1, -1.4, -1.6, 0, 4, 100 / 17]
    data, _, scale_inv, _, tensor_scale_inv, _ = cast(torch.tensor([first + second]))
    codes = [7, 15, 1, 0, 1, 2, 4, 4, 6, 6, 7, 9, 10, 0, 4, 5]
    packed = [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)]
    assert data.tolist() == [[7, *[0] * 7, *packed]]
    assert scale_inv.tolist() == [[0x7E, 0x40]]
    assert tensor_scale_inv.item() == 1.0


def test_four_over_six_by_hand():
    # Mapped to 6, 4.5 becomes 4; with a scale 1.5 times as large both become 4 and 3, without an error.
    x = torch.tensor([[6.0, 4.5] + [0.0] * 14, [6.0, 3.0] + [0.0] * 14, [1536.0] + [0.0] * 15])
    for measure in FourOverSix:
        data, _, scale_inv, _, tensor_scale_inv, _ = cast(x, four_over_six=measure)
        assert data[:, 0].tolist() == [0x56, 0x57, 0x07]
        assert scale_inv.flatten().tolist() == [0x3C, 0x38, 0x78]  # 1.5, 1, 256
        assert tensor_scale_inv.item() == 1.0


def test_the_two_errors_choose_differently():
    x = torch.randn(64, 64)
    mae, mse = (cast(x, four_over_six=measure)[2] for measure in FourOverSix)
    differing = (mae != mse).float().mean().item()
    assert 0.02 < differing < 0.3
    plain = cast(x * 0 + x)[2]
    assert not torch.equal(plain, mae)


@pytest.mark.parametrize("orientation", Orientation)
@by_options
def test_orientations_padding_and_order(orientation, options):
    for shape in ((17, 35), (16, 32), (1, 1)):
        x = torch.randn(shape)
        plain = cast(x, orientation=BOTH, **options)
        for pad, swizzled in itertools.product((2, 16, 32), (False, True)):
            layout = {"pad": pad, "swizzled": swizzled}
            actual = cast(x, orientation=orientation, **layout, **options)
            for i, (ours, both) in enumerate(zip(actual, plain, strict=True)):
                if not (orientation.columnwise if i % 2 else orientation.rowwise):
                    assert ours is None
                    continue
                expected = both.numpy()
                if i in (2, 3) and swizzled:
                    expected = oracles_nvfp4.swizzle(expected)
                if i in (0, 1):
                    expected = oracles_nvfp4.pack(reference.unpack_codes(both).numpy(), pad)
                assert_same_bits(ours, expected)
                assert ours.stride() == torch.empty(ours.shape).stride()


def test_a_large_tensor_swizzled():
    x = torch.randn(130, 150)
    options = {"orientation": BOTH, "swizzled": True, "hadamard": True}
    assert_same(cast(x, **options), expected_cast(x, **options))


@by_options
def test_nothing(options):
    for shape in ((0, 5), (5, 0), (0, 0), (0, 16)):
        for swizzled in (False, True):
            rows, columns = shape
            results = cast(torch.empty(shape), orientation=BOTH, swizzled=swizzled, **options)
            data, columnwise_data, scale_inv, columnwise_scale_inv, outer, columnwise_outer = (
                results
            )
            per = 16 if options.get("hadamard") else 2
            assert data.shape == (rows, -(-columns // 2))
            assert columnwise_data.shape == (columns, -(-rows // per) * per // 2)
            if not swizzled:
                assert scale_inv.shape == (rows, -(-columns // 16))
                assert columnwise_scale_inv.shape == (columns, -(-rows // 16))
            assert outer.tolist() == ([0.0] * rows if options.get("row_scaled") else 0.0)
            assert columnwise_outer.item() == 0.0


VIEWS = {
    "transposed": lambda: torch.randn(9, 33).t(),
    "sliced": lambda: torch.randn(40, 70)[3::2, 1:-4:3],
    "expanded": lambda: torch.randn(1, 33).expand(19, 33),
    "one row": lambda: torch.randn(9, 33)[3:4],
    "one column": lambda: torch.randn(9, 33)[:, 3:4],
    "one row of columns": lambda: torch.randn(33, 1).t(),
    "one of each": lambda: torch.randn(3, 3)[1:2, 2:3],
}


@pytest.mark.parametrize("view", VIEWS)
@by_options
def test_strides_do_not_matter(view, options):
    x = VIEWS[view]()
    plain = x.clone(memory_format=torch.contiguous_format)
    actual = cast(x, orientation=BOTH, **options)
    assert_same(actual, cast(plain, orientation=BOTH, **options))
    for ours in actual:
        assert ours.stride() == torch.empty(ours.shape).stride()


@by_options
def test_results_share_no_storage(options):
    for shape in ((16, 16), (1, 16), (16, 1), (1, 1), (128, 64)):
        for swizzled in (False, True):
            x = torch.ones(shape)
            tensors = [x, *cast(x, orientation=BOTH, swizzled=swizzled, **options)]
            assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
            assert torch.equal(x, torch.ones(shape))


def test_squares():
    """The copies of a cast in squares are transposes of each other, and a square has one scale."""
    x = torch.randn(40, 50)
    for options in ({}, {"four_over_six": MAE}, {"seed": 3}):
        results = cast(x, two_dimensional=True, orientation=BOTH, **options)
        data, columnwise_data, scale_inv, columnwise_scale_inv, outer, columnwise_outer = results
        assert_same_bits(reference.transpose_codes(data, 40, 50), columnwise_data)
        assert_same_bits(reference.transpose_codes(columnwise_data, 50, 40), data)
        assert_same_bits(outer, columnwise_outer)
        for r, c in itertools.product(range(40), range(4)):
            assert scale_inv[r, c] == scale_inv[r // 16 * 16, c]
            assert columnwise_scale_inv[16 * c, r // 16] == scale_inv[r, c]
        rowwise, columnwise = dequantized(results, x.shape)
        assert torch.equal(rowwise, columnwise)


def test_columnwise_is_rowwise_of_the_transpose():
    x = torch.randn(40, 50)
    for options in ({}, {"four_over_six": MAE}, {"two_dimensional": True}):
        both, across = cast(x, orientation=BOTH, **options), cast(x.t(), **options)
        assert_same(both[1::2] + both[1::2], across[0::2] + across[0::2])


def test_row_scaled_rows_are_alone():
    x = torch.randn(6, 40) * torch.logspace(-30, 30, 6)[:, None]
    x[2, 7], x[4, 9] = NAN, INF
    together = cast(x, row_scaled=True)
    for r in range(6):
        alone = cast(x[r : r + 1])
        assert_same_bits(together[0][r], alone[0][0])
        assert_same_bits(together[2][r], alone[2][0])
        assert_same_bits(together[4][r], alone[4])
    assert together[4].isfinite().tolist() == [True, True, False, True, False, True]


def test_what_is_not_finite_shows():
    for value in (NAN, INF, -INF):
        x = torch.ones(3, 40)
        x[1, 20] = value
        for options in ({}, {"two_dimensional": True}, {"hadamard": True}, {"seed": 1}):
            results = cast(x, orientation=BOTH, **options)
            assert not results[4].isfinite()
            assert not results[5].isfinite()
            code = reference.unpack_codes(results[0])[1, 20].item()
            assert code == (15 if value == -INF else 7)
    values = reference.decode_nvfp4(*cast(torch.tensor([[INF, -INF, 2.0]]))[0:3:2])
    assert values[0, :2].tolist() == [2688.0, -2688.0]


@pytest.mark.parametrize(
    ("options", "typical"),
    [
        ({}, (0.095, 0.095)),
        ({"two_dimensional": True}, (0.111, 0.111)),
        ({"hadamard": True}, (0.095, 0.095)),
        ({"four_over_six": MAE}, (0.0883, 0.0883)),
        ({"four_over_six": MSE}, (0.0869, 0.0869)),
        ({"seed": 3}, (0.1375, 0.1375)),
        ({"seed": 3, "hadamard": True}, (0.1375, 0.1375)),
        ({"row_scaled": True}, (0.095, 0.095)),
    ],
    ids=str,
)
def test_round_trip_error_is_that_of_the_format(options, typical):
    x = torch.randn(512, 512)
    copies = cast(x, orientation=BOTH, **options)
    pairs = dequantized(copies, x.shape, hadamard=options.get("hadamard", False))
    for actual, error in zip(pairs, typical, strict=True):
        assert oracles.relative_error(actual, x) == pytest.approx(error, rel=0.03)


def test_stochastic_rounding_takes_neighbours_and_is_right_on_average():
    value = torch.tensor(
        [0.0, 0.1, 0.25, 0.3, 0.75, 1.2, 1.7, 2.1, 2.5, 3.3, 4.2, 5.0, 5.9, -0.3, -2.2]
    )
    block = torch.cat([torch.tensor([6.0]), value])
    rounds = 4096
    x = torch.cat([torch.full((1, 16), 2688.0), block.expand(rounds, 16)])
    data, _, _, _, tensor_scale_inv, _ = cast(x, seed=11)
    assert tensor_scale_inv.item() == 1.0
    values = oracles_nvfp4.values_of(reference.unpack_codes(data)[1:].numpy()).astype(np.float64)
    assert (values[:, 0] == 6).all()
    table = np.concatenate([-oracles_nvfp4.CODES[::-1], oracles_nvfp4.CODES])
    for column, exact in zip(values.T[1:], value.double().numpy(), strict=True):
        lower, upper = table[table <= exact].max(), table[table >= exact].min()
        assert set(column) == {lower, upper}
        gap = upper - lower
        # Rounding probabilities to 1/256 moves the mean by gap / 512 at most.
        assert abs(column.mean() - exact) <= gap * (1 / 512 + 4 * 0.5 / rounds**0.5)


def test_a_seed_decides_every_bit():
    x = torch.randn(64, 64)
    one, again, other = (cast(x, orientation=BOTH, seed=seed) for seed in (1, 1, 2))
    assert_same(one, again)
    for i in (0, 1):
        codes = [reference.unpack_codes(copies[i]) for copies in (one, other)]
        assert 0.2 < (codes[0] != codes[1]).float().mean().item() < 0.5
    # The copies have bits of their own.
    symmetric = x + x.t()
    data, columnwise_data, *_ = cast(symmetric, orientation=BOTH, seed=1)
    assert (data != columnwise_data).float().mean().item() > 0.3


def test_no_seed_no_chance():
    x = torch.randn(64, 64)
    assert_same(cast(x), cast(x))


def test_hadamard_against_the_matrix():
    x = torch.randn(300, 64).bfloat16()
    ours = reference.hadamard_rows(x)
    assert ours.dtype == torch.bfloat16
    assert_same_bits(ours.float(), oracles_nvfp4.hadamard_groups(x.float().numpy()))
    exact = oracles_nvfp4.hadamard_exact(x.float().numpy())
    rounded = torch.from_numpy(exact).float().bfloat16()
    assert (ours != rounded).float().mean().item() < 1e-3
    assert oracles.relative_error(ours, torch.from_numpy(exact)) < 2.0**-9


def test_hadamard_of_exact_sums():
    """Integers: nothing is rounded on the way, so the last rounding is that of the exact result."""
    x = torch.randint(-500, 500, (64, 32)).float()
    exact = torch.from_numpy(oracles_nvfp4.hadamard_exact(x.numpy()))
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(reference.hadamard_rows(x.to(dtype)), exact.float().bfloat16())


def test_hadamard_cancels_in_a_product():
    x, y = torch.randn(32, 48).double().float(), torch.randn(24, 48)
    product = reference.hadamard_rows(x).float() @ reference.hadamard_rows(y).float().t()
    assert oracles.relative_error(product, x @ y.t()) < 4e-3


def test_hadamard_and_back():
    for shape in ((3, 32), (2, 5, 16), (16,), (0, 16), (4, 0)):
        x = torch.randn(shape)
        y = reference.hadamard_rows(x)
        back = reference.inverse_hadamard_rows(y.float())
        assert (back.dtype, back.shape) == (torch.float32, x.shape)
        if x.numel():
            assert oracles.relative_error(back, x) < 4e-3
            # The inverse itself is exact to float32.
            exact = oracles_nvfp4.hadamard_exact(x.numpy())
            assert torch.allclose(
                reference.inverse_hadamard_rows(torch.from_numpy(exact).float()), x, atol=1e-6
            )


def test_hadamard_spreads_an_outlier():
    x = torch.zeros(1, 32)
    x[0, 3] = 8.0
    y = reference.hadamard_rows(x)
    assert y[0, :16].abs().tolist() == [2.0] * 16
    assert y[0, :16].sign().tolist() == [-((-1.0) ** (3 & j).bit_count()) for j in range(16)]
    assert not y[0, 16:].count_nonzero()


@pytest.mark.parametrize("function", [reference.hadamard_rows, reference.inverse_hadamard_rows])
def test_hadamard_needs_whole_groups(function):
    with pytest.raises(ShapeError, match=r"a multiple of 16 \(x: float32\[3, 15\]\)"):
        function(torch.ones(3, 15))


def test_decode():
    x = torch.randn(5, 37)
    for pad in (2, 16, 64):
        data, _, scale_inv, *_ = cast(x, pad=pad)
        expected = oracles_nvfp4.decode(data.numpy(), scale_inv.numpy())
        assert_same_bits(reference.decode_nvfp4(data, scale_inv), expected)
        assert_same_bits(reference.decode_nvfp4(data, scale_inv, 37), expected[:, :37].copy())
        assert not expected[:, 37:].any()


def test_decode_every_code_with_every_scale():
    data = torch.arange(256, dtype=torch.uint8).view(1, 256).expand(256, 256)
    scale_inv = torch.arange(128, dtype=torch.uint8).repeat(2).view(256, 1).expand(256, 32)
    actual = reference.decode_nvfp4(data, scale_inv).view(256, 256, 2)
    codes = np.stack([np.arange(256) % 16, np.arange(256) // 16], 1)
    scales = oracles_nvfp4.E4M3[scale_inv[:, :1].numpy()][:, :, None]
    expected = oracles_nvfp4.values_of(codes) * scales
    assert np.array_equal(actual.numpy(), expected, equal_nan=True)


def test_decode_ignores_what_follows_the_last_block():
    data = torch.full((2, 16), 0x77, dtype=torch.uint8)
    one = torch.full((2, 1), 0x38, dtype=torch.uint8)
    values = reference.decode_nvfp4(data, one)
    assert values.tolist() == [[6.0] * 16 + [0.0] * 16] * 2
    # Swizzled scales may come back with blocks that have no codes.
    assert torch.equal(reference.decode_nvfp4(data, one.expand(2, 4), 20), torch.full((2, 20), 6.0))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_decode_nothing(shape):
    data = torch.empty(shape, dtype=torch.uint8)
    scale_inv = torch.empty((shape[0], -(-shape[1] // 8)), dtype=torch.uint8)
    assert reference.decode_nvfp4(data, scale_inv).shape == (shape[0], 2 * shape[1])


def test_codes_are_packed_low_half_first():
    codes = torch.tensor([[1, 2, 3], [4, 5, 15]], dtype=torch.uint8)
    assert reference.pack_codes(codes).tolist() == [[0x21, 0x03], [0x54, 0x0F]]
    assert reference.pack_codes(codes, 8).tolist() == [[0x21, 3, 0, 0], [0x54, 0x0F, 0, 0]]
    assert reference.unpack_codes(reference.pack_codes(codes)).tolist() == [
        [1, 2, 3, 0],
        [4, 5, 15, 0],
    ]


def test_transposed_codes():
    for rows, columns in ((3, 5), (1, 1), (16, 32), (0, 5), (5, 0)):
        codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
        for pad in (2, 16):
            actual = reference.transpose_codes(reference.pack_codes(codes), rows, columns, pad)
            assert_same_bits(actual, oracles_nvfp4.pack(codes.numpy().T, pad))


EXCLUDED = [
    ({"four_over_six": MAE, "hadamard": True}, "four_over_six and hadamard"),
    ({"four_over_six": MSE, "seed": 3}, "four_over_six and seed"),
    ({"two_dimensional": True, "row_scaled": True}, "two_dimensional and row_scaled"),
    ({"two_dimensional": True, "hadamard": True}, "two_dimensional and hadamard"),
]


@pytest.mark.parametrize(("options", "names"), EXCLUDED, ids=str)
def test_options_that_exclude_each_other(options, names):
    with pytest.raises(ConfigError, match=f"cast_nvfp4: {names} exclude each other"):
        cast(torch.ones(16, 16), **options)


@pytest.mark.parametrize("pad", [0, 1, 3, -2])
def test_pad_is_even(pad):
    with pytest.raises(ConfigError, match=f"pad must be a positive even number, got {pad}"):
        cast(torch.ones(16, 16), pad=pad)


def test_only_matrices():
    with pytest.raises(ShapeError, match=r"a matrix is needed \(x: float32\[2, 3, 4\]\)"):
        cast(torch.ones(2, 3, 4))


def test_codes_survive_a_round_trip():
    """What is representable stays as it is, whichever way it is rounded."""
    values = torch.from_numpy(oracles_nvfp4.values_of(np.arange(16, dtype=np.uint8)))
    x = torch.stack([values, values * 448])
    for options in ({}, {"seed": 1}):
        data, _, scale_inv, _, outer, _ = cast(x, **options)
        assert reference.unpack_codes(data).tolist() == [list(range(16))] * 2
        assert scale_inv.flatten().tolist() == [0x38, Format.E4M3.max_code]
        assert torch.equal(reference.decode_nvfp4(data, scale_inv) * outer, x)


SEEDED = {"seed": 5, "hadamard": True, "row_scaled": True}
SQUARES = {"four_over_six": MSE, "two_dimensional": True}


# In squares and by rows, to nearest and by chance: all of the arithmetic.
@pytest.mark.parametrize(
    ("options", "backend"),
    [
        (SEEDED, "aot_eager"),
        (SQUARES, "aot_eager"),
        pytest.param({"hadamard": True}, "inductor", marks=pytest.mark.slow),
        pytest.param(SQUARES, "inductor", marks=pytest.mark.slow),
        pytest.param(SEEDED, "inductor", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_is_eager(options, backend):
    """One graph, no guard on values: the whole of it can be part of a compiled function."""
    options = dict(options)
    seed = options.pop("seed", None)

    def cast_both(x, seed):
        return reference.cast_nvfp4(x, seed=seed, orientation=BOTH, pad=16, **options)

    compiled = torch.compile(cast_both, fullgraph=True, backend=backend)
    seed = None if seed is None else torch.tensor(seed)
    for data in ("normal", "heavy-tailed", "not a number", "infinite"):
        x = DATA[data](torch.float32)
        assert_same(compiled(x, seed), cast_both(x, seed))
    assert_same(compiled(x * 0, seed), cast_both(x * 0, seed))


def test_compiled_hadamard_is_rounded():
    """Inductor leaves out the way to bfloat16 and back within a graph; what follows must be rounded all the same."""

    def transform(x):
        return reference.hadamard_rows(x).to(torch.float32) * 3

    x = torch.randn(20, 32)
    assert_same_bits(torch.compile(transform, fullgraph=True)(x), transform(x))
