"""Quantizers: how one tensor is cast. Frozen dataclasses, so that they are values of an op's token.

`fg.quantize` is their public form. Which quantizer serves which tensor of a layer is the recipe's decision.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fullgraph import customop, kernels, reference
from fullgraph._version import __version__
from fullgraph.customop import Pass, Plan, TensorSpec
from fullgraph.errors import ConfigError, ShapeError, check_flags, describe
from fullgraph.formats import (
    COLUMNWISE,
    NVFP4_EXCLUSIONS,
    ROWWISE,
    Format,
    FourOverSix,
    MXScaleMode,
    Orientation,
    Scaling,
)
from fullgraph.random import draw_seed, of_rank
from fullgraph.reference import Operand
from fullgraph.tensor import (
    HIGH_PRECISION,
    NO_STATE,
    PLAIN,
    CastState,
    Layout,
    QuantizedParts,
    QuantizedTensor,
    Quantizer,
)


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


def _check_format(quantizer: Quantizer) -> None:
    check_flags(quantizer)
    if quantizer.format not in (Format.E4M3, Format.E5M2):
        raise ConfigError(
            f"{type(quantizer).__name__}: the format must be E4M3 or E5M2, got {quantizer.format!r}",
            why="these are the 8-bit formats of values; E8M0 is one of scales, and E2M1 has NVFP4Quantizer",
            do="choose Format.E4M3 for inputs and weights, Format.E5M2 for gradients",
        )


def _check_epsilon(quantizer: Quantizer, epsilon: object) -> None:
    is_number = isinstance(epsilon, (int, float)) and not isinstance(epsilon, bool)
    if not (is_number and 0 <= epsilon <= torch.finfo(torch.float32).max):  # type: ignore[operator]
        raise ConfigError(
            f"{type(quantizer).__name__}: amax_epsilon must be a finite number >= 0, got {epsilon!r}",
            why="it is the lower bound of a magnitude, in float32",
            do="use 0.0, or something like 1e-12",
        )


def _check_enum(
    quantizer: Quantizer, name: str, kind: type[enum.Enum], optional: bool = False
) -> None:
    value = getattr(quantizer, name)
    if not (isinstance(value, kind) or (optional and value is None)):
        raise ConfigError(
            f"{type(quantizer).__name__}: {name} must be a {kind.__name__}, got {value!r}",
            do=f"choose one of {', '.join(f'{kind.__name__}.{member.name}' for member in kind)}",
        )


@dataclasses.dataclass(frozen=True)
class _CastQuantizer(Quantizer):
    """A quantizer that is one of our casts, in Triton and in PyTorch, with options."""

    def quantize(
        self,
        x: Tensor,
        orientation: Orientation,
        layout: Layout = PLAIN,
        state: CastState = NO_STATE,
    ) -> QuantizedParts:
        """See `Quantizer.quantize`."""
        options: dict[str, Any] = {"orientation": orientation, "pad": layout.pad(self.scaling)}
        if layout.swizzles(self.scaling):
            options["swizzled"] = True
        copies = self._cast(casts_for(x.device), as_matrix(x), state, options)
        return as_parts(self._reader, x, copies, layout)

    @property
    def _reader(self) -> Quantizer:
        """What reads its tensors, and writes them anew in place."""
        return self

    def _cast(
        self, casts: ModuleType, x: Tensor, state: CastState, options: dict[str, Any]
    ) -> tuple[Tensor | None, ...]:
        """Cast a matrix; `options` go to the cast as they are."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class PerTensorQuantizer(_CastQuantizer):
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
        _check_format(self)
        _check_epsilon(self, self.amax_epsilon)

    @property
    def scaling(self) -> Scaling:
        """Per tensor."""
        return Scaling.TENSOR

    def _cast(
        self, casts: ModuleType, x: Tensor, state: CastState, options: dict[str, Any]
    ) -> tuple[Tensor | None, ...]:
        return casts.cast_per_tensor(
            x,
            casts.amax(x),
            self.format,
            eps=self.amax_epsilon,
            power_of_two=self.power_of_two,
            **options,
        )


