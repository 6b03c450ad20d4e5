"""The native GEMMs of every scaling against float64 of the operands that they read."""

import pytest
import torch

import fullgraph as fg
from fullgraph import gemm, reference
from fullgraph.errors import EmulationWarning, HardwareError
from fullgraph.formats import COLUMNWISE, ROWWISE, Format
from fullgraph.gemm import GemmBackend, Kind
from oracles import relative_error

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
E4M3, E5M2 = fg.PerTensorQuantizer(Format.E4M3), fg.PerTensorQuantizer(Format.E5M2)
ROW, ROW_E5M2 = fg.PerRowQuantizer(), fg.PerRowQuantizer(Format.E5M2)
BLOCK, SQUARE = fg.BlockQuantizer(), fg.BlockQuantizer(two_dimensional=True)
FLOAT_SCALES = fg.BlockQuantizer(power_of_two=False)

PAIRS = {
    "E4M3 by E4M3": (E4M3, E4M3),
    "E5M2 by E4M3": (E5M2, E4M3),
    "E4M3 by E5M2": (E4M3, E5M2),
    "rows by rows": (ROW, ROW),
    "E5M2 rows by rows": (ROW_E5M2, ROW),
    "rows by tensor": (ROW, E4M3),
    "tensor by rows": (E5M2, ROW),
    "blocks by blocks": (BLOCK, BLOCK),
    "blocks by squares": (FLOAT_SCALES, SQUARE),
}
# Relative Frobenius error against float64. Hopper's tensor cores keep about 14 bits of a sum of fp8 products;
# promoting it # every 128 products (split accumulator) leaves some 1e-3 at K = 4096, not promoting several times
# that. A bfloat16 output # adds 1.7e-3 in quadrature.
TOLERANCE = {
    (torch.float32, True): 2e-3,
    (torch.float32, False): 1e-2,
    (torch.float16, True): 2e-3,
    (torch.float16, False): 1e-2,
    (torch.bfloat16, True): 4e-3,
    (torch.bfloat16, False): 1e-2,
}
LAYOUT = gemm.layout(GPU) if torch.cuda.is_available() else None


def operand(rows, contraction, quantizer, orientation, scale=1.0):
    """An operand, rows and blocks of very different magnitude, as the rowwise or the columnwise copy of a matrix."""
    shape = (rows, contraction) if orientation is ROWWISE else (contraction, rows)
    x = torch.randn(shape, device=GPU) * scale * torch.logspace(-2, 2, shape[1], device=GPU)
    parts = quantizer.quantize(x.bfloat16(), orientation, LAYOUT)
    return quantizer.operand(parts, orientation, LAYOUT)


def kind(quantizer):
    return Kind(quantizer.format, quantizer.scaling)


@pytest.mark.parametrize("orientation", [ROWWISE, COLUMNWISE], ids=lambda o: o.value)
@pytest.mark.parametrize("split", [True, False], ids=["split", "fast"])
@pytest.mark.parametrize("pair", PAIRS)
def test_native_gemm(pair, split, orientation):
    left, right = PAIRS[pair]
    backend = gemm.select(GPU, kind(left), kind(right), allow_emulation=False)
    assert backend is GemmBackend.NATIVE
    for m, k, n in ((256, 4096, 256), (13, 767, 50), (1, 16, 16), (0, 16, 16), (16, 0, 32)):
        a, b = operand(m, k, left, orientation), operand(n, k, right, orientation, 0.02)
        exact = reference.decode_operand(a).double() @ reference.decode_operand(b).double().t()
        for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
            for bias_dtype in (None, out_dtype, torch.float32, torch.bfloat16):
                bias = None
                expected = exact.clone()
                if bias_dtype is not None:
                    bias = torch.randn(n, device=GPU).to(bias_dtype)
                    expected += bias.double()
                actual = gemm.gemm(
                    backend, a, b, bias=bias, out_dtype=out_dtype, split_accumulator=split
                )
                assert (actual.dtype, actual.shape) == (out_dtype, expected.shape)
                assert actual.is_contiguous()
                if out_dtype is torch.float16 and expected.numel() and expected.abs().max() > 6e4:
                    continue
                if expected.count_nonzero():
                    error = relative_error(actual, expected)
                    assert error <= TOLERANCE[out_dtype, split], (m, k, n, out_dtype, bias_dtype)
                else:
                    assert not actual.count_nonzero()


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (E5M2, E5M2),
        (fg.BlockQuantizer(Format.E5M2), SQUARE),
        (fg.MXQuantizer(), fg.MXQuantizer()),
        (fg.NVFP4Quantizer(), fg.NVFP4Quantizer(two_dimensional=True)),
        (fg.NVFP4Quantizer(row_scaled=True), fg.NVFP4Quantizer()),
        (fg.MXQuantizer(), E4M3),
        (BLOCK, ROW),
    ],
    ids=str,
)
def test_what_hopper_lacks_is_emulated(left, right):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Blackwell multiplies some of these")
    gemm._warn_of_emulation.cache_clear()
    with pytest.warns(EmulationWarning, match="natively: emulated"):
        backend = gemm.select(GPU, kind(left), kind(right))
    assert backend is GemmBackend.REFERENCE
    assert gemm.select(GPU, kind(left), kind(right)) is backend  # says so once
    with pytest.raises(HardwareError, match="does not multiply"):
        gemm.select(GPU, kind(left), kind(right), allow_emulation=False)
    a, b = operand(50, 300, left, ROWWISE), operand(70, 300, right, ROWWISE)
    actual = gemm.gemm(backend, a, b, out_dtype=torch.float32)
    contraction = min(o.data.shape[1] * o.format.codes_per_byte for o in (a, b))
    exact = [reference.decode_operand(o)[:, :contraction].double() for o in (a, b)]
    assert relative_error(actual, exact[0] @ exact[1].t()) <= 2e-5
