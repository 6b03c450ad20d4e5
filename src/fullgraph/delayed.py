"""Delayed scaling as data: how the scales of the next step follow from the amaxes of past ones.

`ScalingRule` is what a recipe decides; `fullgraph.ops.scaling` applies it. How an amax is chosen from the history is an
algorithm, known by name, because a rule crosses into compiled graphs as text.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fullgraph.errors import CompileError, ConfigError
from fullgraph.formats import Format

SLOTS = ("input", "weight", "output", "grad_output")
"""The tensors of a layer that have a scale each, in the order of every state and history."""
FORWARD_SLOTS = 3
"""How many of them are cast in the forward pass; they come first."""

Algorithm = Callable[[Tensor], Tensor]
"""The window float32 [L, n], oldest row first, newest last -> the amaxes float32 [n] that make the scales."""

_REGISTERED: dict[str, Algorithm] = {}
"""Algorithms that cannot be imported by their name: those of notebooks and of functions."""

_FLOAT32_MIN, _FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127


def _largest(window: Tensor) -> Tensor:
    return window.amax(0)


def _newest(window: Tensor) -> Tensor:
    return window[-1]


BUILT_IN: dict[str, Algorithm] = {"max": _largest, "most_recent": _newest}
"""The algorithms with short names: the largest amax of the window, and the newest."""


@dataclasses.dataclass(frozen=True)
class ScalingRule:
    """How the scales of a layer are updated, once a step.

    scale = format.max * 2^-margin / amax, amax = algorithm(the last `history_length` amaxes)

    Args:
        history_length: L, how many steps the window has, the one that ends included.
        algorithm: "max", "most_recent" or what `register_algorithm` returned.
        margin: how many powers of two a scale stays below the largest that does not saturate.
        formats: of input, weight, output and grad_output.
        reduce_amax: whether the ranks of a process group share the largest of their amaxes.

    Raises:
        ConfigError: an option that cannot be meant.

    Source: TransformerEngine 2.20, common/recipe/__init__.py, DelayedScaling.
    """

    history_length: int = 1024
    algorithm: str = "max"
    margin: float = 0.0
    formats: tuple[Format, Format, Format, Format] = (
        Format.E4M3,
        Format.E4M3,
        Format.E4M3,
        Format.E5M2,
    )
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        if type(self.history_length) is not int or self.history_length < 1:
            raise ConfigError(
                f"ScalingRule: history_length must be an integer >= 1, got {self.history_length!r}",
                why="it is how many amaxes the next scale is made from",
                do="use 1024, or 1 for the newest amax alone",
            )
        if self.algorithm not in BUILT_IN and ":" not in str(self.algorithm):
            raise ConfigError(
                f"ScalingRule: unknown algorithm {self.algorithm!r}",
                why=f"the algorithms are {', '.join(BUILT_IN)} and functions of yours",
                do="use one of them, or what register_algorithm(function) returned",
            )
        if len(self.formats) != len(SLOTS) or not all(
            f in (Format.E4M3, Format.E5M2) for f in self.formats
        ):
            raise ConfigError(
                f"ScalingRule: formats must be four of E4M3 and E5M2, got {self.formats!r}",
                why=f"{', '.join(SLOTS)} have a scale each, for an 8-bit format",
                do="use E4M3 for the first three, and E5M2 or E4M3 for grad_output",
            )
        is_number = isinstance(self.margin, (int, float)) and -200 < self.margin < 200
        if not is_number or not all(_FLOAT32_MIN <= m <= _FLOAT32_MAX for m in self.largest):
            raise ConfigError(
                f"ScalingRule: margin must be a small number, got {self.margin!r}",
                why="format.max * 2^-margin must be a normal float32",
                do="use 0; 1 or 2 leave room for amaxes that grow from step to step",
            )

    @property
    def largest(self) -> tuple[float, ...]:
        """Where the amax of each slot is mapped to: format.max * 2^-margin."""
        return tuple([format.max * 2.0**-self.margin for format in self.formats])


def register_algorithm(function: Algorithm) -> str:
    """Give a function a name by which rules, and the graphs compiled with them, find it.

    A function that can be imported is found again in other processes. Others, such as those made in a function, are
    known to this process only.

    Args:
        function: see `Algorithm`. It runs once a step, over all layers with equal rules; it must not read data on the
            host.

    Returns:
        The name, "module:qualified.name".

    Raises:
        ConfigError: not a function, or another function has this name.
    """
    qualname = getattr(function, "__qualname__", None)
    if not callable(function) or qualname is None:
        raise ConfigError(
            f"register_algorithm: a function with a name is needed, got {function!r}",
            why="a compiled graph holds its name and finds it when it runs",
            do="define it with def, at the top level of a module",
        )
    name = f"{function.__module__}:{qualname}"
    if _imported(name) is function:
        _REGISTERED.pop(name, None)
    elif not _is_same(_REGISTERED.setdefault(name, function), function):
        raise ConfigError(
            f"register_algorithm: two functions are called {name}",
            why="a rule knows its algorithm by name",
            do="define them with def, under different names, at the top level of a module",
        )
    return name


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of this name.

    Args:
        name: "max", "most_recent" or what `register_algorithm` returned, perhaps in another process.

    Returns:
        The function.

    Raises:
        CompileError: there is no such function in this process.
    """
    found = BUILT_IN.get(name) or _REGISTERED.get(name) or _imported(name)
    if found is None:
        raise CompileError(
            f"the scaling algorithm {name!r} was not found in this process",
            why="a recipe, and a graph that was compiled with it, name their algorithm by module and qualified name",
            do="define the function at the top level of an importable module",
        )
    return found


def _is_same(one: Any, other: Any) -> bool:
    """Whether two functions are one, or made by one piece of code that refers to nothing around it."""
    if one is other:
        return True
    if getattr(one, "__self__", None) is not getattr(other, "__self__", None):
        return False  # methods of two objects
    parts = ("__code__", "__defaults__", "__kwdefaults__")
    is_plain = getattr(one, "__closure__", 0) is None and getattr(other, "__closure__", 0) is None
    return is_plain and all(getattr(one, p) == getattr(other, p) for p in parts)


def _imported(name: str) -> Algorithm | None:
    """The function that can be imported as "module:qualified.name", or None."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if callable(found) else None  # type: ignore[return-value]
