"""`fg.autocast`: the recipe of every layer inside that has none of its own."""

from __future__ import annotations

import threading
from types import TracebackType

from fullgraph.recipes import BY_NAME, Recipe, resolve

PLAIN = BY_NAME["bf16"]
"""The recipe outside of any autocast: plain high precision."""


class _State(threading.local):
    """The recipes in force in this thread, innermost first: (recipe, (recipe, ... None))."""

    def __init__(self) -> None:  # an instance attribute: Dynamo of torch 2.11 does not see past a class one
        self.stack: tuple | None = None


_STATE = _State()


class autocast:
    """Context manager: layers without a recipe of their own use this one.

    It nests, is per thread, and works outside and inside a compiled function (where it may also construct the recipe).
    It acts when a layer runs forward; backward uses what forward used, wherever it runs.

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
        _STATE.stack = (self.recipe, _STATE.stack)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert _STATE.stack is not None
        _STATE.stack = _STATE.stack[1]


def current_recipe() -> Recipe:
    """The recipe of the innermost autocast of this thread; plain high precision outside of any."""
    stack = _STATE.stack
    return PLAIN if stack is None else stack[0]
