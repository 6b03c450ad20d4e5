"""What a layer keeps of its weight between calls: quantized copies, and gradients that are still to be computed."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullgraph.customop.deferred import count
from fullgraph.customop.structured import map_parts
from fullgraph.customop.token import parse
from fullgraph.errors import ConfigError, describe
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
        version: of the weight when it was quantized, if that was in eager mode.
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
        self.version: int | None = None

    def note(self, weight: Tensor) -> None:
        """Remember which version of the weight was quantized."""
        self.version = None if weight.is_inference() else weight._version

    def check(self, weight: Tensor) -> None:
        """Refuse copies of an older version of the weight.

        Raises:
            ConfigError: the weight has changed.
        """
        if (
            self.version is not None
            and not weight.is_inference()
            and weight._version != self.version
        ):
            raise ConfigError(
                "Linear: is_first_microbatch=False, but the weight has changed since the first microbatch",
                why="its quantized copies are those of the weight before the change",
                do="pass is_first_microbatch=True to the first microbatch after each optimizer step, or None",
            )

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
    fits = (
        tuple(main_grad.shape) == tuple(weight.shape)
        and main_grad.dtype in (torch.float32, torch.bfloat16)
        and main_grad.device == weight.device
    )
    if not fits:
        raise ConfigError(
            f"Linear: main_grad must be float32 or bfloat16 {list(weight.shape)} on {weight.device}, "
            f"got {describe(main_grad)} on {main_grad.device}",
            why="the gradient of the weight is added to it in place",
            do="make it anew after changes of shape or device",
        )


_DEFERRING: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def watch_deferred(layer: nn.Module) -> None:
    """Warn when an optimizer steps while weight gradients of a layer are still to be computed.

    Args:
        layer: with attributes `weight` and `deferred_wgrad`.
    """
    if not _DEFERRING:
        register_optimizer_step_pre_hook(_warn_of_deferred)
    _DEFERRING.add(layer)


def _warn_of_deferred(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = [
        waiting
        for layer in _DEFERRING
        if id(layer.weight) in stepped and (waiting := count(layer.deferred_wgrad))  # type: ignore[arg-type]
    ]
    if left:
        warnings.warn(
            f"{sum(left)} weight gradients of {len(left)} layers are still to be computed: this optimizer step goes "
            "without them.\n"
            "Why: these layers have wgrad=Wgrad(deferred=True).\n"
            "Do: call layer.backward_dw() once for each backward pass, before the step.",
            UserWarning,
            stacklevel=4,
        )
