"""Custom ops with dataclass arguments: one graph node forward, one backward.

Start with README.md beside this file. The reading order of the code is `fields`, `token`, `plan`, `structured`,
`lean`, `op`; then `tangent`, `containers`, `verify`, `check`. Nothing here knows about low precision.
"""

from fullgraph.customop.tangent import (
    PlainGrad as PlainGrad,
    install_tangent_shim as install_tangent_shim,
    remove_tangent_shim as remove_tangent_shim,
)

install_tangent_shim()

from fullgraph.customop.check import cuda_graph_lint as cuda_graph_lint  # noqa: E402
from fullgraph.customop.containers import (  # noqa: E402
    Container as Container,
    decode as decode,
    to_container as to_container,
)
from fullgraph.customop.fields import Carry as Carry, Dyn as Dyn, Mut as Mut, Planned as Planned  # noqa: E402
from fullgraph.customop.op import (  # noqa: E402
    FROM_TOKEN as FROM_TOKEN,
    STRAIGHT_THROUGH as STRAIGHT_THROUGH,
    CustomOp as CustomOp,
    define as define,
)
from fullgraph.customop.plan import Pass as Pass, Plan as Plan, TensorSpec as TensorSpec  # noqa: E402
from fullgraph.customop.structured import StructuredTensor as StructuredTensor  # noqa: E402
from fullgraph.customop.token import Group as Group  # noqa: E402
from fullgraph.customop.verify import (  # noqa: E402
    set_verify_plans as set_verify_plans,
    verify_plans as verify_plans,
)
