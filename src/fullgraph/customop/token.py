"""The token: every static argument of an op as one canonical string.

A token is a Python expression made of literals and five constructors, so a graph dump reads like the call:

    salt='0.1.0',mode=enum('demo.Mode','FAST'),numerics=new('demo.Numerics',eps=0.0),group=group('tp')

Why a string and not an object: compile caches store and compare it as it is, in every version of torch and in
every process. `encode` uses nothing that Dynamo cannot trace, so a value that is built inside a compiled
function can be encoded there too; `parse` runs in the op, where anything goes.
Types need no registration: they are found again by module and qualified name.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import hashlib
import importlib
import inspect
import sys
from typing import Any

import torch

from fullgraph.customop import compat
from fullgraph.errors import CompileError, ConfigError

_TYPES: dict[str, type] = {}
"""Types met by `remember`; those defined in a function could not be found again in another way."""

CACHES: list[dict[Any, Any]] = []
"""Whatever holds parsed values; emptied when a type is defined anew, as in a notebook."""


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A value that was encoded before: stands for itself in a token.

    Args:
        text: what `encode` returned.
    """

    text: str


@dataclasses.dataclass(frozen=True)
class Group:
    """A process group, by name; resolved at each use, so a group that was made anew is found.

    Args:
        name: the name that `torch.distributed` gave the group.
    """

    name: str

    def resolve(self) -> Any:
        """The live `torch.distributed.ProcessGroup` of this name.

        Raises:
            CompileError: no group of this name exists (any more) in this process.
        """
        group = compat.process_group(self.name)
        if group is None:
            raise CompileError(
                f"process group {self.name!r} does not exist in this process",
                why="an op holds its group by name, and the group was destroyed or never made here",
                do="make the same groups, in the same order, in every process before the first step",
            )
        return group


def source_digest(*objects: Any) -> str:
    """Eight characters that change with the source of the modules of these functions and classes.

    Compile caches do not see our Python: a graph that was compiled before an edit would be run after it.
    """
    sources = dict.fromkeys(_source(thing) for thing in objects)
    return hashlib.sha256("".join(sources).encode()).hexdigest()[:8]


def _source(thing: Any) -> str:
    name = getattr(thing, "__module__", "")
    for candidate in (sys.modules.get(name), thing):
        try:
            return inspect.getsource(candidate)  # type: ignore[arg-type]
        except (
            OSError,
            TypeError,
        ):  # a notebook has no module source, a frozen application none at all
            continue
    return name


def type_name(cls: type) -> str:
    """The name under which a token writes a type: module and qualified name."""
    return f"{cls.__module__}.{cls.__qualname__}"


def encode(value: Any, where: str = "value", *, freeze: bool = False) -> str:
    """Write a value as canonical text; equal values of equal types give equal texts.

    Traceable by Dynamo, which rules out much of ordinary Python: `str.join` and `repr` of what a caller passed fail
    in torch 2.11 and 2.13, and an f-string takes such numbers only after `int()` or `float()`.

    Args:
        value: None, bool, int, float, str, dtype, device, enum, process group, frozen dataclass, or tuples and
            string-keyed dicts of these.
        where: what to call the value in an error, such as "linear.numerics".
        freeze: inside a compiled function, make a symbolic integer constant rather than refuse it. Set for the fields
            of a dataclass: Dynamo takes the integers of a configuration object for sizes under `dynamic=True`.

    Returns:
        A Python expression that `parse` turns back into an equal value.

    Raises:
        ConfigError: a value that cannot be a constant of the graph, a symbolic integer above all. (While Dynamo
            traces, where an exception would lose its message, `parse` raises it instead.)

    Example:
        >>> encode((1, 0.5, torch.bfloat16, {"a": None}))
        "(1,0.5,torch.bfloat16,{'a':None,},)"
    """
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise symbolic_value(where)
    if isinstance(value, Encoded):
        return value.text
    if isinstance(value, enum.Enum):
        if isinstance(value, enum.Flag) and value.name not in type(value).__members__:
            raise _not_a_constant(where, "a combination of flags")
        return f"enum({type_name(type(value))!r},{value.name!r})"
    if value is None or isinstance(value, (bool, str)):
        return f"{value!r}"
    if isinstance(value, int):
        if not freeze and compat.is_traced_symbol(value):
            return f"symbolic({where!r})"
        return f"{int(value)!r}"
    if isinstance(value, float):
        return f"{float(value)!r}"
    if isinstance(value, torch.dtype):
        return f"{value}"
    if isinstance(value, torch.device):
        return f"device({str(value)!r})"
    text = ""
    if isinstance(value, tuple):
        for item in value:
            text = f"{text}{encode(item, where, freeze=freeze)},"
        return f"({text})"
    if isinstance(value, dict):
        for key in sorted(value):
            if not isinstance(key, str):
                raise _not_a_constant(where, "a dict with a key other than a string")
            text = f"{text}{key!r}:{encode(value[key], where, freeze=freeze)},"
        return f"{{{text}}}"
    if isinstance(value, Group):
        return f"group({value.name!r})"
    if _is_frozen(value):
        for field in dataclasses.fields(value):
            if field.init:
                text = (
                    f"{text},{field.name}={encode(getattr(value, field.name), where, freeze=True)}"
                )
        return f"new({type_name(type(value))!r}{text})"
    if compat.is_process_group(value):
        return f"group({value.group_name!r})"
    raise _not_a_constant(where, f"a value of type {type(value).__name__}")


