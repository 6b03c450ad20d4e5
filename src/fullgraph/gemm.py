"""Which routine multiplies two quantized matrices, and its call.

`select` decides from device, formats and scalings alone, so a plan can decide before there is data; `gemm` then runs
the choice without deciding anything again. NATIVE is F.scaled_mm, REFERENCE is `reference.gemm_upcast`; both take
the same operands and differ only in the rounding of the sums. What is native, as scalings of a and b:

    ============================  ====================  =====================================================
    scalings                      CUDA devices          formats
    ============================  ====================  =====================================================
    per tensor, per row, mixed    8.9 and newer         E4M3, E5M2; not E5M2 by E5M2
    1x128 by 1x128 or 128x128     9.x, CUDA 12.9        E4M3
    1x32 by 1x32 (MXFP8)          10.x                  E4M3, E5M2; not E5M2 by E5M2
    1x16 by 1x16 (NVFP4)          10.x                  E2M1
    ============================  ====================  =====================================================

Source: PyTorch, aten/src/ATen/native/cuda/ScaledBlas.cpp; measured on an H200 with torch 2.11.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import warnings

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

from fullgraph import reference
from fullgraph.errors import EmulationWarning, HardwareError
from fullgraph.formats import Format, Scaling
from fullgraph.kernels import compute_capability
from fullgraph.reference import Operand
from fullgraph.tensor import Layout

__all__ = ["GemmBackend", "Kind", "Operand", "add_product", "gemm", "layout", "select"]

Capability = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What `select` needs to know of an operand.

    Args:
        format: of its codes; None where they are none that a GEMM reads.
        scaling: of its scales.
    """

    format: Format | None
    scaling: Scaling

    def __str__(self) -> str:
        return f"{self.format.name} {self.scaling.value}" if self.format else "decoded values"


class GemmBackend(enum.Enum):
    """A routine for GEMMs of quantized matrices; see the table of this module."""

    NATIVE = "native"
    REFERENCE = "reference"


_FP8 = (Format.E4M3, Format.E5M2)
_OUTER = (Scaling.TENSOR, Scaling.ROW)
"""Scales that are constant along the contraction."""
_CUBLAS_SCALES = (12, 9)
"""The CUDA version since which cuBLASLt knows scales per row and per block of 128, on Hopper."""
_ROWS_OF_A = 4
"""Rows of a 1x128-scaled left operand: their scales must lie a multiple of 16 bytes apart."""
_ROWS_OF_B = 16
"""Rows of every right operand."""


def select(device: torch.device, a: Kind, b: Kind, *, allow_emulation: bool = True) -> GemmBackend:
    """Choose the routine, without touching data. On a CUDA device the first emulation of each kind warns.

    Args:
        device: where the operands live.
        a: left operand.
        b: right operand.
        allow_emulation: False refuses what the device cannot multiply natively.

    Returns:
        The routine.

    Raises:
        HardwareError: not native, and emulation is not allowed.
    """
    if _is_native(compute_capability(device), a, b):
        return GemmBackend.NATIVE
    if not allow_emulation:
        raise HardwareError(
            f"gemm: {device} does not multiply {a} by {b} natively",
            why="the recipe was made with allow_emulation=False",
            do="allow emulation (the same operands, in high precision), or choose another recipe; "
            "`fullgraph doctor` lists what a device has",
        )
    if device.type == "cuda":
        _warn_of_emulation(str(device), a, b)
    return GemmBackend.REFERENCE


def _is_native(capability: Capability, a: Kind, b: Kind) -> bool:
    scalings, formats = (a.scaling, b.scaling), (a.format, b.format)
    if not layout_of(capability).native.issuperset(scalings):
        return False
    fp8 = all(f in _FP8 for f in formats) and formats != (Format.E5M2, Format.E5M2)
    if all(s in _OUTER for s in scalings) or scalings == (Scaling.BLOCK_1X32,) * 2:
        return fp8
    if a.scaling is Scaling.BLOCK_1X128 and b.scaling in (
        Scaling.BLOCK_1X128,
        Scaling.BLOCK_128X128,
    ):
        return formats == (Format.E4M3, Format.E4M3)
    return scalings == (Scaling.BLOCK_1X16,) * 2 and formats == (Format.E2M1, Format.E2M1)


@functools.cache
def _warn_of_emulation(device: str, a: Kind, b: Kind) -> None:
    warnings.warn(
        f"{device} does not multiply {a} by {b} natively: emulated, with the same operands in high precision. "
        "Slower; meant for trying a recipe out.",
        EmulationWarning,
        stacklevel=2,
    )


def layout(device: torch.device) -> Layout:
    """How the GEMMs of a device want their operands."""
    return layout_of(compute_capability(device))


