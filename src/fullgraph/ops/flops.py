"""How much work a linear op is, for those who count it: `torch.utils.flop_counter`, and torch's partitioner.

Without a formula an op counts as free, and a partitioner with a memory budget would recompute the GEMMs first.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from fullgraph.ops.linear import linear_op, weight_gradient_op


def forward_flops(*arguments: Any, out_val: Any = None) -> int:
    """2 M N K.

    Args:
        *arguments: those of the op: tensors, perhaps tensors that it changes, meta.
        out_val: its results.
    """
    values, plan = _described(linear_op._lean_forward, arguments)
    return _flops(plan, values.input, values.weight.shape[0])


def backward_flops(*arguments: Any, out_val: Any = None) -> int:
    """2 M N K for each GEMM that runs here: dgrad, wgrad, both or none.

    Args:
        *arguments: as forward.
        out_val: as forward.
    """
    values, plan = _described(linear_op._lean_backward, arguments)
    others = [t for t in (values.weight, values.weight_cache, values.input) if t is not None]
    return _flops(plan, values.grad_output, others[0].shape[-1]) if others else 0


def weight_gradient_flops(*arguments: Any, out_val: Any = None) -> int:
    """2 M N K, for a wgrad that was deferred.

    Args:
        *arguments: as forward.
        out_val: as forward.
    """
    values, plan = _described(weight_gradient_op._lean_forward, arguments)
    return _flops(plan, values.grad_output, values.input.shape[-1])


def _described(op: Any, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    *tensors, meta = arguments
    return op.describe([t for group in tensors for t in group], meta, ())


def _flops(plan: Any, left: Any, size: Any) -> int:
    gemms = plan.decisions.gemms.keys() - ({"wgrad"} if plan.deferred else ())
    return 2 * math.prod(left.shape) * size * len(gemms)


@functools.cache
def register() -> None:
    """Tell torch. The first layer does it, not the import of this package: torch's counter imports Triton."""
    from torch.utils.flop_counter import register_flop_formula

    ops = torch.ops.fullgraph
    register_flop_formula(ops.linear_forward, get_raw=True)(forward_flops)
    register_flop_formula(ops.linear_backward, get_raw=True)(backward_flops)
    register_flop_formula(ops.linear_weight_gradient_forward, get_raw=True)(weight_gradient_flops)
