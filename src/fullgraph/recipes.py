"""Recipes: which quantizer for which tensor of a layer, and how each GEMM accumulates.

A recipe is a frozen dataclass. A layer asks it for its `LinearNumerics`, the plain values that reach the op.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from fullgraph.customop.token import encode
from fullgraph.delayed import ScalingRule, find_algorithm, register_algorithm
from fullgraph.errors import ConfigError, check_flags
from fullgraph.formats import (
    COLUMNWISE,
    ROWWISE,
    Format,
    FourOverSix,
    MXScaleMode,
    Orientation,
)
from fullgraph.quantizers import (
    BlockQuantizer,
    DelayedQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXQuantizer,
    NVFP4Quantizer,
    PerRowQuantizer,
    PerTensorQuantizer,
)
from fullgraph.tensor import Quantizer


class Role(enum.Enum):
    """The tensors of a layer that a recipe decides about."""

    INPUT = "input"
    WEIGHT = "weight"
    OUTPUT = "output"
    GRAD_OUTPUT = "grad_output"


class BackwardOverride(enum.Enum):
    """A backward pass in high precision, whatever the forward pass."""

    HIGH_PRECISION = "high precision"
    """On the original input and weight, which are saved."""
    DEQUANTIZED = "dequantized"
    """On the values that fprop multiplied: the quantized input and weight are saved and decoded."""


@dataclasses.dataclass(frozen=True)
class LinearNumerics:
    """Everything numeric that a linear op needs to know, resolved for one layer.

    A GEMM runs in low precision if both of its operands have a quantizer for the copy that it reads, in high precision
    otherwise:

        fprop   input rowwise        weight rowwise
        dgrad   grad_output rowwise  weight columnwise
        wgrad   grad_output columnwise  input columnwise

    Args:
        input: its quantizer, or None for high precision.
        weight: likewise.
        grad_output: likewise.
        output: quantizer of a quantized output, used on request.
        backward_override: run dgrad and wgrad in high precision.
        allow_emulation: whether a GEMM that the device lacks runs in high precision on the same operands, or raises.
        fprop_split_accumulator: whether fprop promotes its partial sums to float32 often (slower, more exact); matters
            to the native FP8 GEMMs of Ada and Hopper.
        dgrad_split_accumulator: the same for dgrad.
        wgrad_split_accumulator: the same for wgrad.
    """

    input: Quantizer | None = None
    weight: Quantizer | None = None
    grad_output: Quantizer | None = None
    output: Quantizer | None = None
    backward_override: BackwardOverride | None = None
    allow_emulation: bool = True
    fprop_split_accumulator: bool = False
    dgrad_split_accumulator: bool = True
    wgrad_split_accumulator: bool = True

    def __post_init__(self) -> None:
        if self.low_precision_dgrad and self.weight.rotates:  # type: ignore[union-attr]
            raise ConfigError(
                "dgrad would multiply a rotated copy with one that is not",
                why=f"the columnwise copy of the weight comes from {self.weight}, and rowwise copies are never rotated",
                do="leave `hadamard` off for the weight",
            )
        if self.low_precision_wgrad and self.input.rotates != self.grad_output.rotates:  # type: ignore[union-attr]
            raise ConfigError(
                "wgrad would multiply a rotated copy with one that is not",
                why=f"the columnwise copies come from {self.input} and {self.grad_output}",
                do="set `hadamard` for both input and grad_output, or for neither",
            )

    @property
    def low_precision_fprop(self) -> bool:
        """Whether output = input @ weight^T runs in low precision."""
        return _makes(self.input, ROWWISE) and _makes(self.weight, ROWWISE)

    @property
    def low_precision_dgrad(self) -> bool:
        """Whether grad_input = grad_output @ weight runs in low precision."""
        low = _makes(self.grad_output, ROWWISE) and _makes(self.weight, COLUMNWISE)
        return low and self.backward_override is None

    @property
    def low_precision_wgrad(self) -> bool:
        """Whether grad_weight = grad_output^T @ input runs in low precision."""
        low = _makes(self.grad_output, COLUMNWISE) and _makes(self.input, COLUMNWISE)
        return low and self.backward_override is None


def _makes(quantizer: Quantizer | None, copy: Orientation) -> bool:
    return quantizer is not None and quantizer.for_copy(copy) is not None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Base of recipes: subclass it as a frozen dataclass and answer `quantizer` for each role.

    Args:
        backward_override: see `BackwardOverride`.
        allow_emulation: whether a GEMM that the device does not have runs emulated, on the same operands in high
            precision (said once); False raises `HardwareError`.
        fprop_split_accumulator: see `LinearNumerics`.
        dgrad_split_accumulator: see `LinearNumerics`.
        wgrad_split_accumulator: see `LinearNumerics`.
    """

    backward_override: BackwardOverride | None = dataclasses.field(default=None, kw_only=True)
    allow_emulation: bool = dataclasses.field(default=True, kw_only=True)
    fprop_split_accumulator: bool = dataclasses.field(default=False, kw_only=True)
    dgrad_split_accumulator: bool = dataclasses.field(default=True, kw_only=True)
    wgrad_split_accumulator: bool = dataclasses.field(default=True, kw_only=True)

    numerics_text: ClassVar[str] = ""
    """The numerics of a linear layer, encoded once for all layers that use the recipe."""
    scaling_rule_text: ClassVar[str] = ""
    """The encoded `ScalingRule` of a recipe with delayed scaling; empty otherwise."""
    draws_forward: ClassVar[bool] = False
    """Whether a forward pass needs random numbers."""
    draws_backward: ClassVar[bool] = False
    """Whether a backward pass needs random numbers."""

    def __post_init__(self) -> None:
        check_flags(self)
        # Derived constants of a frozen object: Dynamo then guards one string per layer.
        if not isinstance(self.backward_override, (BackwardOverride, type(None))):
            raise ConfigError(
                f"{type(self).__name__}: backward_override must be a BackwardOverride or None, "
                f"got {self.backward_override!r}",
                do="pass fullgraph.recipes.BackwardOverride.HIGH_PRECISION or DEQUANTIZED",
            )
        numerics = self.linear_numerics()
        object.__setattr__(self, "numerics_text", encode(numerics, "recipe"))
        forward = (numerics.input, numerics.weight, numerics.output)
        stochastic = any(q is not None and q.is_stochastic for q in forward)
        object.__setattr__(self, "draws_forward", stochastic)
        backward = numerics.grad_output is not None and numerics.grad_output.is_stochastic
        object.__setattr__(self, "draws_backward", backward)

    def quantizer(self, role: Role) -> Quantizer | None:
        """The quantizer of a tensor, or None for high precision."""
        raise NotImplementedError(f"{type(self).__name__} must define quantizer(role)")

    def stored_quantizer(self, role: Role) -> Quantizer:
        """The quantizer of a tensor that is asked to be *kept* quantized: a quantized weight or output.

        A weight with delayed scaling is kept with the scale of its own amax: optimizers write it anew.
        """
        quantizer = self.quantizer(role) or PerTensorQuantizer(Format.E4M3)
        if role is Role.WEIGHT and quantizer.is_delayed:
            return PerTensorQuantizer(quantizer.format)
        return quantizer

    def numerics_text_of(self, layer_name: str) -> str:
        """The encoded numerics of one layer; the same for all unless the recipe goes by name."""
        return self.numerics_text

    def linear_numerics(self) -> LinearNumerics:
        """The numerics of a linear layer."""
        return LinearNumerics(
            input=self.quantizer(Role.INPUT),
            weight=self.quantizer(Role.WEIGHT),
            grad_output=self.quantizer(Role.GRAD_OUTPUT),
            output=self.stored_quantizer(Role.OUTPUT),
            backward_override=self.backward_override,
            allow_emulation=self.allow_emulation,
            fprop_split_accumulator=self.fprop_split_accumulator,
            dgrad_split_accumulator=self.dgrad_split_accumulator,
            wgrad_split_accumulator=self.wgrad_split_accumulator,
        )