@functools.cache
def layout_of(capability: Capability) -> Layout:
    """The scalings that devices of a CUDA compute capability multiply natively, as a `Layout`."""
    native: set[Scaling] = set()
    if capability >= (8, 9):
        native.update(_OUTER)
    if capability[0] == 9 and _cuda_version() >= _CUBLAS_SCALES:
        native.update((Scaling.BLOCK_1X128, Scaling.BLOCK_128X128))
    if capability[0] == 10:
        native.update((Scaling.BLOCK_1X32, Scaling.BLOCK_1X16))
    return Layout(frozenset(native))


def _cuda_version() -> tuple[int, int]:
    """Which torch was built with; builds without count as the newest."""
    major, minor = (torch.version.cuda or "99.0").split(".")[:2]
    return int(major), int(minor)


def gemm(
    backend: GemmBackend,
    a: Operand,
    b: Operand,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    split_accumulator: bool = False,
) -> Tensor:
    """Multiply two quantized matrices.

    out[m, n] = sum_k a[m, k] b[n, k] + bias[n]

    Args:
        backend: what `select` said; the operands have the `layout` of the device.
        a: [M, K].
        b: [N, K].
        bias: floating dtype [N], or None.
        out_dtype: float32, bfloat16 or float16.
        split_accumulator: promote partial sums to float32 as they are added (slower, exacter). It matters on Hopper
            and Ada with scales per tensor and per row; blocks are always promoted, and the reference always sums in
            float32.

    Returns:
        `out_dtype` [M, N], contiguous. M, N or K may be 0; K = 0 gives the bias, or zeros.

    Numerics: sum, scale and bias in float32, one rounding to `out_dtype`. The sums of Hopper's FP8 units are short of
        float32: about 1e-4 of the result.
    """
    if backend is GemmBackend.REFERENCE:
        return reference.gemm_upcast(a, b, bias=bias, out_dtype=out_dtype)
    use_fast_accum = not split_accumulator and a.scaling in _OUTER
    rows_of_a, rows_of_b = a.data.shape[0], b.data.shape[0]
    a, b = _with_row_scales(a, b)
    if a.scaling is Scaling.BLOCK_1X128:
        a = _pad_rows(a, _ROWS_OF_A)
    if rows_of_b % _ROWS_OF_B:
        b = _pad_rows(b, _ROWS_OF_B)
        bias = None if bias is None else pad(bias, (0, b.data.shape[0] - rows_of_b))
    in_one = bias is None or _adds_bias(bias, out_dtype, a)
    by_row: tuple[Tensor | None, Tensor | None] = (None, None)
    if not _multiplies_row_scales(a, b, out_dtype if in_one else torch.float32):
        in_one = False
        (a, *scale_a), (b, *scale_b) = _without_row_scales(a), _without_row_scales(b)
        by_row = scale_a[0], scale_b[0]
    if in_one:
        out = _scaled_mm(a, b, bias, out_dtype, use_fast_accum)
    else:
        out = _scaled_mm(a, b, None, torch.float32, use_fast_accum)
        for scale, shape in zip(by_row, ((-1, 1), (1, -1)), strict=True):
            out = out if scale is None else out.mul_(scale.view(shape))
        out = out if bias is None else out.add_(bias.to(torch.float32))
        out = out.to(out_dtype)
    return out[:rows_of_a, :rows_of_b].contiguous()


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b in high precision, in place: inside of the GEMM where the device has such a one.

    Args:
        out: float32, bfloat16 or float16 [M, N].
        a: floating dtype [M, K].
        b: the dtype of a, [K, N].

    Numerics: sums in float32, one rounding to the dtype of out.
    """
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.dtype == torch.float32 and out.is_cuda:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        out.add_(a.to(torch.float32) @ b.to(torch.float32))


def _with_row_scales(a: Operand, b: Operand) -> tuple[Operand, Operand]:
    """Both per tensor or both per row: a scale per tensor is the same for each row."""
    if {a.scaling, b.scaling} != {Scaling.TENSOR, Scaling.ROW}:
        return a, b
    first, second = (
        dataclasses.replace(
            o,
            scale_inv=o.scale_inv.expand(o.data.shape[0]).contiguous(),  # type: ignore[union-attr]
            scaling=Scaling.ROW,
        )
        for o in (a, b)
    )
    return first, second


def _multiplies_row_scales(a: Operand, b: Operand, out_dtype: torch.dtype) -> bool:
    """Whether scaled_mm multiplies with all scales of these operands.

    For NVFP4 it takes one scale for a whole tensor only. Scales per row are cuBLASLt's on Hopper; elsewhere CUTLASS
    takes over, for E4M3 on the right, and until torch 2.14 it writes nothing but bfloat16.
    """
    if Scaling.ROW not in (a.scaling, b.scaling):
        return all(o.tensor_scale_inv is None or o.tensor_scale_inv.dim() == 0 for o in (a, b))
    is_hopper = compute_capability(a.data.device)[0] == 9
    if is_hopper and _cuda_version() >= _CUBLAS_SCALES:
        return True
    return b.format is Format.E4M3 and out_dtype == torch.bfloat16


def _without_row_scales(operand: Operand) -> tuple[Operand, Tensor | None]:
    """The operand with one for every scale of a row, and these scales, to be multiplied afterwards."""
    if operand.scaling is Scaling.ROW:
        by_row = operand.scale_inv
        assert by_row is not None
        one = by_row.new_ones(())
        return dataclasses.replace(operand, scale_inv=one, scaling=Scaling.TENSOR), by_row
    by_row = operand.tensor_scale_inv
    if by_row is None or by_row.dim() == 0:
        return operand, None
    return dataclasses.replace(operand, tensor_scale_inv=by_row.new_ones(())), by_row


def _pad_rows(operand: Operand, multiple: int) -> Operand:
    """Zero rows up to a multiple, and scales for them where each row has its own."""
    missing = -operand.data.shape[0] % multiple
    if not missing:
        return operand
    scale_inv = operand.scale_inv
    assert scale_inv is not None
    if operand.scaling in (Scaling.ROW, Scaling.BLOCK_1X128):
        scale_inv = pad(scale_inv, (0, missing))
    by_row = operand.tensor_scale_inv
    if by_row is not None and by_row.dim() == 1:
        by_row = pad(by_row, (0, missing))
    data = pad(operand.data, (0, 0, 0, missing))
    return dataclasses.replace(operand, data=data, scale_inv=scale_inv, tensor_scale_inv=by_row)


def _adds_bias(bias: Tensor, out_dtype: torch.dtype, a: Operand) -> bool:
    """Whether scaled_mm adds this bias: only 16-bit to 16-bit; it forgets it where K is 0. Unknown where never run."""
    known = a.scaling not in (Scaling.BLOCK_1X32, Scaling.BLOCK_1X16)
    return known and bias.dtype == out_dtype and out_dtype != torch.float32 and a.data.shape[1] > 0


_RECIPES = {
    Scaling.TENSOR: ScalingType.TensorWise,
    Scaling.ROW: ScalingType.RowWise,
    Scaling.BLOCK_1X128: ScalingType.BlockWise1x128,
    Scaling.BLOCK_128X128: ScalingType.BlockWise128x128,
    Scaling.BLOCK_1X32: ScalingType.BlockWise1x32,
    Scaling.BLOCK_1X16: ScalingType.BlockWise1x16,
}


def _scaled_mm(
    a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    (scale_a, recipe_a, swizzle), (scale_b, recipe_b, _) = (
        _scales(a, is_left=True),
        _scales(b, is_left=False),
    )
    return scaled_mm(
        _codes(a),
        _codes(b).t(),
        scale_a=scale_a,  # type: ignore[arg-type]
        scale_recipe_a=recipe_a,  # type: ignore[arg-type]
        scale_b=scale_b,  # type: ignore[arg-type]
        scale_recipe_b=recipe_b,  # type: ignore[arg-type]
        swizzle_a=swizzle,  # type: ignore[arg-type]
        swizzle_b=swizzle,  # type: ignore[arg-type]
        bias=bias,
        output_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )


def _codes(operand: Operand) -> Tensor:
    """The payload under the dtype that scaled_mm knows."""
    data = operand.data
    # cuBLASLt wants pointers aligned to 16 bytes; a view into somebody's larger tensor may not be.
    if data.data_ptr() % 16:
        data = data.clone()
    if operand.format is Format.E2M1:
        return data.view(torch.float4_e2m1fn_x2)
    return data.view(operand.format.dtype)


def _scales(operand: Operand, *, is_left: bool) -> tuple[object, object, object]:
    """Decode scales, their recipe and their swizzle, as scaled_mm takes them."""
    scaling, scale_inv = operand.scaling, operand.scale_inv
    recipe = _RECIPES[scaling]
    assert scale_inv is not None
    if scaling is Scaling.TENSOR:
        return scale_inv, recipe, None
    if scaling is Scaling.ROW:
        return scale_inv.view((-1, 1) if is_left else (1, -1)), recipe, None
    if scaling is Scaling.BLOCK_1X32:
        return scale_inv.view(Format.E8M0.dtype), recipe, SwizzleType.SWIZZLE_32_4_4
    if scaling is Scaling.BLOCK_1X16:
        scales = [scale_inv.view(Format.E4M3.dtype), operand.tensor_scale_inv]
        swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
        return scales, [recipe, ScalingType.TensorWise], swizzles
    return scale_inv.t(), recipe, None
