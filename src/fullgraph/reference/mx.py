"""MXFP8: one power of two for each block of 32 elements, or for each square of 32 x 32.

A scale is a byte e of format E8M0 and decodes by 2^(e - 127); 0xFF is NaN. It is computed from the bits of a float32
amax as an integer, since a logarithm is off just beside powers of two and torch's cast to E8M0 rounds to nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullgraph.errors import ConfigError, ShapeError, describe
from fullgraph.formats import ROWWISE, Format, MXScaleMode, Orientation, Scaling
from fullgraph.reference.codes import decode, encode
from fullgraph.reference.per_tensor import pad_columns
from fullgraph.reference.swizzle import swizzle

_BLOCK = Scaling.BLOCK_1X32.block
_BIAS = Format.E8M0.value.bias
_LARGEST = Format.E8M0.max_code  # 0xFE
_NAN = _LARGEST + 1  # 0xFF

# A float32 as an integer: the exponent stands above 23 bits of mantissa.
_MANTISSA_BITS = 23
_MANTISSA = (1 << 23) - 1
_MAGNITUDE = 0x7FFFFFFF
_INF_BITS = 0x7F800000


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
    """Cast a matrix to MXFP8, rowwise, columnwise or both.

    data = saturate(x * 2^(127 - e)), scale_inv = e = the byte that `scale_mode` makes of the amax of the block

    Args:
        x: float32, bfloat16 or float16 [M, K], any strides.
        format: E4M3 or E5M2.
        scale_mode: how e follows from the amax.
        two_dimensional: one scale for a square of 32 x 32 instead of 32 of a row; the columnwise copy is then the
            transpose of the same bytes.
        orientation: which copies to make; each comes from x, with blocks along its own last dimension.
        pad: the last dimension of a copy, the one that a GEMM contracts, is rounded up to a multiple of it, with zeros.
        swizzled: return the scales as `swizzle` orders them.

    Returns:
        data: uint8 [M, K_pad], or None.
        columnwise_data: uint8 [K, M_pad], or None.
        scale_inv: uint8 [M, ceil(K / 32)], or None; that of a square stands in each of its rows.
        columnwise_scale_inv: uint8 [K, ceil(M / 32)], or None.
        All contiguous, each in a storage of its own.

    Raises:
        ShapeError: x is not a matrix.
        ConfigError: another format.

    Numerics: nearest-even, saturates at +-format.max; -0 stays -0. Blocks at ragged edges hold what is there. A block
        of zeros has e = 0, as has every block too small for a scale of its own. Infinity gives e = 0xFE in every mode
        and is cast to +-format.max, which decodes to infinity again. NaN gives e = 0xFF and `format.nan_code` in the
        whole block, which decodes to NaN.
    Source: OCP Microscaling Formats 1.0; TransformerEngine 2.20, common/cast/mxfp8; torchao 0.18,
        prototype/mx_formats/mx_tensor.py, whose own RCEIL is half of this one just above some powers of two.
    """
    if x.dim() != 2:
        raise ShapeError(f"cast_mx: a matrix is needed (x: {describe(x)})")
    if format not in (Format.E4M3, Format.E5M2):
        raise ConfigError(f"cast_mx: the format must be E4M3 or E5M2, got {format.name}")
    square = _BLOCK if two_dimensional else 1
    data = scale_inv = columnwise_data = columnwise_scale_inv = None
    if orientation.rowwise:
        data, scale_inv = _cast_rowwise(x, format, scale_mode, square, pad, swizzled)
    if orientation.columnwise:
        columnwise_data, columnwise_scale_inv = _cast_rowwise(
            x.t(), format, scale_mode, square, pad, swizzled
        )
    return data, columnwise_data, scale_inv, columnwise_scale_inv


def decode_mx(data: Tensor, scale_inv: Tensor, format: Format) -> Tensor:
    """The values of one copy.

    x ~ data * 2^(scale_inv - 127), block by block

    Args:
        data: uint8 [rows, contraction], codes of `format`; may be padded with zeros.
        scale_inv: uint8 [rows, blocks], not swizzled; columns of `data` behind the last block are padding.
        format: E4M3 or E5M2.

    Returns:
        float32 [rows, contraction]. NaN in blocks whose scale is 0xFF, 0 behind the last block.

    Numerics: exact, except that magnitudes from 2^128 on become infinity.
    """
    contraction = data.shape[1]
    blocks = -(-contraction // _BLOCK)
    scales = torch.nn.functional.pad(scale_inv, (0, blocks - scale_inv.shape[1]))
    exponent = _repeat(scales.to(torch.int32), 1, _BLOCK, contraction)
    values = _times_power_of_two(decode(data, format), exponent - _BIAS)
    return torch.where(exponent == _NAN, float("nan"), values)


def _cast_rowwise(
    x: Tensor, format: Format, scale_mode: MXScaleMode, square: int, pad: int, swizzled: bool
) -> tuple[Tensor, Tensor]:
    """One copy and its scales; `square` rows share them."""
    rows, columns = x.shape
    bands, blocks = -(-rows // square), -(-columns // _BLOCK)
    padding = (0, blocks * _BLOCK - columns, 0, bands * square - rows)
    padded = torch.nn.functional.pad(x.to(torch.float32), padding)
    tiles = padded.reshape(bands, square, blocks, _BLOCK)
    # Magnitudes are ordered as their bits are, with NaN on top.
    amax_bits = (tiles.view(torch.int32) & _MAGNITUDE).amax((1, 3))
    exponent = _scale_exponent(amax_bits, format, scale_mode)
    row_exponent = _repeat(exponent, 0, square, rows)
    element_exponent = _repeat(row_exponent, 1, _BLOCK, columns)
    scaled = _times_power_of_two(x.to(torch.float32), _BIAS - element_exponent)
    # Flat and back, so that strides of x, also of dimensions of size 1, do not reach the result.
    codes = encode(scaled.reshape(-1), format).view(x.shape)
    # Every NaN is in such a block, so it does not matter which of its NaNs the cast makes of one.
    assert format.nan_code is not None
    codes = codes.masked_fill(element_exponent == _NAN, format.nan_code)
    scale_inv = row_exponent.to(torch.uint8)
    return pad_columns(codes, pad), swizzle(scale_inv) if swizzled else scale_inv


def _scale_exponent(amax_bits: Tensor, format: Format, scale_mode: MXScaleMode) -> Tensor:
    """The E8M0 code for magnitudes given as bits, int32 to int32.

    A carry out of the mantissa is what rounds the exponent up. RCEIL looks at the amax in units of format.max, where a
    subnormal is 2^-127, code 0, if it is not above that; the others look at the exponent of the amax itself.
    """
    bits = amax_bits.clamp(max=_INF_BITS)
    if scale_mode is MXScaleMode.RCEIL:
        bits = (bits.view(torch.float32) * (1.0 / format.max)).view(torch.int32)
        carried = torch.where(bits > _MANTISSA, bits + _MANTISSA, bits + (_MANTISSA >> 1))
        exponent = carried >> _MANTISSA_BITS
    else:
        carry = {
            MXScaleMode.FLOOR: 0,
            MXScaleMode.CEIL: _MANTISSA,
            MXScaleMode.EVEN: int(format.eps * (1 << _MANTISSA_BITS)) // 2,
        }[scale_mode]
        exponent = ((bits + carry) >> _MANTISSA_BITS) - format.max_exponent
    exponent = torch.where(amax_bits < _INF_BITS, exponent.clamp(0, _LARGEST), _LARGEST)
    return torch.where(amax_bits > _INF_BITS, _NAN, exponent)


def _repeat(values: Tensor, dim: int, times: int, size: int) -> Tensor:
    """Repeat each value along a dimension, up to `size`; contiguous.

    The indices are data on purpose. Where they are a division of the loop index, as after `repeat_interleave` or
    `expand`, inductor leaves the end of a size that `times` does not divide unwritten (pytorch/pytorch#195582; CPU,
    torch 2.11 to 2.14).
    """
    index = torch.arange(size, device=values.device) // times
    return values.index_select(dim, index)


def _times_power_of_two(values: Tensor, exponent: Tensor) -> Tensor:
    """values * 2^exponent for int32 exponents from -128 to 127.

    In two steps, because 2^-127 and 2^-128 are subnormal: exact, unless the result is no normal number.
    """
    half = exponent >> 1
    for part in (half, exponent - half):
        values = values * ((part + 127) << _MANTISSA_BITS).view(torch.float32)
    return values
