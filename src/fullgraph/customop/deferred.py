"""Gradients that are computed later: a backward pass hands over what another op needs, and the caller runs it.

A pipeline schedule wants the gradients of inputs at once and those of weights when there is time. So a forward op
takes a leaf, `no_calls(device)`, as one of its differentiable fields, and the backward plan gives it, as its
gradient, a `DeferredCall`: an op, its token and its tensors. Nothing is copied: the tensors are those that were
saved for the backward pass, and results of it. Autograd hands the calls to `leaf.grad`, in the order of the
backward passes; there a hook moves them to the leaf's queue, and `take(leaf)` removes the oldest. All this happens
outside of compiled graphs, so it costs no graph of its own and works for any number of calls of any size.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fullgraph.customop.structured import flatten
from fullgraph.errors import ConfigError

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class DeferredCall:
    """What a backward pass leaves to be done.

    Args:
        token: of the op that does it.
        tensors: the tensors of its arguments, by field.
        versions: of these, when they were left.
    """

    token: str
    tensors: Mapping[str, torch.Tensor]
    versions: tuple[int, ...] | None = None

    def current_versions(self) -> tuple[int, ...]:
        """The versions of all plain tensors now; inference tensors have none."""
        plain = [t for tensor in self.tensors.values() for t in flatten(tensor)]
        return tuple([0 if t.is_inference() else t._version for t in plain])


class DeferredGradient(torch.Tensor):
    """A gradient that consists of calls. It has no elements; its sum with another one has the calls of both.

    Args:
        calls: oldest first.
        anchor: an empty tensor that says on which device this is.
        requires_grad: whether it is a leaf that collects calls.

    Attributes:
        queue: of a leaf, the calls that backward passes have left, oldest first.
    """

    calls: tuple[DeferredCall, ...]
    anchor: torch.Tensor
    queue: list[DeferredCall]

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
            do="let it be: layer.backward_dw(), outside of compiled functions, puts the gradient of the weight where "
            "it belongs; inside of them, as in a whole step, use main_grad",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredGradient:
        if id(self) not in memo:
            made = no_calls(self.anchor.device)
            memo[id(self)] = made
            for call in self.queue:
                tensors = {k: copy.deepcopy(t, memo) for k, t in call.tensors.items()}
                made.queue.append(_noted(DeferredCall(call.token, tensors)))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return no_calls, (self.anchor.device,)


def _noted(call: DeferredCall) -> DeferredCall:
    return dataclasses.replace(call, versions=call.current_versions())


def _collect(leaf: torch.Tensor) -> None:
    """Move what a backward pass has left out of `leaf.grad`, which Dynamo would look into."""
    assert isinstance(leaf, DeferredGradient)
    if isinstance(leaf.grad, DeferredGradient):
        leaf.queue += [_noted(call) for call in leaf.grad.calls]
    leaf.grad = None


def no_calls(device: torch.device) -> DeferredGradient:
    """A leaf that collects calls. A copy of it has copies of them, one out of a pickle has none.

    Args:
        device: where the ops run that use it.
    """
    with torch.inference_mode(False):
        leaf = DeferredGradient((), torch.empty(0, device=device), requires_grad=True)
    leaf.queue = []
    leaf.register_post_accumulate_grad_hook(_collect)
    return leaf


def take(leaf: DeferredGradient) -> DeferredCall | None:
    """Remove the oldest call that a leaf has collected.

    Args:
        leaf: made by `no_calls`.

    Returns:
        The call, or None if there is none.

    Raises:
        ConfigError: one of its tensors was changed in place since. The call stays where it is.
    """
    if not leaf.queue:
        return None
    call = leaf.queue[0]
    if call.current_versions() != call.versions:
        raise ConfigError(
            "a tensor that a deferred gradient needs was changed in place after the backward pass that left it",
            why="nothing is copied: the gradient is computed from the saved tensors themselves",
            do="compute deferred gradients before buffers are used again, or hand the layer a copy",
        )
    return leaf.queue.pop(0)


def count(leaf: DeferredGradient) -> int:
    """How many calls a leaf has collected.

    Args:
        leaf: made by `no_calls`.
    """
    return len(leaf.queue)
