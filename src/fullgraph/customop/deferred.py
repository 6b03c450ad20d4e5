"""Gradients that are computed later: a backward pass hands over what another op needs, and the caller runs it.

A pipeline schedule wants the gradients of inputs at once and those of weights when there is time. So a forward op
takes a leaf, `no_calls(device)`, as one of its differentiable fields, and the backward plan gives it, as its
gradient, a `DeferredCall`: an op, its token and its tensors. Nothing is copied: the tensors are those that were
saved for the backward pass, and results of it. Autograd accumulates the calls in `leaf.grad`, in the order of the
backward passes; `take(leaf)` removes the oldest. All this happens outside of compiled graphs, so it costs no
graph of its own and works for any number of calls of any size.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fullgraph.errors import ConfigError

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class DeferredCall:
    """What a backward pass leaves to be done.

    Args:
        token: of the op that does it.
        tensors: the tensors of its arguments, by field.
    """

    token: str
    tensors: Mapping[str, torch.Tensor]


class DeferredGradient(torch.Tensor):
    """A gradient that consists of calls. It has no elements; its sum with another one has the calls of both.

    Args:
        calls: oldest first.
        anchor: an empty tensor that says on which device this is.
        requires_grad: whether it is a leaf that collects calls.
    """

    calls: tuple[DeferredCall, ...]
    anchor: torch.Tensor

    @staticmethod
    def __new__(  # noqa: D102
        cls: type[DeferredGradient],
        calls: tuple[DeferredCall, ...],
        anchor: torch.Tensor,
        requires_grad: bool = False,
    ) -> DeferredGradient:
        self = torch.Tensor._make_wrapper_subclass(
            cls, (0,), dtype=torch.float32, device=anchor.device, requires_grad=requires_grad
        )
        self.anchor = anchor
        self._hold(calls)
        return self

    def __init__(
        self,
        calls: tuple[DeferredCall, ...],
        anchor: torch.Tensor,
        requires_grad: bool = False,
    ) -> None: ...

    def _hold(self, calls: tuple[DeferredCall, ...]) -> None:
        self.calls = calls
        for name, tensor in self._components():
            setattr(self, name, tensor)

    def _components(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, call in enumerate(self.calls):
            for field, tensor in call.tensors.items():
                yield f"call{i}_{field}", tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeferredGradient({len(self.calls)} calls)"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        calls = tuple([(call.token, tuple(call.tensors)) for call in self.calls])
        return ["anchor", *[name for name, _ in self._components()]], calls

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], meta: Any, outer_size: Any, outer_stride: Any
    ) -> DeferredGradient:
        calls = [
            DeferredCall(token, {field: inner[f"call{i}_{field}"] for field in fields})
            for i, (token, fields) in enumerate(meta)
        ]
        return DeferredGradient(tuple(calls), inner["anchor"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return DeferredGradient(args[0].calls, args[0].anchor)
        if func in (aten.add.Tensor, aten.add_.Tensor) and isinstance(args[1], DeferredGradient):
            calls = args[0].calls + args[1].calls
            if func is aten.add.Tensor:
                return DeferredGradient(calls, args[0].anchor)
            args[0]._hold(calls)
            return args[0]
        raise ConfigError(
            f"{func} of a deferred gradient",
            why="it holds what its computation needs, not numbers",
            do="compute it first: layer.backward_dw() puts the gradient of the weight where it belongs",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredGradient:
        if id(self) not in memo:
            calls = [
                DeferredCall(c.token, {k: copy.deepcopy(t, memo) for k, t in c.tensors.items()})
                for c in self.calls
            ]
            made = DeferredGradient(tuple(calls), self.anchor.clone(), self.requires_grad)
            memo[id(self)] = made
            if self.grad is not None:
                made.grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return DeferredGradient, (self.calls, self.anchor, self.requires_grad)


def no_calls(device: torch.device) -> DeferredGradient:
    """A leaf that collects calls as its gradient.

    Args:
        device: where the ops run that use it.
    """
    with torch.inference_mode(False):
        return DeferredGradient((), torch.empty(0, device=device), requires_grad=True)


def take(leaf: DeferredGradient) -> DeferredCall | None:
    """Remove the oldest call that a leaf has collected.

    Args:
        leaf: made by `no_calls`.

    Returns:
        The call, or None if there is none.
    """
    held = leaf.grad
    if held is None:
        return None
    assert isinstance(held, DeferredGradient)
    first, *rest = held.calls
    leaf.grad = DeferredGradient(tuple(rest), held.anchor) if rest else None
    return first


def count(leaf: DeferredGradient) -> int:
    """How many calls a leaf has collected.

    Args:
        leaf: made by `no_calls`.
    """
    held = leaf.grad
    return len(held.calls) if isinstance(held, DeferredGradient) else 0
