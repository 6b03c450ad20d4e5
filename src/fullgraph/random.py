"""Random numbers of stochastic rounding: a seed for each cast, drawn from torch's own generators.

So `torch.manual_seed` makes runs repeatable, no two casts share a seed, CUDA graphs draw anew at each replay, and
activation checkpointing, which restores the generators, repeats what it repeats.

A backward op draws inside of itself (`new_seed`). Compilers may run ops that do not depend on each other in any
order, and then the draws of a compiled model would not be those of the eager one; `order_of` is what makes them
depend on each other. A forward pass draws with an op of torch's (`draw_seed`), which activation checkpointing knows
how to repeat.
"""

from __future__ import annotations

import torch
from torch import Tensor

_RANK_FACTOR = 0x1E3779B97F4A7C15  # odd: ranks keep distinct seeds

_ORDERS: dict[torch.device, Tensor] = {}


def prepare(device: torch.device) -> None:
    """Make `order_of(device)` exist; outside of compiled functions, which cannot."""
    if device not in _ORDERS and device.type in ("cpu", "cuda"):
        order = torch.zeros((), dtype=torch.uint8, device=device)
        torch._dynamo.mark_static_address(order)
        _ORDERS[device] = order


def order_of(device: torch.device) -> Tensor | None:
    """A tensor that every op which draws declares to change, so that they keep their order; None before `prepare`.

    Args:
        device: where the op runs.
    """
    return _ORDERS.get(device)


def new_seed(device: torch.device) -> Tensor:
    """Draw a seed; for use inside of an op, eager or captured.

    Args:
        device: whose default generator is asked.

    Returns:
        int64 [].
    """
    return of_rank(torch.empty((), dtype=torch.int64, device=device).random_())


def draw_seed(like: Tensor) -> Tensor:
    """Draw a seed as a node of its own.

    Args:
        like: on whose device.

    Returns:
        int64 [], not yet `of_rank`.

    Numerics: as for dropout, Inductor draws other numbers than eager mode unless
        `torch._inductor.config.fallback_random` is set.
    """
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=like.device)


def of_rank(seed: Tensor) -> Tensor:
    """A seed that is this rank's alone, though every rank may have drawn the same; for use inside of an op.

    Args:
        seed: int64 [].
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return seed
    return seed ^ (distributed.get_rank() * _RANK_FACTOR % 2**63)
