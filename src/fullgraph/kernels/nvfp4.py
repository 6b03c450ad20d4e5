"""NVFP4 in Triton: the amaxes, then both copies, packed, with their scales, in one pass.

Bitwise equal to `fullgraph.reference.nvfp4` (tests/gpu/test_kernels_nvfp4.py); what the results mean is documented
there. A columnwise copy is made from the transposed tile, by the code that makes the rowwise copy from the tile.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fullgraph.errors import ShapeError, describe
from fullgraph.formats import (
    HADAMARD_SIGN_CHANGES,
    ROWWISE,
    Format,
    FourOverSix,
    Orientation,
    Scaling,
    check_nvfp4_options,
)
from fullgraph.kernels.per_tensor import amax
from fullgraph.kernels.tiles import encode, load_tile, round_up, tile_indices

_BLOCK = Scaling.BLOCK_1X16.block
# Not tuned yet. A tile is a multiple of 16 both ways, so that blocks and squares do not cross tiles.
_TILE = (64, 64)
_NUM_WARPS = 8
_SWIZZLE_ROWS = 128

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INF_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)
_FLOAT_MAX = tl.constexpr(torch.finfo(torch.float32).max)
_SCALE_MAX = tl.constexpr(Format.E4M3.max)
_NAN_SCALE = tl.constexpr(Format.E4M3.nan_code)
_SIGN_CHANGES = tl.constexpr(HADAMARD_SIGN_CHANGES)


def cast_nvfp4(
    x: Tensor,
    *,
    two_dimensional: bool = False,
    hadamard: bool = False,
    four_over_six: FourOverSix | None = None,
    row_scaled: bool = False,
    seed: Tensor | None = None,
    orientation: Orientation = ROWWISE,
    pad: int = 2,
    swizzled: bool = False,
) -> tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]:
    """Cast a matrix to NVFP4; see `fullgraph.reference.cast_nvfp4`.

    Reads x once for all amaxes and once for all results.
    """
    if x.dim() != 2:
        raise ShapeError(f"cast_nvfp4: a matrix is needed (x: {describe(x)})")
    check_nvfp4_options(
        pad,
        two_dimensional=two_dimensional,
        hadamard=hadamard,
        four_over_six=four_over_six,
        row_scaled=row_scaled,
        seed=seed,
    )
    rows, columns = x.shape
    contracted_rows = round_up(rows, _BLOCK) if hadamard else rows  # of the columnwise copy
    padded_rows, padded_columns = round_up(contracted_rows, pad), round_up(columns, pad)
    whole, columnwise_whole = _amaxes(x, orientation, hadamard, row_scaled)
    results: list[Tensor | None] = [None] * 6
    if orientation.rowwise:
        outer = (rows,) if row_scaled else ()
        results[0::2] = _allocate(x, rows, columns, padded_columns, outer, swizzled)
    if orientation.columnwise:
        results[1::2] = _allocate(x, columns, contracted_rows, padded_rows, (), swizzled)
    tile_rows, tile_columns = _TILE
    if swizzled:
        padded_rows, padded_columns = (
            round_up(size, _SWIZZLE_ROWS) for size in (padded_rows, padded_columns)
        )
    tiles_down = max(1, triton.cdiv(padded_rows, tile_rows))
    tiles_across = max(1, triton.cdiv(padded_columns, tile_columns))
    with torch.cuda.device_of(x):
        _cast_kernel[(tiles_down * tiles_across,)](
            x,
            whole,
            columnwise_whole,
            seed,
            *results,
            rows,
            columns,
            contracted_rows,
            *x.stride(),
            tiles_across,
            TWO_DIMENSIONAL=two_dimensional,
            HADAMARD=hadamard,
            FOUR_OVER_SIX=four_over_six is not None,
            SQUARED_ERROR=four_over_six is FourOverSix.MSE,
            LARGEST=Format.E2M1.max
            * (Format.E4M3.max if four_over_six is None else four_over_six.scale_max),
            ROW_SCALED=row_scaled,
            SWIZZLED=swizzled,
            PAD=pad,
            TILE_M=tile_rows,
            TILE_K=tile_columns,
            num_warps=_NUM_WARPS,
            # A product and a sum in one rounding would not be those of the reference.
            enable_fp_fusion=False,
        )
    return tuple(results)  # type: ignore[return-value]


def _allocate(
    x: Tensor,
    rows: int,
    contraction: int,
    padded_contraction: int,
    outer: tuple[int, ...],
    swizzled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Data, scale_inv and tensor_scale_inv of one copy, not yet written."""
    blocks = round_up(contraction, _BLOCK) // _BLOCK
    shape = (round_up(rows, _SWIZZLE_ROWS) * round_up(blocks, 4),) if swizzled else (rows, blocks)
    return (
        x.new_empty((rows, padded_contraction // 2), dtype=torch.uint8),
        x.new_empty(shape, dtype=torch.uint8),
        x.new_empty(outer, dtype=torch.float32),
    )


def _amaxes(
    x: Tensor, orientation: Orientation, hadamard: bool, row_scaled: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The amaxes from which each copy is cast: float32 [] or, with `row_scaled`, [rows]; and float32 []."""
    by_row = row_scaled and orientation.rowwise
    transformed = hadamard and orientation.columnwise
    if not (by_row or transformed):
        whole = amax(x)
        return whole, whole
    rows, columns = x.shape
    bits = columnwise_bits = None
    if orientation.rowwise:
        bits = x.new_zeros((rows,) if by_row else (), dtype=torch.int32)
    if transformed:
        columnwise_bits = x.new_zeros((), dtype=torch.int32)
    if x.numel() > 0:
        tile_rows, tile_columns = _TILE
        tiles_across = triton.cdiv(columns, tile_columns)
        with torch.cuda.device_of(x):
            _amax_kernel[(triton.cdiv(rows, tile_rows) * tiles_across,)](
                x,
                bits,
                columnwise_bits,
                rows,
                columns,
                *x.stride(),
                tiles_across,
                BY_ROW=by_row,
                TILE_M=tile_rows,
                TILE_K=tile_columns,
                num_warps=_NUM_WARPS,
            )
    whole = None if bits is None else bits.view(torch.float32)
    if columnwise_bits is not None:
        return whole, columnwise_bits.view(torch.float32)
    return whole, amax(whole) if whole is not None and orientation.columnwise else None


@triton.jit(do_not_specialize=["rows", "tiles_across"])
def _amax_kernel(
    x_ptr,
    bits_ptr,  # int32 [] or, if BY_ROW, [rows], zeros at the start: the bits of the largest magnitudes; or None
    columnwise_bits_ptr,  # int32 [], zero at the start: of the Hadamard transform along the columns; or None
    rows,
    columns,
    stride_row,
    stride_column,
    tiles_across,
    BY_ROW: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """One program reads one tile and ends with atomic maxima."""
    m, k = tile_indices(tl.program_id(0), tiles_across, TILE_M, TILE_K)
    x = load_tile(x_ptr, m, k, rows, columns, stride_row, stride_column).to(tl.float32)
    if bits_ptr is not None:
        bits = tl.max(_magnitude_bits(x), axis=1)
        if BY_ROW:
            tl.atomic_max(bits_ptr + m, _one_nan(bits), mask=m < rows, sem="relaxed")
        else:
            tl.atomic_max(bits_ptr, _one_nan(tl.max(bits)), sem="relaxed")
    if columnwise_bits_ptr is not None:
        bits = tl.max(_magnitude_bits(_hadamard_rows(tl.trans(x), TILE_K, TILE_M)))
        tl.atomic_max(columnwise_bits_ptr, _one_nan(bits), sem="relaxed")


# Rows are not what wide loads and stores depend on, so they need no kernels of their own.
@triton.jit(do_not_specialize=["rows", "contracted_rows", "tiles_across"])
def _cast_kernel(
    x_ptr,
    amax_ptr,  # float32 [] or, if ROW_SCALED, [rows]; None if not needed, as all that follow
    columnwise_amax_ptr,
    seed_ptr,
    data_ptr,
    columnwise_data_ptr,
    scale_inv_ptr,
    columnwise_scale_inv_ptr,
    tensor_scale_inv_ptr,
    columnwise_tensor_scale_inv_ptr,
    rows,
    columns,
    contracted_rows,  # codes in a row of the columnwise copy, without padding
    stride_row,
    stride_column,
    tiles_across,
    TWO_DIMENSIONAL: tl.constexpr,
    HADAMARD: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    SQUARED_ERROR: tl.constexpr,
    LARGEST: tl.constexpr,  # of codes times scales: what amax is mapped to
    ROW_SCALED: tl.constexpr,
    SWIZZLED: tl.constexpr,
    PAD: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """One program makes what both copies have of one tile; those of the first tiles also store the tensor scales.

    Bytes per element of bf16: 2 read, 9/16 written for each copy. Elements outside of x are read as zeros.
    """
    tile = tl.program_id(0)
    m, k = tile_indices(tile, tiles_across, TILE_M, TILE_K)
    x = load_tile(x_ptr, m, k, rows, columns, stride_row, stride_column).to(tl.float32)
    if data_ptr is not None or TWO_DIMENSIONAL:
        if ROW_SCALED:
            amax = tl.load(amax_ptr + m, mask=m < rows, other=0.0)
            if tile % tiles_across == 0:
                tl.store(tensor_scale_inv_ptr + m, _tensor_scale_inv(amax, LARGEST), mask=m < rows)
        else:
            single = tl.load(amax_ptr)
            if tensor_scale_inv_ptr is not None and tile == 0:
                tl.store(tensor_scale_inv_ptr, _tensor_scale_inv(single, LARGEST))
            amax = tl.zeros((TILE_M,), tl.float32) + single
        codes, scale_inv = _cast_rows(
            x, amax, seed_ptr, m, k, columns, 0,
            TWO_DIMENSIONAL, FOUR_OVER_SIX, SQUARED_ERROR, LARGEST, TILE_M, TILE_K,
        )  # fmt: skip
        if data_ptr is not None:
            _store(
                data_ptr, scale_inv_ptr, codes, scale_inv, m, k, rows, columns,
                SWIZZLED, PAD, TILE_M, TILE_K,
            )  # fmt: skip
    if columnwise_data_ptr is not None:
        single = tl.load(columnwise_amax_ptr)
        if tile == 0:
            tl.store(columnwise_tensor_scale_inv_ptr, _tensor_scale_inv(single, LARGEST))
        if TWO_DIMENSIONAL:
            codes = tl.trans(codes)
            squares = tl.max(tl.reshape(scale_inv, (TILE_M // 16, 16, TILE_K // 16)), axis=1)
            scale_inv = _repeat_16(tl.trans(squares), TILE_K, TILE_M // 16)
        else:
            transpose = tl.trans(x)
            if HADAMARD:
                transpose = _hadamard_rows(transpose, TILE_K, TILE_M)
            codes, scale_inv = _cast_rows(
                transpose, tl.zeros((TILE_K,), tl.float32) + single, seed_ptr,
                k, m, contracted_rows, 1,
                False, FOUR_OVER_SIX, SQUARED_ERROR, LARGEST, TILE_K, TILE_M,
            )  # fmt: skip
        _store(
            columnwise_data_ptr, columnwise_scale_inv_ptr, codes, scale_inv, k, m,
            columns, contracted_rows, SWIZZLED, PAD, TILE_K, TILE_M,
        )  # fmt: skip


@triton.jit
def _cast_rows(
    x,
    amax,
    seed_ptr,
    row,
    column,
    contraction,
    stream,
    SQUARES: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    SQUARED_ERROR: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Codes, int32 [ROWS, COLUMNS], and scale_inv, int32 [ROWS, COLUMNS / 16], of a tile by the amaxes of its rows."""
    BLOCKS: tl.constexpr = COLUMNS // 16
    blocks = tl.reshape(x, (ROWS, BLOCKS, 16))
    bits = tl.max(_magnitude_bits(blocks), axis=2)
    if SQUARES:
        squares = tl.max(tl.reshape(bits, (ROWS // 16, 16, BLOCKS)), axis=1)
        bits = _repeat_16(squares, ROWS, BLOCKS)
    block_amax = bits.to(tl.float32, bitcast=True)
    scale = _tensor_scale(amax, LARGEST)[:, None]
    if FOUR_OVER_SIX:
        wanted = tl.div_rn(block_amax, 6.0) * scale
        scale_inv4 = _encode_scales(wanted, 1.5)
        scale_inv6 = _encode_scales(wanted, 1.0)
        codes4 = _encode_nearest(_scaled(blocks, scale_inv4, scale))
        codes6 = _encode_nearest(_scaled(blocks, scale_inv6, scale))
        amaxes = tl.broadcast_to(amax[:, None], (ROWS, BLOCKS))[:, :, None]
        error4 = _block_error(
            blocks, codes4, scale_inv4, amaxes, SQUARES, SQUARED_ERROR, LARGEST, ROWS, BLOCKS
        )
        error6 = _block_error(
            blocks, codes6, scale_inv6, amaxes, SQUARES, SQUARED_ERROR, LARGEST, ROWS, BLOCKS
        )
        is_four = error4 < error6
        scale_inv = tl.where(is_four, scale_inv4, scale_inv6)
        codes = tl.where(is_four[:, :, None], codes4, codes6)
    else:
        scale_inv = _encode_scales(block_amax, scale * (1 / 6))
        scaled = _scaled(blocks, scale_inv, scale)
        if seed_ptr is not None:
            block = (
                row[:, None] * tl.cdiv(contraction, 16) + _groups_of(column, 16, BLOCKS)[None, :]
            )
            codes = _encode_stochastic(scaled, _random_bytes(tl.load(seed_ptr), block, stream))
        else:
            codes = _encode_nearest(scaled)
    return tl.reshape(codes, (ROWS, COLUMNS)), scale_inv


@triton.jit
def _store(
    data_ptr,
    scale_inv_ptr,
    codes,
    scale_inv,
    row,
    column,
    rows,
    contraction,
    SWIZZLED: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store a tile of one copy; zeros where there is no element."""
    row = row[:, None]
    codes = tl.where(column[None, :] < contraction, codes, 0)
    low, high = tl.split(tl.reshape(codes, (ROWS, COLUMNS // 2, 2)))
    width = tl.cdiv(contraction, PAD) * (PAD // 2)
    place = _groups_of(column, 2, COLUMNS // 2)[None, :]
    inside = (row < rows) & (place < width)
    tl.store(data_ptr + row * width + place, (low | (high << 4)).to(tl.uint8), mask=inside)

    blocks = tl.cdiv(contraction, 16)
    block = _groups_of(column, 16, COLUMNS // 16)[None, :]
    inside = (row < rows) & (block < blocks)
    if SWIZZLED:
        tiles_across = tl.cdiv(blocks, 4)
        scale_inv = tl.where(inside, scale_inv, 0)
        inside = (row < tl.cdiv(rows, 128) * 128) & (block < tiles_across * 4)
        tile = row // 128 * tiles_across + block // 4
        offsets = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    else:
        offsets = row * blocks + block
    tl.store(scale_inv_ptr + offsets, scale_inv.to(tl.uint8), mask=inside)


@triton.jit
def _magnitude_bits(x):
    """Integers in the order of the magnitudes, with NaN on top."""
    return x.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def _one_nan(bits):
    return tl.where(bits > _INF_BITS, _NAN_BITS, bits)


@triton.jit
def _groups_of(index, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """The numbers of the COUNT groups that consecutive indices belong to, the first of which begins a group."""
    return tl.min(index) // SIZE + tl.arange(0, COUNT)


@triton.jit
def _repeat_16(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS / 16, COLUMNS] to [ROWS, COLUMNS]."""
    repeated = tl.broadcast_to(x[:, None, :], (ROWS // 16, 16, COLUMNS))
    return tl.reshape(repeated, (ROWS, COLUMNS))


@triton.jit
def _tensor_scale_inv(amax, LARGEST: tl.constexpr):
    """What decodes; amax has the one NaN that we write, and a division would change its bits."""
    return tl.where(amax != amax, amax, tl.div_rn(amax, LARGEST))


@triton.jit
def _tensor_scale(amax, LARGEST: tl.constexpr):
    """The factor that maps amax to LARGEST; 1 where amax is zero, infinite or NaN."""
    scale = tl.div_rn(LARGEST, amax)
    scale = tl.where(scale > _FLOAT_MAX, _FLOAT_MAX, scale)
    return tl.where((amax > 0.0) & (amax < float("inf")), scale, 1.0)


@triton.jit
def _encode_scales(x, scale):
    return encode(x, scale, _SCALE_MAX, _NAN_SCALE, tl.float8e4nv).to(tl.int32)


@triton.jit
def _decode_scales(scale_inv):
    return scale_inv.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _scaled(blocks, scale_inv, scale):
    """Blocks [rows, n, 16] in units of a code, by scale_inv [rows, n] and the scale of the tensor [rows, 1]."""
    factor = tl.div_rn(1.0, _decode_scales(scale_inv) * tl.div_rn(1.0, scale))
    factor = tl.where(factor > _FLOAT_MAX, _FLOAT_MAX, factor)  # keeps NaN
    return blocks * factor[:, :, None]


@triton.jit
def _encode_nearest(x):
    """Codes by the ties between their values, which go to the even code."""
    y = tl.abs(x)
    code = (y > 0.25).to(tl.int32) + (y >= 0.75).to(tl.int32) + (y > 1.25).to(tl.int32)
    code += (y >= 1.75).to(tl.int32) + (y > 2.5).to(tl.int32) + (y >= 3.5).to(tl.int32)
    code += (y > 5.0).to(tl.int32)
    return _with_sign(x, code)


@triton.jit
def _encode_stochastic(x, random):
    """Codes of the lower neighbour, or one more if the distance and (random + 1/2) / 256 reach 1."""
    y = tl.minimum(tl.abs(x), 6.0)
    code = (y >= 0.5).to(tl.int32) + (y >= 1.0).to(tl.int32) + (y >= 1.5).to(tl.int32)
    code += (y >= 2.0).to(tl.int32) + (y >= 3.0).to(tl.int32) + (y >= 4.0).to(tl.int32)
    code += (y >= 6.0).to(tl.int32)
    fraction = y - _decode_magnitude(code)
    fraction = tl.where(code < 4, 2.0 * fraction, tl.where(code < 6, fraction, 0.5 * fraction))
    threshold = (255.5 - random.to(tl.float32)) * (1 / 256)
    return _with_sign(x, code + (fraction >= threshold).to(tl.int32))


@triton.jit
def _with_sign(x, code):
    sign = (x.to(tl.int32, bitcast=True) >> 31) & 8
    return tl.where(x != x, 7, code | sign)


@triton.jit
def _decode_magnitude(code):
    """The values of codes below 8."""
    value = code.to(tl.float32)
    return tl.where(code < 4, 0.5 * value, tl.where(code < 7, value - 2.0, 6.0))


@triton.jit
def _block_error(
    blocks,
    codes,
    scale_inv,
    amaxes,
    SQUARES: tl.constexpr,
    SQUARED_ERROR: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The error of each block [ROWS, BLOCKS]; the order of the sums is part of the definition."""
    magnitude = _decode_magnitude(codes & 7)
    decoded = tl.where(codes < 8, magnitude, -magnitude) * _decode_scales(scale_inv)[:, :, None]
    difference = tl.div_rn(decoded * amaxes, LARGEST) - blocks
    terms = difference * difference if SQUARED_ERROR else tl.abs(difference)
    place = tl.arange(0, 16)[None, None, :]
    total = tl.zeros((ROWS, BLOCKS), tl.float32)
    for i in range(16):  # not unrolled: that takes a minute to compile
        # One term and fifteen zeros: exact in any order.
        total += tl.sum(tl.where(place == i, terms, 0.0), axis=2)
    if SQUARES:
        SQUARES_DOWN: tl.constexpr = ROWS // 16
        total = tl.sum(tl.reshape(total, (SQUARES_DOWN, 2, 8, BLOCKS)), axis=1)
        total = tl.sum(tl.reshape(total, (SQUARES_DOWN, 2, 4, BLOCKS)), axis=1)
        total = tl.sum(tl.reshape(total, (SQUARES_DOWN, 2, 2, BLOCKS)), axis=1)
        total = tl.sum(tl.reshape(total, (SQUARES_DOWN, 2, BLOCKS)), axis=1)
        total = _repeat_16(total, ROWS, BLOCKS)
    return total


@triton.jit
def _random_bytes(seed, block, stream):
    """`fullgraph.reference.philox.random_bytes`: int32 [rows, blocks, 16] for the numbers of blocks [rows, blocks]."""
    low, high = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    zero = low * 0
    word0, word1, word2, word3 = tl.philox(seed, low, high, zero + stream, zero)
    place = tl.arange(0, 16)[None, None, :]
    left = tl.where(place < 4, word0[:, :, None], word1[:, :, None])
    right = tl.where(place < 12, word2[:, :, None], word3[:, :, None])
    words = tl.where(place < 8, left, right)
    return ((words >> (place % 4 * 8).to(tl.uint32)) & 0xFF).to(tl.int32)


@triton.jit
def _hadamard_rows(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`fullgraph.reference.hadamard_rows`, the bfloat16 result as float32."""
    GROUPS: tl.constexpr = COLUMNS // 16
    changes = (_SIGN_CHANGES >> tl.arange(0, 16)) & 1
    # Not a negation: Triton computes that as 0 - x, which is another zero.
    signs = 1.0 - 2.0 * changes.to(tl.float32)
    y = tl.reshape(x, (ROWS, GROUPS, 16)) * signs[None, None, :]
    for _ in tl.static_range(4):
        even, odd = tl.split(tl.reshape(y, (ROWS, GROUPS, 8, 2)))
        pairs = tl.permute(tl.join(even + odd, even - odd), (0, 1, 3, 2))
        y = tl.reshape(pairs, (ROWS, GROUPS, 16))
    y = tl.reshape(y * 0.25, (ROWS, COLUMNS))
    bits = y.to(tl.int32, bitcast=True)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & -65536
    return tl.where(y != y, y, rounded.to(tl.float32, bitcast=True))
