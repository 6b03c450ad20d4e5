"""`CustomOp.check` of our ops in every recipe: torch's five op checks, plan against results, the CUDA-graph lint."""

import pytest
import torch

import fullgraph as fg
from fullgraph.ops.linear import LinearArguments, linear_op
from fullgraph.quantizers import QuantizeArguments, quantize_op
from linear_cases import E4M3, RECIPES, tensors

# The lint compares two runs; what draws random numbers cannot be the same twice.
WITHOUT_DRAWS = {"nvfp4": fg.recipes.NVFP4BlockScaling(stochastic_rounding=False)}

QUANTIZERS = {
    "per tensor": E4M3,
    "per row": fg.PerRowQuantizer(),
    "1x128": fg.BlockQuantizer(),
    "128x128": fg.BlockQuantizer(two_dimensional=True),
    "mx": fg.MXQuantizer(),
    "nvfp4": fg.NVFP4Quantizer(hadamard=True),
    "nvfp4 square": fg.NVFP4Quantizer(two_dimensional=True),
    "hybrid": fg.HybridQuantizer(fg.NVFP4Quantizer(), fg.PerRowQuantizer()),
}


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_linear(recipe, quantized):
    chosen = WITHOUT_DRAWS.get(recipe, fg.recipes.get(recipe))
    x, weight, bias = tensors((19, 40), (24, 40), (24,))
    state = {}
    if chosen.scaling_rule_text:
        state = {
            "forward_scale": torch.ones(3),
            "forward_amax": torch.zeros(3),
            "backward_scale": torch.ones(1),
            "backward_amax": torch.zeros(1),
        }
    if quantized:
        weight = fg.quantize(weight, chosen.stored_quantizer(fg.recipes.Role.WEIGHT), fg.BOTH)
    linear_op.check(
        LinearArguments(
            x.requires_grad_(),
            weight.detach().requires_grad_(),
            bias.requires_grad_(),
            **state,
            numerics=chosen.linear_numerics(),
            output_dtype=torch.bfloat16,
            quantized_output=quantized,
            scaling_rule=chosen.scaling_rule_text,
        )
    )


@pytest.mark.parametrize("orientation", list(fg.Orientation), ids=lambda o: o.value)
@pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
def test_quantize(quantizer, orientation):
    x = tensors((19, 40)).requires_grad_()
    quantize_op.check(QuantizeArguments(x, quantizer, orientation))