@dataclasses.dataclass(frozen=True)
class DelayedQuantizer(_CastQuantizer):
    """One scale for the whole tensor, from the amaxes of earlier steps ("delayed scaling").

    data = saturate(x * scale); amax = max(amax, |x|); scale_inv = 1 / scale

    Scale and amax belong to the layer that casts; `fg.update_scales` makes the one out of the other, once a step.
    Outside of a layer there is none, so `fg.quantize` refuses it. What it makes can be quantized anew by
    `PerTensorQuantizer`.

    Args:
        format: E4M3 or E5M2.

    Numerics: the scale is 1 until the first update; NaN does not enter the amax.
    Source: TransformerEngine 2.20, common/recipe/__init__.py, DelayedScaling.
    """

    format: Format

    def __post_init__(self) -> None:
        _check_format(self)

    @property
    def scaling(self) -> Scaling:
        """Per tensor."""
        return Scaling.TENSOR

    @property
    def is_delayed(self) -> bool:
        """True."""
        return True

    def _cast(
        self, casts: ModuleType, x: Tensor, state: CastState, options: dict[str, Any]
    ) -> tuple[Tensor | None, ...]:
        if state.encode_scale is None:
            raise ConfigError(
                "DelayedQuantizer: there is no scale to cast with",
                why="scales come from earlier steps and belong to a layer",
                do="use fg.Linear with a delayed recipe, or quantize with PerTensorQuantizer",
            )
        return casts.cast_delayed(x, state.encode_scale, state.amax, self.format, **options)

    def spec(
        self,
        shape: tuple[Any, ...],
        dtype: torch.dtype,
        device: torch.device,
        orientation: Orientation,
        layout: Layout = PLAIN,
    ) -> QuantizedParts:
        """See `Quantizer.spec`."""
        return self._reader.spec(shape, dtype, device, orientation, layout)

    @property
    def _reader(self) -> Quantizer:
        """Current scaling: a tensor on its own has no earlier steps."""
        return PerTensorQuantizer(self.format)


@dataclasses.dataclass(frozen=True)
class PerRowQuantizer(_CastQuantizer):
    """One scale for each row of a copy: rows of x in the rowwise one, columns of x in the columnwise one.

    scale[r] = format.max / amax(|x[r]|); data[r] = saturate(x[r] * scale[r]); scale_inv = 1 / scale

    The two copies hold different codes, each with its scales along the dimension that a GEMM does not contract.

    Args:
        format: E4M3 or E5M2.
        power_of_two: round every scale down to a power of two.
        amax_epsilon: lower bound of every amax.

    Numerics: as `PerTensorQuantizer`, for each row.
    Source: torchao 0.18, float8/float8_utils.py (axiswise). Bitwise equal to `reference.cast_per_row`.
    """

    format: Format = Format.E4M3
    power_of_two: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        _check_format(self)
        _check_epsilon(self, self.amax_epsilon)

    @property
    def scaling(self) -> Scaling:
        """Per row."""
        return Scaling.ROW

    def _cast(
        self, casts: ModuleType, x: Tensor, state: CastState, options: dict[str, Any]
    ) -> tuple[Tensor | None, ...]:
        return casts.cast_per_row(
            x, self.format, eps=self.amax_epsilon, power_of_two=self.power_of_two, **options
        )


