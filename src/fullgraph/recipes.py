"""Recipes: which quantizer for which tensor of a layer, and how each GEMM accumulates.

A recipe is a frozen dataclass. A layer asks it for its `LinearNumerics`, the plain values that reach the op.
"""

from __future__ import annotations

import dataclasses
import enum

from fullgraph.customop.token import encode
from fullgraph.errors import ConfigError
from fullgraph.formats import Format
from fullgraph.quantizers import PerTensorQuantizer
from fullgraph.tensor import Quantizer


class Role(enum.Enum):
    """The tensors of a layer that a recipe decides about."""

    INPUT = "input"
    WEIGHT = "weight"
    OUTPUT = "output"
    GRAD_OUTPUT = "grad_output"


@dataclasses.dataclass(frozen=True)
class LinearNumerics:
    """Everything numeric that a linear op needs to know, resolved for one layer.

    A GEMM runs in low precision if both of its operands have a quantizer, in high precision otherwise:
    fprop reads input and weight, dgrad reads grad_output and weight, wgrad reads grad_output and input.

    Args:
        input: its quantizer, or None for high precision.
        weight: likewise.
        grad_output: likewise.
        output: quantizer of a quantized output, used on request.
        fprop_split_accumulator: whether fprop promotes its partial sums to float32 often (slower, more exact); matters
            to the native FP8 GEMMs of Ada and Hopper.
        dgrad_split_accumulator: the same for dgrad.
        wgrad_split_accumulator: the same for wgrad.
    """

    input: Quantizer | None = None
    weight: Quantizer | None = None
    grad_output: Quantizer | None = None
    output: Quantizer | None = None
    fprop_split_accumulator: bool = False
    dgrad_split_accumulator: bool = True
    wgrad_split_accumulator: bool = True

    @property
    def low_precision_fprop(self) -> bool:
        """Whether output = input @ weight^T runs in low precision."""
        return self.input is not None and self.weight is not None

    @property
    def low_precision_dgrad(self) -> bool:
        """Whether grad_input = grad_output @ weight runs in low precision."""
        return self.grad_output is not None and self.weight is not None

    @property
    def low_precision_wgrad(self) -> bool:
        """Whether grad_weight = grad_output^T @ input runs in low precision."""
        return self.grad_output is not None and self.input is not None


class Recipe:
    """Base of recipes: subclass it as a frozen dataclass and answer `quantizer` for each role."""

    numerics_text: str = ""
    """The numerics of a linear layer, encoded once for all layers that use the recipe."""

    def __post_init__(self) -> None:
        # A derived constant of a frozen object: Dynamo then guards one string per layer.
        object.__setattr__(self, "numerics_text", encode(self.linear_numerics(), "recipe"))

    def quantizer(self, role: Role) -> Quantizer | None:
        """The quantizer of a tensor, or None for high precision."""
        raise NotImplementedError(f"{type(self).__name__} must define quantizer(role)")

    def stored_quantizer(self, role: Role) -> Quantizer:
        """The quantizer of a tensor that is asked to be *kept* quantized: a quantized weight or output."""
        return self.quantizer(role) or PerTensorQuantizer(Format.E4M3)

    def linear_numerics(self) -> LinearNumerics:
        """The numerics of a linear layer."""
        return LinearNumerics(
            input=self.quantizer(Role.INPUT),
            weight=self.quantizer(Role.WEIGHT),
            grad_output=self.quantizer(Role.GRAD_OUTPUT),
            output=self.stored_quantizer(Role.OUTPUT),
        )


@dataclasses.dataclass(frozen=True)
class HighPrecision(Recipe):
    """Plain high precision ("bf16"): GEMMs in the dtype of the input, or of `torch.autocast`."""

    def quantizer(self, role: Role) -> Quantizer | None:
        """None for every role."""
        return None


@dataclasses.dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor, from the tensor's own amax at the time of the cast.

    Args:
        forward_format: format of inputs, weights and quantized outputs.
        backward_format: format of output gradients; E5M2 makes the recipe "hybrid".
        power_of_two: round every scale down to a power of two.
        amax_epsilon: lower bound of every amax.
        fprop_split_accumulator: see `LinearNumerics`.
        dgrad_split_accumulator: see `LinearNumerics`.
        wgrad_split_accumulator: see `LinearNumerics`.

    Numerics: relative error of a GEMM about 3.7 % (E4M3 operands) or 5.9 % (with an E5M2 one).
    Source: TransformerEngine 2.20, common/recipe/__init__.py, Float8CurrentScaling.
    """

    forward_format: Format = Format.E4M3
    backward_format: Format = Format.E5M2
    power_of_two: bool = False
    amax_epsilon: float = 0.0
    fprop_split_accumulator: bool = False
    dgrad_split_accumulator: bool = True
    wgrad_split_accumulator: bool = True

    def quantizer(self, role: Role) -> Quantizer | None:
        """A per-tensor quantizer for every role."""
        backward = role is Role.GRAD_OUTPUT
        return PerTensorQuantizer(
            self.backward_format if backward else self.forward_format,
            power_of_two=self.power_of_two,
            amax_epsilon=self.amax_epsilon,
        )

    def linear_numerics(self) -> LinearNumerics:
        """The numerics of a linear layer, with the accumulation of each GEMM as given."""
        return dataclasses.replace(
            super().linear_numerics(),
            fprop_split_accumulator=self.fprop_split_accumulator,
            dgrad_split_accumulator=self.dgrad_split_accumulator,
            wgrad_split_accumulator=self.wgrad_split_accumulator,
        )


BY_NAME: dict[str, Recipe] = {"bf16": HighPrecision(), "fp8-current": Float8CurrentScaling()}
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
