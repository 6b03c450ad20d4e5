"""The update of delayed scaling: amaxes into histories, histories into scales, for a whole model in one op.

    window = history, then the amaxes that the step recorded
    scale  = format.max * 2^-margin / algorithm(window)

The ops of the layers read scales and raise amaxes, nothing else, so that a step can run its layers as often and in any
order it likes: microbatches in flight, recomputation, replays. This op runs once a step and starts the next.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullgraph.customop.token import Group, parse
from fullgraph.delayed import FORWARD_SLOTS, ScalingRule, find_algorithm
from fullgraph.errors import ConfigError, describe
from fullgraph.formats import largest_finite

PATIENCE = 1000
"""How often a layer may run without an update before we speak up."""

_COUNTS: dict[int, int] = {}
"""Address of the scales of a layer -> how often it recorded amaxes since the last update."""
_RULES: dict[int, str] = {}
"""The same -> the rule with which it did."""

_LIBRARY = torch.library.Library("fullgraph", "FRAGMENT")
_LIBRARY.define(
    "update_scales(Tensor(a!)[] forward_amax, Tensor(b!)[] backward_amax, Tensor(c!)[] history, "
    "Tensor(d!)[] forward_scale, Tensor(e!)[] backward_scale, str rules, str group) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def update_scales(
    forward_amax: Sequence[Tensor],
    backward_amax: Sequence[Tensor],
    history: Sequence[Tensor],
    forward_scale: Sequence[Tensor],
    backward_scale: Sequence[Tensor],
    rules: str,
    group: str,
) -> None:
    """Update the scales of layers on one device, in place; one node of a graph.

    Slot by slot: a recorded amax of 0 changes nothing. Otherwise it enters the history, whose oldest row leaves; then
    scale = format.max * 2^-margin / amax, amax = algorithm(history, newest). At the end nothing is recorded.

    Args:
        forward_amax: for each layer what was recorded of input, weight and output, float32 [3].
        backward_amax: of grad_output, float32 [1].
        history: float32 [L - 1, 4], the newest row last.
        forward_scale: float32 [3], the factors before the casts.
        backward_scale: float32 [1].
        rules: what `encode_rules` wrote.
        group: name of the process group whose ranks share their largest amaxes, in one collective; "" for none. All of
            them must update the same layers.

    Raises:
        CompileError: the group or an algorithm does not exist in this process.
        ConfigError: an algorithm does not return one amax for each column.

    Numerics: a recorded amax that is NaN or infinite is dropped, as if there were none; so is a NaN in the history.
        Where the amax is 0 or infinite the scale stays; where the quotient overflows it is the largest finite
        float32. The division is correctly rounded.
    Source: TransformerEngine 2.20, common/recipe/delayed_scaling.cu. (There an infinite amax enters the history and
        keeps the scale as it is until it leaves, which the overflows of a gradient scaler make the rule. Its Python
        path rolls slots without an amax, keeps the scale while there is a NaN, and multiplies by a reciprocal.)
    """
    torch.ops.fullgraph.update_scales(
        forward_amax, backward_amax, history, forward_scale, backward_scale, rules, group
    )


def nothing_to_update(model: str) -> ConfigError:
    """The error for a model without a layer that has a rule. Where Dynamo traces, the op has to raise it."""
    return ConfigError(
        f"update_scales: no layer of {model} has delayed scaling",
        why="none has, or has run with, a recipe with delayed scaling",
        do='give them one: fullgraph.convert(model, "fp8-delayed"). With fullgraph.autocast, before the whole step is '
        "compiled, call update_scales once inside of it",
    )


def encode_rules(texts: Sequence[str]) -> str:
    """The rules of some layers as the text that `update_scales` takes.

    Args:
        texts: for each layer its encoded `ScalingRule`.

    Returns:
        A token: the distinct rules, and for each layer the index of its own.
    """
    distinct = list(dict.fromkeys(texts))
    rules = "".join([f"{text}," for text in distinct])
    index = "".join([f"{distinct.index(text)}," for text in texts])
    return f"rules=({rules}),index=({index})"


def count_use(state: Tensor, rule: str = "") -> None:
    """Note that a layer recorded amaxes; warn, once, when it has done so many times without an update.

    Called by the op of the layer when it runs, and so in compiled graphs too. When a CUDA graph is replayed no Python
    runs: nothing is counted then, and an update that is missing there goes unnoticed.

    Args:
        state: a tensor of the layer that is the same in every call; its scales, which no compiler copies.
        rule: the encoded `ScalingRule` with which it records.

    Warns:
        UserWarning: after `PATIENCE` calls.
    """
    address = state.data_ptr()
    count = _COUNTS[address] = _COUNTS.get(address, 0) + 1
    if rule:
        _RULES[address] = rule
    if count == PATIENCE and sum(c >= PATIENCE for c in list(_COUNTS.values())) == 1:
        warnings.warn(
            f"a layer with delayed scaling ran {PATIENCE} times in a row without an update of its scales.\n"
            "Why: scales follow the amaxes of earlier steps only when they are told to; until then tensors are cast "
            "with the scales of the last update, or with 1.\n"
            "Do: call fullgraph.update_scales(model) after each optimizer step, or fullgraph.attach(optimizer, model) "
            "once.",
            UserWarning,
            stacklevel=2,
        )


def forget(state: Tensor) -> None:
    """Drop what was noted for a layer that had its state at the same address before."""
    _COUNTS.pop(state.data_ptr(), None)
    _RULES.pop(state.data_ptr(), None)


def used_rule(state: Tensor) -> str:
    """The rule that `count_use` noted for a layer since its last update, or ""."""
    return _RULES.get(state.data_ptr(), "")


def _update(
    forward_amax: Sequence[Tensor],
    backward_amax: Sequence[Tensor],
    history: Sequence[Tensor],
    forward_scale: Sequence[Tensor],
    backward_scale: Sequence[Tensor],
    rules: str,
    group: str,
) -> None:
    """The kernel: a fixed number of launches for each distinct rule, whatever the number of layers."""
    parsed = parse(rules)
    members: dict[int, list[int]] = {}
    for layer, index in enumerate(parsed["index"]):
        members.setdefault(index, []).append(layer)
    groups: list[tuple[ScalingRule, list[int]]] = [
        (parsed["rules"][index], layers) for index, layers in members.items()
    ]
    with torch.no_grad():
        recorded = [
            _joined(forward_amax, backward_amax, layers).nan_to_num(0.0, 0.0)
            for _, layers in groups
        ]
        if group:
            recorded = _reduced(recorded, [rule.reduce_amax for rule, _ in groups], group)
        for (rule, layers), amax in zip(groups, recorded, strict=True):
            before = torch.stack([history[i] for i in layers])
            scales = _joined(forward_scale, backward_scale, layers)
            after, scales = _advance(rule, before, amax, scales)
            torch._foreach_copy_([history[i] for i in layers], list(after.unbind()))
            forward, backward = scales.split([FORWARD_SLOTS, scales.shape[1] - FORWARD_SLOTS], 1)
            torch._foreach_copy_([forward_scale[i] for i in layers], list(forward.unbind()))
            torch._foreach_copy_([backward_scale[i] for i in layers], list(backward.unbind()))
        torch._foreach_zero_([*forward_amax, *backward_amax])
    _forget([*forward_scale, *forward_amax])


def _joined(forward: Sequence[Tensor], backward: Sequence[Tensor], layers: list[int]) -> Tensor:
    """One row for each layer, all of its slots."""
    return torch.cat(
        [torch.stack([forward[i] for i in layers]), torch.stack([backward[i] for i in layers])], 1
    )


def _reduced(recorded: list[Tensor], wanted: list[bool], group: str) -> list[Tensor]:
    """The maximum over the ranks of what was recorded, in one collective."""
    shared = [amax for amax, reduce in zip(recorded, wanted, strict=True) if reduce]
    if not shared:
        return recorded
    buffer = torch.cat(shared)
    torch.distributed.all_reduce(
        buffer, op=torch.distributed.ReduceOp.MAX, group=Group(group).resolve()
    )
    parts = iter(buffer.split([len(amax) for amax in shared]))
    return [next(parts) if reduce else amax for amax, reduce in zip(recorded, wanted, strict=True)]


def _advance(
    rule: ScalingRule, history: Tensor, newest: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """The next histories and scales of layers with one rule.

    Args:
        rule: of all of them.
        history: float32 [layers, L - 1, slots].
        newest: float32 [layers, slots], without NaN.
        scales: float32 [layers, slots].
    """
    window = torch.cat([history, newest.unsqueeze(1)], 1)
    columns = window.nan_to_num(0.0, float("inf")).transpose(0, 1).flatten(1)
    amax = find_algorithm(rule.algorithm)(columns)
    if amax.shape != columns.shape[1:]:
        raise ConfigError(
            f"update_scales: the algorithm {rule.algorithm!r} returned {describe(amax)} for {describe(columns)}",
            why="it makes one amax out of each column, the history of one tensor",
            do="reduce the first dimension of the window, as window.amax(0) does",
        )
    amax = amax.reshape(newest.shape)
    # Each slot filled on the device: a tensor of Python numbers would be copied there, which no CUDA graph captures.
    # And a number over a tensor is not divided exactly.
    largest = torch.stack([newest.new_full((len(newest),), value) for value in rule.largest], 1)
    made = torch.div(largest, amax)
    made = torch.where(made == float("inf"), largest_finite(made.dtype), made)
    recorded = newest > 0
    usable = recorded & (amax > 0) & (amax < float("inf"))
    rolled = torch.where(recorded.unsqueeze(1), window[:, 1:], history)
    return rolled, torch.where(usable, made, scales)


def _forget(states: Sequence[Tensor]) -> None:
    """Start counting anew. A compiler may have copied every state: then no layer is known, and all are forgotten."""
    known = [_COUNTS.pop(state.data_ptr(), None) for state in states]
    for state in states:
        _RULES.pop(state.data_ptr(), None)
    if not any(known):
        _COUNTS.clear()


def _fake(forward_amax: Sequence[Tensor], *arguments: Any) -> None:
    if not forward_amax:
        raise nothing_to_update("the model")


_LIBRARY.impl("update_scales", _update, "CompositeExplicitAutograd")
torch.library.register_fake("fullgraph::update_scales", _fake, lib=_LIBRARY)
