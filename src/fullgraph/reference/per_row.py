"""One scale for each row of a copy: the scales lie along the dimension that a GEMM does not contract.

A tensor that two GEMMs contract along different dimensions is therefore cast twice, each time from the
high-precision values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullgraph.errors import ShapeError, describe
from fullgraph.formats import ROWWISE, Format, Orientation
from fullgraph.reference.codes import encode
from fullgraph.reference.per_tensor import pad_columns, scale_from_amax


def cast_per_row(
    x: Tensor,
    format: Format,
    *,
    eps: float = 0.0,
    power_of_two: bool = False,
    orientation: Orientation = ROWWISE,
    pad: int = 1,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Cast a matrix with one scale for each row of each copy.

    data[m] = saturate(x[m] * scale[m]), scale = scale_from_amax(max_k |x[m, k]|), scale_inv = 1 / scale

    The columnwise copy is the rowwise copy of x.t(), with one scale for each column of x.

    Args:
        x: float32, bfloat16 or float16 [M, K], any strides.
        format: E4M3 or E5M2.
        eps: see `scale_from_amax`.
        power_of_two: see `scale_from_amax`.
        orientation: which copies to make.
        pad: the last dimension of a copy, the one that a GEMM contracts, is rounded up to a multiple of it, with zeros.

    Returns:
        data: uint8 [M, K_pad], or None.
        columnwise_data: uint8 [K, M_pad], or None.
        scale_inv: float32 [M], or None.
        columnwise_scale_inv: float32 [K], or None.
        All contiguous, each in a storage of its own.

    Raises:
        ShapeError: x is not a matrix.

    Numerics: product in float32, nearest-even, saturates at +-format.max (infinity too); every NaN becomes
        `format.nan_code`. Scale 1 for a row whose amax is zero, infinite or NaN; a row without elements has amax 0.
        Padding is byte 0.
    Source: torchao 0.18, float8/config.py, ROWWISE; the rule of the scale is that of TransformerEngine.
    """
    if x.dim() != 2:
        raise ShapeError(f"cast_per_row: a matrix is needed (x: {describe(x)})")
    data = columnwise_data = scale_inv = columnwise_scale_inv = None
    if orientation.rowwise:
        data, scale_inv = _cast_rows(x, format, eps, power_of_two)
        data = pad_columns(data, pad)
    if orientation.columnwise:
        columnwise_data, columnwise_scale_inv = _cast_rows(x.t(), format, eps, power_of_two)
        columnwise_data = pad_columns(columnwise_data, pad)
    return data, columnwise_data, scale_inv, columnwise_scale_inv


def _cast_rows(x: Tensor, format: Format, eps: float, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns] and scale_inv [rows]."""
    x = x.reshape(-1).view(x.shape)  # strides, also of dimensions of size 1, end here
    scale = scale_from_amax(_amax_of_rows(x), format, x.dtype, eps=eps, power_of_two=power_of_two)
    data = encode(x.to(torch.float32) * scale[:, None], format)
    return data, torch.div(torch.ones_like(scale), scale)


def _amax_of_rows(x: Tensor) -> Tensor:
    """float32 [rows]; NaN for a row with a NaN, 0 for a row without elements."""
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0], dtype=torch.float32)
    return x.abs().amax(1).to(torch.float32)
