"""The GEMM of two per-tensor quantized matrices, by exact upcast.

Every E4M3 or E5M2 value is exact in float32 (and in bfloat16 and TF32), so multiplying the
unscaled codes loses nothing but the rounding of the sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullgraph.formats import Format
from fullgraph.reference.codes import decode


def gemm_upcast(
    a: Tensor,
    a_scale_inv: Tensor,
    a_format: Format,
    b: Tensor,
    b_scale_inv: Tensor,
    b_format: Format,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Multiply two quantized matrices that are both stored along the contraction.

    out[m, n] = (sum_k a[m, k] b[n, k]) (a_scale_inv b_scale_inv) + bias[n]

    Args:
        a: uint8 [M, K], codes of `a_format`.
        a_scale_inv: float32 [].
        a_format: E4M3 or E5M2.
        b: uint8 [N, K], codes of `b_format`.
        b_scale_inv: float32 [].
        b_format: E4M3 or E5M2.
        bias: floating dtype [N], or None.
        out_dtype: dtype of the result.

    Returns:
        `out_dtype` [M, N]; M, N or K may be 0.

    Numerics: sum, scale and bias in float32, one rounding to `out_dtype`. Against float64 the
        relative Frobenius error is below 2e-5 for float32 output, 4e-3 for bfloat16. Never
        `torch._scaled_mm`: on some CPUs it is a thousand times slower than this.
    """
    product = decode(a, a_format) @ decode(b, b_format).t()
    product = product.mul_(a_scale_inv * b_scale_inv)
    if bias is not None:
        product = product.add_(bias.to(torch.float32))
    return product.to(out_dtype)
