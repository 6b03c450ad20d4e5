"""Guards of Dynamo in words: which argument, attribute or setting made a call recompile, what it was and what it is.

A guard is written in terms of `args`, `kwargs` and `function`, the names of `graphs.isolated`. What this module does
not know it leaves as torch wrote it, with the names of the user in place of these three.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fullgraph.customop.structured import StructuredTensor

_UNKNOWN = object()
_DTYPES = {"Double": "float64", "Float": "float32", "Half": "float16", "Long": "int64"}
"""What torch's guards call dtypes, where that is not the dtype's name in capitals."""
_SETTINGS = {
    "grad_mode": "gradients were switched (torch.no_grad, torch.inference_mode)",
    "default_dtype": "the default dtype was changed (torch.set_default_dtype)",
    "num_threads": "the number of threads was changed (torch.set_num_threads)",
    "deterministic_algorithms": "torch.use_deterministic_algorithms was called",
}
"""What torch's guards call global state -> what a user does to it."""

PLACES: dict[str, str] = {}
"""A global variable that compiled code may depend on, such as "package.module.NAME" -> what users call it."""


class Names:
    """How the user calls what the guards of one call speak of.

    Args:
        function: what was compiled.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
    """

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._values = {"args": args, "kwargs": kwargs, "function": function}
        self._positions = _parameter_names(function, len(args))
        self._owner = "" if isinstance(function, torch.nn.Module) else _name(function)

    def rename(self, text: str) -> str:
        """A guard, or a source in it, with the names of the user."""
        text = re.sub(r"L\['(args|kwargs|function)'\]", r"\1", text)
        text = re.sub(
            r"\bargs\[(\d+)\]", lambda match: self._positions.get(int(match[1]), match[0]), text
        )
        text = re.sub(r"\bkwargs\['(\w+)'\]", r"\1", text)
        text = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", text)
        text = re.sub(r"\bfunction\.__closure__\[(\d+)\]\.cell_contents", self._captured, text)
        text = re.sub(r"\bfunction\.", f"{self._owner}." if self._owner else "self.", text)
        text = re.sub(r"G\['__import_(\w+)'\]", lambda m: m[1].replace("_dot_", "."), text)
        for place, words in PLACES.items():
            text = re.sub(re.escape(place) + r"[\w.\[\]]*", words, text)
        return re.sub(r"\.(size|stride)\(\)\[", lambda m: f".{_ATTRIBUTES[m[1]]}[", text)

    def value(self, source: str) -> str:
        """What stands at a source now, as ", is ..."; empty if that cannot be said in a few characters."""
        found = self._resolve(source)
        text = "" if found is _UNKNOWN or isinstance(found, torch.Tensor) else repr(found)
        return f", is {text}" if 0 < len(text) <= 40 else ""

    def type(self, source: str) -> str:
        """The type of what stands at a source now, as ", is ..."; empty if that is unknown."""
        found = self._resolve(source)
        return "" if found is _UNKNOWN else f", is {type(found).__name__}"

    @property
    def keywords(self) -> str:
        """The keyword arguments."""
        return ", ".join(self._values["kwargs"])

    def structured(self) -> list[str]:
        """The arguments that are structured tensors."""
        named = {self._positions.get(i, i): a for i, a in enumerate(self._values["args"])}
        named |= self._values["kwargs"]
        return [str(name) for name, value in named.items() if isinstance(value, StructuredTensor)]

    def _resolve(self, source: str) -> Any:
        return _resolve(ast.parse(source, mode="eval").body, self._values)

    def _captured(self, match: re.Match[str]) -> str:
        """The name of a variable that the function closes over."""
        code = getattr(self._values["function"], "__code__", None)
        return match[0] if code is None else code.co_freevars[int(match[1])]


_ATTRIBUTES = {"size": "shape", "stride": "stride()"}


def in_words(guard: str, names: Names) -> str:
    """Say what a failed guard means.

    Args:
        guard: one line of torch's, without the source line behind it.
        names: of the call.

    Returns:
        What changed, in the user's names, with torch's own words in brackets where they say more.
    """
    said = _said(guard, names)
    theirs = names.rename(guard).strip()
    return f"{said} (guard: {theirs})" if said else theirs


