"""NVFP4: codes of four bits, an E4M3 scale for each 16 of them, and a float32 scale for the tensor.

A block is 16 elements along the contraction, or a square of 16 x 16. In this module a "code" is one element's four
bits in a byte of its own; what is returned and stored is packed, two to a byte. `scale` is a factor before the cast.
"""

from __future__ import annotations

import torch
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
from fullgraph.reference.codes import decode, encode
from fullgraph.reference.per_tensor import amax, pad_columns
from fullgraph.reference.philox import random_bytes
from fullgraph.reference.swizzle import swizzle

_BLOCK = Scaling.BLOCK_1X16.block
_CODE_MAX = Format.E2M1.max  # 6
_SCALE_MAX = Format.E4M3.max  # 448
_NAN_SCALE = Format.E4M3.max_code + 1  # 0x7F
_MIDDLE_CODE = 4.0  # the other value that four over six may map the amax of a block to
_FLOAT_MAX = torch.finfo(torch.float32).max
_SIGN_CODE = 8
_CODE_OF_MAX = Format.E2M1.max_code


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
    """Cast a matrix to NVFP4, rowwise, columnwise or both.

    x ~ data * scale_inv * tensor_scale_inv, tensor_scale_inv = amax / (6 * 448), scale_inv ~ block amax * 448 / amax

    Args:
        x: float32, bfloat16 or float16 [M, K], any strides.
        two_dimensional: one scale for a square of 16 x 16 instead of 16 of a row; the columnwise copy is then the
            transpose of the same codes.
        hadamard: the columnwise copy is that of `hadamard_rows` of the transpose, so M is rounded up to a multiple of
            16 in it: a transformed group has something in every place.
        four_over_six: choose the scale of each block, or square, by this error from two: one maps its amax to 6, the
            other to 4. tensor_scale_inv is then amax / (6 * 256).
        row_scaled: each row of the rowwise copy has an amax and a tensor_scale_inv of its own.
        seed: int64 [] on the device of x: round stochastically, with the bits of this seed; None rounds to nearest.
        orientation: which copies to make; each comes from x, with blocks along its own last dimension.
        pad: the codes in a row of a copy are rounded up to a multiple of it, an even number, with zeros.
        swizzled: return the scales of the blocks as `swizzle` orders them.

    Returns:
        data: uint8 [M, K_pad / 2], two codes a byte, the even element in the low half, or None.
        columnwise_data: uint8 [K, M_pad / 2], or None.
        scale_inv: uint8 [M, ceil(K / 16)], E4M3 codes, or None; that of a square stands in each of its rows.
        columnwise_scale_inv: uint8 [K, ceil(M / 16)], or None.
        tensor_scale_inv: float32 [], or [M] if row_scaled, or None.
        columnwise_tensor_scale_inv: float32 [], or None; with `hadamard` from the amax of what was transformed.
        All contiguous, each in a storage of its own.

    Raises:
        ShapeError: x is not a matrix.
        ConfigError: `pad` is odd, or options exclude each other.

    Numerics: float32 throughout, one rounding to E4M3 for a scale and one to E2M1 for a code. Nearest-even, or up
        with the probability of the distance from the lower neighbour, rounded to 1/256; saturates at +-6; -0 stays
        -0. A block whose scale underflows has byte 0 and decodes to 0. FP4 has neither infinity nor NaN, so both show
        in tensor_scale_inv, which becomes infinite or NaN, and with it all that it decodes; the code of an infinite
        element is +-6. A block with a NaN has the E4M3 NaN as its scale and +6 as all of its codes.
    Source: TransformerEngine 2.20, common/cast/nvfp4 and custom_recipes/reference_nvfp4.py; it leaves open which
        random bits are used.
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
    values = x.reshape(-1).to(torch.float32).view(x.shape)
    rowwise = columnwise = None
    if orientation.rowwise or two_dimensional:
        whole = _amax_of_rows(values) if row_scaled else amax(values)
        rowwise = _cast_rows(values, whole, two_dimensional, four_over_six, seed, stream=0)
    if orientation.columnwise:
        if two_dimensional:
            assert rowwise is not None
            columnwise = _transpose(*rowwise)
        else:
            transpose = values.t().clone(memory_format=torch.contiguous_format)
            if hadamard:
                transpose = hadamard_rows(pad_columns(transpose, _BLOCK)).to(torch.float32)
            columnwise = _cast_rows(
                transpose, amax(transpose), two_dimensional, four_over_six, seed, stream=1
            )
    data, scale_inv, tensor_scale_inv = _store(
        rowwise if orientation.rowwise else None, pad, swizzled
    )
    columnwise_data, columnwise_scale_inv, columnwise_tensor_scale_inv = _store(
        columnwise, pad, swizzled
    )
    return (
        data,
        columnwise_data,
        scale_inv,
        columnwise_scale_inv,
        tensor_scale_inv,
        columnwise_tensor_scale_inv,
    )


def decode_nvfp4(data: Tensor, scale_inv: Tensor, contraction: int | None = None) -> Tensor:
    """The values of one copy, but for the scale of the tensor.

    x ~ result * tensor_scale_inv

    Args:
        data: uint8 [rows, bytes], two codes a byte; may be padded with zeros.
        scale_inv: uint8 [rows, blocks], not swizzled; codes behind the last block are padding.
        contraction: columns of the result; None keeps the padding.

    Returns:
        float32 [rows, contraction], or [rows, 2 * bytes]; 0 behind the last block.

    Numerics: exact.
    """
    codes = unpack_codes(data)
    rows, columns = codes.shape
    blocks = -(-columns // _BLOCK)
    known = min(blocks, scale_inv.shape[1])
    padding = (0, blocks - known)
    scales = torch.nn.functional.pad(decode(scale_inv[:, :known], Format.E4M3), padding)
    values = pad_columns(_decode_codes(codes), _BLOCK).view(rows, blocks, _BLOCK)
    values = (values * scales[:, :, None]).view(rows, blocks * _BLOCK)
    values = values[:, : columns if contraction is None else contraction]
    return values.clone(memory_format=torch.contiguous_format)


def hadamard_rows(x: Tensor) -> Tensor:
    """The random Hadamard transform along the last dimension, group by group.

    y = x diag(signs) H / 4, with H the Hadamard matrix of order 16 in Sylvester's order

    It is orthogonal, so it cancels in a product of two matrices that are both transformed along the contraction, and
    it spreads an outlier over its group. "Random" is the vector of signs, which is fixed.

    Args:
        x: floating dtype [..., 16 n].

    Returns:
        bfloat16, the shape of x.

    Raises:
        ShapeError: the last dimension is no multiple of 16.

    Numerics: float32, in four stages of sums and differences, a fixed order that the kernels share; times 1/4; one
        rounding to bfloat16.
    Source: TransformerEngine 2.20, custom_recipes/reference_nvfp4.py, get_wgrad_sign_vector.
    """
    exact = _sums_and_differences(_groups(x) * _signs(x)) * 0.25
    return _round_to_bfloat16(exact).to(torch.bfloat16).view(x.shape)


def inverse_hadamard_rows(y: Tensor) -> Tensor:
    """The inverse of `hadamard_rows`.

    x = y H diag(signs) / 4

    Args:
        y: floating dtype [..., 16 n].

    Returns:
        float32, the shape of y.

    Raises:
        ShapeError: the last dimension is no multiple of 16.

    Numerics: float32, not rounded to bfloat16.
    """
    return (_sums_and_differences(_groups(y)) * 0.25 * _signs(y)).view(y.shape)


def pack_codes(codes: Tensor, pad: int = 2) -> Tensor:
    """Two codes a byte, the even element in the low half.

    Args:
        codes: uint8 [rows, columns], values below 16.
        pad: an even number; columns are rounded up to a multiple of it, with code 0.

    Returns:
        uint8 [rows, columns_pad / 2].
    """
    rows, columns = codes.shape
    # Flat and back, so that strides of codes, also of dimensions of size 1, do not reach the result.
    low, high = pad_columns(codes, pad).reshape(-1).view(-1, 2).unbind(1)
    return (low | (high << 4)).view(rows, (columns + -columns % pad) // 2)


def unpack_codes(data: Tensor) -> Tensor:
    """The inverse of `pack_codes`.

    Args:
        data: uint8 [rows, bytes].

    Returns:
        uint8 [rows, 2 * bytes], values below 16, the padding included.
    """
    rows, columns = data.shape
    return torch.stack((data & 0xF, data >> 4), -1).view(rows, 2 * columns)


def transpose_codes(data: Tensor, rows: int, contraction: int, pad: int = 2) -> Tensor:
    """Transpose packed codes.

    Args:
        data: uint8 [rows, bytes].
        rows: of `data`.
        contraction: codes in a row that are no padding.
        pad: an even number; rows are rounded up to a multiple of it, with code 0.

    Returns:
        uint8 [contraction, rows_pad / 2].
    """
    return pack_codes(unpack_codes(data)[:rows, :contraction].t(), pad)


def _amax_of_rows(x: Tensor) -> Tensor:
    """`amax` of each row, float32 [rows]."""
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0])
    largest = x.abs().amax(1)
    return torch.where(largest.isnan(), float("nan"), largest)


def _cast_rows(
    x: Tensor,
    amax: Tensor,
    two_dimensional: bool,
    four_over_six: FourOverSix | None,
    seed: Tensor | None,
    *,
    stream: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """One copy: codes [rows, contraction], scale_inv [rows, blocks], tensor_scale_inv.

    `x` is float32 [rows, contraction]; `amax` is float32 [] or [rows]. A block that x does not fill is filled with
    zeros, which change nothing in the others.
    """
    rows, contraction = x.shape
    square = _BLOCK if two_dimensional else 1
    padded = torch.nn.functional.pad(x, (0, -contraction % _BLOCK, 0, -rows % square))
    bands, blocks = padded.shape[0] // square, padded.shape[1] // _BLOCK
    x = padded.view(bands * square, blocks, _BLOCK)
    block_amax = x.abs().amax(2).view(bands, square, blocks).amax(1, keepdim=True)
    block_amax = block_amax.expand(bands, square, blocks).reshape(bands * square, blocks)
    threshold = None if seed is None else _thresholds(seed, bands * square, blocks, stream)
    if four_over_six is None:
        codes, scale_inv = _to_six(x, block_amax, amax.view(-1, 1), threshold)
    else:
        codes, scale_inv = _four_over_six(x, block_amax, amax.view(-1, 1), square, four_over_six)
    codes = codes.view(bands * square, blocks * _BLOCK)[:rows, :contraction]
    largest = _CODE_MAX * (_SCALE_MAX if four_over_six is None else four_over_six.scale_max)
    # amax has the one NaN that we write; a division would change its bits on some devices.
    return codes, scale_inv[:rows], torch.where(amax.isnan(), amax, _divide(amax, largest))


def _to_six(
    x: Tensor, block_amax: Tensor, amax: Tensor, threshold: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes [rows, blocks, 16] and scale_inv [rows, blocks] with the amax of each block mapped to 6."""
    scale = _tensor_scale(amax, _CODE_MAX * _SCALE_MAX)
    scale_inv = _encode_scales(block_amax * (scale * (1 / _CODE_MAX)))
    return _encode_blocks(x, scale_inv, scale, threshold), scale_inv