@dataclasses.dataclass(frozen=True)
class HighPrecision(Recipe):
    """Plain high precision ("bf16"): GEMMs in the dtype of the input, or of `torch.autocast`.

    Args:
        backward_override: without effect here, as the other options of `Recipe` are.
    """

    def quantizer(self, role: Role) -> Quantizer | None:
        """None for every role."""
        return None


@dataclasses.dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with one scale per tensor, from the amaxes of earlier steps.

    scale = format.max * 2^-margin / amax(history)

    Call `fullgraph.update_scales(model)` once per optimizer step, or `fullgraph.attach(optimizer, model)` once.
    Scales are read and amaxes accumulated during the step, so recomputation, microbatches in flight and CUDA graphs
    see one scale.

    Args:
        history_length: amaxes that are remembered for each tensor, the current one included.
        algorithm: "max" over the history, "most_recent", or a function of the window float32 [history_length, n],
            newest last, that returns the amax float32 [n].
        margin: powers of two to stay below the largest value of the format.
        forward_format: of inputs, weights and quantized outputs.
        backward_format: of output gradients; E5M2 makes the recipe "hybrid".
        reduce_amax: whether `update_scales` takes the maximum over all ranks.

    Raises:
        ConfigError: an option out of range, or `backward_override`, which TransformerEngine refuses too.

    Numerics: as current scaling while amaxes are steady. An amax that doubles saturates up to half of the range: a
        margin of 1 or 2 is cheap.
    Source: TransformerEngine 2.20, common/recipe/__init__.py, DelayedScaling.
    """

    history_length: int = 1024
    algorithm: str | Callable[[Tensor], Tensor] = "max"
    margin: float = 0.0
    forward_format: Format = Format.E4M3
    backward_format: Format = Format.E5M2
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        if self.backward_override is not None:
            raise ConfigError(
                "DelayedScaling: there is no backward_override with delayed scaling",
                why="gradients that are not cast would leave their amax history empty",
                do="use Float8CurrentScaling(backward_override=...)",
            )
        super().__post_init__()
        formats = (*[self.forward_format] * 3, self.backward_format)
        object.__setattr__(
            self,
            "scaling_rule_text",
            _scaling_rule_text(self, formats),
        )

    def quantizer(self, role: Role) -> Quantizer | None:
        """A delayed per-tensor quantizer for every role."""
        backward = role is Role.GRAD_OUTPUT
        return DelayedQuantizer(self.backward_format if backward else self.forward_format)


@dataclasses.dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor, from the tensor's own amax at the time of the cast.

    Args:
        forward_format: format of inputs, weights and quantized outputs.
        backward_format: format of output gradients; E5M2 makes the recipe "hybrid".
        power_of_two: round every scale down to a power of two.
        amax_epsilon: lower bound of every amax.

    Numerics: relative error of a GEMM about 3.7 % (E4M3 operands) or 5.9 % (with an E5M2 one).
    Source: TransformerEngine 2.20, common/recipe/__init__.py, Float8CurrentScaling.
    """

    forward_format: Format = Format.E4M3
    backward_format: Format = Format.E5M2
    power_of_two: bool = False
    amax_epsilon: float = 0.0

    def quantizer(self, role: Role) -> Quantizer | None:
        """A per-tensor quantizer for every role."""
        backward = role is Role.GRAD_OUTPUT
        return PerTensorQuantizer(
            self.backward_format if backward else self.forward_format,
            power_of_two=self.power_of_two,
            amax_epsilon=self.amax_epsilon,
        )


