"""Which routine multiplies two quantized matrices, and its call.

`select` decides from device and formats alone, so a plan can decide before there is data;
`gemm` then runs the choice without deciding anything again.

    ==========  =============================================  =========  ====================
    backend     used for                                       alignment  routine
    ==========  =============================================  =========  ====================
    NATIVE      CUDA 8.9 and newer, unless E5M2 meets E5M2     16         F.scaled_mm
    REFERENCE   everything else                                1          reference.gemm_upcast
    ==========  =============================================  =========  ====================

Both take the same operands and differ only in the rounding of the sums.
"""

from __future__ import annotations

import dataclasses
import enum

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from fullgraph import reference
from fullgraph.errors import ConfigError
from fullgraph.formats import Format
from fullgraph.kernels import compute_capability

_FIRST_NATIVE = (8, 9)
_FP8 = (Format.E4M3, Format.E5M2)


@dataclasses.dataclass(frozen=True)
class Operand:
    """One side of a GEMM, stored along the contraction.

    Args:
        data: uint8 [rows, contraction], row-major, codes of `format`.
        scale_inv: float32 [], in a storage of its own: cuBLASLt wants it aligned to 16 bytes.
        format: E4M3 or E5M2.
    """

    data: Tensor
    scale_inv: Tensor
    format: Format


class GemmBackend(enum.Enum):
    """A routine for per-tensor quantized GEMMs; see the table of this module."""

    NATIVE = "native"
    REFERENCE = "reference"

    @property
    def alignment(self) -> int:
        """What the contraction and the rows of `b` must be a multiple of for the routine.

        The quantizing pass pads the contraction; rows of `b` are padded by `gemm`, in the rare case.
        """
        return 16 if self is GemmBackend.NATIVE else 1


def select(device: torch.device, a_format: Format, b_format: Format) -> GemmBackend:
    """Choose the routine, without touching data.

    Args:
        device: where the operands live.
        a_format: E4M3 or E5M2.
        b_format: E4M3 or E5M2.

    Raises:
        ConfigError: another format.

    Source: PyTorch, aten/src/ATen/native/cuda/ScaledBlas.cpp (devices, E5M2 by E5M2).
    """
    if a_format not in _FP8 or b_format not in _FP8:
        raise ConfigError(
            "gemm: per-tensor operands must be E4M3 or E5M2, "
            f"got {a_format.name} and {b_format.name}"
        )
    if compute_capability(device) < _FIRST_NATIVE or a_format is b_format is Format.E5M2:
        return GemmBackend.REFERENCE
    return GemmBackend.NATIVE


def gemm(
    backend: GemmBackend,
    a: Operand,
    b: Operand,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    split_accumulator: bool = False,
) -> Tensor:
    """Multiply two quantized matrices.

    out[m, n] = (sum_k a[m, k] b[n, k]) (a.scale_inv b.scale_inv) + bias[n]

    Args:
        backend: what `select` said; the contraction is padded to its `alignment`.
        a: [M, K].
        b: [N, K].
        bias: floating dtype [N], or None.
        out_dtype: float32, bfloat16 or float16.
        split_accumulator: promote partial sums to float32 as they are added (slower, exacter). It
            matters on Hopper and Ada; the reference always sums in float32.

    Returns:
        `out_dtype` [M, N], contiguous. M, N or K may be 0; K = 0 gives the bias, or zeros.

    Numerics: sum, scale and bias in float32, one rounding to `out_dtype`.
    """
    if backend is GemmBackend.NATIVE:
        return _native(a, b, bias, out_dtype, use_fast_accum=not split_accumulator)
    return reference.gemm_upcast(
        a.data,
        a.scale_inv,
        a.format,
        b.data,
        b.scale_inv,
        b.format,
        bias=bias,
        out_dtype=out_dtype,
    )


def _native(
    a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, *, use_fast_accum: bool
) -> Tensor:
    """Multiply on the tensor cores, adding the bias there if they can."""
    rows = b.data.shape[0]
    missing = -rows % GemmBackend.NATIVE.alignment
    if missing:
        b = dataclasses.replace(b, data=torch.nn.functional.pad(b.data, (0, 0, 0, missing)))
        bias = None if bias is None else torch.nn.functional.pad(bias, (0, missing))
        return _native(a, b, bias, out_dtype, use_fast_accum=use_fast_accum)[:, :rows].contiguous()
    if bias is None or _adds_bias(bias, out_dtype, contraction=a.data.shape[1]):
        return _scaled_mm(a, b, bias, out_dtype, use_fast_accum)
    product = _scaled_mm(a, b, None, torch.float32, use_fast_accum)
    return product.add_(bias.to(torch.float32)).to(out_dtype)


def _adds_bias(bias: Tensor, out_dtype: torch.dtype, *, contraction: int) -> bool:
    """Whether scaled_mm adds this bias: only 16-bit to 16-bit; and it forgets it where K is 0."""
    return bias.dtype == out_dtype and out_dtype != torch.float32 and contraction > 0


def _scaled_mm(
    a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    # cuBLASLt wants pointers aligned to 16 bytes; a view into somebody's larger tensor may not be.
    a, b = (
        o if o.data.data_ptr() % 16 == 0 else dataclasses.replace(o, data=o.data.clone())
        for o in (a, b)
    )
    return scaled_mm(
        a.data.view(a.format.dtype),
        b.data.view(b.format.dtype).t(),
        scale_a=a.scale_inv,
        scale_recipe_a=ScalingType.TensorWise,
        scale_b=b.scale_inv,
        scale_recipe_b=ScalingType.TensorWise,
        bias=bias,
        output_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )


def alignment(device: torch.device) -> int:
    """What the contraction of every quantized matrix on a device is padded to a multiple of."""
    native = compute_capability(device) >= _FIRST_NATIVE
    return (GemmBackend.NATIVE if native else GemmBackend.REFERENCE).alignment
