"""One scale for a whole tensor, in Triton: amax, and the cast with its transpose in one pass.

Bitwise equal to `fullgraph.reference.per_tensor` (tests/gpu/test_kernels.py); what the results
mean is documented there.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# (to a type checker that sees Triton, a kernel is neither callable nor does it return)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fullgraph.errors import ShapeError, describe
from fullgraph.formats import ROWWISE, Format, Orientation, largest_finite
from fullgraph.kernels.tiles import (
    FP8,
    INF_BITS,
    encode,
    load_tile,
    magnitude_bits,
    round_up,
    scale_from_amax,
    tile_indices,
)

# 64 x 128 with 8 warps: the fastest of nine tiles tried for a bare cast of bf16 with both copies,
# 8192 x 4096 to 14336 x 4096 on an H200 (2026-12), where it reached 3.0-3.4 of 4.1 TB/s.
_TILE = (64, 128)
_FLAT_TILE = (1, 8192)
_NUM_WARPS = 8
_TILES_PER_PROGRAM = 4  # of the amax kernel: fewer atomics, and still enough programs

_NAN_BITS = tl.constexpr(0x7FC00000)


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of a tensor; see `fullgraph.reference.amax`.

    Numerics: the order of magnitudes is the order of their bit patterns as integers, with NaN on
        top, so an integer maximum is exact, propagates NaN and does not depend on the order in
        which programs finish.
    """
    bits = x.new_zeros((), dtype=torch.int32)
    if x.numel() > 0:
        _launch_amax(_as_matrix(x), bits)
    return bits.view(torch.float32)