def _four_over_six(
    x: Tensor, block_amax: Tensor, amax: Tensor, square: int, error: FourOverSix
) -> tuple[Tensor, Tensor]:
    """As `_to_six`, with the amax of each block mapped to 6 or to 4; `square` rows decide together."""
    largest = _CODE_MAX * error.scale_max
    scale = _tensor_scale(amax, largest)
    wanted = _divide(block_amax, _CODE_MAX) * scale
    candidates = []
    for factor in (_CODE_MAX / _MIDDLE_CODE, 1.0):
        scale_inv = _encode_scales(wanted * factor)
        codes = _encode_blocks(x, scale_inv, scale, None)
        decoded = _decode_codes(codes) * decode(scale_inv, Format.E4M3)[:, :, None]
        decoded = _divide(decoded * amax[:, :, None], largest)
        candidates.append((codes, scale_inv, _block_error(decoded - x, square, error)))
    (codes4, scale_inv4, error4), (codes6, scale_inv6, error6) = candidates
    is_four = error4 < error6
    return torch.where(is_four[:, :, None], codes4, codes6), torch.where(
        is_four, scale_inv4, scale_inv6
    )


def _block_error(difference: Tensor, square: int, error: FourOverSix) -> Tensor:
    """The error of each block [rows, blocks]; the order of the sums is part of the definition.

    Along a row from left to right; then, where `square` rows decide together, halves of the rows onto each other.
    """
    terms = difference.abs() if error is FourOverSix.MAE else difference * difference
    total = terms[:, :, 0]
    for i in range(1, _BLOCK):
        total = total + terms[:, :, i]
    rows, blocks = total.shape
    total = total.view(rows // square, square, blocks)
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total.expand(rows // square, square, blocks).reshape(rows, blocks)


def _tensor_scale(amax: Tensor, largest: float) -> Tensor:
    """The factor that maps amax to `largest`; 1 where amax is zero, infinite or NaN."""
    scale = torch.div(torch.full_like(amax, largest), amax).clamp(max=_FLOAT_MAX)
    usable = (amax > 0) & (amax < float("inf"))
    return torch.where(usable, scale, 1.0)


def _encode_scales(x: Tensor) -> Tensor:
    """E4M3 codes. Compiled code may set the sign of a NaN that it has been asked to clear."""
    return torch.where(x.isnan(), _NAN_SCALE, encode(x, Format.E4M3))


def _encode_blocks(x: Tensor, scale_inv: Tensor, scale: Tensor, threshold: Tensor | None) -> Tensor:
    """Codes of x [rows, blocks, 16] by the scales of its blocks [rows, blocks] and of the tensor [1 or rows, 1]."""
    decoded = decode(scale_inv, Format.E4M3) * torch.div(torch.ones_like(scale), scale)
    factor = torch.div(torch.ones_like(decoded), decoded)
    factor = torch.where(factor > _FLOAT_MAX, _FLOAT_MAX, factor)  # keeps NaN
    return _encode_codes(x * factor[:, :, None], threshold)


def _encode_codes(x: Tensor, threshold: Tensor | None) -> Tensor:
    """Codes of float32 values: to nearest, or up where the distance from the lower neighbour reaches a threshold.

    Between 0 and 2, 2 and 4, 4 and 6 the codes are 1/2, 1 and 2 apart, so they are integers of 2x, x + 2 and x/2 + 4,
    of which the smallest is the right one, before rounding and so after it.
    """
    magnitude = x.abs().clamp(max=_CODE_MAX)
    code = torch.minimum(
        torch.minimum(_to_integer(magnitude * 2, threshold), _to_integer(magnitude, threshold) + 2),
        _to_integer(magnitude * 0.5, threshold) + 4,
    )
    sign = (x.view(torch.int32) >> 31) & _SIGN_CODE
    code = code.to(torch.int32) | sign
    return torch.where(x.isnan(), _CODE_OF_MAX, code).to(torch.uint8)


def _to_integer(x: Tensor, threshold: Tensor | None) -> Tensor:
    if threshold is None:
        return x.round()
    lower = x.floor()
    return torch.where(x - lower >= threshold, lower + 1, lower)


def _thresholds(seed: Tensor, rows: int, blocks: int, stream: int) -> Tensor:
    """Uniform in (0, 1), float32 [rows, blocks, 16]: 1 - (r + 1/2) / 256 for random bytes r."""
    return (255.5 - random_bytes(seed, rows, blocks, stream).to(torch.float32)) * (1 / 256)


def _decode_codes(codes: Tensor) -> Tensor:
    """The values of codes, float32."""
    magnitude = (codes & _CODE_OF_MAX).to(torch.float32)
    # Each is the largest of three lines, the inverses of those in `_encode_codes`.
    value = torch.maximum(torch.maximum(magnitude * 0.5, magnitude - 2), magnitude * 2 - 8)
    return torch.where(codes < _SIGN_CODE, value, -value)


def _divide(x: Tensor, divisor: float) -> Tensor:
    """Correctly rounded: a tensor over a number may be computed as tensor times reciprocal."""
    return torch.div(x, torch.full_like(x, divisor))


def _transpose(
    codes: Tensor, scale_inv: Tensor, tensor_scale_inv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The other copy of what was cast in squares: each column of scales now stands in 16 rows."""
    squares = scale_inv[::_BLOCK].t()
    blocks, bands = squares.shape
    rows = squares[:, None].expand(blocks, _BLOCK, bands).reshape(blocks * _BLOCK, bands)
    return codes.t(), rows[: codes.shape[1]], tensor_scale_inv.clone()


def _store(
    copy: tuple[Tensor, Tensor, Tensor] | None, pad: int, swizzled: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if copy is None:
        return None, None, None
    codes, scale_inv, tensor_scale_inv = copy
    if swizzled:
        scale_inv = swizzle(scale_inv)
    return (
        pack_codes(codes, pad),
        scale_inv.clone(memory_format=torch.contiguous_format),
        tensor_scale_inv,
    )


def _groups(x: Tensor) -> Tensor:
    """float32 [n, 16]."""
    if x.shape[-1] % _BLOCK:
        raise ShapeError(
            f"the Hadamard transform needs a last dimension that is a multiple of {_BLOCK} (x: {describe(x)})"
        )
    return x.reshape(-1).to(torch.float32).view(-1, _BLOCK)


def _signs(x: Tensor) -> Tensor:
    """The vector of signs, float32 [16]; by arithmetic, since data from the host cannot be copied in a CUDA graph."""
    place = torch.arange(_BLOCK, dtype=torch.int32, device=x.device)
    signs = 1 - 2 * ((torch.full_like(place, HADAMARD_SIGN_CHANGES) >> place) & 1)
    return signs.to(torch.float32)  # not by arithmetic with a float, which gives the default dtype


def _round_to_bfloat16(x: Tensor) -> Tensor:
    """To nearest, float32 to float32. By its bits, for a compiler may leave out the way to bfloat16 and back."""
    bits = x.view(torch.int32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & -(1 << 16)
    return torch.where(x.isnan(), x, rounded.view(torch.float32))


def _sums_and_differences(groups: Tensor) -> Tensor:
    """groups @ H, [n, 16]: four stages, each of which transforms the last bit of the index and makes it the first."""
    for _ in range(_BLOCK.bit_length() - 1):
        even, odd = groups.view(-1, _BLOCK // 2, 2).unbind(2)
        groups = torch.cat((even + odd, even - odd), 1)
    return groups
