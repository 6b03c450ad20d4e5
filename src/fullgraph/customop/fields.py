"""Field kinds: what each annotation of an argument dataclass means to the op.

An argument dataclass is read once, when the op is defined. Every field gets one `FieldKind`; whatever
cannot become an op argument is refused here, with the class, the field and the remedy in the message.
Next file: `token.py`, how values cross; `structured.py`, how tensor subclasses do.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from typing import Annotated, Any, TypeVar, Union

import torch

from fullgraph.errors import ConfigError

T = TypeVar("T")


class FieldKind(enum.Enum):
    """How one field of an argument dataclass reaches the op."""

    TENSOR = "tensor"
    """A tensor or structured tensor that the op reads."""
    MUT = "mut"
    """A tensor that this op changes in place."""
    CARRY = "carry"
    """A tensor that only the backward op sees; the forward op never gets it."""
    DYN = "dyn"
    """An integer that may be symbolic: a `SymInt` argument of the op, never part of the token."""
    VALUE = "value"
    """A plain value or a process group: part of the token, a compile-time constant."""
    PLANNED = "planned"
    """Backward only: a value that the forward plan decided (`Plan.values`)."""


Mut = Annotated[T, FieldKind.MUT]
"""`Mut[Tensor]`, `Mut[Tensor | None]`: the op changes this tensor in place."""
Carry = Annotated[T, FieldKind.CARRY]
"""`Carry[Tensor]`: handed to the backward op only, which may declare it `Mut`."""
Dyn = Annotated[T, FieldKind.DYN]
"""`Dyn[int]`: a size-like integer that varies between calls without a new graph."""
Planned = Annotated[T, FieldKind.PLANNED]
"""`Planned[torch.dtype]`, in backward arguments: the value of this name in the forward plan's `values`."""

NEEDS = "needs"
"""A field of this name is filled in by the framework: the names of the fields that need a gradient."""

RESERVED = ("salt", "token", "dyn")
"""Names that the framework gives to arguments of its own."""

