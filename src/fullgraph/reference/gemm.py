"""The GEMM of two quantized matrices, by exact upcast, and the decoding of one.

Every code is exact in float32, and so is its product with the scale of its block where that is a power of two or an
8-bit number, so multiplying decoded blocks loses nothing but the rounding of the sums. Scales that are constant
along the contraction, per tensor and per row, are multiplied afterwards.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fullgraph.errors import ConfigError
from fullgraph.formats import Format, Scaling
from fullgraph.reference.block import decode_block
from fullgraph.reference.codes import decode
from fullgraph.reference.mx import decode_mx
from fullgraph.reference.nvfp4 import decode_nvfp4
from fullgraph.reference.swizzle import unswizzle


@dataclasses.dataclass(frozen=True)
class Operand:
    """One side of a GEMM, stored along the contraction.

    Args:
        data: uint8 [rows, contraction], row-major, codes of `format` (E2M1: [rows, contraction / 2], two a byte);
            values in float32 where the scaling is CUSTOM.
        scale_inv: decode scales, stored as `Scaling` says; None where the scaling is CUSTOM.
        format: of the codes.
        scaling: which elements share a scale.
        tensor_scale_inv: the second level of BLOCK_1X16, float32 [] or [rows].
    """

    data: Tensor
    scale_inv: Tensor | None
    format: Format
    scaling: Scaling
    tensor_scale_inv: Tensor | None = None


def decode_operand(operand: Operand) -> Tensor:
    """The values of an operand.

    Args:
        operand: any scaling.

    Returns:
        float32 [rows, contraction], the padding of the contraction included, as zeros.

    Raises:
        ConfigError: a format and a scaling that do not belong together.

    Numerics: one rounding to float32 for each level of scales that is no power of two.
    """
    values, outer = _decode_inner(operand), _outer_scale(operand)
    if outer is None:
        return values
    return values * (outer if outer.dim() == 0 else outer[:, None])


def gemm_upcast(
    a: Operand,
    b: Operand,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Multiply two quantized matrices that are both stored along the contraction.

    out[m, n] = sum_k a[m, k] b[n, k] + bias[n]

    Args:
        a: [M, K].
        b: [N, K]; of another scaling than `a` if you like. The zeros that pad the contraction may differ in number.
        bias: floating dtype [N], or None.
        out_dtype: dtype of the result.

    Returns:
        `out_dtype` [M, N]; M, N or K may be 0.

    Numerics: sum, scale and bias in float32, one rounding to `out_dtype`. Against float64 the relative Frobenius
        error is below 2e-5 for float32 output, 4e-3 for bfloat16. Never `torch._scaled_mm`: on some CPUs it is a
        thousand times slower than this.
    """
    left, right = _decode_inner(a), _decode_inner(b)
    contraction = min(left.shape[1], right.shape[1])
    left, right = left[:, :contraction], right[:, :contraction].t()
    if left.is_cuda and a.scaling in _EXACT_IN_BFLOAT16 and b.scaling in _EXACT_IN_BFLOAT16:
        # On the tensor cores, which sum in float32.
        product = torch.mm(left.bfloat16(), right.bfloat16(), out_dtype=torch.float32)
    else:
        product = left @ right
    scales = _outer_scale(a), _outer_scale(b)
    if all(s is not None and s.dim() == 0 for s in scales):
        product = product.mul_(scales[0] * scales[1])  # type: ignore[operator]
    else:
        for scale, shape in zip(scales, ((-1, 1), (1, -1)), strict=True):
            if scale is not None:
                product = product.mul_(scale if scale.dim() == 0 else scale.view(shape))
    if bias is not None:
        product = product.add_(bias.to(torch.float32))
    return product.to(out_dtype)


# 8 significant bits hold every code of E4M3, E5M2 and E2M1, and its product with a power of two or an E4M3 scale.
_EXACT_IN_BFLOAT16 = (Scaling.TENSOR, Scaling.ROW, Scaling.BLOCK_1X32, Scaling.BLOCK_1X16)


def _decode_inner(operand: Operand) -> Tensor:
    """Codes times the scales that vary along the contraction, float32 [rows, contraction]."""
    data, scale_inv, scaling = operand.data, operand.scale_inv, operand.scaling
    if scaling is Scaling.CUSTOM:
        return data
    if (operand.format is Format.E2M1) is not (scaling is Scaling.BLOCK_1X16):
        raise ConfigError(
            f"an operand of {operand.format.name} codes with scales {scaling.value} has no meaning",
            why="scales of 1x16 belong to E2M1, all others to E4M3 and E5M2",
            do="give the quantizer Scaling.CUSTOM, and a decode_matrix",
        )
    if scaling in (Scaling.TENSOR, Scaling.ROW):
        return decode(data, operand.format)
    assert scale_inv is not None
    if scaling in (Scaling.BLOCK_1X128, Scaling.BLOCK_128X128):
        two_dimensional = scaling is Scaling.BLOCK_128X128
        return decode_block(data, scale_inv, operand.format, two_dimensional=two_dimensional)
    if scale_inv.dim() == 1:
        contraction = data.shape[1] * operand.format.codes_per_byte
        scale_inv = unswizzle(scale_inv, data.shape[0], -(-contraction // scaling.block))
    if scaling is Scaling.BLOCK_1X32:
        return decode_mx(data, scale_inv, operand.format)
    return decode_nvfp4(data, scale_inv)


def _outer_scale(operand: Operand) -> Tensor | None:
    """The scales that are constant along the contraction: float32 [] or [rows], or None."""
    if operand.scaling in (Scaling.TENSOR, Scaling.ROW):
        return operand.scale_inv
    return operand.tensor_scale_inv
