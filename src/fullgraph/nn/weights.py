"""What a layer keeps of its weight between calls: quantized copies, and gradients that are still to be computed."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullgraph.customop.deferred import count
from fullgraph.customop.structured import StructuredTensor, map_parts
from fullgraph.customop.token import parse
from fullgraph.errors import ConfigError, describe
from fullgraph.ops import kept
from fullgraph.ops.linear import cast_layout, weight_copies
from fullgraph.tensor import QuantizedTensor


class WeightCache:
    """Quantized copies of one weight for all microbatches of a step, in buffers that keep their addresses.

    A copy of a layer, or one out of a pickle, has none: its first microbatch makes them.

    Args:
        weight: floating dtype [N, K].
        numerics_text: encoded `LinearNumerics`, which have a low-precision fprop.

    Attributes:
        quantized: the copies; NaN until the first microbatch has filled them.
    """

    def __init__(self, weight: Tensor, numerics_text: str) -> None:
        numerics = parse(f"numerics={numerics_text}")["numerics"]
        copies = weight_copies(numerics)
        assert copies is not None
        layout = cast_layout(numerics, weight.device)
        spec = numerics.weight.spec(
            tuple(weight.shape), weight.dtype, weight.device, copies, layout
        )
        with torch.inference_mode(False), torch.no_grad():
            self.quantized = QuantizedTensor(map_parts(lambda s: _not_a_number(s.empty()), spec))
        self._form = weight.shape, weight.dtype, weight.device
        kept.forget(weight)

    def fits(self, weight: Tensor) -> bool:
        """Whether copies of a weight of this form have room here."""
        return self._form == (weight.shape, weight.dtype, weight.device)

    def __reduce__(self) -> Any:
        return type(None), ()


def _not_a_number(tensor: Tensor) -> Tensor:
    return tensor.fill_(torch.nan if tensor.is_floating_point() else 255)


def check_main_grad(weight: Tensor) -> None:
    """Refuse a weight whose attribute `main_grad` cannot take its gradient.

    Args:
        weight: [N, K].

    Raises:
        ConfigError: there is none, or it does not fit.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ConfigError(
            "Linear: wgrad=Wgrad(into_main_grad=True), but the weight has no main_grad",
            why="the gradient of the weight is added to it, and weight.grad stays None",
            do="set layer.weight.main_grad = torch.zeros(layer.weight.shape, dtype=torch.float32, device=...) "
            "before the first forward pass",
        )
    wrong = _wrong_with(main_grad, weight)
    if wrong:
        raise ConfigError(
            f"Linear: main_grad must be float32 or bfloat16 {list(weight.shape)} on {weight.device}, {wrong}",
            why="the gradient of the weight is added to it in place, outside of autograd",
            do="make it anew after changes of shape or device, with torch.zeros(...)",
        )


def _wrong_with(main_grad: Any, weight: Tensor) -> str:
    """What keeps an object from taking the gradient of a weight; "" if nothing does."""
    if not isinstance(main_grad, Tensor) or isinstance(main_grad, StructuredTensor):
        return f"got a {type(main_grad).__name__}"
    shape = tuple(main_grad.shape) == tuple(weight.shape)
    dtype = main_grad.dtype in (torch.float32, torch.bfloat16)
    if not (shape and dtype and main_grad.device == weight.device):
        return f"got {describe(main_grad)} on {main_grad.device}"
    if main_grad.layout != torch.strided:
        return f"got one that is {main_grad.layout}"
    if main_grad.requires_grad:
        return "got one that requires a gradient itself"
    if main_grad.is_inference():
        return "got one that was made in inference mode"
    if any(
        size > 1 and stride == 0
        for size, stride in zip(main_grad.shape, main_grad.stride(), strict=True)
    ):
        return "got an expanded one, whose elements share memory"
    return ""


_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Layers that have kept copies of their weight, or defer its gradient."""
_is_watching: list[bool] = []


def watch(layer: nn.Module) -> None:
    """Have optimizer steps count kept copies of a weight as old, and warn of gradients that are still to be computed.

    Optimizers may change weights without autograd's noticing: fused ones do.

    Args:
        layer: with attributes `weight`, `weight_caches` and `deferred_wgrad`.
    """
    if not _is_watching:
        register_optimizer_step_pre_hook(_before_step)
        _is_watching.append(True)
    _WATCHED.add(layer)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    layers: list[Any] = [layer for layer in _WATCHED if id(layer.weight) in stepped]
    for layer in layers:
        if layer.weight_caches:
            kept.forget(layer.weight)
    waiting = [count(d) for layer in layers if (d := layer.deferred_wgrad) is not None]
    if any(waiting):
        warnings.warn(
            f"{sum(waiting)} weight gradients of {sum(map(bool, waiting))} layers are still to be computed: this "
            "optimizer step goes without them.\n"
            "Why: these layers have wgrad=Wgrad(deferred=True).\n"
            "Do: call layer.backward_dw() once for each backward pass, before the step; or layer.discard_dw().",
            UserWarning,
            stacklevel=4,
        )
