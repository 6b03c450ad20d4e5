"""Quantizers: how one tensor is cast. Frozen dataclasses, so that they are values of an op's token.

`fg.quantize` is their public form. Which quantizer serves which tensor of a layer is the recipe's decision.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fullgraph import customop, kernels, reference
from fullgraph._version import __version__
from fullgraph.customop import Pass, Plan, TensorSpec
from fullgraph.errors import ConfigError, ShapeError, describe
from fullgraph.formats import ROWWISE, Format, Orientation
from fullgraph.tensor import HIGH_PRECISION, QuantizedParts, QuantizedTensor, Quantizer


@functools.cache
def casts_for(device: torch.device) -> ModuleType:
    """Who casts on a device: our kernels where they run, the reference elsewhere. Both give the same bytes."""
    return kernels if kernels.available(device) else reference


def check_quantizable(x: Tensor | TensorSpec) -> None:
    """Raise unless `x` can be quantized.

    Raises:
        ConfigError: not float32, bfloat16 or float16.
        ShapeError: a tensor without dimensions.
    """
    if x.dtype not in HIGH_PRECISION:
        raise ConfigError(
            f"quantize: the input must be float32, bfloat16 or float16, got {describe(x)}",
            why="these are the dtypes whose values the 8-bit casts are defined for",
            do="convert it first",
        )
    if x.ndim == 0:
        raise ShapeError(
            "quantize: the input needs at least one dimension, got a scalar",
            why="the last dimension is the one that a GEMM contracts",
            do="use x.reshape(1)",
        )


@dataclasses.dataclass(frozen=True)
class PerTensorQuantizer:
    """One scale for the whole tensor, from its own amax ("current scaling").

    scale = format.max / amax(|x|); data = saturate(x * scale); scale_inv = 1 / scale

    Args:
        format: E4M3 or E5M2.
        power_of_two: round the scale down to a power of two.
        amax_epsilon: lower bound of the amax.

    Numerics: scale 1 for an amax of zero, infinity or NaN; finite overflow saturates; NaN stays NaN.
    Source: TransformerEngine 2.20, common/recipe/recipe_common.cuh. Bitwise equal to `reference.cast_per_tensor`.

    Example:
        >>> q = fullgraph.quantize(torch.ones(2, 16), PerTensorQuantizer(Format.E4M3))
        >>> q.data.dtype, round(q.scale_inv.item() * 448, 6)
        (torch.float8_e4m3fn, 1.0)
    """

    format: Format
    power_of_two: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        if self.format not in (Format.E4M3, Format.E5M2):
            raise ConfigError(
                f"PerTensorQuantizer: the format must be E4M3 or E5M2, got {self.format}",
                why="one scale for a whole tensor needs the range of an 8-bit format",
                do="choose Format.E4M3 for inputs and weights, Format.E5M2 for gradients",
            )
        if not (
            isinstance(self.amax_epsilon, (int, float)) and 0 <= self.amax_epsilon < float("inf")
        ):
            raise ConfigError(
                f"PerTensorQuantizer: amax_epsilon must be a finite number >= 0, got {self.amax_epsilon!r}",
                why="it is the lower bound of a magnitude",
                do="use 0.0, or something like 1e-12",
            )

    def quantize(self, x: Tensor, orientation: Orientation, *, pad: int = 1) -> QuantizedParts:
        """See `Quantizer.quantize`."""
        casts = casts_for(x.device)
        columns = x.shape[-1]
        rows = math.prod(x.shape[:-1])
        rowwise, columnwise, scale_inv = casts.cast_per_tensor(
            x.reshape(rows, columns),
            casts.amax(x),
            self.format,
            eps=self.amax_epsilon,
            power_of_two=self.power_of_two,
            orientation=orientation,
            pad=pad,
        )
        if x.ndim != 2:
            rowwise = None if rowwise is None else rowwise.view(x.shape)
            columnwise = None if columnwise is None else columnwise.view(columns, *x.shape[:-1])
        return QuantizedParts(rowwise, columnwise, scale_inv, self, x.dtype)

    def spec(
        self,
        shape: tuple[Any, ...],
        dtype: torch.dtype,
        device: torch.device,
        orientation: Orientation,
        *,
        pad: int = 1,
    ) -> QuantizedParts:
        """See `Quantizer.spec`."""
        *leading, columns = shape
        rowwise: Any = TensorSpec((*leading, round_up(columns, pad)), torch.uint8, device)
        last = () if not leading else (*leading[:-1], round_up(leading[-1], pad))
        columnwise: Any = TensorSpec((columns, *last), torch.uint8, device)
        scale_inv: Any = TensorSpec((), torch.float32, device)
        return QuantizedParts(
            rowwise if orientation.rowwise else None,
            columnwise if orientation.columnwise else None,
            scale_inv,
            self,
            dtype,
        )

    def dequantize(self, parts: QuantizedParts) -> Tensor:
        """See `Quantizer.dequantize`."""
        data = parts.data
        if data is None:
            assert parts.columnwise_data is not None
            data = parts.columnwise_data.movedim(0, -1)
        return reference.dequantize_per_tensor(data, parts.scale_inv, self.format, parts.dtype)

    def matrix(
        self, parts: QuantizedParts, orientation: Orientation, *, pad: int = 1
    ) -> tuple[Tensor, Tensor]:
        """See `Quantizer.matrix`. A missing copy is the transpose of the other: bytes and scale are the same."""
        rowwise, columnwise = (_flat(parts.data, -1), _flat(parts.columnwise_data, 1))
        wanted, other = (rowwise, columnwise) if orientation is ROWWISE else (columnwise, rowwise)
        if wanted is None:
            assert other is not None
            wanted = other.t().contiguous()
        return reference.pad_columns(wanted, pad), parts.scale_inv


def _flat(payload: Tensor | None, dim: int) -> Tensor | None:
    """A payload as a matrix: the dimensions before `dim` are its rows, the others its columns."""
    if payload is None:
        return None
    return payload.reshape(math.prod(payload.shape[:dim]), math.prod(payload.shape[dim:]))


def round_up(size: Any, multiple: int) -> Any:
    """The next multiple, without branching on the size (it may be symbolic)."""
    return size if multiple == 1 else (size + multiple - 1) // multiple * multiple


@dataclasses.dataclass
class QuantizeArguments:
    """Arguments of the quantizing op."""

    x: Tensor
    quantizer: Quantizer
    orientation: Orientation


def _plan(a: QuantizeArguments) -> Plan:
    check_quantizable(a.x)
    if not isinstance(a.orientation, Orientation):
        raise ConfigError(
            f"quantize: the orientation must be a fullgraph.Orientation, got {a.orientation!r}",
            why="it names the copies to make",
            do="pass fullgraph.ROWWISE, fullgraph.COLUMNWISE or fullgraph.BOTH",
        )
    if not hasattr(a.quantizer, "quantize"):
        raise ConfigError(
            f"quantize: a quantizer is needed, got {a.quantizer!r}",
            why="it decides format and scales",
            do="pass a frozen dataclass such as fullgraph.PerTensorQuantizer(fullgraph.Format.E4M3)",
        )
    shape, dtype, device = tuple(a.x.shape), a.x.dtype, a.x.device
    return Plan({"output": a.quantizer.spec(shape, dtype, device, a.orientation)})


def _execute(plan: Plan, a: QuantizeArguments) -> dict[str, QuantizedParts]:
    return {"output": a.quantizer.quantize(a.x, a.orientation)}


quantize_op = customop.define(
    "fullgraph::quantize",
    forward=Pass(QuantizeArguments, _plan, _execute),
    backward=customop.STRAIGHT_THROUGH,
    gradients=("x",),
    version=__version__,
)


def quantize(
    x: Tensor, quantizer: Quantizer, orientation: Orientation = ROWWISE
) -> QuantizedTensor:
    """Quantize a tensor; differentiable (the gradient passes straight through), one node under `torch.compile`.

    Args:
        x: float32, bfloat16 or float16 [..., K], at least one dimension, any strides.
        quantizer: how, such as `PerTensorQuantizer(Format.E4M3)`.
        orientation: which copies to make: `fg.ROWWISE`, `fg.COLUMNWISE` or `fg.BOTH`.

    Returns:
        A `QuantizedTensor` of the dtype and shape of `x`. A quantized `x` is decoded first.

    Raises:
        ConfigError: the dtype cannot be quantized, or not a quantizer or an orientation.
        ShapeError: `x` is a scalar.

    Example:
        >>> q = fullgraph.quantize(torch.tensor([1.0, -2.0]), PerTensorQuantizer(Format.E4M3))
        >>> q.dequantize()
        tensor([ 1., -2.])
    """
    if isinstance(x, QuantizedTensor):
        x = x.dequantize()
    if not isinstance(x, Tensor):
        raise ConfigError(
            f"quantize: a tensor is needed, got {type(x).__name__}",
            why="its dtype and device decide how it is cast",
            do="convert it with torch.as_tensor",
        )
    token = None
    if not torch.compiler.is_compiling():
        token = quantize_op.encode(quantizer=quantizer, orientation=orientation)
    return quantize_op(QuantizeArguments(x, quantizer, orientation), token=token)
