"""The exceptions of fullgraph, and how a tensor is written in their messages.

Every error that a user can cause is one of these:

    FullgraphError(Exception)
    ├── ConfigError(ValueError)     an option, recipe or declaration that cannot be meant
    ├── ShapeError(ValueError)      a tensor whose shape, layout or dtype does not fit
    ├── HardwareError(RuntimeError) a device that cannot do what was asked
    └── CompileError(RuntimeError)  something that cannot become part of one graph

A message has up to three lines: what is required and what came instead, why, and the one change
that helps. An `AssertionError` out of this package is a bug of this package.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol


class FullgraphError(Exception):
    """Base class of every error that fullgraph raises on purpose.

    Args:
        what: what is required and what came instead; starts with a public name.
        why: the hardware or format rule behind it, in one sentence.
        do: the one change that helps.

    Example:
        >>> print(ShapeError("cast: need 2 dimensions, got 3", do="flatten the leading ones."))
        cast: need 2 dimensions, got 3
        Do: flatten the leading ones.
    """

    def __init__(self, what: str, *, why: str = "", do: str = "") -> None:
        self.what = what
        self.why = why
        self.do = do
        super().__init__(_three_lines(what, why, do))

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the class with the whole message as its first argument.
        return _rebuild, (type(self), self.what, self.why, self.do), self.__dict__


class ConfigError(FullgraphError, ValueError):
    """An option, a recipe or a declaration that cannot be meant."""


class ShapeError(FullgraphError, ValueError):
    """A tensor whose shape, layout or dtype does not fit."""


class HardwareError(FullgraphError, RuntimeError):
    """A device that cannot do what was asked."""


class EmulationWarning(UserWarning):
    """A GEMM that the device does not have runs emulated; said once for each kind of GEMM."""


class CompileError(FullgraphError, RuntimeError):
    """Something that cannot become part of one compiled graph."""


def check_flags(options: Any) -> None:
    """Raise unless the fields of a dataclass that are declared bool are True or False.

    Args:
        options: an instance.

    Raises:
        ConfigError: another value, such as a string, which would count as True.
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.type in ("bool", bool) and value is not True and value is not False:
            raise ConfigError(
                f"{type(options).__name__}: {field.name} must be True or False, got {value!r}",
                do="pass a bool",
            )


class HasDtypeAndShape(Protocol):
    """What `describe` needs: a tensor, a fake tensor, a spec."""

    @property
    def dtype(self) -> Any:
        """Element type; written without its `torch.`."""
        ...

    @property
    def shape(self) -> Any:
        """Sizes, perhaps symbolic."""
        ...


def describe(tensor: HasDtypeAndShape) -> str:
    """Write a tensor as dtype and shape, without reading its data.

    Args:
        tensor: anything with `dtype` and `shape`; sizes may be symbolic and stay so.

    Returns:
        For example `bfloat16[3, 7]`, `float32[]` for a scalar, `bfloat16[s0, 7]`.

    Example:
        >>> import torch
        >>> describe(torch.empty(3, 7, dtype=torch.bfloat16))
        'bfloat16[3, 7]'
    """
    sizes = ", ".join(str(size) for size in tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}[{sizes}]"


def _three_lines(what: str, why: str, do: str) -> str:
    lines = [what]
    if why:
        lines.append(f"Why: {why}")
    if do:
        lines.append(f"Do: {do}")
    return "\n".join(lines)


def _rebuild(cls: type[FullgraphError], what: str, why: str, do: str) -> FullgraphError:
    return cls(what, why=why, do=do)