@dataclasses.dataclass(frozen=True)
class Float8PerRowScaling(Recipe):
    """FP8 with a scale for each row of both operands of each GEMM, from the row's own amax.

    Every tensor is cast twice, for rows and for columns: a scale lies along the dimension that the GEMM does not
        contract.

    Args:
        forward_format: format of inputs, weights and quantized outputs.
        backward_format: format of output gradients.
        power_of_two: round every scale down to a power of two.
        amax_epsilon: lower bound of every amax.
        high_precision_wgrad: weight gradients in high precision; dgrad then reads a weight with one scale per tensor.

    Numerics: relative error of a GEMM about 3.8 %.
    Source: torchao 0.18, float8/config.py, ROWWISE and ROWWISE_WITH_GW_HP.
    """

    forward_format: Format = Format.E4M3
    backward_format: Format = Format.E4M3
    power_of_two: bool = True
    amax_epsilon: float = 1e-12
    high_precision_wgrad: bool = False

    def quantizer(self, role: Role) -> Quantizer | None:
        """A per-row quantizer for every role, unless weight gradients are in high precision."""
        options = {"power_of_two": self.power_of_two, "amax_epsilon": self.amax_epsilon}
        backward = role is Role.GRAD_OUTPUT
        by_row = PerRowQuantizer(
            self.backward_format if backward else self.forward_format, **options
        )
        if not self.high_precision_wgrad:
            return by_row
        if role is Role.WEIGHT:
            return HybridQuantizer(by_row, PerTensorQuantizer(self.forward_format, **options))
        return HybridQuantizer(by_row, None)

    def stored_quantizer(self, role: Role) -> Quantizer:
        """A quantized output is cast for rows only."""
        quantizer = self.quantizer(role)
        assert quantizer is not None
        return quantizer if role is Role.WEIGHT else quantizer.for_copy(ROWWISE) or quantizer


