"""One scale for a whole tensor, in Triton: amax, and the cast with its transpose in one pass.

Bitwise equal to `fullgraph.reference.per_tensor` (tests/gpu/test_kernels.py); what the results
mean is documented there.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# (to a type checker that sees Triton, a kernel is neither callable nor does it return)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fullgraph.errors import ShapeError, describe
from fullgraph.formats import ROWWISE, Format, Orientation, largest_finite

# 64 x 128 with 8 warps: the fastest of nine tiles tried for a bare cast of bf16 with both copies,
# 8192 x 4096 to 14336 x 4096 on an H200 (2026-12), where it reached 3.0-3.4 of 4.1 TB/s.
_TILE = (64, 128)
_FLAT_TILE = (1, 8192)
_NUM_WARPS = 8
_TILES_PER_PROGRAM = 4  # of the amax kernel: fewer atomics, and still enough programs

_FP8 = {"E4M3": tl.float8e4nv, "E5M2": tl.float8e5}
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INF_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)
_SIGN_AND_EXPONENT = tl.constexpr(-(1 << 23))


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
    if x.dim() != 2:
        raise ShapeError(f"cast_per_tensor: a matrix is needed (x: {describe(x)})")
    rows, columns = x.shape
    padded_rows, padded_columns = _round_up(rows, pad), _round_up(columns, pad)
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
        _cast_kernel[(tiles_down * tiles_across,)](
            x,
            amax,
            rowwise,
            columnwise,
            scale_inv,
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
            FP8=_FP8[format.name],
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


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


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
        m, k = _tile_indices(tile, tiles_across, TILE_M, TILE_K)
        x = _load(x_ptr, m, k, rows, columns, stride_row, stride_column)
        bits = x.to(tl.float32).to(tl.int32, bitcast=True) & _MAGNITUDE
        largest = tl.maximum(largest, bits)
    result = tl.max(largest)
    result = tl.where(result > _INF_BITS, _NAN_BITS, result)
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
    scale = _scale_from_amax(tl.load(amax_ptr), EPS, LARGEST, POWER_OF_TWO, FORMAT_MAX)
    if tile == 0:
        tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))
    m, k = _tile_indices(tile, tiles_across, TILE_M, TILE_K)
    x = _load(x_ptr, m, k, rows, columns, stride_row, stride_column)
    data = _encode(x, scale, FORMAT_MAX, NAN_CODE, FP8)
    if rowwise_ptr is not None:
        inside = (m[:, None] < rows) & (k[None, :] < padded_columns)
        tl.store(rowwise_ptr + m[:, None] * padded_columns + k[None, :], data, mask=inside)
    if columnwise_ptr is not None:
        inside = (k[:, None] < columns) & (m[None, :] < padded_rows)
        offsets = k[:, None] * padded_rows + m[None, :]
        tl.store(columnwise_ptr + offsets, tl.trans(data), mask=inside)


@triton.jit
def _tile_indices(tile, tiles_across, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """Row and column indices of a tile, int64: a tensor may have more than 2**31 elements."""
    m = (tile // tiles_across).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    k = (tile % tiles_across).to(tl.int64) * TILE_K + tl.arange(0, TILE_K)
    return m, k


@triton.jit
def _load(x_ptr, m, k, rows, columns, stride_row, stride_column):
    """Load a tile of any strides, zero outside of the matrix."""
    inside = (m[:, None] < rows) & (k[None, :] < columns)
    offsets = m[:, None] * stride_row + k[None, :] * stride_column
    return tl.load(x_ptr + offsets, mask=inside, other=0.0)


@triton.jit
def _scale_from_amax(
    amax,
    EPS: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
):
    """`fullgraph.reference.scale_from_amax`: the comparisons keep NaN, the division is exact."""
    eps = tl.full((), EPS, tl.float32)
    bounded = tl.where(amax < eps, eps, amax)
    scale = tl.div_rn(tl.full((), FORMAT_MAX, tl.float32), bounded)
    scale = tl.where(scale == float("inf"), LARGEST, scale)
    usable = (bounded > 0.0) & (bounded < float("inf"))
    scale = tl.where(usable, scale, 1.0)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True) & _SIGN_AND_EXPONENT
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _encode(x, scale, FORMAT_MAX: tl.constexpr, NAN_CODE: tl.constexpr, FP8: tl.constexpr):
    """`fullgraph.reference.codes.encode` of x * scale: uint8 codes, saturating, one NaN."""
    value = x.to(tl.float32) * scale
    clamped = tl.minimum(tl.maximum(value, -FORMAT_MAX), FORMAT_MAX)  # NaN becomes a number here
    codes = clamped.to(FP8).to(tl.uint8, bitcast=True)
    # Do not write this as a NaN-propagating clamp before the cast. Selecting single bytes after it
    # also keeps us clear of a silent miscompile on Hopper (triton-lang/triton#11111,
    # pytorch/ao#4652): where a kernel stores a tile in packed words and its transpose byte by
    # byte, the ptxas of CUDA 12.8 and 12.9 merges two conversions into one register and then reads
    # the second byte of each four from another register before that is written. Bytes that pass
    # through a selection are not merged: tests/unit/test_kernels_compiled.py looks, without a GPU;
    # tests/gpu/test_kernels.py compares every transposed byte with its rowwise twin.
    # Testing x rather than value for NaN keeps Triton from transposing x and casting it twice.
    return tl.where(x != x, NAN_CODE, codes)
