"""Custom ops with dataclass arguments: one graph node forward, one backward.

Start with README.md beside this file. The reading order of the code is `fields`, `token`, `plan`, `structured`,
`lean`, `definition`, `op`; then `tangent`, `containers`, `verify`, `check`, `graphs`. Nothing here knows about
low precision.
"""

from fullgraph.customop.check import cuda_graph_lint
from fullgraph.customop.containers import Container, decode, to_container
from fullgraph.customop.fields import Carry, Dyn, Mut, Planned
from fullgraph.customop.op import FROM_TOKEN, STRAIGHT_THROUGH, CustomOp, define
from fullgraph.customop.plan import Pass, Plan, TensorSpec
from fullgraph.customop.structured import StructuredTensor
from fullgraph.customop.tangent import (
    PlainGrad,
    can_install_tangent_shim,
    install_tangent_shim,
    remove_tangent_shim,
)
from fullgraph.customop.token import Group
from fullgraph.customop.verify import set_verify_plans, verify_plans

__all__ = [
    "FROM_TOKEN",
    "STRAIGHT_THROUGH",
    "Carry",
    "Container",
    "CustomOp",
    "Dyn",
    "Group",
    "Mut",
    "Pass",
    "PlainGrad",
    "Plan",
    "Planned",
    "StructuredTensor",
    "TensorSpec",
    "cuda_graph_lint",
    "decode",
    "define",
    "install_tangent_shim",
    "remove_tangent_shim",
    "set_verify_plans",
    "to_container",
    "verify_plans",
]

if can_install_tangent_shim():
    install_tangent_shim()
