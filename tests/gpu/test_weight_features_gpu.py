"""Weight caching, main_grad, deferred weight gradients and what is saved, on a GPU: Inductor and CUDA graphs."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

import fullgraph as fg
from linear_cases import assert_same_results, batch, same_random_numbers, state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::fullgraph.errors.EmulationWarning"),
]

K, N = 200, 328  # to be padded
MICROBATCHES, STEPS = 3, 4
RECIPES = ["bf16", "fp8-delayed", "fp8-current", "fp8-per-row", "fp8-block", "nvfp4"]
ORIGINAL = {"save_input": fg.Save.ORIGINAL, "save_weight": fg.Save.ORIGINAL}
OPTIONS = {
    "cached weight": {},
    "main_grad": {"wgrad": fg.Wgrad(into_main_grad=True)},
    "main_grad in bf16": {"wgrad": fg.Wgrad(into_main_grad=True)},
    "placeholder": {"wgrad": fg.Wgrad(into_main_grad=True, placeholder_grad=True)},
    "deferred": {"wgrad": fg.Wgrad(deferred=True)},
    "originals": ORIGINAL,
    "all": {"wgrad": fg.Wgrad(into_main_grad=True, deferred=True), **ORIGINAL},
}


def train(layer, function, feature, in_flight):
    """A few steps of equal microbatches; every output, gradient and state, by name."""
    data = [batch(64, K, N, device="cuda") for _ in range(MICROBATCHES)]
    main_grad = getattr(layer.weight, "main_grad", None)
    for (
        parameter
    ) in layer.parameters():  # to be added to: torch would keep memory of a graph instead
        parameter.grad = torch.zeros_like(parameter)
    results = {}
    for step in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        flying = []

        def finish(step=step, flying=flying):
            i, leaf, output, grad_output = flying.pop(0)
            output.backward(grad_output)
            results[f"input {step} {i}"] = leaf.grad.clone()
            if layer.wgrad.deferred:
                layer.backward_dw()

        with same_random_numbers(step):
            for i, (x, grad_output) in enumerate(data):
                leaf = x.clone().requires_grad_()
                first = i == 0 if feature in ("cached weight", "all") else None
                output = function(leaf, is_first_microbatch=first)
                results[f"output {step} {i}"] = output.detach().clone()
                flying.append((i, leaf, output, grad_output))
                if not in_flight:
                    finish()
            while flying:
                finish()
        for name, grad in (("weight", layer.weight.grad), ("main", main_grad)):
            if grad is not None:
                results[f"{name} {step}"] = grad.clone()
        with torch.no_grad():
            gradient = layer.weight.grad if main_grad is None else main_grad
            layer.weight.sub_(gradient.to(layer.weight.dtype) * 10)
            if main_grad is not None:
                main_grad.zero_()
        layer.zero_grad(set_to_none=False)
        if layer.scaling_state.rule:
            fg.update_scales(layer)
    return results | state_of(layer)


@pytest.mark.parametrize("in_flight", [False, True], ids=["one by one", "in flight"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("feature", OPTIONS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_equals_eager(recipe, feature, mode, in_flight):
    base = fg.Linear(K, N, device="cuda", dtype=torch.bfloat16, recipe=recipe, **OPTIONS[feature])
    results = []
    for compiled in (False, True):
        layer = copy.deepcopy(base)
        if layer.wgrad.into_main_grad:
            dtype = torch.bfloat16 if feature == "main_grad in bf16" else torch.float32
            layer.weight.main_grad = torch.zeros(N, K, device="cuda", dtype=dtype)
        function = torch.compile(layer, mode=mode, fullgraph=True) if compiled else layer
        torch.manual_seed(3)
        results.append(train(layer, function, feature, in_flight))
    assert_same_results(results[1], results[0])
    assert counters["stats"]["unique_graphs"] == (2 if feature in ("cached weight", "all") else 1)
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_high_precision_adds_inside_of_the_gemm(dtype):
    wgrad = fg.Wgrad(into_main_grad=True)
    layer = fg.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16, recipe="bf16", wgrad=wgrad)
    layer.weight.main_grad = torch.randn(4096, 4096, device="cuda", dtype=dtype)
    x, grad_output = batch(512, 4096, 4096, device="cuda")
    layer(x).backward(grad_output)  # workspaces
    before = layer.weight.main_grad.clone()
    output = layer(x)
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output.backward(grad_output)
    assert torch.cuda.max_memory_allocated() - start < 1 << 20, "no gradient of its own"
    exact = before.double() + grad_output.double().t() @ x.double()
    error = (layer.weight.main_grad.double() - exact).norm() / exact.norm()
    assert error <= (2e-5 if dtype == torch.float32 else 4e-3)
