"""Structured tensors: one logical tensor made of several plain ones, such as bytes and scales.

A structured tensor has two faces. Outside of ops it is a `torch.Tensor` subclass (`StructuredTensor`), so that it
can be a parameter, an activation or a leaf. Inside an op it is its *parts*: a small dataclass whose tensor fields
are its components and whose other fields are static. The same dataclass filled with `TensorSpec`s is its spec.

    @dataclass
    class Int8Parts:
        data: Tensor
        scale_inv: Tensor
        dtype: torch.dtype = torch.float32

        @property
        def shape(self): return self.data.shape
        def decode(self): return (self.data * self.scale_inv).to(self.dtype)

    class Int8Tensor(StructuredTensor, parts=Int8Parts): ...
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch.utils._pytree import tree_map_only

from fullgraph.customop.fields import _is_tensor, _union
from fullgraph.customop.plan import TensorSpec
from fullgraph.customop.tangent import PlainGrad, declare_tangent
from fullgraph.customop.token import encode, parse, remember, type_name
from fullgraph.errors import ConfigError

aten = torch.ops.aten

PREFIX = "part_"
"""A structured tensor holds each field of its parts under this prefix, clear of the attributes of `torch.Tensor`."""

FRONTS: dict[Any, Callable[..., Any]] = {}
"""Trace-time ops that accept structured tensors. In inference mode, where autograd is out of the way, they reach
`__torch_dispatch__` themselves and are found here."""

_STRUCTURED: dict[type, type[StructuredTensor]] = {}
"""Parts class -> its tensor class."""


class Parts(Protocol):
    """What a parts dataclass must offer. Tensor fields hold tensors, `TensorSpec`s or None."""

    dtype: torch.dtype

    @property
    def shape(self) -> Any:
        """Shape of the logical tensor, from the shapes of the components."""
        ...

    def decode(self) -> torch.Tensor:
        """The logical tensor as a plain one, `dtype` [`shape`]; plain torch ops only."""
        ...


@dataclasses.dataclass(frozen=True)
class PartsTable:
    """Field names of a parts dataclass: the components (tensors) and the statics (everything else)."""

    cls: type
    components: tuple[str, ...]
    statics: tuple[str, ...]

    @functools.cached_property
    def attributes(self) -> tuple[str, ...]:
        """Names under which a structured tensor holds its components."""
        return tuple(PREFIX + name for name in self.components)

    @functools.cached_property
    def everything(self) -> tuple[tuple[str, str], ...]:
        """All fields with the names of their attributes on a structured tensor."""
        return tuple((name, PREFIX + name) for name in self.components + self.statics)

    def tensors(self, parts: Any) -> dict[str, Any]:
        """The components that are present, by name."""
        values = {name: getattr(parts, name) for name in self.components}
        return {name: value for name, value in values.items() if value is not None}

    def constants(self, parts: Any) -> dict[str, Any]:
        """The static fields by name."""
        return {name: getattr(parts, name) for name in self.statics}


_TABLES: dict[type, PartsTable] = {}


def parts_table(parts: Any) -> PartsTable | None:
    """The table of a parts object's class, or None if it is no parts object."""
    return _TABLES.get(type(parts))


def is_parts(value: Any) -> bool:
    """Whether `value` stands for a structured tensor inside an op or a plan."""
    return type(value) in _TABLES


def device_of(parts: Any) -> torch.device:
    """Device of the first component that is present."""
    table = _TABLES[type(parts)]
    return next(iter(table.tensors(parts).values())).device


def layout_text(parts: Any) -> str:
    """How a structured tensor stands in a token: its statics, and a slot for each component."""
    table = _TABLES[type(parts)]
    remember(parts)
    fields = [
        f"{name}={'None' if (t := getattr(parts, name)) is None else f'T[{t.dtype}]'}"
        for name in table.components
    ]
    fields += [f"{name}={encode(getattr(parts, name), name)}" for name in table.statics]
    return f"new({type_name(table.cls)!r},{','.join(fields)})"