@dataclasses.dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 with a scale for 128 elements of inputs and gradients, and for 128 by 128 of weights.

    Args:
        forward_format: format of inputs, weights and quantized outputs.
        backward_format: format of output gradients. E5M2 is emulated: no device multiplies it in these blocks.
        power_of_two: round every scale down to a power of two.
        amax_epsilon: lower bound of every amax.
        weight_two_dimensional: False casts weights in blocks of 1x128 too.

    Numerics: relative error of a GEMM about 3.8 %. Partial sums are always promoted to float32.
    Source: TransformerEngine 2.20, Float8BlockScaling; DeepSeek-V3.
    """

    forward_format: Format = Format.E4M3
    backward_format: Format = Format.E4M3
    power_of_two: bool = True
    amax_epsilon: float = 0.0
    weight_two_dimensional: bool = True
    fprop_split_accumulator: bool = dataclasses.field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        splits = (
            self.fprop_split_accumulator,
            self.dgrad_split_accumulator,
            self.wgrad_split_accumulator,
        )
        if not all(splits):
            raise ConfigError(
                "Float8BlockScaling: split accumulation cannot be turned off",
                why="each block of 128 has a scale of its own, so its partial sum is promoted anyway",
                do="leave the *_split_accumulator options at True",
            )

    def quantizer(self, role: Role) -> Quantizer | None:
        """A block quantizer for every role."""
        backward = role is Role.GRAD_OUTPUT
        return BlockQuantizer(
            self.backward_format if backward else self.forward_format,
            two_dimensional=role is Role.WEIGHT and self.weight_two_dimensional,
            power_of_two=self.power_of_two,
            amax_epsilon=self.amax_epsilon,
        )


@dataclasses.dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8: blocks of 32 with a power-of-two scale of one byte.

    Args:
        forward_format: format of inputs, weights and quantized outputs.
        backward_format: format of output gradients; E5M2 makes the recipe "hybrid".
        scale_mode: how a scale follows from the amax of its block.
        weight_two_dimensional: one scale for 32 by 32 of a weight, so that both of its copies hold the same codes.

    Numerics: relative error of a GEMM about 3.8 %, with FLOOR 4.2 %, with an E5M2 operand 5.9 %.
    Source: TransformerEngine 2.20, MXFP8BlockScaling; torchao 0.18, prototype/mx_formats; OCP Microscaling Formats 1.0.
    """

    forward_format: Format = Format.E4M3
    backward_format: Format = Format.E4M3
    scale_mode: MXScaleMode = MXScaleMode.RCEIL
    weight_two_dimensional: bool = False

    def quantizer(self, role: Role) -> Quantizer | None:
        """An MX quantizer for every role."""
        backward = role is Role.GRAD_OUTPUT
        return MXQuantizer(
            self.backward_format if backward else self.forward_format,
            scale_mode=self.scale_mode,
            two_dimensional=role is Role.WEIGHT and self.weight_two_dimensional,
        )


