"""One scale for a whole tensor: amax, scale, cast and its inverse.

In this module `scale` is the factor before the cast; what is returned and stored is always its
inverse, `scale_inv`, which decodes: x ~ data * scale_inv.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullgraph.errors import ShapeError, describe
from fullgraph.formats import ROWWISE, Format, Orientation, largest_finite
from fullgraph.reference.codes import decode, encode

_SIGN_AND_EXPONENT = -(1 << 23)  # 0xFF800000: what a float32 keeps when its mantissa is cleared


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of a tensor.

    Args:
        x: any floating dtype, any shape, any strides.

    Returns:
        float32 [], 0 for a tensor without elements.

    Numerics: NaN if any element is NaN, always the NaN 0x7FC00000; a float64 magnitude is rounded
        to float32.
    """
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(x)
    largest = torch.maximum(low.abs(), high.abs()).to(torch.float32)
    return torch.where(largest.isnan(), float("nan"), largest)


def scale_from_amax(
    amax: Tensor,
    format: Format,
    input_dtype: torch.dtype,
    *,
    eps: float = 0.0,
    power_of_two: bool = False,
) -> Tensor:
    """The factor that maps `amax` to the largest value of a format.

    scale = format.max / max(amax, eps)

    Args:
        amax: float32, any shape.
        format: the format of the cast.
        input_dtype: dtype of the tensor that will be cast; bounds the scale.
        eps: lower bound of amax.
        power_of_two: round the scale down to a power of two, so that the cast never saturates.

    Returns:
        float32, the shape of `amax`. To be multiplied before the cast; never stored.

    Numerics: correctly rounded division. 1 where amax is zero, infinite or NaN. Where the quotient
        overflows, the largest finite value of `input_dtype` (bounded by float32's).
    Source: TransformerEngine 2.20, common/recipe/recipe_common.cuh, compute_scale_from_amax; its
        Python reference differs for an infinite or NaN amax.
    """
    bounded = amax.clamp(min=eps)
    # torch.div of two tensors is exact. A Python number over a tensor is not: PyTorch turns it
    # into number * reciprocal, one unit off for a quarter of all values.
    scale = torch.div(torch.full_like(bounded, format.max), bounded)
    scale = torch.where(scale == float("inf"), largest_finite(input_dtype), scale)
    usable = (bounded > 0) & (bounded < float("inf"))
    scale = torch.where(usable, scale, 1.0)
    if power_of_two:
        scale = (scale.view(torch.int32) & _SIGN_AND_EXPONENT).view(torch.float32)
    return scale


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
    """Cast a matrix with one scale, rowwise, columnwise or both.

    data = saturate(x * scale), scale = scale_from_amax(amax), scale_inv = 1 / scale

    Args:
        x: floating dtype [M, K], any strides.
        amax: float32 [], the magnitude to be mapped to `format.max`; usually `amax(x)`.
        format: E4M3 or E5M2.
        eps: see `scale_from_amax`.
        power_of_two: see `scale_from_amax`.
        orientation: which copies to make.
        pad: the last dimension of a copy, the one that a GEMM contracts, is rounded up to a multiple of it, with zeros.

    Returns:
        rowwise: uint8 [M, K_pad], or None.
        columnwise: uint8 [K, M_pad], the transpose of the same bytes, or None.
        scale_inv: float32 [].
        All contiguous, each in a storage of its own.

    Raises:
        ShapeError: x is not a matrix.

    Numerics: product in float32, nearest-even, saturates at +-format.max (infinity too); -0 stays
        -0; every NaN becomes `format.nan_code`. Padding is byte 0.
    """
    scale = scale_from_amax(amax, format, x.dtype, eps=eps, power_of_two=power_of_two)
    return _cast("cast_per_tensor", x, scale, format, orientation, pad)


def cast_delayed(
    x: Tensor,
    encode_scale: Tensor,
    amax: Tensor | None,
    format: Format,
    *,
    orientation: Orientation = ROWWISE,
    pad: int = 1,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Cast a matrix with a scale from elsewhere, and record the magnitude of what was cast.

    data = saturate(x * encode_scale), scale_inv = 1 / encode_scale; amax = max(amax, |x|)

    Args:
        x: floating dtype [M, K], any strides.
        encode_scale: float32 [], the factor before the cast.
        amax: float32 [], not negative, raised in place; None records nothing.
        format: E4M3 or E5M2.
        orientation: which copies to make.
        pad: see `cast_per_tensor`.

    Returns:
        As `cast_per_tensor`; scale_inv in a storage of its own too.

    Raises:
        ShapeError: x is not a matrix.

    Numerics: the cast as in `cast_per_tensor`. NaN elements do not enter the amax, infinite ones do. Doing it twice
        leaves the same amax as doing it once.
    Source: TransformerEngine 2.20, the casts of DelayedScaling.
    """
    copies = _cast("cast_delayed", x, encode_scale, format, orientation, pad)
    if amax is not None and x.numel() > 0:
        magnitudes = x.abs()
        numbers = torch.where(magnitudes.isnan(), 0.0, magnitudes)
        amax.copy_(torch.maximum(amax, numbers.amax().to(torch.float32)))
    return copies


def _cast(
    name: str, x: Tensor, scale: Tensor, format: Format, orientation: Orientation, pad: int
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The cast itself, once the factor before it is known."""
    if x.dim() != 2:
        raise ShapeError(f"{name}: a matrix is needed (x: {describe(x)})")
    # Flat and back, so that strides of x, also of dimensions of size 1, do not reach the result.
    data = encode(x.reshape(-1).to(torch.float32) * scale, format).view(x.shape)
    rowwise = pad_columns(data, pad) if orientation.rowwise else None
    columnwise = None
    if orientation.columnwise:
        columnwise = pad_columns(data.t().clone(memory_format=torch.contiguous_format), pad)
    return rowwise, columnwise, torch.div(torch.ones_like(scale), scale)


def dequantize_per_tensor(
    data: Tensor, scale_inv: Tensor, format: Format, dtype: torch.dtype
) -> Tensor:
    """The values that a quantized tensor stands for.

    x ~ data * scale_inv

    Args:
        data: uint8, any shape, codes of `format`.
        scale_inv: float32 [].
        format: E4M3 or E5M2.
        dtype: dtype of the result.

    Returns:
        `dtype`, the shape of `data`.

    Numerics: product in float32, then one rounding to `dtype`.
    """
    return (decode(data, format) * scale_inv).to(dtype)


def pad_columns(data: Tensor, multiple: int) -> Tensor:
    """Round the last dimension of a matrix up to a multiple, filling with zeros; the same tensor if it is one."""
    missing = -data.shape[-1] % multiple
    return torch.nn.functional.pad(data, (0, missing)) if missing else data
