"""MXFP8 in Triton: both copies and their scales, also in the order of the GEMM, from one reading of x.

Bitwise equal to `fullgraph.reference.mx` (tests/gpu/test_kernels_mx.py); what the results mean is documented there.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# (to a type checker that sees Triton, a kernel is neither callable nor does it return)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fullgraph.errors import ConfigError, ShapeError, describe
from fullgraph.formats import ROWWISE, Format, MXScaleMode, Orientation
from fullgraph.kernels.tiles import (
    FP8,
    INF_BITS,
    encode,
    load_tile,
    magnitude_bits,
    round_up,
    tile_indices,
)

_TILE = (64, 128)  # both multiples of a block
_NUM_WARPS = 8

_BLOCK = tl.constexpr(32)
_SCALE_ROWS = tl.constexpr(128)  # of a tile of swizzled scales
_SCALE_COLUMNS = tl.constexpr(4)

_BIAS = tl.constexpr(127)  # of E8M0, and of float32
_LARGEST = tl.constexpr(0xFE)  # codes of E8M0
_NAN = tl.constexpr(0xFF)

_MANTISSA_BITS = tl.constexpr(23)
_MANTISSA = tl.constexpr((1 << 23) - 1)


def cast_mx(
    x: Tensor,
    format: Format,
    *,
    scale_mode: MXScaleMode = MXScaleMode.RCEIL,
    two_dimensional: bool = False,
    orientation: Orientation = ROWWISE,
    pad: int = 1,
    swizzled: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Cast a matrix to MXFP8; see `fullgraph.reference.cast_mx`.

    Reads x once and writes the bytes of both copies and their scales, padding included, in one kernel.
    """
    if x.dim() != 2:
        raise ShapeError(f"cast_mx: a matrix is needed (x: {describe(x)})")
    if format not in (Format.E4M3, Format.E5M2):
        raise ConfigError(f"cast_mx: the format must be E4M3 or E5M2, got {format.name}")
    rows, columns = x.shape
    data = scale_inv = columnwise_data = columnwise_scale_inv = None
    if orientation.rowwise:
        data, scale_inv = _new_copy(x, rows, columns, pad, swizzled)
    if orientation.columnwise:
        columnwise_data, columnwise_scale_inv = _new_copy(x, columns, rows, pad, swizzled)
    if x.numel() > 0:
        tile_rows, tile_columns = _TILE
        covered_rows, covered_columns = (
            max(round_up(size, pad), round_up(size, _SCALE_ROWS.value)) for size in (rows, columns)
        )
        tiles_across = triton.cdiv(covered_columns, tile_columns)
        with torch.cuda.device_of(x):
            _cast_kernel[(triton.cdiv(covered_rows, tile_rows) * tiles_across,)](
                x,
                data,
                scale_inv,
                columnwise_data,
                columnwise_scale_inv,
                rows,
                columns,
                round_up(rows, pad),
                round_up(columns, pad),
                *x.stride(),
                tiles_across,
                **_constants(format, scale_mode),
                SQUARE=two_dimensional,
                SWIZZLED=swizzled,
                TILE_M=tile_rows,
                TILE_K=tile_columns,
                num_warps=_NUM_WARPS,
            )
    return data, columnwise_data, scale_inv, columnwise_scale_inv


def _new_copy(
    x: Tensor, rows: int, columns: int, pad: int, swizzled: bool
) -> tuple[Tensor, Tensor]:
    """Memory for the codes of a copy and for their scales."""
    blocks = round_up(columns, _BLOCK.value) // _BLOCK.value
    shape: tuple[int, ...] = (rows, blocks)
    if swizzled:
        shape = (round_up(rows, _SCALE_ROWS.value) * round_up(blocks, _SCALE_COLUMNS.value),)
    data = x.new_empty((rows, round_up(columns, pad)), dtype=torch.uint8)
    return data, x.new_empty(shape, dtype=torch.uint8)


def _constants(format: Format, scale_mode: MXScaleMode) -> dict[str, Any]:
    """What the kernel knows of the format and of the rule of the scale."""
    carry = {
        MXScaleMode.RCEIL: None,  # depends on the amax
        MXScaleMode.FLOOR: 0,
        MXScaleMode.CEIL: _MANTISSA.value,
        MXScaleMode.EVEN: int(format.eps * (1 << _MANTISSA_BITS.value)) // 2,
    }
    return {
        "CARRY": carry[scale_mode],
        "MAX_EXPONENT": format.max_exponent,
        "FORMAT_MAX": format.max,
        "NAN_CODE": format.nan_code,
        "FP8": FP8[format.name],
    }


