"""One scale for each block of 128: a stretch of 128 along the contraction, or a square of 128 x 128.

The scales are returned as GEMMs read them (`fullgraph.formats.Scaling`): those of stretches with the contraction first,
those of squares in rows of a multiple of four.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullgraph.errors import ShapeError, describe
from fullgraph.formats import ROWWISE, Format, Orientation, Scaling
from fullgraph.reference.codes import decode, encode
from fullgraph.reference.per_tensor import pad_columns, scale_from_amax

_BLOCK = Scaling.BLOCK_128X128.block
_SCALES_ALIGNMENT = 4  # of a row of the scales of squares: 16 bytes


def cast_block(
    x: Tensor,
    format: Format,
    *,
    eps: float = 0.0,
    power_of_two: bool = True,
    two_dimensional: bool = False,
    orientation: Orientation = ROWWISE,
    pad: int = 1,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Cast a matrix with one scale for each block of 128, in stretches or in squares.

    data = saturate(x * scale), scale = scale_from_amax(max |x| over the block), scale_inv = 1 / scale

    Args:
        x: float32, bfloat16 or float16 [M, K], any strides.
        format: E4M3 or E5M2.
        eps: see `scale_from_amax`.
        power_of_two: see `scale_from_amax`.
        two_dimensional: blocks are squares of 128 x 128 rather than 128 elements along the contraction.
        orientation: which copies to make.
        pad: the last dimension of a copy, the one that a GEMM contracts, is rounded up to a multiple of it, with zeros.

    Returns:
        data: uint8 [M, K_pad], or None.
        columnwise_data: uint8 [K, M_pad], or None. With stretches the rowwise copy of x.t(); with squares also the
            transposed bytes of the rowwise copy.
        scale_inv: float32 [ceil(K / 128), M]; two-dimensional [ceil(M / 128), round_up(ceil(K / 128), 4)], filled up
            with 0; or None.
        columnwise_scale_inv: float32 [ceil(M / 128), K]; two-dimensional
            [ceil(K / 128), round_up(ceil(M / 128), 4)], filled up with 0; or None.
        All contiguous, each in a storage of its own.

    Raises:
        ShapeError: x is not a matrix.

    Numerics: product in float32, nearest-even, saturates at +-format.max (infinity too); every NaN becomes
        `format.nan_code`. Scale 1 for a block whose amax is zero, infinite or NaN. A ragged block is a whole one filled
        up with zeros. Padding is byte 0.
    Source: TransformerEngine 2.20, Float8BlockScaling; DeepSeek-V3 (arXiv:2412.19437).
    """
    if x.dim() != 2:
        raise ShapeError(f"cast_block: a matrix is needed (x: {describe(x)})")
    cast = _cast_squares if two_dimensional else _cast_stretches
    return cast(x, format, eps, power_of_two, orientation, pad)


def decode_block(
    data: Tensor, scale_inv: Tensor, format: Format, *, two_dimensional: bool
) -> Tensor:
    """The values that the codes of `cast_block` stand for.

    x ~ data * scale_inv, block by block

    Args:
        data: uint8 [rows, contraction], codes of `format`; the contraction may be padded with byte 0, also beyond the
            last block that has a scale.
        scale_inv: float32, as `cast_block` returns it for this copy.
        format: E4M3 or E5M2.
        two_dimensional: as in `cast_block`.

    Returns:
        float32 [rows, contraction], contiguous. Padding is 0.

    Numerics: product in float32. The scales that `cast_block` makes are finite, so that padding stays 0.
    """
    scales = scale_inv if two_dimensional else scale_inv.t()
    blocks = _blocks(decode(data, format), two_dimensional)
    # Scales that only align a row are dropped; blocks that are nothing but padding get 0.
    scales = torch.nn.functional.pad(scales, (0, blocks.shape[2] - scales.shape[1]))
    return _matrix(blocks * scales[:, None, :, None], data.shape)


def _cast_stretches(
    x: Tensor, format: Format, eps: float, power_of_two: bool, orientation: Orientation, pad: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    data = columnwise_data = scale_inv = columnwise_scale_inv = None
    if orientation.rowwise:
        data, scale_inv = _cast_blocks(x, format, eps, power_of_two, two_dimensional=False)
        data, scale_inv = pad_columns(data, pad), _transpose(scale_inv)
    if orientation.columnwise:
        columnwise_data, columnwise_scale_inv = _cast_blocks(
            x.t(), format, eps, power_of_two, two_dimensional=False
        )
        columnwise_data = pad_columns(columnwise_data, pad)
        columnwise_scale_inv = _transpose(columnwise_scale_inv)
    return data, columnwise_data, scale_inv, columnwise_scale_inv


def _cast_squares(
    x: Tensor, format: Format, eps: float, power_of_two: bool, orientation: Orientation, pad: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    rowwise = columnwise = (None, None)
    data, scale_inv = _cast_blocks(x, format, eps, power_of_two, two_dimensional=True)
    if orientation.rowwise:
        rowwise = pad_columns(data, pad), pad_columns(scale_inv, _SCALES_ALIGNMENT)
    if orientation.columnwise:
        columnwise = (
            pad_columns(_transpose(data), pad),
            pad_columns(_transpose(scale_inv), _SCALES_ALIGNMENT),
        )
    return rowwise[0], columnwise[0], rowwise[1], columnwise[1]


def _cast_blocks(
    x: Tensor, format: Format, eps: float, power_of_two: bool, *, two_dimensional: bool
) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns] and scale_inv [block rows, block columns]."""
    blocks = _blocks(x.reshape(-1).view(x.shape), two_dimensional)
    amax = blocks.abs().amax((1, 3)).to(torch.float32)
    scale = scale_from_amax(amax, format, x.dtype, eps=eps, power_of_two=power_of_two)
    scaled = _matrix(blocks.to(torch.float32) * scale[:, None, :, None], x.shape)
    return encode(scaled, format), torch.div(torch.ones_like(scale), scale)


def _blocks(x: Tensor, two_dimensional: bool) -> Tensor:
    """A matrix, filled up with zeros, as [block rows, rows of a block, block columns, 128]."""
    height = _BLOCK if two_dimensional else 1
    missing_rows, missing_columns = -x.shape[0] % height, -x.shape[1] % _BLOCK
    if missing_rows or missing_columns:
        x = torch.nn.functional.pad(x, (0, missing_columns, 0, missing_rows))
    rows, columns = x.shape
    return x.view(rows // height, height, columns // _BLOCK, _BLOCK)


def _matrix(blocks: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_blocks`, contiguous."""
    block_rows, height, block_columns, width = blocks.shape
    rows, columns = shape
    matrix = blocks.reshape(block_rows * height, block_columns * width)
    # Not a slice: of a later slice, too, Inductor works out only what is left, with scale[column // 128], and its loop
    # splitting for CPUs (torch 2.11 to 2.14) turns that into columns // 128 loops of 128, without the ragged rest. What
    # as_strided reads is computed whole, in loops that divide evenly.
    inside = matrix.as_strided((rows, columns), (block_columns * width, 1))
    # Flat and back, so that the result has the strides of its own shape.
    return inside.reshape(-1).view(rows, columns)


def _transpose(matrix: Tensor) -> Tensor:
    return matrix.t().clone(memory_format=torch.contiguous_format)
