"""One scale for each row of each copy, in Triton: a pass for the amaxes, a pass for the casts.

Bitwise equal to `fullgraph.reference.per_row` (tests/gpu/test_kernels_block.py), where the results are documented.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fullgraph.errors import ShapeError, describe
from fullgraph.formats import ROWWISE, Format, Orientation, largest_finite
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

_TILE = (64, 128)
_NUM_WARPS = 8


def cast_per_row(
    x: Tensor,
    format: Format,
    *,
    eps: float = 0.0,
    power_of_two: bool = False,
    orientation: Orientation = ROWWISE,
    pad: int = 1,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Cast a matrix with one scale for each row of each copy; see `fullgraph.reference.cast_per_row`.

    Reads x twice, whichever copies are made: once for the amaxes of rows and columns, once for the casts.
    """
    if x.dim() != 2:
        raise ShapeError(f"cast_per_row: a matrix is needed (x: {describe(x)})")
    rows, columns = x.shape
    padded_rows, padded_columns = round_up(rows, pad), round_up(columns, pad)
    row_bits = column_bits = data = columnwise_data = scale_inv = columnwise_scale_inv = None
    if orientation.rowwise:
        row_bits = x.new_zeros(rows, dtype=torch.int32)
        data = x.new_empty((rows, padded_columns), dtype=torch.uint8)
        scale_inv = x.new_empty(rows, dtype=torch.float32)
    if orientation.columnwise:
        column_bits = x.new_zeros(columns, dtype=torch.int32)
        columnwise_data = x.new_empty((columns, padded_rows), dtype=torch.uint8)
        columnwise_scale_inv = x.new_empty(columns, dtype=torch.float32)
    tile_rows, tile_columns = _TILE
    # A matrix without elements can have scales all the same.
    tiles_across = max(1, triton.cdiv(padded_columns, tile_columns))
    grid = (max(1, triton.cdiv(padded_rows, tile_rows)) * tiles_across,)
    tile = {"TILE_M": tile_rows, "TILE_K": tile_columns, "num_warps": _NUM_WARPS}
    with torch.cuda.device_of(x):
        _amax_kernel[grid](
            x, row_bits, column_bits, rows, columns, *x.stride(), tiles_across, **tile
        )
        _cast_kernel[grid](
            x,
            row_bits,
            column_bits,
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
            EPS=eps,
            LARGEST=largest_finite(x.dtype),
            POWER_OF_TWO=power_of_two,
            FORMAT_MAX=format.max,
            NAN_CODE=format.nan_code,
            FP8=FP8[format.name],
            **tile,
        )
    return data, columnwise_data, scale_inv, columnwise_scale_inv


@triton.jit(do_not_specialize=["tiles_across"])
def _amax_kernel(
    x_ptr,
    row_bits_ptr,  # int32 [rows], zero at the start: the bits of the largest magnitude; or None
    column_bits_ptr,  # int32 [columns], likewise
    rows,
    columns,
    stride_row,
    stride_column,
    tiles_across,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """One program reads one tile and raises the amaxes of its rows and of its columns.

    An integer maximum is exact and does not depend on the order in which programs finish.
    """
    m, k = tile_indices(tl.program_id(0), tiles_across, TILE_M, TILE_K)
    x = load_tile(x_ptr, m, k, rows, columns, stride_row, stride_column)
    magnitudes = magnitude_bits(x)
    if row_bits_ptr is not None:
        tl.atomic_max(row_bits_ptr + m, tl.max(magnitudes, 1), mask=m < rows, sem="relaxed")
    if column_bits_ptr is not None:
        tl.atomic_max(column_bits_ptr + k, tl.max(magnitudes, 0), mask=k < columns, sem="relaxed")


@triton.jit(do_not_specialize=["tiles_across"])
def _cast_kernel(
    x_ptr,
    row_bits_ptr,
    column_bits_ptr,
    data_ptr,  # uint8 [rows, padded_columns], or None
    columnwise_data_ptr,  # uint8 [columns, padded_rows], or None
    scale_inv_ptr,  # float32 [rows], or None
    columnwise_scale_inv_ptr,  # float32 [columns], or None
    rows,
    columns,
    padded_rows,
    padded_columns,
    stride_row,
    stride_column,
    tiles_across,
    EPS: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    NAN_CODE: tl.constexpr,
    FP8: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """One program casts one tile of the padded matrix; the first ones of a row or a column also store its scales.

    Bytes per element of bf16: 2 read, 1 written for each copy. Elements outside of x are read as zeros, so the padding
    is written as zeros.
    """
    tile = tl.program_id(0)
    m, k = tile_indices(tile, tiles_across, TILE_M, TILE_K)
    x = load_tile(x_ptr, m, k, rows, columns, stride_row, stride_column)
    if data_ptr is not None:
        amax = tl.load(row_bits_ptr + m, mask=m < rows, other=0).to(tl.float32, bitcast=True)
        scale = scale_from_amax(amax, EPS, LARGEST, POWER_OF_TWO, FORMAT_MAX)
        data = encode(x, scale[:, None], FORMAT_MAX, NAN_CODE, FP8)
        store_tile(data_ptr, data, m, k, rows, padded_columns)
        is_first = tile % tiles_across == 0
        tl.store(scale_inv_ptr + m, tl.div_rn(1.0, scale), mask=(m < rows) & is_first)
    if columnwise_data_ptr is not None:
        amax = tl.load(column_bits_ptr + k, mask=k < columns, other=0).to(tl.float32, bitcast=True)
        scale = scale_from_amax(amax, EPS, LARGEST, POWER_OF_TWO, FORMAT_MAX)
        data = encode(x, scale[None, :], FORMAT_MAX, NAN_CODE, FP8)
        store_tile(columnwise_data_ptr, tl.trans(data), k, m, columns, padded_rows)
        is_first = tile < tiles_across
        tl.store(columnwise_scale_inv_ptr + k, tl.div_rn(1.0, scale), mask=(k < columns) & is_first)