def _said(guard: str, names: Names) -> str:
    if match := re.match(r"tensor '(.+)' (size|stride|rank|dtype|requires_grad) mismatch", guard):
        return _of_tensor(names.rename(match[1]), match[2], guard)
    if match := re.match(r"GLOBAL_STATE changed: (.*)", guard):
        return _of_setting(match[1].strip())
    if match := re.match(r"___check_type_id\((.+), \d+\), type=<class '(.+?)'>", guard):
        kind = match[2].rpartition(".")[2]
        return f"the type of {names.rename(match[1])} was {kind}{names.type(match[1])}"
    if match := re.match(r"len\((.+)\) == (\d+)$", guard):
        return f"len({names.rename(match[1])}) was {match[2]}{names.value(f'len({match[1]})')}"
    if guard.startswith("not kwargs"):
        return f"{names.keywords} was not passed before"
    if "___check_metadata" in guard:
        which = " or ".join(names.structured()) or "a parameter"
        return f"another kind of structured tensor in {which}"
    if match := re.match(r"Duplicate tensors? found: \[(.*)\]", guard):
        both = re.findall(r'[^", ]+', names.rename(match[1]))
        return f"{' and '.join(both)} are one tensor now"
    if match := re.match(r"(.+?) is (?!None)(\w.*)$", guard):
        return f"{names.rename(match[1])} and {names.rename(match[2])} were one tensor"
    if match := re.match(r"([\w.\[\]'\"]+) (?:==|is) (.+)$", guard):
        return f"{names.rename(match[1])} was {match[2]}{names.value(match[1])}"
    if match := re.match(r"2 <= (.+\.size\(\)\[\d+\])$", guard):
        return f"{names.rename(match[1])} is 0 or 1, and torch compiles for these sizes apart"
    return ""


def _of_tensor(name: str, what: str, guard: str) -> str:
    if what == "requires_grad":
        before = "requires_grad=1" in guard
        return f"{name}.requires_grad was {before}, is {not before}"
    found = re.search(r"(?: at index (\d+))?\. expected (\w+), actual (\w+)", guard)
    if found is None:
        return ""
    index, *values = found.groups()
    if what == "dtype":
        values = [_DTYPES.get(value, value.lower()) for value in values]
    place = {"size": f"shape[{index}]", "stride": f"stride()[{index}]", "rank": "ndim"}
    return f"{name}.{place.get(what, what)} was {values[0]}, is {values[1]}"


def _of_setting(what: str) -> str:
    if what.startswith("autocast"):
        return "torch.autocast was switched"
    return "; ".join([_SETTINGS.get(name, f"global state: {name}") for name in what.split()])


def _resolve(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """What an expression of names, attributes, constant subscripts and `len` stands for."""
    match node:
        case ast.Name(id=name):
            return values.get(name, _UNKNOWN)
        case ast.Attribute(value=value, attr=attribute):
            return getattr(_resolve(value, values), attribute, _UNKNOWN)
        case ast.Subscript(value=value, slice=ast.Constant(value=key)):
            holder = _resolve(value, values)
            if isinstance(holder, Mapping):
                return holder.get(key, _UNKNOWN)
            if isinstance(holder, list | tuple) and isinstance(key, int) and key < len(holder):
                return holder[key]
        case ast.Call(func=ast.Name(id="len"), args=[value]):
            holder = _resolve(value, values)
            return len(holder) if isinstance(holder, list | tuple | dict | str) else _UNKNOWN
    return _UNKNOWN


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _parameter_names(function: Callable[..., Any], num_args: int) -> dict[int, str]:
    """Position -> name of the parameter that takes it."""
    target = function.forward if isinstance(function, torch.nn.Module) else function
    names: dict[int, str] = {}
    for parameter in inspect.signature(target).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            first = len(names)
            names |= {i: f"{parameter.name}[{i - first}]" for i in range(first, num_args)}
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names[len(names)] = parameter.name
    return names