@dataclasses.dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """NVFP4: E2M1 codes in blocks of 16 with an E4M3 scale, and a float32 scale for the tensor.

    Args:
        hadamard: transform the columnwise copies of input and output gradient, which wgrad multiplies.
        stochastic_rounding: round output gradients stochastically.
        weight_two_dimensional: one scale for 16 by 16 of a weight, so that both of its copies hold the same codes.
        four_over_six: choose the better of two scales for each block of input and weight; excludes `hadamard`.
        row_scaled_input: a tensor-level scale for each row of the input of fprop.

    Raises:
        ConfigError: switches that exclude each other.

    Numerics: relative error of fprop about 14.6 %, of dgrad 17.6 %, of wgrad 16.6 %.
    Source: TransformerEngine 2.20, NVFP4BlockScaling.
    """

    hadamard: bool = True
    stochastic_rounding: bool = True
    weight_two_dimensional: bool = True
    four_over_six: FourOverSix | None = None
    row_scaled_input: bool = False

    def quantizer(self, role: Role) -> Quantizer | None:
        """An NVFP4 quantizer for every role."""
        if role is Role.GRAD_OUTPUT:
            return NVFP4Quantizer(
                hadamard=self.hadamard, stochastic_rounding=self.stochastic_rounding
            )
        if role is Role.INPUT:
            return NVFP4Quantizer(
                hadamard=self.hadamard,
                four_over_six=self.four_over_six,
                row_scaled=self.row_scaled_input,
            )
        return NVFP4Quantizer(
            two_dimensional=role is Role.WEIGHT and self.weight_two_dimensional,
            four_over_six=self.four_over_six,
        )


@dataclasses.dataclass(frozen=True)
class LayerRole:
    """What a `CustomRecipe` is asked about.

    Args:
        tensor: which tensor of the layer.
        module: kind of layer, "linear".
        name: the layer's path in the model that `fullgraph.convert` converted; "" for layers that were made one by one.
    """

    tensor: Role
    module: str = "linear"
    name: str = ""


@dataclasses.dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Quantizers of your own choice, tensor by tensor and layer by layer.

    Args:
        factory: called with a `LayerRole` for input, weight, output and grad_output; returns a quantizer, an
            `IdentityQuantizer` for high precision. It is called once for each layer name, not in each forward, so it
            must give the same answer to the same question. The answers for the name "" say which scales every layer
            keeps and whether it draws random numbers, so a delayed or stochastic quantizer must be among them.
        history_length: for `DelayedQuantizer`s, see `DelayedScaling`.
        algorithm: likewise.
        margin: likewise.
        reduce_amax: likewise.

    Raises:
        ConfigError: an answer that is no quantizer, None among them; a delayed or stochastic quantizer for a layer with
            a name alone.

    Example:
        >>> def factory(role):
        ...     if role.tensor is Role.GRAD_OUTPUT:
        ...         return fullgraph.MXQuantizer(Format.E5M2)
        ...     return (
        ...         fullgraph.IdentityQuantizer()
        ...         if role.name == "head"
        ...         else fullgraph.MXQuantizer()
        ...     )
        >>> recipe = CustomRecipe(factory)
    """

    factory: Callable[[LayerRole], Quantizer]
    history_length: int = 1024
    algorithm: str | Callable[[Tensor], Tensor] = "max"
    margin: float = 0.0
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        if not callable(self.factory):
            raise ConfigError(
                f"CustomRecipe: the factory must be callable, got {self.factory!r}",
                why="it is asked about each tensor of a layer",
                do="pass a function of a LayerRole that returns a quantizer",
            )
        object.__setattr__(self, "_answers", {"": self._ask("")})
        super().__post_init__()
        object.__setattr__(self, "_texts", {"": self.numerics_text})
        answers = self._answers[""].values()  # type: ignore[attr-defined]
        if any(a.is_delayed for a in answers):
            formats = tuple([a.format if a.is_delayed else Format.E4M3 for a in answers])
            object.__setattr__(self, "scaling_rule_text", _scaling_rule_text(self, formats))

    def quantizer(self, role: Role) -> Quantizer | None:
        """What the factory says of a layer without a name."""
        return _as_quantizer(self._answers[""][role])  # type: ignore[attr-defined]

    def numerics_text_of(self, layer_name: str) -> str:
        """See `Recipe.numerics_text_of`."""
        texts: dict[str, str] = self._texts  # type: ignore[attr-defined]
        text = texts.get(layer_name)
        if text is None:
            text = encode(self._numerics_of(layer_name), "recipe")
            if not torch.compiler.is_compiling():  # a write would invalidate the graph that does it
                texts[layer_name] = text
        return text

    def _numerics_of(self, name: str) -> LinearNumerics:
        answers = self._ask(name)
        self._check_state(name, answers)
        quantizers = {role: _as_quantizer(answer) for role, answer in answers.items()}
        return dataclasses.replace(
            self.linear_numerics(),
            input=quantizers[Role.INPUT],
            weight=quantizers[Role.WEIGHT],
            output=quantizers[Role.OUTPUT] or PerTensorQuantizer(Format.E4M3),
            grad_output=quantizers[Role.GRAD_OUTPUT],
        )

    def _check_state(self, name: str, answers: dict[Role, Quantizer]) -> None:
        """Raise unless layers without a name have the state and the random numbers that this one needs."""
        unnamed: dict[Role, Quantizer] = self._answers[""]  # type: ignore[attr-defined]
        for role, answer in answers.items():
            draws = self.draws_backward if role is Role.GRAD_OUTPUT else self.draws_forward
            kept = unnamed[role]
            if (answer.is_stochastic and not draws) or (
                answer.is_delayed and not (kept.is_delayed and kept.format is answer.format)
            ):
                raise ConfigError(
                    f"CustomRecipe: the factory returned {answer!r} for {role.value} of {name}, "
                    f"but {kept!r} for a layer without a name",
                    why="the answers for a layer without a name say which scales every layer keeps, and whether it "
                    "draws random numbers",
                    do="let the factory answer likewise where `role.name` is empty",
                )

    def _ask(self, name: str) -> dict[Role, Quantizer]:
        """What the factory says of the tensors of one layer."""
        answers: dict[Role, Quantizer] = {}
        for role in _SLOTS:
            answer = self.factory(LayerRole(role, name=name))
            if not isinstance(answer, Quantizer):
                raise ConfigError(
                    f"CustomRecipe: the factory returned {answer!r} for {role.value} of {name or 'a layer'}",
                    why="every tensor of a layer needs an answer",
                    do="return a quantizer, or fullgraph.IdentityQuantizer() for high precision",
                )
            answers[role] = answer
        return answers


_SLOTS = (Role.INPUT, Role.WEIGHT, Role.OUTPUT, Role.GRAD_OUTPUT)
"""The tensors that delayed scaling keeps scales of, in the order of a layer's state."""


