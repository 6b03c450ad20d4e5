"""What the casting kernels share: tiles of a matrix of any strides, the rule of the scale, the cast to 8 bits."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

FP8 = {"E4M3": tl.float8e4nv, "E5M2": tl.float8e5}
"""Triton's name of each 8-bit format."""

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
"""The bits of a float32 but for its sign."""
INF_BITS = tl.constexpr(0x7F800000)
"""Infinity; whatever has more is NaN."""
_SIGN_AND_EXPONENT = tl.constexpr(-(1 << 23))


def round_up(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


@triton.jit
def tile_indices(tile, tiles_across, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """Row and column indices of a tile, int64: a tensor may have more than 2**31 elements."""
    m = (tile // tiles_across).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    k = (tile % tiles_across).to(tl.int64) * TILE_K + tl.arange(0, TILE_K)
    return m, k


@triton.jit
def load_tile(x_ptr, m, k, rows, columns, stride_row, stride_column):
    """Load a tile of any strides, zero outside of the matrix."""
    inside = (m[:, None] < rows) & (k[None, :] < columns)
    offsets = m[:, None] * stride_row + k[None, :] * stride_column
    return tl.load(x_ptr + offsets, mask=inside, other=0.0)


@triton.jit
def magnitude_bits(x):
    """|x| as the bits of a float32, in an integer: the same order, with NaN on top, so that a maximum keeps NaN."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def store_tile(data_ptr, data, m, k, rows, columns):
    """Store a tile of a contiguous matrix [rows, columns]."""
    inside = (m[:, None] < rows) & (k[None, :] < columns)
    tl.store(data_ptr + m[:, None] * columns + k[None, :], data, mask=inside)


@triton.jit
def scale_from_amax(
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
def encode(x, encode_scale, FORMAT_MAX: tl.constexpr, NAN_CODE: tl.constexpr, FP8: tl.constexpr):
    """`fullgraph.reference.codes.encode` of x * encode_scale: uint8 codes, saturating, one NaN."""
    value = x.to(tl.float32) * encode_scale
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