def cast_per_tensor(
    x: Tensor,
    amax: Tensor,
    format: Format,
    *,
    eps: float = 0.0,
    power_of_two: bool = False,
    orientation: Orientation = ROWWISE,
    pad: int = 1,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Cast a matrix with one scale; see `fullgraph.reference.cast_per_tensor`.

    Reads x once and writes the bytes of both copies and `scale_inv` in one kernel.
    """
    options = {"EPS": eps, "LARGEST": largest_finite(x.dtype), "POWER_OF_TWO": power_of_two}
    return _cast("cast_per_tensor", _cast_kernel, (amax,), options, x, format, orientation, pad)


def cast_delayed(
    x: Tensor,
    encode_scale: Tensor,
    amax: Tensor | None,
    format: Format,
    *,
    orientation: Orientation = ROWWISE,
    pad: int = 1,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Cast a matrix with a scale from elsewhere; see `fullgraph.reference.cast_delayed`.

    Reads x once for both copies and the amax, in one kernel.

    Numerics: the amax is raised by an integer maximum of the bits, as in `amax`; NaN counts as 0.
    """
    bits = None if amax is None else amax.view(torch.int32)
    state = (encode_scale, bits)
    return _cast("cast_delayed", _cast_delayed_kernel, state, {}, x, format, orientation, pad)


def _cast(
    name: str,
    kernel: Any,
    state: tuple[Tensor | None, ...],
    options: dict[str, Any],
    x: Tensor,
    format: Format,
    orientation: Orientation,
    pad: int,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Allocate the copies and launch a casting kernel; `state` and `options` are those of the kernel."""
    if x.dim() != 2:
        raise ShapeError(f"{name}: a matrix is needed (x: {describe(x)})")
    rows, columns = x.shape
    padded_rows, padded_columns = round_up(rows, pad), round_up(columns, pad)
    rowwise = columnwise = None
    if orientation.rowwise:
        rowwise = x.new_empty((rows, padded_columns), dtype=torch.uint8)
    if orientation.columnwise:
        columnwise = x.new_empty((columns, padded_rows), dtype=torch.uint8)
    scale_inv = x.new_empty((), dtype=torch.float32)
    tile_rows, tile_columns = _TILE
    tiles_across = max(1, triton.cdiv(padded_columns, tile_columns))
    tiles_down = max(1, triton.cdiv(padded_rows, tile_rows))
    with torch.cuda.device_of(x):
        kernel[(tiles_down * tiles_across,)](
            x,
            *state,
            rowwise,
            columnwise,
            scale_inv,
            rows,
            columns,
            padded_rows,
            padded_columns,
            *x.stride(),
            tiles_across,
            **options,
            FORMAT_MAX=format.max,
            NAN_CODE=format.nan_code,
            FP8=FP8[format.name],
            TILE_M=tile_rows,
            TILE_K=tile_columns,
            num_warps=_NUM_WARPS,
        )
    return rowwise, columnwise, scale_inv


def _launch_amax(x: Tensor, bits: Tensor) -> None:
    rows, columns = x.shape
    tile_rows, tile_columns = _FLAT_TILE if rows == 1 else _TILE
    tiles_across = triton.cdiv(columns, tile_columns)
    num_tiles = triton.cdiv(rows, tile_rows) * tiles_across
    # The stride of a lone row is never used, but as 0 it keeps the wide loads.
    stride_row, stride_column = (0, x.stride(1)) if rows == 1 else x.stride()
    with torch.cuda.device_of(x):
        _amax_kernel[(triton.cdiv(num_tiles, _TILES_PER_PROGRAM),)](
            x,
            bits,
            rows,
            columns,
            stride_row,
            stride_column,
            tiles_across,
            NUM_TILES=_TILES_PER_PROGRAM,
            TILE_M=tile_rows,
            TILE_K=tile_columns,
            num_warps=_NUM_WARPS,
        )


def _as_matrix(x: Tensor) -> Tensor:
    """Any view with the same elements: one row if they lie densely, else [rows, columns]."""
    if x.is_contiguous():
        return x.view(1, -1)
    if x.dim() == 2 and x.t().is_contiguous():
        return x.t().view(1, -1)
    return x.reshape(-1, x.shape[-1])


@triton.jit(do_not_specialize=["tiles_across"])
def _amax_kernel(
    x_ptr,
    bits_ptr,  # int32 [], zero at the start: the bits of the largest magnitude
    rows,
    columns,
    stride_row,
    stride_column,
    tiles_across,
    NUM_TILES: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """One program reads NUM_TILES neighbouring tiles and ends with one atomic maximum.

    Tiles after the last one are read as zeros.
    """
    largest = tl.zeros((TILE_M, TILE_K), tl.int32)
    for i in range(NUM_TILES):
        tile = tl.program_id(0) * NUM_TILES + i
        m, k = tile_indices(tile, tiles_across, TILE_M, TILE_K)
        x = load_tile(x_ptr, m, k, rows, columns, stride_row, stride_column)
        bits = magnitude_bits(x)
        largest = tl.maximum(largest, bits)
    result = tl.max(largest)
    result = tl.where(result > INF_BITS, _NAN_BITS, result)
    tl.atomic_max(bits_ptr, result, sem="relaxed")


@triton.jit(do_not_specialize=["tiles_across"])
def _cast_kernel(
    x_ptr,
    amax_ptr,
    rowwise_ptr,  # uint8 [rows, padded_columns], or None
    columnwise_ptr,  # uint8 [columns, padded_rows], or None
    scale_inv_ptr,
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
    """One program casts one tile of the padded matrix; the first also stores scale_inv.

    Bytes per element of bf16: 2 read, 1 written for each copy. Elements outside of x are read as
    zeros, so the padding is written as zeros.
    """
    tile = tl.program_id(0)
    scale = scale_from_amax(tl.load(amax_ptr), EPS, LARGEST, POWER_OF_TWO, FORMAT_MAX)
    if tile == 0:
        tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))
    m, k = tile_indices(tile, tiles_across, TILE_M, TILE_K)
    x = load_tile(x_ptr, m, k, rows, columns, stride_row, stride_column)
    data = encode(x, scale, FORMAT_MAX, NAN_CODE, FP8)
    _store_copies(
        data, m, k, rowwise_ptr, columnwise_ptr, rows, columns, padded_rows, padded_columns
    )


# A slot of the state lies at any multiple of 4 bytes: no kernel for each alignment of one number.
@triton.jit(
    do_not_specialize=["tiles_across"],
    do_not_specialize_on_alignment=["scale_ptr", "bits_ptr"],
)
def _cast_delayed_kernel(
    x_ptr,
    scale_ptr,
    bits_ptr,  # int32 []: the bits of the amax; or None
    rowwise_ptr,
    columnwise_ptr,
    scale_inv_ptr,
    rows,
    columns,
    padded_rows,
    padded_columns,
    stride_row,
    stride_column,
    tiles_across,
    FORMAT_MAX: tl.constexpr,
    NAN_CODE: tl.constexpr,
    FP8: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """`_cast_kernel` with a given scale; each program ends with one atomic maximum of the amax."""
    tile = tl.program_id(0)
    scale = tl.load(scale_ptr)
    if tile == 0:
        tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))
    m, k = tile_indices(tile, tiles_across, TILE_M, TILE_K)
    x = load_tile(x_ptr, m, k, rows, columns, stride_row, stride_column)
    data = encode(x, scale, FORMAT_MAX, NAN_CODE, FP8)
    _store_copies(
        data, m, k, rowwise_ptr, columnwise_ptr, rows, columns, padded_rows, padded_columns
    )
    if bits_ptr is not None:
        bits = magnitude_bits(x)
        tl.atomic_max(bits_ptr, tl.max(tl.where(bits > INF_BITS, 0, bits)), sem="relaxed")


@triton.jit
def _store_copies(
    data, m, k, rowwise_ptr, columnwise_ptr, rows, columns, padded_rows, padded_columns
):
    """Store a tile of codes and its transpose, each where it is wanted."""
    if rowwise_ptr is not None:
        inside = (m[:, None] < rows) & (k[None, :] < padded_columns)
        tl.store(rowwise_ptr + m[:, None] * padded_columns + k[None, :], data, mask=inside)
    if columnwise_ptr is not None:
        inside = (k[:, None] < columns) & (m[None, :] < padded_rows)
        offsets = k[:, None] * padded_rows + m[None, :]
        tl.store(columnwise_ptr + offsets, tl.trans(data), mask=inside)
