"""Changing the form of a structured tensor, differentiably: decode it, or take it apart and back.

All are ops of their own rather than bare `autograd.Function`s, which AOTAutograd's cache would refuse.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor

from fullgraph.customop.lean import TAGS
from fullgraph.customop.op import _LIBRARIES, STRAIGHT_THROUGH, define
from fullgraph.customop.plan import Pass, Plan, TensorSpec
from fullgraph.customop.structured import (
    FRONTS,
    StructuredTensor,
    device_of,
    flatten,
)


@dataclasses.dataclass
class DecodeArguments:
    """Arguments of the decoding op: one structured tensor."""

    x: Tensor


def _plan_decode(a: DecodeArguments) -> Plan:
    return Plan({"output": TensorSpec(tuple(a.x.shape), a.x.dtype, device_of(a.x))})


def _decode(plan: Plan, a: Any) -> dict[str, Tensor]:
    return {"output": a.x.decode()}


decode_op = define(
    "fullgraph::decode",
    forward=Pass(DecodeArguments, _plan_decode, _decode),
    backward=STRAIGHT_THROUGH,
    gradients=("x",),
)


def decode(x: StructuredTensor) -> Tensor:
    """The logical tensor of a structured one as a plain tensor; one node, gradient passed straight through.

    Args:
        x: any structured tensor.

    Returns:
        `x.dtype` [`x.shape`], dense.
    """
    return decode_op(DecodeArguments(x))


@dataclasses.dataclass
class Container:
    """A structured tensor taken apart, to leave a compiled region without the tangent shim.

    Args:
        anchor: the differentiable stand-in, plain, logical dtype and shape, one element of memory.
        value: the structured tensor itself, cut off from autograd.
    """

    anchor: Tensor
    value: Tensor

    def unpack(self) -> StructuredTensor:
        """The structured tensor again; its gradient flows to the anchor."""
        return cast(StructuredTensor, _Unpack.apply(self.anchor, self.value))

    def decode(self) -> Tensor:
        """The logical tensor as a plain one, differentiable."""
        return self.unpack().decode()


def to_container(x: StructuredTensor) -> Container:
    """Take a structured tensor apart: the way out of a compiled region without the tangent shim.

    A function, since Dynamo takes a method of a tensor made in the region for a torch op, which returns tensors only.

    Args:
        x: any structured tensor.

    Returns:
        What may leave the region; outside, its `unpack()` and `decode()` are differentiable.
    """
    anchor = torch.ops.fullgraph.anchor(x) if torch.compiler.is_compiling() else _Anchor.apply(x)
    return Container(anchor, x.detach())


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: StructuredTensor) -> Tensor:
        return flatten(x)[0].new_zeros((), dtype=x.dtype).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


_LIBRARIES["fullgraph"].define("anchor(Tensor x) -> Tensor", tags=TAGS)
_LIBRARIES["fullgraph"].impl("anchor", _Anchor.apply, "CompositeImplicitAutograd")
FRONTS[torch.ops.fullgraph.anchor.default] = _Anchor.apply
