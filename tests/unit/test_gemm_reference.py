"""The upcast GEMM against float64 of the operands that the oracles decode, for every pair of scalings."""

import itertools

import numpy as np
import pytest
import torch

import fullgraph as fg
import oracles
from fullgraph import gemm, reference
from fullgraph.errors import ConfigError
from fullgraph.formats import Format, Scaling
from fullgraph.reference import Operand
from fullgraph.tensor import PLAIN, Layout
from oracles import assert_same_bits
from oracles_quantizers import QUANTIZERS, Expected, table_of

# Relative Frobenius error. float32: rounding of the sums. bfloat16: 2^-9 / sqrt(3) for the one
# rounding of the output, with room for cancellation; float16 is eight times finer.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}

FORMATS = [Format.E4M3, Format.E5M2]
# Ragged, one row, a long contraction, and each size empty.
SHAPES = [(7, 33, 5), (1, 16, 16), (24, 4096, 8), (0, 4, 4), (3, 0, 5), (3, 4, 0)]
# One of each scaling and of each second level.
NAMES = ("per-tensor", "per-row", "block", "block-2d", "mx", "nvfp4", "nvfp4-rows")
EMPTY = [(0, 33, 5), (7, 0, 5), (7, 33, 0), (0, 0, 0)]

by_formats = pytest.mark.parametrize(
    ("a_format", "b_format"),
    [(a, b) for a in FORMATS for b in FORMATS],
    ids=lambda f: f.name,
)
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
by_out_dtype = pytest.mark.parametrize("out_dtype", TOLERANCE, ids=str)
by_layout = pytest.mark.parametrize(
    "layout", [PLAIN, gemm.layout_of((9, 0)), gemm.layout_of((10, 0))], ids=["plain", "9.0", "10.0"]
)


def operand_of(quantizer, x, layout=PLAIN):
    """The rowwise copy as a GEMM reads it."""
    return quantizer.operand(quantizer.quantize(x, fg.ROWWISE, layout), fg.ROWWISE, layout)


def exact_values(quantizer, x):
    """What the operand stands for by the oracle, float64."""
    return torch.from_numpy(Expected(quantizer, x).rowwise.values).double()


def assert_product(actual, expected, out_dtype):
    """Dtype, shape and error of a product; zeros are zeros."""
    assert (actual.dtype, actual.shape) == (out_dtype, expected.shape)
    assert actual.is_contiguous()
    if expected.count_nonzero():
        assert oracles.relative_error(actual, expected) <= TOLERANCE[out_dtype]
    else:
        assert not actual.count_nonzero()


@by_layout
@pytest.mark.parametrize(("a", "b"), list(itertools.product(NAMES, NAMES)))
def test_every_pair_of_scalings(a, b, layout):
    for m, k, n in ((5, 50, 7), (3, 130, 20)):
        x, w = torch.randn(m, k), 0.02 * torch.randn(n, k)
        exact = exact_values(QUANTIZERS[a], x) @ exact_values(QUANTIZERS[b], w).t()
        left, right = operand_of(QUANTIZERS[a], x, layout), operand_of(QUANTIZERS[b], w, layout)
        for out_dtype in TOLERANCE:
            for bias in (None, torch.randn(n), torch.randn(n).bfloat16()):
                expected = exact if bias is None else exact + bias.double()
                actual = reference.gemm_upcast(left, right, bias=bias, out_dtype=out_dtype)
                assert_product(actual, expected, out_dtype)


@by_layout
@pytest.mark.parametrize(("a", "b"), list(itertools.product(NAMES, NAMES)))
def test_empty_sizes_of_every_pair(a, b, layout):
    for m, k, n in EMPTY:
        left = operand_of(QUANTIZERS[a], torch.randn(m, k), layout)
        right = operand_of(QUANTIZERS[b], torch.randn(n, k), layout)
        bias = torch.randn(n)
        for with_bias in (None, bias):
            expected = torch.zeros(m, n) if with_bias is None else bias.expand(m, n)
            actual = reference.gemm_upcast(left, right, bias=with_bias, out_dtype=torch.float32)
            assert_same_bits(actual, expected)


@by_layout
@pytest.mark.parametrize("name", NAMES)
def test_operands_decode_to_what_the_oracle_says(name, layout):
    for shape in ((5, 50), (130, 260), (1, 1), (0, 7), (7, 0)):
        x = torch.randn(shape)
        if "nvfp4" in name and x.numel() > 1000:
            continue  # the oracle is slow
        values = reference.decode_operand(operand_of(QUANTIZERS[name], x, layout))
        expected = Expected(QUANTIZERS[name], x).rowwise.values
        assert_same_bits(values[:, : shape[1]], expected)
        assert not values[:, shape[1] :].any()