def map_parts(function: Callable[[Any], Any], parts: Any) -> Any:
    """The same parts with `function` applied to each component that is present."""
    table = _TABLES[type(parts)]
    mapped = {name: function(value) for name, value in table.tensors(parts).items()}
    return table.cls(**{**dict.fromkeys(table.components), **mapped, **table.constants(parts)})


def to_spec(value: Any) -> Any:
    """The spec of a tensor, of parts, or None."""
    if value is None or isinstance(value, TensorSpec):
        return value
    if is_parts(value):
        return map_parts(to_spec, value)
    if isinstance(value, StructuredTensor):
        return map_parts(to_spec, value.parts)
    return TensorSpec.of(value)


def flatten(value: Any) -> list[Any]:
    """The plain tensors (or specs) in a tensor, a structured tensor, parts, or None."""
    if value is None:
        return []
    if isinstance(value, StructuredTensor):
        return [t for name in value._table.attributes if (t := getattr(value, name)) is not None]
    table = _TABLES.get(type(value))
    return [value] if table is None else list(table.tensors(value).values())


def unflatten_like(template: Any, tensors: Iterator[Any]) -> Any:
    """Take as many tensors as `template` has and give them its form: one tensor, or parts."""
    if template is None:
        return None
    return map_parts(lambda _: next(tensors), template) if is_parts(template) else next(tensors)


def wrap(value: Any) -> Any:
    """Parts as their structured tensor; anything else as it is."""
    if not is_parts(value):
        return value
    return _STRUCTURED[type(value)](map_parts(_without_base, value))


