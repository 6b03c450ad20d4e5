"""`CustomOp.check` of our ops in every recipe: torch's five op checks, plan against results, the CUDA-graph lint."""

import pytest
import torch

import fullgraph as fg
from fullgraph.customop.deferred import take
from fullgraph.customop.token import encode
from fullgraph.nn.weights import WeightCache
from fullgraph.ops import kept
from fullgraph.ops.linear import (
    DEFAULT_OPTIONS,
    LinearArguments,
    LinearOptions,
    WeightGradientArguments,
    linear_op,
    weight_gradient_op,
)
from fullgraph.ops.statistics import StatisticsBuffers
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


def weight_cache(weight, numerics):
    return WeightCache(weight, encode(numerics)).quantized


# Not deferred gradients: torch compares gradients as numbers, and these are none. test_weight_features.py has them.
FEATURES = {
    "plain": lambda *_: {},
    "originals": lambda *_: {
        "options": LinearOptions(fg.Wgrad(), fg.Save.ORIGINAL, fg.Save.ORIGINAL)
    },
    "first microbatch": lambda weight, numerics: {"weight_cache": weight_cache(weight, numerics)},
    "later microbatch": lambda weight, numerics: {"cached_weight": weight_cache(weight, numerics)},
    "main_grad": lambda weight, _: {"main_grad": torch.zeros(weight.shape)},
    "statistics": lambda *_: {
        "forward_statistics": (rows := StatisticsBuffers(torch.device("cpu"))).forward,
        "backward_statistics": rows.backward,
    },
}


QUICK = ("bf16", "fp8-delayed", "nvfp4")


@pytest.mark.parametrize("feature", ["quantized", *FEATURES])
@pytest.mark.parametrize(
    "recipe", [r if r in QUICK else pytest.param(r, marks=pytest.mark.slow) for r in RECIPES]
)
def test_linear(monkeypatch, recipe, feature):
    chosen = WITHOUT_DRAWS.get(recipe, fg.recipes.get(recipe))
    if recipe == "bf16" and "microbatch" in feature:
        return  # there is nothing to keep
    x, weight, bias = tensors((19, 40), (24, 40), (24,))
    numerics = chosen.linear_numerics()
    given = {"options": DEFAULT_OPTIONS}
    if chosen.scaling_rule_text:
        given |= {
            "forward_scale": torch.ones(3),
            "forward_amax": torch.zeros(3),
            "backward_scale": torch.ones(1),
            "backward_amax": torch.zeros(1),
        }
    if feature == "quantized":
        weight = fg.quantize(weight, chosen.stored_quantizer(fg.recipes.Role.WEIGHT), fg.BOTH)
    else:
        given |= FEATURES[feature](weight, numerics)
        if feature == "later microbatch":  # what is there is no number before the first one
            monkeypatch.setattr(
                kept, "check", lambda *_: None
            )  # the checks run on copies of the weight
            given["cached_weight"].copy_(weight)
    linear_op.check(
        LinearArguments(
            x.requires_grad_(),
            weight.detach().requires_grad_(),
            bias.requires_grad_(),
            **given,
            numerics=numerics,
            output_dtype=torch.bfloat16,
            quantized_output=feature == "quantized",
            scaling_rule=chosen.scaling_rule_text,
        )
    )


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_deferred_weight_gradient(recipe, main_grad):
    wgrad = fg.Wgrad(deferred=True, into_main_grad=main_grad)
    layer = fg.Linear(40, 24, dtype=torch.bfloat16, recipe=recipe, wgrad=wgrad)
    layer.weight.main_grad = torch.zeros(24, 40)
    x, grad_output = tensors((19, 40), (19, 24))
    layer(x).backward(grad_output)
    call = take(layer.deferred_wgrad)
    numerics = layer.recipe.linear_numerics()
    weight_gradient_op.check(
        WeightGradientArguments(
            **call.tensors,
            main_grad=layer.weight.main_grad if main_grad else None,
            numerics=numerics,
            output_dtype=torch.bfloat16,
            weight_dtype=torch.bfloat16,
            options=LinearOptions(wgrad, fg.Save.QUANTIZED, fg.Save.QUANTIZED),
        )
    )


@pytest.mark.parametrize("orientation", list(fg.Orientation), ids=lambda o: o.value)
@pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
def test_quantize(quantizer, orientation):
    x = tensors((19, 40)).requires_grad_()
    quantize_op.check(QuantizeArguments(x, quantizer, orientation))