def _scaling_rule_text(recipe: DelayedScaling | CustomRecipe, formats: tuple[Format, ...]) -> str:
    algorithm = recipe.algorithm
    if isinstance(algorithm, str) and ":" in algorithm:
        find_algorithm(algorithm)  # may raise: before the first step
    rule = ScalingRule(
        recipe.history_length,
        algorithm if isinstance(algorithm, str) else register_algorithm(algorithm),
        recipe.margin,
        formats,  # type: ignore[arg-type]
        recipe.reduce_amax,
    )
    return encode(rule, "recipe")


def _as_quantizer(answer: Quantizer) -> Quantizer | None:
    return None if isinstance(answer, IdentityQuantizer) else answer


BY_NAME: dict[str, Recipe] = {
    "bf16": HighPrecision(),
    "fp8-delayed": DelayedScaling(),
    "fp8-current": Float8CurrentScaling(),
    "fp8-per-row": Float8PerRowScaling(),
    "fp8-block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
"""The recipes with their default options, by the names of the command line."""


def get(name: str) -> Recipe:
    """The recipe of this name with its default options.

    Args:
        name: one of `BY_NAME`.

    Returns:
        The recipe.

    Raises:
        ConfigError: no recipe has this name; the message lists those that exist.
    """
    if name not in BY_NAME:
        raise ConfigError(
            f"recipes.get: unknown recipe {name!r}",
            why=f"the recipes are {', '.join(BY_NAME)}",
            do="use one of them, or construct a recipe class",
        )
    return BY_NAME[name]


def resolve(recipe: Recipe | str) -> Recipe:
    """A recipe, given itself or its name.

    Args:
        recipe: either.

    Returns:
        The recipe.

    Raises:
        ConfigError: neither a recipe nor the name of one.
    """
    if isinstance(recipe, str):
        return get(recipe)
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"a recipe is needed, got {recipe!r}",
            why="it decides how each tensor of a layer is quantized",
            do=f"pass a fullgraph.recipes object or one of {', '.join(BY_NAME)}",
        )
    if not recipe.numerics_text or not type(recipe).__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise ConfigError(
            f"{type(recipe).__name__}: a recipe must be a frozen dataclass",
            why="its numerics are constants of the graph, written down when it is constructed",
            do="decorate the class with @dataclass(frozen=True); a __post_init__ of its own calls super()'s",
        )
    return recipe
