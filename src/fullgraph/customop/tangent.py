"""Gradients of a structured tensor that leaves the compiled region.

The gradient of a quantized output is an ordinary tensor, yet AOTAutograd expects a tangent of the output's own
class. Two hooks bridge that:

1. at trace time the output declares its tangent to be a `PlainGrad`, a wrapper around one plain tensor;
2. at run time AOTAutograd asks the incoming plain gradient whether it can become one. `torch.Tensor` has no
   answer, so `install_tangent_shim` gives it the three lines that wrap it. They answer None for every other class,
   which keeps torch's own error.

The second hook adds an attribute to `torch.Tensor`. Whoever forbids that calls `remove_tangent_shim()` and lets
structured results leave the region in a container instead: `to_container(output)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from fullgraph.errors import CompileError

_HOOK = "__coerce_same_metadata_as_tangent__"


class PlainGrad(torch.Tensor):
    """The declared tangent of a structured output: a wrapper around one plain tensor.

    Args:
        plain: the gradient, any dtype and shape.
    """

    plain: torch.Tensor

    @staticmethod
    def __new__(cls: type[PlainGrad], plain: torch.Tensor) -> PlainGrad:  # noqa: D102
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, plain.shape, strides=plain.stride(), dtype=plain.dtype, device=plain.device
        )
        wrapper.plain = plain
        return wrapper

    def __init__(self, plain: torch.Tensor) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PlainGrad({self.dtype})"  # without sizes: torch 2.11 prints tangents with unbacked ones

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["plain"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], meta: None, outer_size: Any, outer_stride: Any
    ) -> PlainGrad:
        return PlainGrad(inner["plain"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        unwrap = tree_map_only
        result = func(
            *unwrap(PlainGrad, lambda t: t.plain, args),
            **unwrap(PlainGrad, lambda t: t.plain, kwargs or {}),
        )
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return PlainGrad(result)
        return result


def plain_gradient(gradient: Any) -> Any:
    """The tensor inside a `PlainGrad`; anything else as it is."""
    return gradient.plain if type(gradient) is PlainGrad else gradient


def _wrap_plain_gradient(
    gradient: torch.Tensor, expected_meta: Any, expected_type: type | None = None
) -> PlainGrad | None:
    return PlainGrad(gradient) if expected_type is PlainGrad else None


def declare_tangent(output: torch.Tensor) -> PlainGrad:
    """The tangent that AOTAutograd shall expect for a structured output.

    Raises:
        CompileError: the shim was removed, so the gradient could not be converted at run time.
    """
    if not has_tangent_shim():
        raise CompileError(
            f"{type(output).__name__}: a differentiable structured tensor leaves the compiled region",
            why="its gradient is a plain tensor, which torch converts only with fullgraph's tangent shim, "
            "and that is not installed",
            do="return customop.to_container(output), or call customop.install_tangent_shim()",
        )
    return PlainGrad(torch.empty(output.shape, dtype=output.dtype, device=output.device))


def has_tangent_shim() -> bool:
    """Whether `torch.Tensor` carries the hook of this module."""
    return getattr(torch.Tensor, _HOOK, None) is _wrap_plain_gradient


def can_install_tangent_shim() -> bool:
    """Whether nobody else has defined the hook on `torch.Tensor`."""
    return has_tangent_shim() or not hasattr(torch.Tensor, _HOOK)


def install_tangent_shim() -> None:
    """Let plain gradients flow into structured outputs of compiled regions.

    Importing this package does it, unless somebody else has defined the hook.

    Raises:
        CompileError: somebody else has defined the hook on `torch.Tensor`.
    """
    if not can_install_tangent_shim():
        raise CompileError(
            f"torch.Tensor.{_HOOK} is already defined",
            why="two libraries cannot both convert plain gradients for compiled regions",
            do="remove the other definition, or return structured tensors with customop.to_container(output)",
        )
    setattr(torch.Tensor, _HOOK, _wrap_plain_gradient)


def remove_tangent_shim() -> None:
    """Take the hook off `torch.Tensor` again; structured outputs then need `to_container`."""
    if has_tangent_shim():
        delattr(torch.Tensor, _HOOK)
