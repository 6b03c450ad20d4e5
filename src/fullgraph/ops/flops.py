"""How much work a linear op is, for those who count it: `torch.utils.flop_counter`, and torch's partitioner.

Without a formula an op counts as free, and a partitioner with a memory budget would recompute the GEMMs first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from fullgraph.ops.linear import linear_op


def forward_flops(*arguments: Any, out_val: Any = None) -> int:
    """2 M N K.

    Args:
        *arguments: those of the op: tensors, perhaps tensors that it changes, meta.
        out_val: its results.
    """
    values, plan = _described(linear_op._lean_forward, arguments)
    return _flops(values.input, values.weight.shape[0], plan)


def backward_flops(*arguments: Any, out_val: Any = None) -> int:
    """2 M N K for each GEMM that runs: dgrad, wgrad, both or none.

    Args:
        *arguments: as forward.
        out_val: as forward.
    """
    values, plan = _described(linear_op._lean_backward, arguments)
    other = values.input if values.weight is None else values.weight
    return 0 if other is None else _flops(values.grad_output, other.shape[-1], plan)


def _described(op: Any, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    *tensors, meta = arguments
    return op.describe([t for group in tensors for t in group], meta, ())


def _flops(left: Any, size: Any, plan: Any) -> int:
    return 2 * math.prod(left.shape) * size * len(plan.decisions.gemms)


register_flop_formula(torch.ops.fullgraph.linear_forward, get_raw=True)(forward_flops)
register_flop_formula(torch.ops.fullgraph.linear_backward, get_raw=True)(backward_flops)