_SCALARS = (bool, int, float, str, torch.dtype, torch.device, type(None))


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of an argument dataclass.

    Args:
        name: the field's name, also its name in the plan and in the token.
        kind: how it reaches the op.
        optional: whether the annotation admits None.
    """

    name: str
    kind: FieldKind
    optional: bool


@dataclasses.dataclass(frozen=True)
class FieldTable:
    """All fields of one argument dataclass, by kind, in declaration order."""

    cls: type
    fields: tuple[Field, ...]

    def of(self, *kinds: FieldKind) -> tuple[Field, ...]:
        """The fields of these kinds, in declaration order."""
        return tuple(f for f in self.fields if f.kind in kinds)

    def names(self, *kinds: FieldKind) -> tuple[str, ...]:
        """The names of the fields of these kinds, in declaration order."""
        return tuple(f.name for f in self.of(*kinds))

    def get(self, name: str) -> Field | None:
        """The field of this name, or None."""
        return next((f for f in self.fields if f.name == name), None)


def read_fields(cls: type) -> FieldTable:
    """Read an argument dataclass into its field table.

    Args:
        cls: a dataclass; annotations as described by `FieldKind`.

    Returns:
        One `Field` per dataclass field.

    Raises:
        ConfigError: not a dataclass, has `__slots__`, or a field's name or annotation is not supported.
    """
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(
            f"define: arguments must be a dataclass, got {cls!r}",
            why="its annotations say what each argument is",
            do="decorate the class with @dataclass",
        )
    if "__slots__" in cls.__dict__:
        raise ConfigError(
            f"define: {cls.__name__} must not use __slots__",
            why="the op builds argument objects from their __dict__ in its hot path",
            do="use @dataclass without slots=True",
        )
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as err:
        raise ConfigError(
            f"define: an annotation of {cls.__name__} cannot be resolved: {err}",
            why="annotations that are strings are looked up in the module of the class",
            do="import or define the name at the top level of that module",
        ) from err
    for name in RESERVED:
        if name in hints:
            raise ConfigError(
                f"define: {cls.__name__} must not have a field called {name!r}",
                why="an argument of the op has that name already",
                do="rename the field",
            )
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.default) or dataclasses.is_dataclass(
            field.default_factory
        ):
            raise ConfigError(
                f"define: the default of {cls.__name__}.{field.name} is a dataclass",
                why="Dynamo cannot make such a default inside a compiled function",
                do="let it be None, which `plan` may replace, or have the caller pass it",
            )
    return FieldTable(
        cls, tuple(_read(cls, f.name, hints[f.name]) for f in dataclasses.fields(cls))
    )


def _read(cls: type, name: str, annotation: Any) -> Field:
    marks: tuple[Any, ...] = ()
    if typing.get_origin(annotation) is Annotated:
        annotation, *rest = typing.get_args(annotation)
        marks = tuple(rest)
    kinds = [m for m in marks if isinstance(m, FieldKind)]
    if name == NEEDS and annotation not in (tuple, tuple[str, ...]):
        raise _refuse(cls, name, annotation, "tuple[str, ...]: the framework fills it in")
    alternatives = _union(annotation)
    optional = type(None) in alternatives
    members = [a for a in alternatives if a is not type(None)]
    is_tensor = bool(members) and all(_is_tensor(a) for a in members)
    if len(kinds) > 1:
        raise _refuse(cls, name, annotation, "one of Mut, Carry and Dyn, not two")
    if kinds and kinds[0] is FieldKind.PLANNED:
        _check_value(cls, name, annotation)
        return Field(name, FieldKind.PLANNED, optional)
    if kinds and kinds[0] is FieldKind.DYN:
        if members != [int] or optional:
            raise _refuse(cls, name, annotation, "Dyn[int]: symbolic integers only, never None")
        return Field(name, FieldKind.DYN, False)
    if kinds:
        if not is_tensor:
            raise _refuse(cls, name, annotation, f"{kinds[0].name.title()}[Tensor]: tensors only")
        return Field(name, kinds[0], optional)
    if is_tensor:
        return Field(name, FieldKind.TENSOR, optional)
    if any(_is_tensor(a) for a in members):
        raise _refuse(cls, name, annotation, "either tensors or values, not a union of both")
    _check_value(cls, name, annotation)
    return Field(name, FieldKind.VALUE, optional)


def _union(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _is_tensor(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, torch.Tensor)


def _check_value(cls: type, name: str, annotation: Any) -> None:
    """Refuse an annotation whose values the token could not hold."""
    for alternative in _union(annotation):
        origin, args = typing.get_origin(alternative), typing.get_args(alternative)
        if origin is dict and args[0] is not str:
            raise _refuse(cls, name, annotation, "string keys")
        if origin in (tuple, dict):
            for arg in args:
                if arg is not Ellipsis:
                    _check_value(cls, name, arg)
        elif origin is typing.Literal:
            for arg in args:
                _check_value(cls, name, type(arg))
        elif not _is_value_type(alternative):
            raise _refuse(
                cls,
                name,
                annotation,
                "Tensor, Mut/Carry/Dyn, or a value: None, bool, int, float, str, dtype, device, Enum, "
                "ProcessGroup, a frozen dataclass, or tuples and dicts of these",
            )


def _is_value_type(annotation: Any) -> bool:
    if not isinstance(annotation, type):
        return False
    if annotation in _SCALARS or annotation in (tuple, dict) or issubclass(annotation, enum.Enum):
        return True
    if getattr(annotation, "_is_protocol", False) or annotation.__name__ == "ProcessGroup":
        return True
    parameters = getattr(annotation, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def _refuse(cls: type, name: str, annotation: Any, supported: str) -> ConfigError:
    return ConfigError(
        f"define: {cls.__name__}.{name} has the unsupported annotation {annotation!r}",
        why="every argument must become a tensor, a symbolic integer or a constant of the graph",
        do=f"use {supported}",
    )
