"""What a CPU can show of CUDA graphs: no step waits for the device, nothing that a first call makes stays behind."""

import pytest
import torch
from torch import nn

import fullgraph as fg
from fullgraph import testing
from linear_cases import RECIPES, batch

K, N = 48, 32


def two_layers(recipe, **options):
    options = {"dtype": torch.bfloat16, "recipe": recipe, **options}
    return nn.Sequential(fg.Linear(K, 24, **options), nn.GELU(), fg.Linear(24, N, **options))


@pytest.mark.parametrize("options", [{}, {"quantized_weight": True}, {"bias": False}], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_keeps_to_the_rules_of_capture(recipe, options):
    """Forward, backward and the update, each time for a size that was never seen."""
    model = two_layers(recipe, **options)

    def step(x, grad_output, parameters):
        output = model(x)
        gradients = torch.autograd.grad(output, parameters, grad_output)
        if recipe == "fp8-delayed":
            fg.update_scales(model)
        return [output.detach(), *gradients]

    for tokens in (8, 13):
        testing.cuda_graph_lint(step, *batch(tokens, K, N), list(model.parameters()))
