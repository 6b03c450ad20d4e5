"""`fg.autocast`: the recipe of every layer inside that has none of its own."""

from __future__ import annotations

import threading
from types import TracebackType

import torch
from torch import nn

from fullgraph.customop import compat
from fullgraph.recipes import BY_NAME, Recipe, resolve

_LAST_RECIPE = "_last_recipe"

PLAIN = BY_NAME["bf16"]
"""The recipe outside of any autocast: plain high precision."""


class _State(threading.local):
    """The recipes in force in this thread, innermost first: (recipe, entered in a backward pass?, (... None))."""

    def __init__(
        self,
    ) -> None:  # an instance attribute: Dynamo of torch 2.11 does not see past a class one
        self.stack: tuple | None = None


_STATE = _State()


class autocast:
    """Context manager: layers without a recipe of their own use this one.

    It nests, is per thread, and works outside and inside a compiled function (where it may also construct the recipe).
    It acts when a layer runs forward; backward uses what forward used, wherever it runs. So does a layer that
    activation checkpointing runs again; the function `fg.linear` has no memory and needs its recipe passed there.

    Args:
        recipe: a recipe, or the name of one.
        enabled: False means plain high precision inside.

    Raises:
        ConfigError: neither a recipe nor the name of one.

    Example:
        >>> with fullgraph.autocast("fp8-current"):
        ...     fullgraph.nn.current_recipe()
        Float8CurrentScaling(...)
    """

    def __init__(self, recipe: Recipe | str, enabled: bool = True) -> None:
        self.recipe = resolve(recipe) if enabled else PLAIN

    def __enter__(self) -> autocast:
        in_backward = not torch.compiler.is_compiling() and compat.is_in_backward()
        _STATE.stack = (self.recipe, in_backward, _STATE.stack)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert _STATE.stack is not None
        _STATE.stack = _STATE.stack[2]


def recipe_of(layer: nn.Module, own: Recipe | None) -> Recipe:
    """The recipe with which a layer runs now: its own, else the one in force.

    Activation checkpointing runs a layer again during backward, in eager mode perhaps in another thread and outside of
    the autocast of its forward. Unless an autocast was entered within that backward pass, it then takes the recipe
    of its last forward pass in training.

    Args:
        layer: remembers the recipe of its last forward pass with gradients or in training mode, in eager mode.
        own: the recipe that it was constructed with, or None.
    """
    if own is not None:
        return own
    if torch.compiler.is_compiling():  # a compiled graph holds its recomputation
        return current_recipe()
    if compat.is_in_backward():
        stack = _STATE.stack
        if stack is not None and stack[1]:
            return stack[0]
        return layer.__dict__.get(_LAST_RECIPE, PLAIN)
    recipe = current_recipe()
    if torch.is_grad_enabled() or layer.training:
        layer.__dict__[_LAST_RECIPE] = recipe
    return recipe


def current_recipe() -> Recipe:
    """The recipe of the innermost autocast of this thread; plain high precision outside of any."""
    stack = _STATE.stack
    return PLAIN if stack is None else stack[0]