@dataclasses.dataclass(frozen=True)
class BlockQuantizer(_CastQuantizer):
    """One scale for 128 elements along the contraction, or for a square of 128 by 128.

    scale[b] = format.max / amax(|x[b]|); data[b] = saturate(x[b] * scale[b]); scale_inv = 1 / scale

    Args:
        format: E4M3 or E5M2.
        two_dimensional: squares, as for weights, whose copies are then transposes of each other.
        power_of_two: round every scale down to a power of two.
        amax_epsilon: lower bound of every amax.

    Numerics: as `PerTensorQuantizer`, for each block; a ragged edge counts as filled up with zeros.
    Source: TransformerEngine 2.20, Float8BlockScaling; DeepSeek-V3. Bitwise equal to `reference.cast_block`.
    """

    format: Format = Format.E4M3
    two_dimensional: bool = False
    power_of_two: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        _check_format(self)
        _check_epsilon(self, self.amax_epsilon)

    @property
    def scaling(self) -> Scaling:
        """Blocks of 1x128 or 128x128."""
        return Scaling.BLOCK_128X128 if self.two_dimensional else Scaling.BLOCK_1X128

    def _cast(
        self, casts: ModuleType, x: Tensor, state: CastState, options: dict[str, Any]
    ) -> tuple[Tensor | None, ...]:
        return casts.cast_block(
            x,
            self.format,
            eps=self.amax_epsilon,
            power_of_two=self.power_of_two,
            two_dimensional=self.two_dimensional,
            **options,
        )


@dataclasses.dataclass(frozen=True)
class MXQuantizer(_CastQuantizer):
    """MXFP8: one power-of-two scale, a byte, for 32 elements along the contraction.

    data[b] = saturate(x[b] / 2^e[b]); scale_inv[b] = 2^e[b]

    Args:
        format: E4M3 or E5M2.
        scale_mode: how the exponent follows from the block's amax.
        two_dimensional: one scale for a square of 32 by 32, as for weights; the copies are transposes of each other.

    Numerics: with RCEIL nothing saturates but infinity. A NaN makes its block NaN.
    Source: OCP Microscaling Formats 1.0; TransformerEngine 2.20, MXFP8BlockScaling. Bitwise equal to
        `reference.cast_mx`.
    """

    format: Format = Format.E4M3
    scale_mode: MXScaleMode = MXScaleMode.RCEIL
    two_dimensional: bool = False

    def __post_init__(self) -> None:
        _check_format(self)
        _check_enum(self, "scale_mode", MXScaleMode)

    @property
    def scaling(self) -> Scaling:
        """Blocks of 1x32; those of a square have the same scale."""
        return Scaling.BLOCK_1X32

    def _cast(
        self, casts: ModuleType, x: Tensor, state: CastState, options: dict[str, Any]
    ) -> tuple[Tensor | None, ...]:
        return casts.cast_mx(
            x,
            self.format,
            scale_mode=self.scale_mode,
            two_dimensional=self.two_dimensional,
            **options,
        )


