"""Layers: thin modules around the ops, and the autocast that gives them a recipe. No numerics in here."""

from fullgraph.nn.autocast import autocast as autocast
from fullgraph.nn.autocast import current_recipe as current_recipe
from fullgraph.nn.checkpoint import LINEAR_OPS as LINEAR_OPS
from fullgraph.nn.checkpoint import save_linears as save_linears
from fullgraph.nn.linear import Linear as Linear
from fullgraph.nn.linear import linear as linear
from fullgraph.nn.linear import make_weight_caches as make_weight_caches
from fullgraph.nn.scaling import ScalingState as ScalingState
from fullgraph.nn.scaling import attach as attach
from fullgraph.nn.scaling import update_scales as update_scales
from fullgraph.ops.linear import Save as Save
from fullgraph.ops.linear import Wgrad as Wgrad
