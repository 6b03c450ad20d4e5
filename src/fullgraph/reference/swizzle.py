"""The order in which block-scaled GEMMs read their scales, SWIZZLE_32_4_4."""

from __future__ import annotations

import torch
from torch import Tensor

from fullgraph.errors import ShapeError, describe

_ROWS, _COLUMNS = 128, 4  # of one tile of scales, 512 bytes


def swizzle(scale_inv: Tensor) -> Tensor:
    """Bring the scales of MX and NV blocks into the tile order of the GEMM.

    Tiles of 128 x 4 scales follow each other row by row; inside of a tile the scale of row r, column c is the byte
    (r % 32) * 16 + (r // 32) * 4 + c.

    Args:
        scale_inv: uint8 [rows, columns].

    Returns:
        uint8 [round_up(rows, 128) * round_up(columns, 4)]; scales that are not there are byte 0.

    Raises:
        ShapeError: scale_inv is not a matrix.

    Source: cuBLAS documentation, "1D Block Scaling Factors Layout"; torch.nn.functional.SwizzleType.SWIZZLE_32_4_4.
    """
    if scale_inv.dim() != 2:
        raise ShapeError(f"swizzle: a matrix is needed (scale_inv: {describe(scale_inv)})")
    rows, columns = scale_inv.shape
    padded = torch.nn.functional.pad(scale_inv, (0, -columns % _COLUMNS, 0, -rows % _ROWS))
    down, across = padded.shape[0] // _ROWS, padded.shape[1] // _COLUMNS
    return padded.reshape(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(flat: Tensor, rows: int, columns: int) -> Tensor:
    """The scales that were swizzled.

    Args:
        flat: uint8 [round_up(rows, 128) * round_up(columns, 4)], made by `swizzle`.
        rows: of the scales.
        columns: of the scales.

    Returns:
        uint8 [rows, columns], contiguous.

    Raises:
        ShapeError: flat is of another length.
    """
    down, across = -(-rows // _ROWS), -(-columns // _COLUMNS)
    length = down * across * _ROWS * _COLUMNS
    if flat.dim() != 1 or flat.shape[0] != length:
        raise ShapeError(
            f"unswizzle: the scales of {rows} x {columns} blocks take {length} bytes (flat: {describe(flat)})",
            why="swizzled scales are stored in whole tiles of 128 x 4",
        )
    tiles = flat.reshape(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    matrix = tiles.reshape(down * _ROWS, across * _COLUMNS)[:rows, :columns]
    return matrix.clone(memory_format=torch.contiguous_format)