def test_decoded_values_are_multiplied_as_they_are():
    x, w = torch.randn(5, 50), torch.randn(7, 50)
    for quantizer in (QUANTIZERS["nvfp4"], QUANTIZERS["block"]):
        left = Operand(x, None, Format.E4M3, Scaling.CUSTOM)
        assert reference.decode_operand(left) is x
        right = operand_of(quantizer, w, Layout(frozenset(Scaling)))
        expected = x.double() @ exact_values(quantizer, w).t()
        for pair, wanted in (((left, right), expected), ((right, left), expected.t())):
            assert_product(
                reference.gemm_upcast(*pair, out_dtype=torch.float32), wanted, torch.float32
            )


# Per tensor, both formats, every size.


def operands(shape, a_format, b_format):
    """Quantized a [M, K] and b [N, K], and the exact product in float64."""
    m, k, n = shape
    x, w = torch.randn(m, k), 0.02 * torch.randn(n, k)
    a, b = (
        operand_of(fg.PerTensorQuantizer(format), t) for format, t in ((a_format, x), (b_format, w))
    )
    exact = values(a) @ values(b).t()
    return (a, b), exact * a.scale_inv.double() * b.scale_inv.double()


def values(operand):
    return torch.from_numpy(table_of(operand.format.name)).double()[operand.data.long()]


@by_formats
@by_shape
@by_out_dtype
def test_against_float64(shape, a_format, b_format, out_dtype):
    pair, exact = operands(shape, a_format, b_format)
    bias = torch.randn(shape[2])
    for with_bias in (None, bias, bias.bfloat16()):
        expected = exact if with_bias is None else exact + with_bias.double()
        actual = reference.gemm_upcast(*pair, bias=with_bias, out_dtype=out_dtype)
        assert_product(actual, expected, out_dtype)


def replaced(operand, **fields):
    return Operand(**{n: fields.get(n, getattr(operand, n)) for n in operand.__dataclass_fields__})


def test_tolerance_notices_a_wrong_scale():
    (a, b), exact = operands((7, 33, 5), *FORMATS)
    wrong = replaced(a, scale_inv=a.scale_inv * 1.001)
    error = oracles.relative_error(reference.gemm_upcast(wrong, b, out_dtype=torch.float32), exact)
    assert error > TOLERANCE[torch.float32]


def one_element(code, scale_inv=1.0):
    data = torch.tensor([[code]], dtype=torch.uint8)
    return Operand(data, torch.tensor(scale_inv), Format.E4M3, Scaling.TENSOR)


def test_output_is_rounded_once():
    """Product 1 + d and bias d: each rounds to less than their sum, 1 + 2d, does in bfloat16."""
    d = 3 * 2.0**-10
    one, other = one_element(0x38), one_element(0x38, 1 + d)
    assert reference.gemm_upcast(other, one).item() == 1
    assert reference.gemm_upcast(other, one, bias=torch.tensor([d])).item() == 1 + 2.0**-7


def test_nan_and_saturated_codes_come_through():
    one = torch.tensor(1.0)
    a = torch.tensor([[0x7F, 0x38], [0x7E, 0x38]], dtype=torch.uint8)
    b = torch.tensor([[0x38, 0x38]], dtype=torch.uint8)
    actual = reference.gemm_upcast(
        Operand(a, one, Format.E4M3, Scaling.TENSOR),
        Operand(b, one, Format.E4M3, Scaling.TENSOR),
        out_dtype=torch.float32,
    )
    assert actual[0].isnan().all()
    assert actual[1].item() == Format.E4M3.max + 1


@pytest.mark.parametrize(
    ("format", "scaling"),
    [
        (format, scaling)
        for format, scaling in itertools.product((*FORMATS, Format.E2M1), Scaling)
        if scaling is not Scaling.CUSTOM
        and (format is Format.E2M1) != (scaling is Scaling.BLOCK_1X16)
    ],
)
def test_formats_have_scalings_of_their_own(format, scaling):
    operand = Operand(torch.zeros(2, 2, dtype=torch.uint8), torch.ones(2), format, scaling)
    with pytest.raises(
        ConfigError, match=f"{format.name} codes with scales {scaling.value} has no meaning"
    ):
        reference.decode_operand(operand)


def test_the_oracle_is_not_the_reference():
    """Both tables of E4M3 values agree, so an operand of all codes is one row of it."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, -1)
    operand = Operand(codes, torch.tensor(1.0), Format.E4M3, Scaling.TENSOR)
    decoded = reference.decode_operand(operand).numpy()[0]
    assert np.array_equal(decoded, table_of("E4M3"), equal_nan=True)