@dataclasses.dataclass(frozen=True)
class NVFP4Quantizer(_CastQuantizer):
    """NVFP4: E2M1 codes, an E4M3 scale for 16 of them along the contraction, and a float32 scale for the tensor.

    x ~ data * scale_inv * tensor_scale_inv, tensor_scale_inv = amax(|x|) / (6 * 448)

    Args:
        two_dimensional: one scale for a square of 16 by 16, as for weights; the copies are transposes of each other.
        hadamard: the columnwise copy is one of the randomly Hadamard-transformed x: groups of 16 along its
            contraction are multiplied by diag(signs) H / 4. A GEMM of two such copies needs no inverse.
        stochastic_rounding: up with a probability of the distance from the lower neighbour; needs random numbers,
            which a layer and `fg.quantize` draw. Without, as in in-place writes of a quantized tensor, to the nearest.
        four_over_six: per block the better of two scales, mapping the largest value to 4 or to 6, by this error; with
            tensor_scale_inv = amax / (6 * 256).
        row_scaled: tensor_scale_inv of the rowwise copy is one for each row, from its own amax.

    Raises:
        ConfigError: switches that exclude each other.

    Numerics: NaN and infinity are not representable in a block; they show as a tensor scale that is not finite.
    Source: TransformerEngine 2.20, NVFP4BlockScaling. Bitwise equal to `reference.cast_nvfp4`.
    """

    two_dimensional: bool = False
    hadamard: bool = False
    stochastic_rounding: bool = False
    four_over_six: FourOverSix | None = None
    row_scaled: bool = False

    def __post_init__(self) -> None:
        check_flags(self)
        _check_enum(self, "four_over_six", FourOverSix, optional=True)
        for pair, why in NVFP4_EXCLUSIONS.items():
            one, other = ["stochastic_rounding" if name == "seed" else name for name in pair]
            if getattr(self, one) and getattr(self, other):
                raise ConfigError(
                    f"NVFP4Quantizer: {one} and {other} exclude each other",
                    why=why,
                    do="turn one of them off",
                )

    @property
    def format(self) -> Format:
        """E2M1."""
        return Format.E2M1

    @property
    def scaling(self) -> Scaling:
        """Blocks of 1x16; those of a square have the same scale."""
        return Scaling.BLOCK_1X16

    @property
    def is_stochastic(self) -> bool:
        """Whether it rounds stochastically."""
        return self.stochastic_rounding

    @property
    def rotates(self) -> bool:
        """Whether the columnwise copy is Hadamard-transformed; its contraction then fills whole blocks."""
        return self.hadamard

    def _cast(
        self, casts: ModuleType, x: Tensor, state: CastState, options: dict[str, Any]
    ) -> tuple[Tensor | None, ...]:
        options["pad"] = max(self.format.codes_per_byte, options["pad"])
        return casts.cast_nvfp4(
            x,
            two_dimensional=self.two_dimensional,
            hadamard=self.hadamard,
            four_over_six=self.four_over_six,
            row_scaled=self.row_scaled,
            seed=state.seed if self.stochastic_rounding else None,
            **options,
        )

    def tensor_scale_spec(
        self, rows: Any, device: torch.device, orientation: Orientation
    ) -> TensorSpec:
        """See `Quantizer.tensor_scale_spec`."""
        by_row = self.row_scaled and orientation is ROWWISE
        return TensorSpec((rows,) if by_row else (), torch.float32, device)

    def decode_matrix(self, parts: QuantizedParts, orientation: Orientation) -> Tensor:
        """See `Quantizer.decode_matrix`; in the untransformed basis."""
        if not (self.hadamard and orientation is COLUMNWISE):
            return super().decode_matrix(parts, orientation)
        rows = math.prod(parts.shape[:-1])
        values = reference.decode_operand(self.operand(parts, orientation))
        return reference.inverse_hadamard_rows(values)[:, :rows].contiguous()


