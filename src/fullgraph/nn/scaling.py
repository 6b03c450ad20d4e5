"""State of delayed scaling: what each layer keeps, how it is saved, and the update that is due once a step."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fullgraph.customop.token import parse
from fullgraph.delayed import FORWARD_SLOTS, SLOTS
from fullgraph.errors import ConfigError, describe
from fullgraph.nn.autocast import current_recipe
from fullgraph.ops import scaling

SCALE_KEY = "fp8_scale"
HISTORY_KEY = "fp8_amax_history"
"""The entries of a state_dict, behind the prefix of the layer."""

_last_load: list[Any] = [None]
"""The list of missing keys of the last load that warned; all layers of one load are given the same list."""

_NO_SCALES = (
    "Why: the model that it was saved from did not use delayed scaling, or its recipe came from an autocast and the "
    "state_dict that was saved, or that was loaded into, was made outside of it before the first step.\n"
    "Do: nothing, if it is a checkpoint in high precision: a few steps make new scales. To resume exactly, save and "
    'load inside of the autocast, or give the model its recipe first: fullgraph.convert(model, "fp8-delayed").'
)


class ScalingState:
    """Scales and amaxes of one layer. Made by `fg.Linear`, as its attribute `scaling_state`.

    They are no buffers: DDP would broadcast them and `.to(torch.bfloat16)` would round them. They follow the device of
    the layer and stay float32. All of them exist before the first forward pass, so that nothing is made while a graph
    is traced.

    Attributes:
        forward_scale: factors before the casts of input, weight and output, float32 [3].
        forward_amax: largest magnitudes of these since the last update, float32 [3].
        backward_scale: the factor before the cast of grad_output, float32 [1].
        backward_amax: its largest magnitude, float32 [1].
        amax_history: amaxes of earlier steps, float32 [history_length - 1, 4], the newest row last; columns input,
            weight, output, grad_output. None while there is no rule, which says how many rows there are.
        rule: the encoded `ScalingRule` of the layer's recipe, or of the last one it ran with; "" without delayed
            scaling.
        without_scales: the list of missing keys of the load that brought the weights of a layer without a rule, and
            no scales; it matters if the layer gets a rule.
    """

    def __init__(self, device: torch.device) -> None:
        self.rule = ""
        self.without_scales: list[str] | None = None
        self._start(device, None)

    def _start(self, device: torch.device, rows: int | None) -> None:
        with torch.inference_mode(False):
            self.forward_scale = torch.ones(FORWARD_SLOTS, device=device, dtype=torch.float32)
            self.forward_amax = torch.zeros_like(self.forward_scale)
            self.backward_scale = torch.ones(
                len(SLOTS) - FORWARD_SLOTS, device=device, dtype=torch.float32
            )
            self.backward_amax = torch.zeros_like(self.backward_scale)
            self.amax_history = None if rows is None else self._rows(rows)
        for state in (
            self.forward_scale,
            self.forward_amax,
            self.backward_scale,
            self.backward_amax,
        ):
            torch._dynamo.mark_static(
                state
            )  # or a batch of as many tokens would count as that size
        if device.type != "meta" and type(self.forward_scale) is Tensor:
            scaling.forget(self.forward_scale)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(
            state
        )  # a copy, or out of a pickle, at an address where another state may have been
        if self.device.type != "meta" and type(self.forward_scale) is Tensor:
            scaling.forget(self.forward_scale)

    def _rows(self, count: int) -> Tensor:
        return self.forward_scale.new_zeros((count, len(SLOTS)))

    @property
    def device(self) -> torch.device:
        """Where the state is."""
        return self.forward_scale.device

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was recorded, updated or loaded yet. Reads the state on the host."""
        if self.device.type == "meta" or type(self.forward_scale) is not Tensor:
            return True  # no data, as under a fake tensor mode
        return not ((self.scales() != 1).any() | self.history().any())

    def scales(self) -> Tensor:
        """The scales of all slots, float32 [4]: input, weight, output, grad_output. A copy."""
        return torch.cat([self.forward_scale, self.backward_scale])

    def history(self) -> Tensor:
        """What was recorded since the last update, then the history, float32 [history_length, 4]. A copy."""
        recorded = torch.cat([self.forward_amax, self.backward_amax]).unsqueeze(0)
        return recorded if self.amax_history is None else torch.cat([recorded, self.amax_history])

    def set_rule(self, rule: str) -> None:
        """Take a rule, and make the history as long as it says: the newest rows stay, missing ones are zeros."""
        self.rule = rule
        if not rule:
            return
        self._resize(parse(f"rule={rule}")["rule"].history_length - 1)
        if self.without_scales is not None:
            _warn_of_a_fresh_start(self.without_scales, f"{SCALE_KEY} and {HISTORY_KEY}")
            self.without_scales = None

    def _resize(self, rows: int) -> None:
        old = self.amax_history
        if old is not None and len(old) == rows:
            return
        with torch.inference_mode(False), torch.no_grad():
            self.amax_history = self._rows(rows)
            kept = 0 if old is None else min(rows, len(old))
            if kept and old is not None:
                self.amax_history[rows - kept :] = old[len(old) - kept :]

    def reset(self) -> None:
        """Forget everything but the rule, in place."""
        self.without_scales = None
        with torch.no_grad():
            for scales in (self.forward_scale, self.backward_scale):
                scales.fill_(1.0)
            for amaxes in (self.forward_amax, self.backward_amax, self.amax_history):
                if amaxes is not None:
                    amaxes.zero_()

    def share_memory(self) -> None:
        """Move to memory that other processes see, as `torch.nn.Module.share_memory` moves parameters."""
        for state in (
            self.forward_scale,
            self.forward_amax,
            self.backward_scale,
            self.backward_amax,
            self.amax_history,
        ):
            if state is not None:
                state.share_memory_()

    def follow(self, device: torch.device) -> None:
        """Move to a device. Coming from meta tensors, which have no data, everything starts anew."""
        if device == self.device:
            return
        rows = None if self.amax_history is None else len(self.amax_history)
        before = None if self.device.type == "meta" else (self.scales(), self.history())
        self._start(device, rows)
        if before is not None:
            self.load(*before)

    def load(self, scales: Tensor, history: Tensor) -> None:
        """Take over what `scales` and `history` returned, in place.

        A history of another length than the rule's is cut to its newest rows, or preceded by zeros.

        Args:
            scales: [4].
            history: [any number >= 1, 4], row 0 what was recorded, then the history, the newest row last.
        """
        with torch.no_grad():
            self.forward_scale.copy_(scales[:FORWARD_SLOTS])
            self.backward_scale.copy_(scales[FORWARD_SLOTS:])
            self.forward_amax.copy_(history[0, :FORWARD_SLOTS])
            self.backward_amax.copy_(history[0, FORWARD_SLOTS:])
            rows = len(history) - 1
            if self.amax_history is None:
                if rows == 0:
                    return
                self._resize(rows)
            assert self.amax_history is not None
            kept = min(rows, len(self.amax_history))
            self.amax_history.zero_()
            self.amax_history[len(self.amax_history) - kept :] = history[1 + rows - kept :]

    def load_from(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """The part of a layer's `_load_from_state_dict` that concerns this state.

        A checkpoint without it is no error: delayed scaling then starts anew, and a warning says so, once a load. A
        layer that learns only later, from an autocast, that it has delayed scaling warns then.

        Warns:
            UserWarning: a layer with delayed scaling is loaded from a checkpoint without scales.
        """
        keys = [prefix + SCALE_KEY, prefix + HISTORY_KEY]
        for key in keys:
            if key in unexpected_keys:
                unexpected_keys.remove(key)
        present = [key in state_dict for key in keys]
        if any(present):
            wrong = _what_is_wrong(keys, [state_dict.get(key) for key in keys])
            if wrong is not None:
                error_msgs.append(wrong)
            elif not any(state_dict[key].is_meta for key in keys):
                self.load(*[state_dict[key] for key in keys])
            self.without_scales = None
        elif f"{prefix}weight" in state_dict:
            if self.rule or not self.is_fresh:
                self.reset()
                _warn_of_a_fresh_start(missing_keys, f"{keys[0]} and {keys[1]}")
            else:
                self.without_scales = missing_keys


def _what_is_wrong(keys: list[str], values: list[Any]) -> str | None:
    """Why this cannot be the state of a layer, in the words of `load_state_dict`; None if it can."""
    what = (
        f"{keys[0]} and {keys[1]} must be float32 [{len(SLOTS)}] and [history_length, {len(SLOTS)}]"
    )
    scales, history = values
    if not (isinstance(scales, Tensor) and isinstance(history, Tensor)):
        return f"{what}, got {_describe(scales)} and {_describe(history)}"
    fits = tuple(scales.shape) == (len(SLOTS),) and history.dim() == 2 and len(history) > 0
    if (
        not fits
        or history.shape[1:] != scales.shape
        or {scales.dtype, history.dtype} != {torch.float32}
    ):
        return f"{what}, got {describe(scales)} and {describe(history)}"
    if scales.is_meta or history.is_meta:
        return None
    if not ((scales > 0) & scales.isfinite()).all():
        return f"{keys[0]} must hold finite positive numbers, got {scales.tolist()}"
    if not (history >= 0).all():
        return f"{keys[1]} must hold amaxes, no number of which is negative or NaN"
    return None


def _describe(value: Any) -> str:
    return describe(value) if isinstance(value, Tensor) else type(value).__name__


def _warn_of_a_fresh_start(load: list[str], keys: str) -> None:
    """Say, once for all layers of a load, that delayed scaling starts anew."""
    if _last_load[0] is load:
        return
    _last_load[0] = load
    warnings.warn(
        f"the checkpoint has no scales for delayed scaling ({keys}); they start anew.\n{_NO_SCALES}",
        UserWarning,
        stacklevel=3,
    )


def saved_state(layer: Any) -> dict[str, Tensor]:
    """What delayed scaling adds to the state_dict of a layer: scales and amaxes, used or not; copies.

    It depends on the recipe alone, so that a fresh model asks for the same entries as a trained one has. A layer that
    takes its recipe from an autocast adds them once it ran, or while it is inside of one.

    Args:
        layer: with a `scaling_state`.

    Returns:
        The entries by name; none without delayed scaling.
    """
    _find_rule(layer)
    state: ScalingState = layer.scaling_state
    if not state.rule and state.is_fresh:
        return {}
    return {SCALE_KEY: state.scales(), HISTORY_KEY: state.history()}


def update_scales(model: nn.Module, *, group: Any = None) -> None:
    """Make the scales of the next step from the amaxes of this one, for every layer with delayed scaling, in one op.

    scale = format.max * 2^-margin / amax, amax = algorithm(history, newest)

    Call it once after each optimizer step, in eager mode or inside a compiled function (then the layers must have run,
    or have been given, a recipe before). A tensor that was not cast since the last update keeps scale and history.

    Args:
        model: any module; all of its `fg.Linear` layers that have a recipe with delayed scaling, or ran with one.
        group: process group whose ranks share their largest amaxes, in one collective, where the recipe says so; the
            default is the world. All of its ranks must call this with the same layers.

    Raises:
        ConfigError: the model has no `fg.Linear` with delayed scaling.

    Numerics: see `fullgraph.ops.scaling.update_scales`.

    Example:
        >>> layer = fullgraph.Linear(32, 8, recipe="fp8-delayed")
        >>> layer(torch.full((4, 32), 2.0)).sum().backward()
        >>> fullgraph.update_scales(layer)
        >>> layer.scaling_state.forward_scale[0].item()  # 448 / 2
        224.0
    """
    if not isinstance(model, nn.Module):
        raise _not_a_model("update_scales", model)
    states = _states(model)
    if not states:
        if not torch.compiler.is_compiling():
            raise scaling.nothing_to_update(type(model).__name__)
        scaling.update_scales([], [], [], [], [], "", "")
    name = _group_name(group)
    for device in dict.fromkeys([state.device for state in states]):
        here = [state for state in states if state.device == device]
        scaling.update_scales(
            [state.forward_amax for state in here],
            [state.backward_amax for state in here],
            [state.amax_history for state in here],  # type: ignore[misc]
            [state.forward_scale for state in here],
            [state.backward_scale for state in here],
            scaling.encode_rules([state.rule for state in here]),
            name,
        )


def attach(
    optimizer: torch.optim.Optimizer, model: nn.Module, *, group: Any = None
) -> RemovableHandle:
    """Call `update_scales(model)` after each step of an optimizer.

    A step that a gradient scaler skips updates nothing; what was recorded then stays for the next one.

    Args:
        optimizer: of the parameters of the model. Attach one, if there are several.
        model: see `update_scales`.
        group: see `update_scales`.

    Returns:
        A handle; its `remove()` undoes this.

    Raises:
        ConfigError: not an optimizer, not a module, or a module without `fg.Linear`.

    Example:
        >>> layer = fullgraph.Linear(32, 8, recipe="fp8-delayed")
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> handle = fullgraph.attach(optimizer, layer)
        >>> layer(torch.ones(4, 32)).sum().backward()
        >>> optimizer.step()
        >>> layer.scaling_state.forward_scale[0].item()
        448.0
    """
    if not isinstance(model, nn.Module):
        raise _not_a_model("attach", model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"attach: a torch.optim.Optimizer is needed, got {type(optimizer).__name__}",
            why="scales are updated after each of its steps",
            do="attach(optimizer, model); or call update_scales(model) yourself",
        )
    if not any(hasattr(module, "scaling_state") for module in model.modules()):
        raise scaling.nothing_to_update(type(model).__name__)

    def update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        update_scales(model, group=group)

    return optimizer.register_step_post_hook(update)


@contextlib.contextmanager
def preserved(model: Any) -> Iterator[None]:
    """Scales, amaxes, `main_grad` and deferred gradients of a model are afterwards what they were; to look at a run.

    Args:
        model: a module; anything else has none.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    layers: list[Any] = [m for m in modules if hasattr(m, "scaling_state")]
    scales = [(layer.scaling_state.scales(), layer.scaling_state.history()) for layer in layers]
    buffers = {
        id(b): b
        for layer in layers
        if layer.wgrad.into_main_grad and (b := _main_grad(layer)) is not None
    }
    sums = {key: buffer.clone() for key, buffer in buffers.items()}
    queues = [leaf.queue for layer in layers if (leaf := layer.deferred_wgrad) is not None]
    waiting = [list(queue) for queue in queues]
    try:
        yield
    finally:
        for layer, kept in zip(layers, scales, strict=True):
            layer.scaling_state.load(*kept)
        for key, buffer in buffers.items():
            buffer.copy_(sums[key])
        for queue, calls in zip(queues, waiting, strict=True):
            queue[:] = calls


def _main_grad(layer: Any) -> Tensor | None:
    return getattr(layer.weight, "main_grad", None)


def _not_a_model(name: str, model: Any) -> ConfigError:
    return ConfigError(
        f"{name}: a torch.nn.Module is needed, got {type(model).__name__}",
        why="the scales belong to its fg.Linear layers",
        do="pass the model",
    )


def _states(model: nn.Module) -> list[ScalingState]:
    """The states that have a rule, in the order of the modules."""
    layers = [module for module in model.modules() if hasattr(module, "scaling_state")]
    if not torch.compiler.is_compiling():
        for layer in layers:
            _find_rule(layer)
    states: list[ScalingState] = [layer.scaling_state for layer in layers]  # type: ignore[misc]
    return [state for state in states if state.rule]


def _find_rule(layer: Any) -> None:
    """Give a layer the rule with which it ran under an autocast, if it ran where it could not note that itself."""
    if layer.recipe is not None:
        return
    state = layer.scaling_state
    has_data = state.device.type != "meta" and type(state.forward_scale) is Tensor
    used = scaling.used_rule(state.forward_scale) if has_data else ""
    rule = used or state.rule or current_recipe().scaling_rule_text
    if rule != state.rule:
        state.set_rule(rule)


def _group_name(group: Any) -> str:
    """The name of the group, "" if there is nothing to share."""
    distributed = torch.distributed
    if group is None:
        if not (distributed.is_available() and distributed.is_initialized()):
            return ""
        group = distributed.group.WORLD
    return "" if group.size() == 1 else group.group_name
