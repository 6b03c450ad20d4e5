"""Random numbers of stochastic rounding: a seed for each cast, drawn from torch's own generators.

So `torch.manual_seed` makes runs repeatable, no two casts share a seed, CUDA graphs draw anew at each replay, and
activation checkpointing, which restores the generators, repeats what it repeats.
"""

from __future__ import annotations

import torch
from torch import Tensor

_RANK_FACTOR = 0x1E3779B97F4A7C15  # odd: ranks keep distinct seeds


def new_seed(device: torch.device) -> Tensor:
    """Draw a seed; for use inside of an op, eager or captured.

    Args:
        device: whose default generator is asked.

    Returns:
        int64 []. Ranks with generators in the same state get different ones.
    """
    seed = torch.empty((), dtype=torch.int64, device=device).random_()
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0:
        seed = seed.bitwise_xor_(distributed.get_rank() * _RANK_FACTOR % 2**63)
    return seed


@torch.library.custom_op(
    "fullgraph::draw_seed", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def draw_seed(like: Tensor) -> Tensor:
    """Draw a seed as a node of its own.

    The node is marked as one that uses a generator, so that a recomputation of what follows draws the same.

    Args:
        like: on whose device.

    Returns:
        int64 [].
    """
    return new_seed(like.device)


@draw_seed.register_fake
def _(like: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=like.device)
