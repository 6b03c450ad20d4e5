"""`fg.autocast`: the recipe of every layer inside that has none of its own."""

from __future__ import annotations

import dataclasses
import threading
from types import TracebackType

import torch
from torch import nn

from fullgraph.customop import compat
from fullgraph.customop.guards import PLACES
from fullgraph.errors import ConfigError
from fullgraph.recipes import BY_NAME, Recipe, resolve

_LAST_RUN = "_last_run"
_COMPILED = "_compiled_recipes"

PLAIN = BY_NAME["bf16"]
"""The recipe outside of any autocast: plain high precision."""


class _State(threading.local):
    """The recipes in force in this thread, innermost first: (recipe, entered in a backward pass?, (... None))."""

    def __init__(
        self,
    ) -> None:  # an instance attribute: Dynamo of torch 2.11 does not see past a class one
        self.stack: tuple | None = None


_STATE = _State()
PLACES[f"{__name__}._STATE.stack"] = "the recipe of the enclosing fg.autocast"


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

    Raises:
        ConfigError: the layer runs again, and it ran with two recipes.
    """
    if own is not None:
        return own
    if torch.compiler.is_compiling():  # a compiled graph holds its recomputation
        return current_recipe()
    run = layer.__dict__.get(_LAST_RUN)
    if compat.is_in_backward():
        stack = _STATE.stack
        if stack is not None and stack[1]:
            return stack[0]
        return PLAIN if run is None else run.repeated(layer)
    recipe = current_recipe()
    if torch.is_grad_enabled() or layer.training:
        layer.__dict__[_LAST_RUN] = _Run.after(run, layer, recipe)
    return recipe


@dataclasses.dataclass
class _Run:
    """The last forward pass of a layer.

    Args:
        recipe: what it ran with.
        versions: of its parameters then; once they change nothing before is run again.
        earlier: what it ran with before, if that was another recipe and may still be run again.
        is_repeated: whether it was run again since.
    """

    recipe: Recipe
    versions: tuple[int, ...]
    earlier: Recipe | None = None
    is_repeated: bool = False

    @classmethod
    def after(cls, last: _Run | None, layer: nn.Module, recipe: Recipe) -> _Run:
        """The run of `layer` with `recipe` that follows `last`."""
        tensors = [p for p in layer._parameters.values() if p is not None]
        versions = tuple([0 if p.is_inference() else p._version for p in tensors])
        if last is None or last.is_repeated or last.versions != versions:
            return cls(recipe, versions)
        earlier = last.earlier if last.recipe == recipe else last.recipe
        return cls(recipe, versions, earlier)

    def repeated(self, layer: nn.Module) -> Recipe:
        """The recipe with which the layer runs again."""
        if self.earlier is not None:
            raise ConfigError(
                f"{type(layer).__name__}: it runs again in a backward pass, and before it ran with {self.earlier} "
                f"and with {self.recipe}",
                why="outside of its autocast, a layer that activation checkpointing runs again takes the recipe of its "
                "last run, which need not be this one",
                do="enter fullgraph.autocast inside of the function that is checkpointed, or give the layer a recipe "
                "of its own; if one of the two runs was an evaluation, call model.eval() for it",
            )
        self.is_repeated = True
        return self.recipe


def check_repetition(layer: nn.Module, numerics_text: str) -> None:
    """Refuse to compile what activation checkpointing runs again outside of the autocast of its forward pass.

    For use while a graph is traced. A graph that is compiled within a backward pass is such a repetition; if it is
    around a compiled function, nothing but the recipe in force can say which recipe that has.

    Args:
        layer: without a recipe of its own; remembers what it was compiled with.
        numerics_text: of the recipe in force.

    Raises:
        ConfigError: the layer was compiled before, and never with this recipe.
    """
    compiled = layer.__dict__.setdefault(_COMPILED, set())
    if compiled and numerics_text not in compiled and compat.is_in_backward():
        raise ConfigError(
            f"{type(layer).__name__}: a compiled function runs again in a backward pass, with another recipe",
            why="activation checkpointing around a compiled function repeats it with the recipe that is in force then, "
            "and its autocast has ended",
            do="run backward() inside of the autocast, compile around the checkpoint, or give the layers a recipe of "
            "their own",
        )
    compiled.add(numerics_text)


def current_recipe() -> Recipe:
    """The recipe of the innermost autocast of this thread; plain high precision outside of any."""
    stack = _STATE.stack
    return PLAIN if stack is None else stack[0]
