"""The ops behind the layers: argument dataclasses, plans, and how a plan is executed. No modules, no state."""

from fullgraph.ops import flops as flops  # registers how much work an op is
