"""A whole training step in one graph on a GPU: gradients and scales of eager mode, everything captured."""

import pytest
import torch
from torch._dynamo.utils import counters

import fullgraph as fg
from linear_cases import RECIPES, assert_same_results
from whole_step_cases import Step, main_grad_step, new_model, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::fullgraph.errors.EmulationWarning"),
]
GPU = torch.device("cuda", 0)


def adamw(model):
    """Everything that changes is a tensor: the learning rate, and the count of steps."""
    rate = torch.tensor(0.01, device=GPU)
    return torch.optim.AdamW(model.parameters(), lr=rate, capturable=True, foreach=True)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("quantized_weight", [False, True], ids=["plain", "quantized-weight"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_whole_step(recipe, quantized_weight, mode):
    """The twin starts each step from the weights of the compiled model: Inductor rounds AdamW otherwise."""
    if quantized_weight and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 does not differentiate by a quantized parameter inside of a graph")
    options = {"device": GPU, "quantized_weight": quantized_weight, "bias": False}
    models = new_model(recipe, **options), new_model(recipe, **options)
    optimizers = adamw(models[0]), adamw(models[1])
    steps = [Step(*pair).unclipped for pair in zip(models, optimizers, strict=True)]
    compiled = torch.compile(steps[0], fullgraph=True, mode=mode)
    for number in range(8):
        optimizers[0].param_groups[0]["lr"].fill_(0.01 / (1 + number))
        with torch.no_grad():
            for ours, theirs in zip(*[model.parameters() for model in models], strict=True):
                theirs.copy_(ours)
        with torch._inductor.config.patch(emulate_precision_casts=True):
            torch.compiler.cudagraph_mark_step_begin()
            got = run(compiled, models[0], number, GPU)
        expected = run(steps[1], models[1], number, GPU)
        weights = [(got.pop(name), expected.pop(name)) for name in ("0.weight", "2.weight")]
        assert_same_results(got, expected)
        for ours, theirs in weights:
            # A step of AdamW moves a weight by a tenth of its size; some change their sign by rounding.
            assert (ours.float() - theirs.float()).norm() <= 0.05 * theirs.float().norm()
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad(dtype):
    """`weight.main_grad` is filled and cleared in the same graph."""
    models = [
        new_model("fp8-delayed", device=GPU, bias=False, wgrad=fg.Wgrad(into_main_grad=True))
        for _ in range(2)
    ]
    steps = [main_grad_step(model, dtype) for model in models]
    compiled = torch.compile(steps[0], fullgraph=True, mode="reduce-overhead")
    for number in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        with torch._inductor.config.patch(emulate_precision_casts=True):
            got = run(compiled, models[0], number, GPU)
        assert_same_results(got, run(steps[1], models[1], number, GPU))
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
