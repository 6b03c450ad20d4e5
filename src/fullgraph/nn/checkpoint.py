"""Selective activation checkpointing: `LINEAR_OPS` for a policy of one's own, `save_linears` for the usual one."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.checkpoint import create_selective_checkpoint_contexts

from fullgraph.ops.linear import linear_op

LINEAR_OPS: tuple[Any, ...] = linear_op.fwd_ops
"""The ops by which linear layers run forward, in eager mode and in compiled graphs: `op in fg.LINEAR_OPS`."""


def save_linears() -> tuple[Any, Any]:
    """Keep what linear layers make in the forward pass, recompute everything else; for `torch.utils.checkpoint`.

    Backward then runs no linear layer again, and needs the memory of their outputs and of the quantized copies that
    they save, but not of what stands between them: norms, activations, and other ops.

    Returns:
        The two contexts that a `context_fn` makes.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> block = torch.nn.Sequential(
        ...     fullgraph.Linear(32, 64, recipe="fp8-current"), torch.nn.GELU()
        ... )
        >>> x = torch.randn(4, 32)
        >>> y = checkpoint(block, x, use_reentrant=False, context_fn=fullgraph.save_linears)
        >>> y.sum().backward()
    """
    return _contexts()


_contexts = functools.partial(create_selective_checkpoint_contexts, list(LINEAR_OPS))
