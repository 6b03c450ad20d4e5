"""Plans: every decision of an op, made from specs, before any data is touched.

A `Plan` is what both kernels of an op follow: the fake kernel allocates its specs, the real kernel executes its
decisions. So there is no data-free twin of an implementation that could drift from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A dense, contiguous tensor without data.

    Args:
        shape: sizes, each an int or a symbolic integer.
        dtype: element type.
        device: where it lives.
    """

    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor; its strides are not part of it."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def with_shape(self, *shape: Any) -> TensorSpec:
        """The same dtype and device in another shape."""
        return dataclasses.replace(self, shape=shape)

    def with_dtype(self, dtype: torch.dtype) -> TensorSpec:
        """The same shape and device in another dtype."""
        return dataclasses.replace(self, dtype=dtype)

    def empty(self) -> torch.Tensor:
        """An uninitialised tensor of this spec."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one pass of an op will do, decided from specs.

    Which names appear, and whether each is plain or structured, may depend on values, dtypes and presence, never
    on sizes: one graph serves every size. Sizes may appear in the specs and in `decisions`.

    Args:
        outputs: results by name, as a `TensorSpec` or the parts of a structured tensor filled with specs. In the
            forward pass the names of `define(outputs=...)`; one that is left out, or None, is None for the caller.
            In the backward pass the names of forward fields: their gradients; a needed name left out has none.
        saved: more results of the forward pass, each for the backward field of that name.
        saved_inputs: backward field -> forward field whose tensor is saved as it is.
        saved_outputs: backward field -> output that is saved as it is.
        values: constants for the backward pass, each for its `Planned` field of that name.
        deferred: in the backward pass, forward field -> the call that is its gradient (`deferred.py`), as its token and
            its tensors: field of that op's arguments -> a name in `saved`, or a field of the backward arguments, handed
            over as it is. `saved` then holds results of the backward pass.
        decisions: anything `execute` wants to have decided; opaque to the framework.
    """

    outputs: Mapping[str, Any]
    saved: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    saved_inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    saved_outputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    deferred: Mapping[str, tuple[str, Mapping[str, str]]] = dataclasses.field(default_factory=dict)
    decisions: Any = None

    @property
    def results(self) -> dict[str, Any]:
        """Everything that `execute` must return, in the order in which the op returns it."""
        return {n: spec for n, spec in {**self.outputs, **self.saved}.items() if spec is not None}


@dataclasses.dataclass(frozen=True)
class Pass:
    """One direction of an op.

    Args:
        arguments: the argument dataclass.
        plan: specs -> `Plan`. Gets the argument dataclass with every tensor replaced by a `TensorSpec` (a
            structured tensor by its parts, filled with specs). Must not branch on sizes.
        execute: (plan, arguments) -> results by name. Gets the argument dataclass with real tensors (a structured
            tensor as its parts). Returns exactly the names of `plan.results`; nothing may alias an input.
    """

    arguments: type
    plan: Callable[[Any], Plan]
    execute: Callable[[Plan, Any], Mapping[str, Any]]
