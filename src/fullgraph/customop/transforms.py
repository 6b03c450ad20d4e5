"""What cannot look into an op: function transforms, forward-mode AD, second derivatives, TorchScript and ONNX.

An op casts whole tensors: a scale belongs to all elements under it. A transform that batches or differentiates the
op as if it were made of elementwise operations would compute something else. Each is refused before anything ran, in
eager mode and while a graph is traced alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fullgraph.customop import compat
from fullgraph.customop.structured import StructuredTensor
from fullgraph.errors import CompileError

_BATCHING = (
    "vmap",
    "torch.vmap, and what is built on it (jacrev, jacfwd, hessian, is_grads_batched, vectorize=True),",
    "a scale belongs to a whole tensor, so one call over a batch is not many calls over its elements",
    "call the layer on the batch itself, or once for each element in a loop",
)
_REVERSE = (
    "grad",
    "torch.func.grad, and what is built on it (vjp, jacrev),",
    "it makes every derivative differentiable again, and the backward pass of this op is one node without a derivative",
    "use torch.func.functional_call with torch.autograd.grad or backward()",
)
_FORWARD = (
    "jvp",
    "forward-mode AD (torch.func.jvp, jacfwd, linearize, torch.autograd.forward_ad)",
    "the op is one node with a backward pass; it has no rule for tangents, and a cast has no useful derivative",
    "use reverse mode: torch.autograd.grad or backward()",
)
_OTHER = (
    "functionalize",
    "this torch.func transform",
    "the op is one node that no transform can look into",
    "call the op outside of the transform",
)
_BY_TRANSFORM = {"Vmap": _BATCHING, "Grad": _REVERSE, "Jvp": _FORWARD}


_BATCHING_KEYS = ("Batched", "FuncTorchBatched")
"""Where the dispatcher comes by with a batch of calls: of `is_grads_batched`, and of `torch.vmap`."""


def refuse_batches(library: torch.library.Library, overload: str, name: str) -> None:
    """Give an op kernels for batches of calls, which raise.

    Args:
        library: where it is defined.
        overload: its name there.
        name: "ns::name", for the message.
    """

    def refuse(*arguments: Any) -> Any:
        raise _refused(name, _BATCHING)

    for key in _BATCHING_KEYS:
        library.impl(overload, refuse, key)


def check_call(name: str, tensors: Iterable[torch.Tensor | None]) -> None:
    """Refuse a forward call that something looks into; for calls that are not `compat.is_plain_call`.

    Args:
        name: of the op.
        tensors: its arguments.

    Raises:
        CompileError: a function transform, a tangent, `torch.jit.trace`, ONNX, or an export with a structured tensor
            that requires a gradient.
    """
    present = [t for t in tensors if t is not None]
    transform = compat.transform()
    if transform is not None:
        raise _refused(name, _BY_TRANSFORM.get(transform, _OTHER))
    check_tangents(name, present)
    is_exporting = compat.is_exporting()
    if not (is_exporting or torch.jit.is_tracing()):
        return
    if torch.onnx.is_in_onnx_export():
        raise CompileError(
            f"{name}: ONNX has no such operator",
            why="an ONNX file holds operators of ONNX only, and none of them casts and multiplies as this op does",
            do="use torch.export and AOTInductor; or, for an ONNX file in high precision, load the weights into a "
            "model of torch.nn.Linear",
        )
    if not is_exporting:
        raise CompileError(
            f"{name}: torch.jit.trace is not supported",
            why="a trace records plain operators, and constants such as the recipe are no part of TorchScript",
            do="use torch.export.export",
        )
    if any(isinstance(t, StructuredTensor) and t.requires_grad for t in present):
        raise CompileError(
            f"{name}: torch.export with a structured tensor that requires a gradient",
            why="torch takes such a parameter apart into its components, and bytes cannot require a gradient",
            do="freeze the model before the export: model.requires_grad_(False)",
        )


def check_tangents(name: str, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse forward-mode AD.

    Raises:
        CompileError: a tensor has a tangent.
    """
    if any(compat.has_tangent(t) for t in tensors):
        raise _refused(name, _FORWARD)


def check_backward(name: str) -> None:
    """Refuse a backward call that is to be differentiated again.

    Raises:
        CompileError: create_graph=True.
    """
    if torch.is_grad_enabled():
        raise CompileError(
            f"{name}: create_graph=True is not supported: its backward pass has no derivative",
            why="it works on quantized copies, which are no differentiable functions of the inputs; a second "
            "derivative through it would be missing, or silently zero",
            do="leave create_graph out (retain_graph=True works), or give the layers of which a second derivative is "
            "needed to torch.nn.Linear",
        )


def _refused(name: str, reason: tuple[str, str, str, str]) -> CompileError:
    short, what, why, do = reason
    return CompileError(
        f"{name}: {short} is not supported: {what} cannot look into it", why=why, do=do
    )