def _is_frozen(value: Any) -> bool:
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return False
    return value.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _not_a_constant(where: str, what: str) -> ConfigError:
    return ConfigError(
        f"{where}: {what} cannot be a constant of the graph",
        why="static arguments cross as text, so that compile caches and other processes can compare them",
        do="use None, bool, int, float, str, dtype, device, an Enum, a process group, a frozen dataclass, or "
        "tuples and string-keyed dicts of these; a tensor belongs in a Tensor field",
    )


def symbolic_value(where: str) -> ConfigError:
    """The error for a symbolic integer in a value field."""
    return ConfigError(
        f"{where}: a symbolic integer (SymInt) cannot be a constant of the graph",
        why="it would be frozen at its first value and force a new graph for every size",
        do=f"declare the field as Dyn[int] ({where.rpartition('.')[2]}: Dyn[int])",
    )


def remember(value: Any) -> None:
    """Keep the types inside `value` findable by `parse`, also those that cannot be imported by name.

    Raises:
        ConfigError: two types of one name.
    """
    if isinstance(value, enum.Enum):
        _remember_type(type(value))
    elif isinstance(value, tuple):
        for item in value:
            remember(item)
    elif isinstance(value, dict):
        for item in value.values():
            remember(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, (type, Encoded, Group)):
        _remember_type(type(value))
        for field in dataclasses.fields(value):
            remember(getattr(value, field.name))


def _remember_type(cls: type) -> None:
    name = type_name(cls)
    known = _TYPES.setdefault(name, cls)
    if known is cls:
        return
    if _import_type(name) is not cls:
        raise ConfigError(
            f"two types are called {name}, and a value of the one that the name does not lead to came up",
            why="a token names types by module and qualified name",
            do="give one of them another name; after defining a type anew, make its values anew as well",
        )
    _TYPES[name] = cls
    parse.cache_clear()
    for cache in CACHES:
        cache.clear()


def find_type(name: str) -> type:
    """The type that `type_name` called `name`.

    Raises:
        CompileError: no such type in this process.
    """
    found = _TYPES.get(name) or _import_type(name)
    if found is None:
        raise CompileError(
            f"the type {name} of a static argument was not found in this process",
            why="a compiled graph names the types of its constants by module and qualified name",
            do="define the class at the top level of an importable module",
        )
    return found


def _import_type(name: str) -> type | None:
    path = name.split(".")
    for cut in range(len(path) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(path[:cut]))
        except ModuleNotFoundError:
            continue
        for part in path[cut:]:
            found = getattr(found, part, None)
        return found
    return None


class Slot(enum.Enum):
    """What stands in a token where the op has a run-time argument."""

    TENSOR = "T"
    """Followed by the dtype: `T[torch.bfloat16]`."""
    DYN = "D"


@dataclasses.dataclass(frozen=True)
class TensorSlot:
    """The place of one plain tensor in a parsed token."""

    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Construct:
    """A parsed `new(...)` that still has tensor slots in it."""

    cls: type
    fields: dict[str, Any]


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> dict[str, Any]:
    """Read `name=expression,...` back into values.

    Args:
        text: what `encode` wrote, one keyword per field.

    Returns:
        A dict, not to be changed: the value of each keyword. Tensor places come back as `TensorSlot`, symbolic
        integers as `Slot.DYN`, a structured tensor as a `Construct`.

    Raises:
        CompileError: a type was not found, or the text is not a token.
        ConfigError: `encode` met a symbolic integer while Dynamo traced it.
    """
    call = ast.parse(f"token({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {k.arg: _value(k.value) for k in call.keywords if k.arg is not None}


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.Tuple(elts=elements):
            return tuple(_value(e) for e in elements)
        case ast.Dict(keys=keys, values=values):
            return {
                _value(k): _value(v) for k, v in zip(keys, values, strict=True) if k is not None
            }
        case ast.Name(id=name) if name in ("inf", "nan"):
            return float(name)
        case ast.Name(id=Slot.DYN.value):
            return Slot.DYN
        case ast.Attribute(value=ast.Name(id="torch"), attr=attr):
            return getattr(torch, attr)
        case ast.Subscript(value=ast.Name(id=Slot.TENSOR.value), slice=dtype):
            return TensorSlot(_value(dtype))
        case ast.Call(func=ast.Name(id=constructor), args=args, keywords=keywords):
            return _construct(
                constructor,
                [_value(a) for a in args],
                {k.arg or "": _value(k.value) for k in keywords},
            )
    raise CompileError(f"not a token: {ast.unparse(node)}")


def _construct(constructor: str, args: list[Any], fields: dict[str, Any]) -> Any:
    match constructor:
        case "enum":
            return find_type(args[0])[args[1]]  # type: ignore[index]
        case "device":
            return torch.device(args[0])
        case "group":
            return Group(args[0])
        case "symbolic":
            raise symbolic_value(args[0])
        case "new":
            cls = find_type(args[0])
            has_slot = any(isinstance(v, TensorSlot) for v in fields.values())
            return Construct(cls, fields) if has_slot else cls(**fields)
    raise CompileError(f"not a token: unknown constructor {constructor!r}")