@triton.jit(do_not_specialize=["tiles_across"])
def _cast_kernel(
    x_ptr,
    data_ptr,  # uint8 [rows, padded_columns], or None
    scale_inv_ptr,  # uint8 [rows, blocks] or swizzled, or None
    columnwise_data_ptr,  # uint8 [columns, padded_rows], or None
    columnwise_scale_inv_ptr,
    rows,
    columns,
    padded_rows,
    padded_columns,
    stride_row,
    stride_column,
    tiles_across,
    CARRY: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    NAN_CODE: tl.constexpr,
    FP8: tl.constexpr,
    SQUARE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """One program casts one tile of the matrix, with its padding.

    Bytes per element of bf16: 2 read, 1.03 written for each copy. The columnwise copy is the rowwise one of the
    transposed tile. Elements outside of x are read as zeros, so codes and scales of the padding are zeros.
    """
    tile = tl.program_id(0)
    m, k = tile_indices(tile, tiles_across, TILE_M, TILE_K)
    down, across = tile // tiles_across, tile % tiles_across
    x = load_tile(x_ptr, m, k, rows, columns, stride_row, stride_column)
    if data_ptr is not None:
        exponent = _scale_exponents(x, CARRY, MAX_EXPONENT, FORMAT_MAX, SQUARE)
        _store_scales(scale_inv_ptr, exponent, down, across, rows, columns, SWIZZLED)
        codes = _encode(x, exponent, m, k, rows, columns, FORMAT_MAX, NAN_CODE, FP8)
        _store_codes(data_ptr, codes, m, k, rows, padded_columns)
    if columnwise_data_ptr is not None:
        y = tl.trans(x)
        exponent = _scale_exponents(y, CARRY, MAX_EXPONENT, FORMAT_MAX, SQUARE)
        _store_scales(columnwise_scale_inv_ptr, exponent, across, down, columns, rows, SWIZZLED)
        codes = _encode(y, exponent, k, m, columns, rows, FORMAT_MAX, NAN_CODE, FP8)
        _store_codes(columnwise_data_ptr, codes, k, m, columns, padded_rows)


@triton.jit
def _scale_exponents(
    x,
    CARRY: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    SQUARE: tl.constexpr,
):
    """The E8M0 codes of a tile [M, K], int32 [M, K / 32]: `fullgraph.reference.mx._scale_exponent` of each amax."""
    ROWS: tl.constexpr = x.shape[0]
    BANDS: tl.constexpr = x.shape[0] // _BLOCK
    BLOCKS: tl.constexpr = x.shape[1] // _BLOCK
    bits = magnitude_bits(x)
    if SQUARE:
        amax_bits = tl.max(tl.max(tl.reshape(bits, [BANDS, _BLOCK, BLOCKS, _BLOCK]), 3), 1)
    else:
        amax_bits = tl.max(tl.reshape(bits, [ROWS, BLOCKS, _BLOCK]), 2)
    finite = tl.minimum(amax_bits, INF_BITS)
    if CARRY is None:
        ratio = finite.to(tl.float32, bitcast=True) * (1.0 / FORMAT_MAX)
        ratio_bits = ratio.to(tl.int32, bitcast=True)
        carry = tl.where(ratio_bits > _MANTISSA, _MANTISSA, _MANTISSA >> 1)
        exponent = (ratio_bits + carry) >> _MANTISSA_BITS
    else:
        exponent = ((finite + CARRY) >> _MANTISSA_BITS) - MAX_EXPONENT
    exponent = tl.minimum(tl.maximum(exponent, 0), _LARGEST)
    exponent = tl.where(amax_bits < INF_BITS, exponent, _LARGEST)
    exponent = tl.where(amax_bits > INF_BITS, _NAN, exponent)
    if SQUARE:
        exponent = tl.broadcast_to(exponent[:, None, :], [BANDS, _BLOCK, BLOCKS])
        exponent = tl.reshape(exponent, [ROWS, BLOCKS])
    return exponent


@triton.jit
def _encode(
    x,
    exponent,
    m,
    k,
    rows,
    columns,
    FORMAT_MAX: tl.constexpr,
    NAN_CODE: tl.constexpr,
    FP8: tl.constexpr,
):
    """Cast a tile with the scales of its blocks; blocks of NaN become NaN, padding zero."""
    blocked = tl.broadcast_to(exponent[:, :, None], [x.shape[0], x.shape[1] // _BLOCK, _BLOCK])
    exponent = tl.reshape(blocked, x.shape)
    # In two steps, because 2^-127 and 2^-128 are subnormal.
    shift = -exponent + _BIAS
    half = shift >> 1
    scaled = x.to(tl.float32) * _power_of_two(half)
    codes = encode(scaled, _power_of_two(shift - half), FORMAT_MAX, NAN_CODE, FP8)
    inside = (m[:, None] < rows) & (k[None, :] < columns)
    return tl.where(inside & (exponent == _NAN), NAN_CODE, codes)


@triton.jit
def _power_of_two(exponent):
    """2^exponent for a normal one, int32 to float32."""
    return ((exponent + _BIAS) << _MANTISSA_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _store_codes(data_ptr, codes, m, k, rows, padded_columns):
    inside = (m[:, None] < rows) & (k[None, :] < padded_columns)
    tl.store(data_ptr + m[:, None] * padded_columns + k[None, :], codes, mask=inside)


@triton.jit
def _store_scales(
    scale_inv_ptr, exponent, tile_down, tile_across, rows, columns, SWIZZLED: tl.constexpr
):
    """Store the scales of a tile, row by row or as `fullgraph.reference.swizzle` orders them, with their padding."""
    ROWS: tl.constexpr = exponent.shape[0]
    BLOCKS: tl.constexpr = exponent.shape[1]
    m = (tile_down.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    block = (tile_across.to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS))[None, :]
    stored_rows = rows
    stored_blocks = tl.cdiv(columns, _BLOCK)
    offsets = m * stored_blocks + block
    if SWIZZLED:
        stored_rows = tl.cdiv(rows, _SCALE_ROWS) * _SCALE_ROWS
        tiles_across = tl.cdiv(stored_blocks, _SCALE_COLUMNS)
        stored_blocks = tiles_across * _SCALE_COLUMNS
        scale_tile = (m // _SCALE_ROWS) * tiles_across + block // _SCALE_COLUMNS
        place = (m % 32) * 16 + (m % _SCALE_ROWS) // 32 * 4 + block % _SCALE_COLUMNS
        offsets = scale_tile * (_SCALE_ROWS * _SCALE_COLUMNS) + place
    # A square may reach below the last row.
    codes = tl.where(m < rows, exponent, 0).to(tl.uint8)
    inside = (m < stored_rows) & (block < stored_blocks)
    tl.store(scale_inv_ptr + offsets, codes, mask=inside)
