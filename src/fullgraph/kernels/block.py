"""One scale for each 1x128 or 128x128, in Triton: scales and both copies in one pass.

Bitwise equal to `fullgraph.reference.block` (tests/gpu/test_kernels_block.py), where the results are documented.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fullgraph.errors import ShapeError, describe
from fullgraph.formats import ROWWISE, Format, Orientation, Scaling, largest_finite
from fullgraph.kernels.tiles import (
    FP8,
    encode,
    load_tile,
    magnitude_bits,
    round_up,
    scale_from_amax,
    store_tile,
    tile_indices,
)

_BLOCK = Scaling.BLOCK_128X128.block
_SCALES_ALIGNMENT = tl.constexpr(4)  # of a row of the scales of squares: 16 bytes
_NUM_WARPS = 8


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
    """Cast a matrix with one scale for each block of 128; see `fullgraph.reference.cast_block`.

    One kernel reads x once and writes the bytes and the scales of both copies.
    """
    if x.dim() != 2:
        raise ShapeError(f"cast_block: a matrix is needed (x: {describe(x)})")
    rows, columns = x.shape
    padded_rows, padded_columns = round_up(rows, pad), round_up(columns, pad)
    data = columnwise_data = scale_inv = columnwise_scale_inv = None
    if orientation.rowwise:
        data = x.new_empty((rows, padded_columns), dtype=torch.uint8)
        scale_inv = _empty_scales(x, rows, columns, two_dimensional)
    if orientation.columnwise:
        columnwise_data = x.new_empty((columns, padded_rows), dtype=torch.uint8)
        columnwise_scale_inv = _empty_scales(x, columns, rows, two_dimensional)
    if x.numel() > 0:
        tiles_across = triton.cdiv(padded_columns, _BLOCK)
        with torch.cuda.device_of(x):
            _cast_kernel[(triton.cdiv(padded_rows, _BLOCK) * tiles_across,)](
                x,
                data,
                columnwise_data,
                scale_inv,
                columnwise_scale_inv,
                rows,
                columns,
                padded_rows,
                padded_columns,
                *x.stride(),
                tiles_across,
                TWO_DIMENSIONAL=two_dimensional,
                EPS=eps,
                LARGEST=largest_finite(x.dtype),
                POWER_OF_TWO=power_of_two,
                FORMAT_MAX=format.max,
                NAN_CODE=format.nan_code,
                FP8=FP8[format.name],
                TILE=_BLOCK,
                num_warps=_NUM_WARPS,
            )
    return data, columnwise_data, scale_inv, columnwise_scale_inv


def _empty_scales(x: Tensor, rows: int, contraction: int, two_dimensional: bool) -> Tensor:
    """The scales of a copy, as `fullgraph.formats.Scaling` says, to be filled by the kernel."""
    blocks = round_up(contraction, _BLOCK) // _BLOCK
    if two_dimensional:
        shape = round_up(rows, _BLOCK) // _BLOCK, round_up(blocks, _SCALES_ALIGNMENT.value)
    else:
        shape = blocks, rows
    return x.new_empty(shape, dtype=torch.float32)


@triton.jit
def _store_scale_of_square(scales_ptr, scale_inv, row, column, rows, columns):
    """Store one element of [rows, columns]; after the last of a row also the zeros that align it."""
    aligned = tl.cdiv(columns, _SCALES_ALIGNMENT) * _SCALES_ALIGNMENT
    i = tl.arange(0, _SCALES_ALIGNMENT)
    end = tl.where(column == columns - 1, aligned, tl.minimum(column + 1, columns))
    mask = (row < rows) & (column + i < end)
    offsets = row.to(tl.int64) * aligned + column + i
    tl.store(scales_ptr + offsets, tl.where(i == 0, scale_inv, 0.0), mask=mask)


@triton.jit(do_not_specialize=["tiles_across"])
def _cast_kernel(
    x_ptr,
    data_ptr,  # uint8 [rows, padded_columns], or None
    columnwise_data_ptr,  # uint8 [columns, padded_rows], or None
    scale_inv_ptr,  # float32, or None
    columnwise_scale_inv_ptr,
    rows,
    columns,
    padded_rows,
    padded_columns,
    stride_row,
    stride_column,
    tiles_across,
    TWO_DIMENSIONAL: tl.constexpr,
    EPS: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    NAN_CODE: tl.constexpr,
    FP8: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program casts one square of the padded matrix: one block of either kind, or 128 of each copy.

    Bytes per element of bf16: 2 read, 1 written for each copy. Elements outside of x are read as zeros: they change no
    amax, and the padding is written as zeros.
    """
    tile = tl.program_id(0)
    down, across = tile // tiles_across, tile % tiles_across
    blocks_down, blocks_across = tl.cdiv(rows, TILE), tl.cdiv(columns, TILE)
    m, k = tile_indices(tile, tiles_across, TILE, TILE)
    x = load_tile(x_ptr, m, k, rows, columns, stride_row, stride_column)
    magnitudes = magnitude_bits(x)
    if TWO_DIMENSIONAL:
        amax = tl.max(magnitudes).to(tl.float32, bitcast=True)
        scale = scale_from_amax(amax, EPS, LARGEST, POWER_OF_TWO, FORMAT_MAX)
        scale_inv = tl.div_rn(1.0, scale)
        data = encode(x, scale, FORMAT_MAX, NAN_CODE, FP8)
        if data_ptr is not None:
            store_tile(data_ptr, data, m, k, rows, padded_columns)
            _store_scale_of_square(
                scale_inv_ptr, scale_inv, down, across, blocks_down, blocks_across
            )
        if columnwise_data_ptr is not None:
            store_tile(columnwise_data_ptr, tl.trans(data), k, m, columns, padded_rows)
            _store_scale_of_square(
                columnwise_scale_inv_ptr, scale_inv, across, down, blocks_across, blocks_down
            )
    else:
        if data_ptr is not None:
            amax = tl.max(magnitudes, 1).to(tl.float32, bitcast=True)
            scale = scale_from_amax(amax, EPS, LARGEST, POWER_OF_TWO, FORMAT_MAX)
            data = encode(x, scale[:, None], FORMAT_MAX, NAN_CODE, FP8)
            store_tile(data_ptr, data, m, k, rows, padded_columns)
            inside = (m < rows) & (across < blocks_across)
            offsets = across.to(tl.int64) * rows + m
            tl.store(scale_inv_ptr + offsets, tl.div_rn(1.0, scale), mask=inside)
        if columnwise_data_ptr is not None:
            amax = tl.max(magnitudes, 0).to(tl.float32, bitcast=True)
            scale = scale_from_amax(amax, EPS, LARGEST, POWER_OF_TWO, FORMAT_MAX)
            data = encode(x, scale[None, :], FORMAT_MAX, NAN_CODE, FP8)
            store_tile(columnwise_data_ptr, tl.trans(data), k, m, columns, padded_rows)
            inside = (k < columns) & (down < blocks_down)
            offsets = down.to(tl.int64) * columns + k
            tl.store(columnwise_scale_inv_ptr + offsets, tl.div_rn(1.0, scale), mask=inside)
