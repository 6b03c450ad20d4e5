"""Saved tensors through hooks and on the CPU: they travel as bytes and scales, and nothing changes."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import (
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)

import fullgraph as fg
from fullgraph.customop.structured import flatten
from linear_cases import (
    LOW_PRECISION,
    Case,
    assert_same_results,
    batch,
    state_of,
    step,
)

# Dynamo looks for the gradient of a quantized input that is no leaf; hidden from users, an error here.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

M, K, N = 256, 128, 384
compiled_or_not = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
weights = pytest.mark.parametrize(
    "quantized_weight", [False, True], ids=["plain", "quantized-weight"]
)


class Traffic:
    """Hooks that copy what is saved, as offloading does, and note it."""

    def __init__(self, keep=lambda tensor: False):
        self.keep, self.packed, self.unpacked = keep, [], 0

    def pack(self, tensor):
        if self.keep(tensor):
            return tensor
        self.packed.append(tensor)
        return tensor.detach().clone()

    def unpack(self, tensor):
        self.unpacked += 1
        return tensor

    def hooks(self):
        return saved_tensors_hooks(self.pack, self.unpack)

    @property
    def bytes(self):
        return sum(tensor.nbytes for tensor in self.packed)

    @property
    def dtypes(self):
        return {tensor.dtype for tensor in self.packed if tensor.numel() > 1}


def compile_if(compiled, function):
    return torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function


def both(model, function, x, grad_output, context, eager=None):
    """A step within the context, and one in eager mode without it, from fresh scales and amaxes."""
    found = []
    for run, around in ((function, context), (eager or model, nullcontext())):
        for layer in model.modules():
            if isinstance(layer, fg.Linear):
                layer.scaling_state.reset()
        with around:
            results = step(model, x, grad_output, run)
        found.append({**results, **state_of(model)})
    return found


SAVED = {
    "fp8-delayed": M * K + N * K + 2 * 4,
    "fp8-current": M * K + N * K + 2 * 4,
    "fp8-per-row": M * K + N * K + 4 * (K + K),
    # 1x128 of the columnwise input; 128x128 of the weight, its rows of scales filled up to four.
    "fp8-block": M * K + N * K + 4 * (K * M // 128) + 4 * (K // 128 * 4),
    "mxfp8": (M * K + N * K) * 33 // 32,
    "nvfp4": (M * K + N * K) * 9 // 16 + 2 * 4,
}
"""Bytes that a layer with plain tensors saves: columnwise codes of input and weight, and their scales."""


@compiled_or_not
@pytest.mark.parametrize("recipe", LOW_PRECISION)
def test_half_of_the_bytes_travel(recipe, compiled):
    layer = Case(recipe).layer(K, N)
    x, grad_output = batch(M, K, N)
    traffic = Traffic()
    function = compile_if(compiled, layer)
    assert_same_results(*both(layer, function, x, grad_output, traffic.hooks()))
    assert traffic.bytes == SAVED[recipe]
    assert traffic.bytes <= 0.55 * 2 * (M * K + N * K)
    assert traffic.unpacked == len(traffic.packed)
    assert traffic.dtypes <= {torch.uint8, torch.float32}


@compiled_or_not
def test_high_precision_travels_as_it_is(compiled):
    layer = Case("bf16").layer(K, N)
    x, grad_output = batch(M, K, N)
    traffic = Traffic()
    assert_same_results(*both(layer, compile_if(compiled, layer), x, grad_output, traffic.hooks()))
    assert traffic.bytes == 2 * (M * K + N * K)
    assert sum(isinstance(tensor, nn.Parameter) for tensor in traffic.packed) == 1


@compiled_or_not
@weights
@pytest.mark.parametrize("quantized_input", [False, True], ids=["plain-input", "quantized-input"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "fp8-delayed", "nvfp4"])
def test_save_on_cpu(recipe, quantized_input, quantized_weight, compiled):
    case = Case(recipe, quantized_weight=quantized_weight, quantized_input=quantized_input)
    layer = case.layer(K, N)
    function = compile_if(compiled, layer)
    x, grad_output = batch(M, K, N)
    found = both(
        layer,
        lambda x: function(case.input(x)),
        x,
        grad_output,
        save_on_cpu(),
        lambda x: layer(case.input(x)),
    )
    assert_same_results(*found)


@compiled_or_not
@weights
def test_what_came_quantized_travels_quantized(quantized_weight, compiled):
    case = Case("fp8-current", quantized_weight=quantized_weight, quantized_input=True)
    layer = case.layer(K, N)
    x, grad_output = batch(M, K, N)
    traffic = Traffic()
    function = compile_if(compiled, layer)
    input = case.input(x.requires_grad_())
    with traffic.hooks():
        output = function(input)
    output.backward(grad_output)
    codes = [tensor for tensor in traffic.packed if tensor.dtype == torch.uint8]
    assert traffic.bytes == sum(t.nbytes for t in codes) + 4 * 2
    # Both copies of a tensor that came with both; of a plain weight the one that dgrad reads.
    assert sum(t.nbytes for t in codes) == 2 * M * K + (2 if quantized_weight else 1) * N * K


def tensors_of(model):
    """Where the memory of all parameters is, that of quantized ones included."""
    return {t.data_ptr() for p in model.parameters() for t in flatten(p)}


@compiled_or_not
@weights
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_parameters_can_be_told_apart(recipe, quantized_weight, compiled):
    """A parameter that is saved as it is stays on the device anyway: hooks should leave it where it is."""
    layer = Case(recipe, quantized_weight=quantized_weight).layer(K, N)
    own = tensors_of(layer)
    traffic = Traffic(keep=lambda tensor: tensor.data_ptr() in own)
    x, grad_output = batch(M, K, N)
    assert_same_results(*both(layer, compile_if(compiled, layer), x, grad_output, traffic.hooks()))
    input_bytes = 2 * M * K if recipe == "bf16" else M * K + 4
    weight_bytes = N * K + 4 if recipe == "fp8-current" and not quantized_weight else 0
    assert traffic.bytes == input_bytes + weight_bytes


@compiled_or_not
def test_scales_and_amaxes_stay(compiled):
    """The state of delayed scaling is kept by reference: it is not saved, and not copied back over what came later."""
    layer = Case("fp8-delayed").layer(K, N)
    state = layer.scaling_state
    pointers = {t.data_ptr() for t in vars(state).values() if isinstance(t, torch.Tensor)}
    traffic = Traffic()
    function = compile_if(compiled, layer)
    x, grad_output = batch(M, K, N)
    with traffic.hooks():
        outputs = [function(x), function(4 * x)]
    assert not pointers & {tensor.data_ptr() for tensor in traffic.packed}
    for output in outputs:
        output.backward(grad_output)
    assert state.forward_amax[0] == 4 * x.abs().max()
    assert state.backward_amax == grad_output.abs().max()
    fg.update_scales(layer)
    with traffic.hooks():
        output = function(x)
    fg.update_scales(layer)
    output.backward(grad_output)
    assert state.backward_amax == grad_output.abs().max()


@compiled_or_not
def test_a_model_and_its_quantized_activations(compiled):
    first, second = Case("fp8-current").layer(K, N), Case("fp8-current").layer(N, K)
    model = nn.ModuleList([first, second])

    def forward(x):
        return second(first(x, quantized_output=True))

    x, grad_output = batch(M, K, K)
    traffic = Traffic()
    function = compile_if(compiled, forward)
    assert_same_results(*both(model, function, x, grad_output, traffic.hooks(), forward))
    # Nothing in bfloat16: of the hidden activation the codes.
    assert traffic.dtypes == {torch.uint8}


@compiled_or_not
def test_hooks_where_they_are_disabled(compiled):
    """`disable_saved_tensors_hooks` forbids hooks; it does not forbid our ops."""
    layer = Case("fp8-current").layer(K, N)
    x, grad_output = batch(M, K, N)
    function = compile_if(compiled, layer)
    context = disable_saved_tensors_hooks
    assert_same_results(*both(layer, function, x, grad_output, context("no hooks here")))
    hooks = save_on_cpu()
    with context("no hooks here"), pytest.raises(RuntimeError, match="no hooks here"):
        hooks.__enter__()


@pytest.mark.parametrize(
    "context",
    [save_on_cpu, lambda: saved_tensors_hooks(lambda t: t, lambda t: t)],
    ids=["save_on_cpu", "hooks"],
)
def test_torch_does_not_trace_hooks(context):
    """They go around a compiled function, not inside of it: torch says so, with any layer."""
    for layer in (nn.Linear(K, N), fg.Linear(K, N, recipe="fp8-current")):

        def function(x, layer=layer):
            with context():
                return layer(x)

        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="should not be traced"):
            compiled(torch.randn(M, K))


def test_inductor():
    layer = Case("fp8-current", quantized_weight=True).layer(K, N)
    x, grad_output = batch(M, K, N)
    traffic = Traffic()
    function = torch.compile(layer, fullgraph=True)
    assert_same_results(*both(layer, function, x, grad_output, traffic.hooks()))
    assert traffic.dtypes == {torch.uint8}
    assert_same_results(*both(layer, function, x, grad_output, save_on_cpu()))
