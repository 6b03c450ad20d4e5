"""Saved tensors on the host between forward and backward: the same results, half of the bytes, a free GPU."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from linear_cases import Case, assert_same_results, batch, gradients, state_of, step

pytestmark = [
    pytest.mark.gpu,
    # Dynamo looks for the gradient of a quantized input that is no leaf; hidden from users, an error here.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore::fullgraph.errors.EmulationWarning"),
]
GPU = torch.device("cuda", 0)
M, K, N = 512, 256, 384

by_recipe = pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "fp8-delayed", "nvfp4"])
weights = pytest.mark.parametrize(
    "quantized_weight", [False, True], ids=["plain", "quantized-weight"]
)


def one_step(layer, x, grad_output, function):
    layer.scaling_state.reset()
    return {**step(layer, x, grad_output, function), **state_of(layer)}


@pytest.mark.parametrize("pin_memory", [False, True], ids=["pageable", "pinned"])
@weights
@by_recipe
def test_eager(recipe, quantized_weight, pin_memory):
    layer = Case(recipe, quantized_weight=quantized_weight).layer(K, N, device=GPU)
    x, grad_output = batch(M, K, N, device=GPU)
    expected = one_step(layer, x, grad_output, layer)
    with save_on_cpu(pin_memory=pin_memory):
        found = one_step(layer, x, grad_output, layer)
    assert_same_results(found, expected)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@weights
@by_recipe
def test_around_a_compiled_function(recipe, quantized_weight, mode):
    """CUDA graphs take what comes back from the host as new inputs: right, though they record anew for a while."""
    layer = Case(recipe, quantized_weight=quantized_weight).layer(K, N, device=GPU)
    function = torch.compile(layer, fullgraph=True, mode=mode)
    for _ in range(4):
        x, grad_output = batch(M, K, N, device=GPU)
        expected = one_step(layer, x, grad_output, layer)
        torch.compiler.cudagraph_mark_step_begin()
        with save_on_cpu(pin_memory=True):
            found = one_step(layer, x, grad_output, function)
        assert_same_results(found, expected)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_the_gpu_is_free_in_between(recipe):
    layers = [Case(recipe, bias=False).layer(K, K, device=GPU) for _ in range(4)]
    model = nn.Sequential(*layers)
    x, grad_output = batch(M, K, K, device=GPU)
    step(model, x, grad_output)
    model.zero_grad()
    held = {}
    for where in ("gpu", "host"):
        leaf = x.clone().requires_grad_()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        if where == "gpu":
            output = model(leaf)
        else:
            with save_on_cpu(pin_memory=True):
                output = model(leaf)
        held[where] = torch.cuda.memory_allocated() - before - output.nbytes
        output.backward(grad_output)
        model.zero_grad()
    saved = 3 * M * K * 2 if recipe == "bf16" else 4 * (M * K + K * K)
    assert held["gpu"] >= saved
    assert held["host"] <= 1e4


def test_bytes_that_cross_the_bus():
    layer = Case("fp8-current").layer(K, N, device=GPU)
    x, grad_output = batch(M, K, N, device=GPU)
    expected = step(layer, x, grad_output)
    crossed = []

    def to_host(tensor):
        crossed.append(tensor.nbytes)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    with saved_tensors_hooks(to_host, lambda host: host.to(GPU, non_blocking=True)):
        output = layer(leaf)
    output.backward(grad_output)
    assert sum(crossed) == M * K + N * K + 2 * 4
    found = {"output": output.detach(), "grad_input": leaf.grad, **gradients(layer)}
    assert_same_results(found, expected)
