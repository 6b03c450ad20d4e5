"""The upcast GEMM against float64 of the same quantized operands."""

import pytest
import torch

import oracles
from fullgraph import reference
from fullgraph.formats import Format

# Relative Frobenius error. float32: rounding of the sums. bfloat16: 2^-9 / sqrt(3) for the one
# rounding of the output, with room for cancellation; float16 is eight times finer.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}

FORMATS = [Format.E4M3, Format.E5M2]
# Ragged, one row, a long contraction, and each size empty.
SHAPES = [(7, 33, 5), (1, 16, 16), (24, 4096, 8), (0, 4, 4), (3, 0, 5), (3, 4, 0)]

by_formats = pytest.mark.parametrize(
    ("a_format", "b_format"),
    [(a, b) for a in FORMATS for b in FORMATS],
    ids=lambda f: f.name,
)
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
by_out_dtype = pytest.mark.parametrize("out_dtype", TOLERANCE, ids=str)


def operands(shape, a_format, b_format):
    """Quantized a [M, K] and b [N, K] with their scale_inv, and the exact product in float64."""
    m, k, n = shape
    x, w = torch.randn(m, k), 0.02 * torch.randn(n, k)
    a, _, a_scale_inv = reference.cast_per_tensor(x, reference.amax(x), a_format)
    b, _, b_scale_inv = reference.cast_per_tensor(w, reference.amax(w), b_format)
    exact = (values(a, a_format) @ values(b, b_format).t()) * a_scale_inv.double()
    return (a, a_scale_inv, a_format, b, b_scale_inv, b_format), exact * b_scale_inv.double()


def values(data, format):
    table = torch.tensor([format.decode(code) for code in range(256)], dtype=torch.float64)
    return table[data.long()]


@by_formats
@by_shape
@by_out_dtype
def test_against_float64(shape, a_format, b_format, out_dtype):
    arguments, exact = operands(shape, a_format, b_format)
    bias = torch.randn(shape[2])
    for with_bias in (None, bias, bias.bfloat16()):
        expected = exact if with_bias is None else exact + with_bias.double()
        actual = reference.gemm_upcast(*arguments, bias=with_bias, out_dtype=out_dtype)
        assert actual.dtype == out_dtype
        assert actual.shape == (shape[0], shape[2])
        assert actual.is_contiguous()
        if expected.count_nonzero():
            assert oracles.relative_error(actual, expected) <= TOLERANCE[out_dtype]
        else:
            assert not actual.count_nonzero()


def test_tolerance_notices_a_wrong_scale():
    arguments, exact = operands((7, 33, 5), *FORMATS)
    wrong = list(arguments)
    wrong[1] = wrong[1] * 1.001
    error = oracles.relative_error(reference.gemm_upcast(*wrong, out_dtype=torch.float32), exact)
    assert error > TOLERANCE[torch.float32]


def test_output_is_rounded_once():
    """Product 1 + d and bias d: each rounds to less than their sum, 1 + 2d, does in bfloat16."""
    d = 3 * 2.0**-10
    one = torch.tensor([[0x38]], dtype=torch.uint8)
    operands = (one, torch.tensor(1 + d), Format.E4M3, one, torch.tensor(1.0), Format.E4M3)
    assert reference.gemm_upcast(*operands).item() == 1
    assert reference.gemm_upcast(*operands, bias=torch.tensor([d])).item() == 1 + 2.0**-7


def test_nan_and_saturated_codes_come_through():
    a = torch.tensor([[0x7F, 0x38], [0x7E, 0x38]], dtype=torch.uint8)
    b = torch.tensor([[0x38, 0x38]], dtype=torch.uint8)
    one = torch.tensor(1.0)
    actual = reference.gemm_upcast(
        a, one, Format.E4M3, b, one, Format.E4M3, out_dtype=torch.float32
    )
    assert actual[0].isnan().all()
    assert actual[1].item() == Format.E4M3.max + 1
