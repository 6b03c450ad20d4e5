"""Which GEMM is chosen, and that both choices take the same call.

The native route runs here too where this torch has it on CPUs, which checks how we call it; what
it demands of its operands on a GPU is checked in tests/gpu/test_kernels.py.
"""

import inspect

import pytest
import torch

import oracles
from fullgraph import gemm as gemm_module
from fullgraph import kernels, reference
from fullgraph.errors import ConfigError
from fullgraph.formats import Format
from fullgraph.gemm import GemmBackend, Operand, gemm, select

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
E4M3, E5M2 = Format.E4M3, Format.E5M2
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def quantized(x, format):
    data, _, scale_inv = reference.cast_per_tensor(x, reference.amax(x), format, pad=16)
    return Operand(data, scale_inv, format)


def runs_native_on_cpu():
    a = quantized(torch.ones(16, 16), E4M3)
    try:
        gemm(GemmBackend.NATIVE, a, a)
    except NotImplementedError:
        return False
    return True


native_on_cpu = pytest.mark.skipif(
    not runs_native_on_cpu(), reason="this torch has no scaled_mm for CPUs"
)


@pytest.mark.parametrize(
    ("capability", "a_format", "b_format", "backend"),
    [
        ((0, 0), E4M3, E4M3, GemmBackend.REFERENCE),
        ((8, 0), E4M3, E4M3, GemmBackend.REFERENCE),
        ((8, 9), E4M3, E4M3, GemmBackend.NATIVE),
        ((9, 0), E5M2, E4M3, GemmBackend.NATIVE),
        ((9, 0), E4M3, E5M2, GemmBackend.NATIVE),
        ((9, 0), E5M2, E5M2, GemmBackend.REFERENCE),
        ((12, 0), E4M3, E4M3, GemmBackend.NATIVE),
    ],
)
def test_choice_by_device_and_formats(monkeypatch, capability, a_format, b_format, backend):
    monkeypatch.setattr(gemm_module, "compute_capability", lambda device: capability)
    assert select(GPU, a_format, b_format) is backend


def test_choice_on_a_cpu():
    assert select(CPU, E4M3, E4M3) is GemmBackend.REFERENCE
    assert kernels.compute_capability(CPU) == (0, 0)
    assert not kernels.available(CPU)


@pytest.mark.parametrize("formats", [(Format.E2M1, E4M3), (E4M3, Format.E8M0)])
def test_other_formats_are_refused(formats):
    with pytest.raises(ConfigError, match="must be E4M3 or E5M2, got"):
        select(CPU, *formats)


def test_alignment():
    assert {b: b.alignment for b in GemmBackend} == {
        GemmBackend.NATIVE: 16,
        GemmBackend.REFERENCE: 1,
    }


@pytest.mark.parametrize(
    "backend", [GemmBackend.REFERENCE, pytest.param(GemmBackend.NATIVE, marks=native_on_cpu)]
)
# Full, with rows that the native routine pads, and with each of the sizes empty.
@pytest.mark.parametrize(
    "shape", [(32, 48, 16), (5, 48, 7), (0, 16, 16), (16, 0, 16), (16, 16, 0)], ids=str
)
def test_against_float64(backend, shape):
    m, k, n = shape
    a, b = quantized(torch.randn(m, k), E5M2), quantized(0.02 * torch.randn(n, k), E4M3)
    exact = (
        reference.dequantize_per_tensor(a.data, a.scale_inv, a.format, torch.float64)
        @ reference.dequantize_per_tensor(b.data, b.scale_inv, b.format, torch.float64).t()
    )
    full = torch.randn(n)
    for out_dtype, tolerance in TOLERANCE.items():
        for bias in (None, full, full.to(out_dtype), full.bfloat16(), full.half()):
            expected = exact.clone()
            if bias is not None:
                expected += bias.double()
            for split in (False, True):
                actual = gemm(
                    backend, a, b, bias=bias, out_dtype=out_dtype, split_accumulator=split
                )
                assert (actual.dtype, tuple(actual.shape)) == (out_dtype, (m, n))
                assert actual.is_contiguous()
                if expected.count_nonzero():
                    assert oracles.relative_error(actual, expected) <= tolerance
                else:
                    assert not actual.count_nonzero()


def test_nothing_calls_the_slow_cpu_op():
    for module in (gemm_module, inspect.getmodule(reference.gemm_upcast)):
        assert "torch._scaled_mm(" not in inspect.getsource(module)