def _without_base(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without a history as a view: Dynamo would guard the sizes of what it is a view of."""
    if not tensor._is_view():
        return tensor
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    return tensor.new_empty(0).set_(storage, offset, tensor.shape, tensor.stride())


def code_of(value: Any) -> Any:
    """What distinguishes layouts: None, the dtype of a plain tensor, the text of a structured one."""
    if value is None:
        return None
    if isinstance(value, StructuredTensor):
        return value.layout_text
    return layout_text(value) if is_parts(value) else value.dtype


class StructuredTensor(torch.Tensor):
    """Base of tensor subclasses whose data are several plain tensors.

    Subclass it with `parts=`, a dataclass as described by `Parts`; its fields become attributes. The subclass can
    then be a parameter or an activation, and cross op and graph boundaries, differentiably. Ops that
    nobody taught it decode first; in-place ops decode, compute and encode back through `parts.encode_`.

    Args:
        parts: the components and static fields.
        requires_grad: as for any tensor.

    Raises:
        ConfigError: (on subclassing) the parts class is no dataclass or has no tensor field.
    """

    _table: ClassVar[PartsTable]
    _layout_text: str
    _handlers: ClassVar[dict[Any, Callable[..., Any]]] = {}

    def __init_subclass__(cls, *, parts: type | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if parts is None:
            return
        if not dataclasses.is_dataclass(parts):
            raise ConfigError(
                f"{cls.__name__}: parts must be a dataclass, got {parts!r}",
                why="its tensor fields become the components of the tensor, the others its static data",
                do="decorate the class with @dataclass",
            )
        hints = typing.get_type_hints(parts)
        names = [f.name for f in dataclasses.fields(parts)]
        components = tuple(n for n in names if any(_is_tensor(a) for a in _union(hints[n])))
        if not components:
            raise ConfigError(
                f"{cls.__name__}: {parts.__name__} has no Tensor field",
                why="a structured tensor needs at least one component",
                do="annotate the components as Tensor or Tensor | None",
            )
        missing = [
            n for n in ("shape", "dtype", "decode") if n not in names and not hasattr(parts, n)
        ]
        if missing:
            raise ConfigError(
                f"{cls.__name__}: {parts.__name__} has no {missing[0]}",
                why="a structured tensor takes its shape, dtype and plain value from its parts",
                do=f"give it {missing[0]}, as customop.structured.Parts describes it",
            )
        if parts in _STRUCTURED:
            raise ConfigError(
                f"{cls.__name__}: {parts.__name__} already belongs to {_STRUCTURED[parts].__name__}",
                why="an op makes the tensor class from the parts class",
                do="subclass the parts, or that tensor class",
            )
        table = PartsTable(parts, components, tuple(n for n in names if n not in components))
        cls._table, cls._handlers = table, {}
        _TABLES[parts], _STRUCTURED[parts] = table, cls

    @staticmethod
    def __new__(  # noqa: D102
        cls: type[StructuredTensor], parts: Any, *, requires_grad: bool = False
    ) -> StructuredTensor:
        return cls._wrap(parts, parts.shape, None, requires_grad)

    def __init__(self, parts: Any, *, requires_grad: bool = False) -> None: ...

    @classmethod
    def _wrap(
        cls, parts: Any, shape: Any, stride: Any, requires_grad: bool = False
    ) -> StructuredTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=stride,
            dtype=parts.dtype,
            device=device_of(parts),
            requires_grad=requires_grad,
        )
        for name, attribute in cls._table.everything:
            setattr(self, attribute, getattr(parts, name))
        return self

    @property
    def parts(self) -> Any:
        """The components and static fields, not differentiable."""
        return self._table.cls(**{n: getattr(self, a) for n, a in self._table.everything})

    @property
    def layout_text(self) -> str:
        """How this tensor stands in an op's token."""
        text = self.__dict__.get("_layout_text")
        if text is None:
            text = layout_text(self.parts)
            self._layout_text = text
        return text

    def decode(self) -> torch.Tensor:
        """The logical tensor as a plain one, differentiable (the gradient passes straight through).

        Returns:
            `dtype` [`shape`], dense.
        """
        from fullgraph.customop.containers import decode

        return decode(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        statics = ", ".join(f"{n}={getattr(self, PREFIX + n)!r}" for n in self._table.statics)
        return f"{type(self).__name__}({tuple(self.shape)}, {statics})"

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        present = [a for a in self._table.attributes if getattr(self, a) is not None]
        return present, {n: getattr(self, PREFIX + n) for n in self._table.statics}

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner: dict[str, torch.Tensor],
        meta: dict[str, Any],
        outer_size: Any,
        outer_stride: Any,
    ) -> StructuredTensor:
        components = {n: inner.get(PREFIX + n) for n in cls._table.components}
        return cls._wrap(cls._table.cls(**components, **meta), outer_size, outer_stride)

    def _stable_hash_for_caching(self) -> str:
        return self.layout_text

    def __coerce_tangent_metadata__(self) -> PlainGrad:
        return declare_tangent(self)

    @classmethod
    def implements(cls, *functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Teach this class aten ops: the decorated `handler(func, args, kwargs)` runs in place of decoding."""

        def register(handler: Callable[..., Any]) -> Callable[..., Any]:
            cls._handlers.update(dict.fromkeys(functions, handler))
            return handler

        return register

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FRONTS:
            return FRONTS[func](*args, **kwargs)
        for owner in cls.__mro__:
            handler = owner.__dict__.get("_handlers", {}).get(func)
            if handler is not None:
                return handler(func, args, kwargs)
        return run_decoded(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> StructuredTensor:
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            result = type(self)(map_parts(torch.clone, self.parts))
        result.requires_grad_(self.requires_grad)
        memo[id(self)] = result
        for name, value in self._extra_attributes().items():
            setattr(result, name, copy.deepcopy(value, memo))
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        table = self._table
        statics = ",".join(f"{n}={encode(getattr(self, PREFIX + n), n)}" for n in table.statics)
        components = table.tensors(self.parts)
        extra = self._extra_attributes()
        return _rebuild, (type(self), components, statics, self.requires_grad, extra)

    def _extra_attributes(self) -> dict[str, Any]:
        """What users and optimizers have set on this tensor, such as main_grad."""
        own = {"_layout_text", *[attribute for _, attribute in self._table.everything]}
        return {k: v for k, v in self.__dict__.items() if k not in own}


def _rebuild(
    cls: type[StructuredTensor],
    components: dict[str, torch.Tensor],
    statics: str,
    requires_grad: bool,
    extra: dict[str, Any],
) -> StructuredTensor:
    table = cls._table
    parts = table.cls(**{**dict.fromkeys(table.components), **components, **parse(statics)})
    result = cls(parts, requires_grad=requires_grad)
    for name, value in extra.items():
        setattr(result, name, value)
    return result


torch.serialization.add_safe_globals([_rebuild])


def run_decoded(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an aten op on the decoded tensors; arguments that it writes are encoded back in place."""
    plain: dict[int, torch.Tensor] = {}

    def decode(tensor: StructuredTensor) -> torch.Tensor:
        if id(tensor) not in plain:
            plain[id(tensor)] = tensor.parts.decode()
        return plain[id(tensor)]

    result = func(
        *tree_map_only(StructuredTensor, decode, args),
        **tree_map_only(StructuredTensor, decode, kwargs),
    )
    written: dict[int, StructuredTensor] = {}
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, StructuredTensor):
                _encode(tensor, plain[id(tensor)])
                written[id(plain[id(tensor)])] = tensor
    return tree_map_only(torch.Tensor, lambda t: written.get(id(t), t), result)


def _encode(tensor: StructuredTensor, value: torch.Tensor) -> None:
    encode_ = getattr(tensor.parts, "encode_", None)
    if encode_ is None:
        raise ConfigError(
            f"{type(tensor).__name__} cannot be changed in place",
            why=f"{tensor._table.cls.__name__} has no encode_(value) that writes its components",
            do="define it, or use an operation that returns a new tensor",
        )
    encode_(value)
    _mark_changed(tensor)


def _mark_changed(tensor: StructuredTensor) -> None:
    """Tell autograd that the components have changed: below it, where this code runs, nobody else does."""
    for component in flatten(tensor):
        if not component.is_inference():
            torch.autograd.graph.increment_version(component)


@StructuredTensor.implements(aten.detach.default, aten.alias.default, aten.clone.default)
def _component_wise(func: Any, args: tuple, kwargs: dict[str, Any]) -> StructuredTensor:
    kwargs.pop("memory_format", None)
    return type(args[0])(map_parts(lambda t: func(t, **kwargs), args[0].parts))


@StructuredTensor.implements(aten._to_copy.default)
def _to_copy(func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    if kwargs.get("dtype") not in (None, args[0].dtype):
        return run_decoded(func, args, kwargs)
    moves = {k: v for k, v in kwargs.items() if k in ("device", "non_blocking", "pin_memory")}
    return type(args[0])(map_parts(lambda t: func(t, **moves), args[0].parts))


@StructuredTensor.implements(aten.copy_.default)
def _copy_(func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    target, source = args[:2]
    if not isinstance(target, StructuredTensor):
        return target.copy_(source.parts.decode(), *args[2:])
    # Components broadcast otherwise than the tensor that they stand for.
    same_form = (
        isinstance(source, StructuredTensor)
        and source.layout_text == target.layout_text
        and source.shape == target.shape
    )
    if same_form:
        for ours, theirs in zip(flatten(target), flatten(source), strict=True):
            ours.copy_(theirs, *args[2:])
        _mark_changed(target)
    else:
        value = source.parts.decode() if isinstance(source, StructuredTensor) else source
        _encode(target, value.expand(target.shape))
    return target


@StructuredTensor.implements(
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty_strided.default,
)
def _factory(func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """New tensors like this one are plain, of its logical dtype: optimizer state, zero gradients."""
    like = args[0]
    stand_in = flatten(like)[0].new_empty(like.shape, dtype=like.dtype)
    return func(stand_in, *args[1:], **kwargs)


@StructuredTensor.implements(aten.new_empty.default)
def _new_empty(func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """On a device that is named, and of the same size, the same form: how checkpoints are staged in host memory."""
    like, size = args
    device = kwargs.get("device")
    if device is None or kwargs.get("dtype") is not None or tuple(size) != tuple(like.shape):
        return _factory(func, args, kwargs)
    return type(like)(map_parts(lambda t: torch.empty_like(t, device=device), like.parts))