@dataclasses.dataclass(frozen=True)
class HybridQuantizer(Quantizer):
    """Two quantizers: one makes the rowwise copy, for fprop (and dgrad of gradients), one the columnwise copy.

    Args:
        rowwise: None or an `IdentityQuantizer` for high precision.
        columnwise: likewise.
        columnwise_from_rowwise: cast the columnwise copy from the decoded rowwise one rather than from the original.

    Raises:
        ConfigError: neither is a quantizer, or one consists of two or is delayed.
    """

    rowwise: Quantizer | None
    columnwise: Quantizer | None
    columnwise_from_rowwise: bool = False

    def __post_init__(self) -> None:
        check_flags(self)
        for name in ("rowwise", "columnwise"):
            member = getattr(self, name)
            if isinstance(member, IdentityQuantizer):
                object.__setattr__(self, name, None)
            elif member is not None and (
                not isinstance(member, Quantizer)
                or isinstance(member, HybridQuantizer)
                or member.is_delayed
            ):
                raise ConfigError(
                    f"HybridQuantizer: {name} must be a quantizer of one kind, or None, got {member!r}",
                    why="each copy is made in one way, from the tensor alone",
                    do="pass quantizers such as fullgraph.BlockQuantizer()",
                )
        if self.rowwise is None and (self.columnwise is None or self.columnwise_from_rowwise):
            raise ConfigError(
                "HybridQuantizer: there is nothing to make the columnwise copy from"
                if self.columnwise
                else "HybridQuantizer: both copies are in high precision",
                do="use fullgraph.IdentityQuantizer() for a tensor in high precision",
            )

    @property
    def format(self) -> Format:
        """Of the rowwise copy, if there is one."""
        return self._first.format

    @property
    def scaling(self) -> Scaling:
        """Of the rowwise copy, if there is one."""
        return self._first.scaling

    @property
    def is_stochastic(self) -> bool:
        """Whether one of the two is."""
        return any(m is not None and m.is_stochastic for m in (self.rowwise, self.columnwise))

    @property
    def rotates(self) -> bool:
        """Whether the columnwise copy is one of a rotated tensor."""
        return self.columnwise is not None and self.columnwise.rotates

    @property
    def _first(self) -> Quantizer:
        first = self.rowwise or self.columnwise
        assert first is not None
        return first

    def for_copy(self, orientation: Orientation) -> Quantizer | None:
        """See `Quantizer.for_copy`."""
        return self.rowwise if orientation is ROWWISE else self.columnwise

    def quantize(
        self,
        x: Tensor,
        orientation: Orientation,
        layout: Layout = PLAIN,
        state: CastState = NO_STATE,
    ) -> QuantizedParts:
        """See `Quantizer.quantize`."""
        rowwise = columnwise = None
        if orientation.rowwise:
            rowwise = self._member(ROWWISE).quantize(x, ROWWISE, layout, state)
        if orientation.columnwise:
            if self.columnwise_from_rowwise:
                member = self._member(ROWWISE)
                x = member.dequantize(member.quantize(x, ROWWISE, state=state))
            columnwise = self._member(COLUMNWISE).quantize(x, COLUMNWISE, layout, state)
        return self._join(rowwise, columnwise)

    def spec(
        self,
        shape: tuple[Any, ...],
        dtype: torch.dtype,
        device: torch.device,
        orientation: Orientation,
        layout: Layout = PLAIN,
    ) -> QuantizedParts:
        """See `Quantizer.spec`."""
        specs = [
            self._member(copy).spec(shape, dtype, device, copy, layout) if wanted else None
            for copy, wanted in (
                (ROWWISE, orientation.rowwise),
                (COLUMNWISE, orientation.columnwise),
            )
        ]
        return self._join(*specs)

    def _member(self, orientation: Orientation) -> Quantizer:
        member = self.for_copy(orientation)
        if member is None:
            raise ConfigError(
                f"HybridQuantizer: the {orientation.value} copy stays in high precision",
                why="no quantizer makes it",
                do="ask for the other copy only, or name a quantizer for this one",
            )
        return member

    def _join(
        self, rowwise: QuantizedParts | None, columnwise: QuantizedParts | None
    ) -> QuantizedParts:
        """One tensor out of two copies, each with scales of its own."""
        joined = dataclasses.replace(rowwise or columnwise, quantizer=self)  # type: ignore[type-var]
        if columnwise is not None:
            scale_inv, tensor_scale_inv = columnwise.scales(COLUMNWISE)
            joined.columnwise_data = columnwise.columnwise_data
            joined.columnwise_scale_inv = scale_inv
            joined.columnwise_tensor_scale_inv = tensor_scale_inv
            joined.sizes = columnwise.sizes if joined.sizes is None else joined.sizes
            joined.swizzled = joined.swizzled or columnwise.swizzled
            if rowwise is None:
                joined.scale_inv = None
        return joined

    def decode_matrix(self, parts: QuantizedParts, orientation: Orientation) -> Tensor:
        """See `Quantizer.decode_matrix`."""
        return self._member(orientation).decode_matrix(parts, orientation)

    def operand(
        self, parts: QuantizedParts, orientation: Orientation, layout: Layout = PLAIN
    ) -> Operand:
        """See `Quantizer.operand`."""
        member = self._member(orientation)
        if parts.payload(orientation) is None:
            values = self.dequantize(parts)
            parts = member.quantize(as_matrix(values), orientation, layout)
        return member.operand(parts, orientation, layout)


