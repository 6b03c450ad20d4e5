"""Layers: thin modules around the ops, and the autocast that gives them a recipe. No numerics in here."""

from fullgraph.nn.autocast import autocast as autocast
from fullgraph.nn.autocast import current_recipe as current_recipe
from fullgraph.nn.linear import Linear as Linear
from fullgraph.nn.linear import linear as linear
from fullgraph.nn.scaling import ScalingState as ScalingState
from fullgraph.nn.scaling import attach as attach
from fullgraph.nn.scaling import update_scales as update_scales