@dataclasses.dataclass(frozen=True)
class IdentityQuantizer(Quantizer):
    """High precision, as an answer where a quantizer is asked for: the tensor stays as it is."""

    @property
    def format(self) -> Format:
        """There is none.

        Raises:
            ConfigError: always.
        """
        raise self._nothing_to_cast()

    def quantize(
        self,
        x: Tensor,
        orientation: Orientation,
        layout: Layout = PLAIN,
        state: CastState = NO_STATE,
    ) -> QuantizedParts:
        """Not possible.

        Raises:
            ConfigError: always.
        """
        raise self._nothing_to_cast()

    def spec(
        self,
        shape: tuple[Any, ...],
        dtype: torch.dtype,
        device: torch.device,
        orientation: Orientation,
        layout: Layout = PLAIN,
    ) -> QuantizedParts:
        """Not possible.

        Raises:
            ConfigError: always.
        """
        raise self._nothing_to_cast()

    def _nothing_to_cast(self) -> ConfigError:
        return ConfigError(
            "IdentityQuantizer: nothing is quantized",
            why="it says that a tensor of a layer stays in high precision",
            do="use the tensor itself, or another quantizer",
        )


def as_matrix(x: Tensor) -> Tensor:
    """[..., K] as [M, K]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def as_parts(
    quantizer: Quantizer, x: Tensor, copies: tuple[Tensor | None, ...], layout: Layout = PLAIN
) -> QuantizedParts:
    """The copies of `as_matrix(x)` as parts of the shape of `x`.

    Args:
        quantizer: what can read them.
        x: what was cast, [..., K].
        copies: data, columnwise_data and then scales, in the order of the fields of `QuantizedParts`.
        layout: in which they were made.
    """
    data, columnwise_data, *scales = copies
    scales = [s.view(-1) if s is not None and s.dim() > 1 else s for s in scales]
    sizes = None
    if quantizer.format.codes_per_byte > 1:
        sizes = x.new_empty((0, *x.shape), dtype=torch.uint8)
        columnwise_data = None if columnwise_data is None else columnwise_data.view(-1)
    elif x.ndim != 2 and columnwise_data is not None:
        columnwise_data = columnwise_data.view(x.shape[-1], *x.shape[:-1])
    if x.ndim != 2 and data is not None:
        data = data.view(*x.shape[:-1], data.shape[1])
    return QuantizedParts(
        data,
        columnwise_data,
        *scales,
        sizes=sizes,
        quantizer=quantizer,
        dtype=x.dtype,
        swizzled=layout.swizzles(quantizer.scaling),
    )


@dataclasses.dataclass
class QuantizeArguments:
    """Arguments of the quantizing op."""

    x: Tensor
    quantizer: Quantizer
    orientation: Orientation
    seed: Tensor | None = None


def _plan(a: QuantizeArguments) -> Plan:
    check_quantizable(a.x)
    if not isinstance(a.orientation, Orientation):
        raise ConfigError(
            f"quantize: the orientation must be a fullgraph.Orientation, got {a.orientation!r}",
            why="it names the copies to make",
            do="pass fullgraph.ROWWISE, fullgraph.COLUMNWISE or fullgraph.BOTH",
        )
    if not isinstance(a.quantizer, Quantizer):
        raise ConfigError(
            f"quantize: a quantizer is needed, got {a.quantizer!r}",
            why="it decides format and scales",
            do="pass one such as fullgraph.PerTensorQuantizer(fullgraph.Format.E4M3); "
            "your own subclasses fullgraph.Quantizer",
        )
    shape, dtype, device = tuple(a.x.shape), a.x.dtype, a.x.device
    return Plan({"output": a.quantizer.spec(shape, dtype, device, a.orientation)})


def _execute(plan: Plan, a: QuantizeArguments) -> dict[str, QuantizedParts]:
    state = CastState(seed=None if a.seed is None else of_rank(a.seed))
    return {"output": a.quantizer.quantize(a.x, a.orientation, state=state)}


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
    seed = draw_seed(x) if isinstance(quantizer, Quantizer) and quantizer.is_stochastic else None
    return quantize_op(QuantizeArguments(x, quantizer, orientation, seed), token=token)
