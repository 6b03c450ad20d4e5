"""What training loops do with a weight: quantize it once a step, add its gradient to a buffer, compute that later,
choose what is saved. Each of it gives the bits of a layer without it, in eager mode and in one graph.
"""

import copy
import gc
import pickle
import warnings

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fullgraph as fg
from fullgraph.customop.deferred import count
from fullgraph.customop.graphs import GraphRecorder
from fullgraph.errors import ConfigError
from fullgraph.ops import kept
from fullgraph.ops.statistics import COLUMN_NAMES, StatisticsBuffers
from fullgraph.recipes import BackwardOverride
from linear_cases import (
    LOW_PRECISION,
    RECIPES,
    K,
    N,
    assert_same_results,
    batch,
    decoded_linear,
    same_random_numbers,
    state_of,
)
from oracles import assert_same_bits, relative_error

recipes = pytest.mark.parametrize("recipe", RECIPES)
low_precision = pytest.mark.parametrize("recipe", LOW_PRECISION)
backends = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
MICROBATCHES, STEPS = 3, 3


def layer_of(recipe, **options):
    return fg.Linear(K, N, recipe=recipe, **{"dtype": torch.bfloat16, **options})


def with_main_grad(layer, dtype=torch.float32):
    layer.weight.main_grad = torch.zeros(layer.weight.shape, dtype=dtype)
    return layer


def graphs():
    return counters["stats"]["unique_graphs"]


def train(layer, function=None, *, caches=False, order=None, between=lambda layer: None):
    """A few steps of three microbatches in flight, of different sizes: everything that they give, by name.

    Args:
        layer: trained by plain gradient descent, on main_grad where it has one.
        function: the layer, perhaps compiled.
        caches: whether to say which microbatch is the first.
        order: of the backward passes.
        between: called between the backward passes and the optimizer.
    """
    function = layer if function is None else function
    # None of N tokens: torch 2.14 compares sizes of quantized tensors that leave a graph, and makes one for that.
    data = [batch(18 + 8 * i) for i in range(MICROBATCHES)]
    results = {}
    for step in range(STEPS):
        with same_random_numbers(step):
            flying = []
            for i, (x, grad_output) in enumerate(data):
                leaf = x.clone().requires_grad_()
                flag = {"is_first_microbatch": i == 0} if caches else {}
                flying.append((leaf, function(leaf, **flag), grad_output))
            for i in order or range(MICROBATCHES):
                leaf, output, grad_output = flying[i]
                output.backward(grad_output)
                results |= {f"output {step} {i}": output.detach(), f"input {step} {i}": leaf.grad}
        between(layer)
        weight, bias = layer.weight, layer.bias
        grads = {
            "weight": weight.grad,
            "main": getattr(weight, "main_grad", None),
            "bias": bias.grad,
        }
        results |= {f"{n} {step}": g.clone() for n, g in grads.items() if g is not None}
        with torch.no_grad():
            gradient = grads["weight"] if grads["main"] is None else grads["main"]
            weight.sub_(gradient.to(weight.dtype) * 10)
            if grads["main"] is not None:
                grads["main"].zero_()
        layer.zero_grad()
        if layer.scaling_state.rule:
            fg.update_scales(layer)
    return results | state_of(layer)


def both(layer, backend="aot_eager", **options):
    """The results in eager mode, after those of the compiled layer were found to be the same."""
    torch.manual_seed(3)
    eager = train(copied(layer), **options)
    torch.manual_seed(3)
    ours = copied(layer)
    assert_same_results(
        train(ours, torch.compile(ours, backend=backend, fullgraph=True), **options), eager
    )
    return eager


def copied(layer):
    """A copy of a layer; torch copies no attributes of parameters."""
    made = copy.deepcopy(layer)
    if hasattr(layer.weight, "main_grad"):
        made.weight.main_grad = layer.weight.main_grad.clone()
    return made


# Weight caching over microbatches.


@recipes
def test_a_cached_weight_gives_the_same_bits(recipe):
    layer = layer_of(recipe)
    torch.manual_seed(3)
    plain = train(copied(layer))
    assert_same_results(both(layer, caches=True), plain)
    assert graphs() == 2, "one for the first microbatch, one for the others"


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_a_cached_weight_with_inductor(recipe):
    both(layer_of(recipe), "inductor", caches=True)
    assert graphs() == 2


@low_precision
def test_it_is_quantized_once_a_step_into_the_same_buffers(recipe):
    layer = layer_of(recipe)
    layer.statistics = StatisticsBuffers(torch.device("cpu"))
    recorder = GraphRecorder()
    function = torch.compile(layer, backend=recorder, fullgraph=True)
    addresses = set()

    def look(layer):
        (cache,) = layer.weight_caches.values()
        addresses.add(tuple(t.data_ptr() for t in fg.customop.structured.flatten(cache.quantized)))

    train(layer, function, caches=True, between=look)
    casts = layer.statistics.forward[:, COLUMN_NAMES.index("casts")]
    assert casts[:2].tolist() == [STEPS * MICROBATCHES, STEPS]
    assert len(addresses) == 1
    assert [len(recorder.forward), len(recorder.backward)] == [2, 2], "one node in each graph"


def test_forgetting_to_say_it_stays_correct():
    layer = layer_of("fp8-current")
    x, _ = batch(8)
    layer(x, is_first_microbatch=True)
    with torch.no_grad():
        layer.weight.add_(1.0)
    assert_same_bits(layer(x), copied(layer)(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_no_first_microbatch(compiled):
    layer = layer_of("fp8-current")
    function = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    with pytest.raises(Exception, match="there has been no first microbatch"):
        function(batch(8)[0], is_first_microbatch=False)


def test_a_change_of_the_weight_is_noticed():
    layer = layer_of("fp8-current")
    x, _ = batch(8)
    layer(x, is_first_microbatch=True)
    layer(x, is_first_microbatch=False)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(ConfigError, match="has changed since the first microbatch"):
        layer(x, is_first_microbatch=False)
    layer(x, is_first_microbatch=True)
    layer(x, is_first_microbatch=False)


@pytest.mark.parametrize("first", [True, False])
def test_the_cache_overwritten_in_flight_is_noticed(first):
    layer = layer_of("fp8-current")
    x, grad_output = batch(8)
    leaf = x.requires_grad_()
    outputs = [layer(leaf, is_first_microbatch=is_first) for is_first in (True, False)]
    layer(leaf, is_first_microbatch=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0 if first else 1].backward(grad_output)


CHANGES = {
    "optimizer": lambda layer: torch.optim.SGD(layer.parameters(), lr=0.1).step(),
    "fused optimizer": lambda layer: torch.optim.AdamW(layer.parameters(), fused=True).step(),
    "in place": lambda layer: layer.weight.detach().mul_(2),
    "another parameter": lambda layer: setattr(
        layer, "weight", torch.nn.Parameter(layer.weight.detach().clone())
    ),
    "load_state_dict": lambda layer: layer.load_state_dict(copy.deepcopy(layer.state_dict())),
    "load_state_dict, assigned": lambda layer: layer.load_state_dict(
        copy.deepcopy(layer.state_dict()), assign=True
    ),
    "data": lambda layer: setattr(layer.weight, "data", layer.weight.detach().clone()),
    "a first microbatch that failed": lambda layer: make_it_fail(layer),
}


def make_it_fail(layer):
    layer.weight.detach().mul_(2)
    with pytest.raises(Exception, match="in_features"):
        layer(torch.randn(8, K + 1, dtype=torch.bfloat16), is_first_microbatch=True)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("compiled", [False, True])
def test_copies_of_another_weight_are_refused(compiled, change):
    kept._FILLED.clear()  # a weight of another test may have had the memory of the next one
    layer = layer_of("fp8-current")
    function = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x, grad_output = batch(8)
    fg.make_weight_caches(layer)
    with pytest.raises(Exception, match="no first microbatch"):
        function(x, is_first_microbatch=False)
    for first in (True, False):
        function(x, is_first_microbatch=first).backward(grad_output)
    CHANGES[change](layer)
    with pytest.raises(Exception, match="no first microbatch|weight has changed since"):
        function(x, is_first_microbatch=False)
    for first in (True, False):
        assert_same_bits(function(x, is_first_microbatch=first), layer(x))


def test_some_microbatches_checkpointed():
    """What is repeated leaves the copies alone that another microbatch has saved."""
    layer = layer_of("fp8-current")
    results = []
    for first in (True, None):
        layer.zero_grad()
        torch.manual_seed(0)
        (x, g), (y, h) = batch(8), batch(8)
        x.requires_grad_()
        one = checkpoint(lambda x, f=first: layer(x, is_first_microbatch=f), x, use_reentrant=False)
        other = layer(y.requires_grad_(), is_first_microbatch=None if first is None else False)
        one.backward(g)
        other.backward(h)
        results.append({"x": x.grad, "y": y.grad, "weight": layer.weight.grad})
    assert_same_results(*results)


def test_recipes_that_take_turns_keep_a_cache_each():
    layer = layer_of(None)
    function = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, _ = batch(8)
    for _ in range(3):
        for recipe in ("fp8-current", "mxfp8"):
            for first in (True, False):
                with fg.autocast(recipe):
                    output = function(x, is_first_microbatch=first)
                    assert_same_bits(output, layer(x))
    assert graphs() == 4
    assert len(layer.weight_caches) == 2


@pytest.mark.parametrize("first", [True, False])
def test_nothing_to_cache(first):
    x, _ = batch(8)
    for layer in (layer_of("bf16"), layer_of("fp8-current", quantized_weight=True)):
        assert_same_bits(layer(x, is_first_microbatch=first), layer(x))
        assert not layer.weight_caches


def test_layers_that_share_a_graph():
    layers = [layer_of("fp8-current") for _ in range(12)]
    model = torch.nn.Sequential(*layers, torch.nn.ReLU(), layer_of("bf16"))
    assert fg.make_weight_caches(model) == 12
    for layer in layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    x, _ = batch(8)
    for first in (True, False):
        for layer in layers:
            assert_same_bits(layer(x, is_first_microbatch=first), layer.forward(x))
    assert graphs() == 2
    with pytest.raises(ConfigError, match="torch.nn.Module is needed"):
        fg.make_weight_caches(layers)


def test_copies_of_a_layer_have_no_cache():
    layer = layer_of("fp8-current")
    layer(batch(8)[0], is_first_microbatch=True)
    for other in (copied(layer), pickle.loads(pickle.dumps(layer)), copied(layer).float()):
        assert not any(other.weight_caches.values())
        other(batch(8)[0].to(other.weight.dtype), is_first_microbatch=True)
    assert any(layer.weight_caches.values())
    assert not any("cache" in key for key in layer.state_dict())


def test_a_cached_weight_in_inference_and_after_it():
    layer = layer_of("fp8-current")
    x, grad_output = batch(8)
    with torch.inference_mode():
        output = layer(x, is_first_microbatch=True)
        assert_same_bits(layer(x, is_first_microbatch=False), output)
    for first in (False, True):
        layer(x.requires_grad_(), is_first_microbatch=first).backward(grad_output)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_cached_weight_under_checkpointing(compiled):
    def function(layer):
        return lambda x, **kwargs: checkpoint(lambda x: layer(x, **kwargs), x, use_reentrant=False)

    layer = layer_of("fp8-delayed")
    torch.manual_seed(3)
    plain = train(copied(layer))
    torch.manual_seed(3)
    run = function(layer)
    if compiled:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert_same_results(train(layer, run, caches=True), plain)


# main_grad.


@recipes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad(recipe, dtype):
    layer = with_main_grad(layer_of(recipe, wgrad=fg.Wgrad(into_main_grad=True)), dtype)
    results = both(layer, order=(2, 0, 1))
    assert graphs() == 2, "one for the first size, one for all"
    assert not any(name.startswith("weight") for name in results)
    # One gradient, against float64 on what the GEMM read.
    x, grad_output = batch(24)
    numerics = layer.recipe.linear_numerics()
    exact = decoded_linear(numerics, x, layer.weight, layer.bias, grad_output)["grad_weight"]
    start = torch.randn(N, K).to(dtype)
    layer.weight.main_grad.copy_(start)
    with same_random_numbers():
        layer(x.requires_grad_()).backward(grad_output)
    bound = 2e-5 if dtype == torch.float32 else 4e-3
    assert relative_error(layer.weight.main_grad, start.double() + exact) <= bound
    assert layer.weight.grad is None


def test_main_grad_with_inductor():
    both(with_main_grad(layer_of("fp8-delayed", wgrad=fg.Wgrad(into_main_grad=True))), "inductor")


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_placeholder_lets_hooks_run_after_the_addition(compiled, deferred):
    wgrad = fg.Wgrad(into_main_grad=True, placeholder_grad=True, deferred=deferred)
    layer = with_main_grad(layer_of("fp8-current", wgrad=wgrad))
    seen = []
    layer.weight.register_post_accumulate_grad_hook(
        lambda p: None if p.grad is None else seen.append((p.grad.clone(), p.main_grad.clone()))
    )
    x, grad_output = batch(8)
    function = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    function(x.requires_grad_()).backward(grad_output)
    if deferred:
        assert not seen
        layer.backward_dw()
    ((grad, main_grad),) = seen
    assert grad.dtype == layer.weight.dtype
    assert not grad.any()
    assert_same_bits(main_grad, layer.weight.main_grad)
    assert main_grad.any()


WRONG_MAIN_GRADS = {
    "has no main_grad": lambda: None,
    r"must be float32 or bfloat16 \[32, 48\] on cpu, got float32\[48, 32\]": lambda: torch.zeros(
        K, N
    ),
    "got float16": lambda: torch.zeros(N, K, dtype=torch.float16),
    "on meta": lambda: torch.zeros(N, K, device="meta"),
    "got a int": lambda: 3,
    "requires a gradient itself": lambda: torch.zeros(N, K, requires_grad=True),
    "an expanded one": lambda: torch.zeros(1, K).expand(N, K),
    "torch.sparse": lambda: torch.zeros(N, K).to_sparse(),
    "got a QuantizedTensor": lambda: fg.quantize(torch.zeros(N, K), fg.PerRowQuantizer()),
}


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("words", WRONG_MAIN_GRADS)
def test_main_grad_that_does_not_fit(words, compiled, deferred):
    layer = layer_of("fp8-delayed", wgrad=fg.Wgrad(into_main_grad=True, deferred=deferred))
    buffer = WRONG_MAIN_GRADS[words]()
    if buffer is not None:
        layer.weight.main_grad = buffer
    before = state_of(layer)
    function = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    with pytest.raises(Exception, match=words):
        function(batch(8)[0])
    assert_same_results(state_of(layer), before)
    with torch.no_grad():
        layer(batch(8)[0])  # needs no main_grad


def test_two_layers_add_to_one_main_grad():
    wgrad = fg.Wgrad(into_main_grad=True)
    first, second = (fg.Linear(K, K, recipe="fp8-current", wgrad=wgrad) for _ in range(2))
    second.weight = first.weight
    with_main_grad(first)
    x = torch.randn(8, K)

    def step(x):
        return second(first(x).relu()).square().sum()

    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        first.weight.main_grad.zero_()
        function(x).backward()
        results.append(first.weight.main_grad.clone())
    assert_same_bits(*results)
    for layer in (first, second):
        layer.configure("fp8-current", wgrad=None)
    step(x).backward()
    assert relative_error(results[0], first.weight.grad) < 1e-6


def test_main_grad_of_a_frozen_and_of_a_quantized_weight():
    wgrad = fg.Wgrad(into_main_grad=True)
    x, grad_output = batch(8)
    frozen = with_main_grad(layer_of("fp8-current", wgrad=wgrad))
    frozen.weight.requires_grad_(False)
    frozen(x.requires_grad_()).backward(grad_output)
    assert not frozen.weight.main_grad.any()
    quantized = layer_of("fp8-current", wgrad=wgrad, quantized_weight=True)
    results = []
    for backend in (None, "aot_eager"):
        with_main_grad(quantized)
        function = quantized if backend is None else torch.compile(quantized, backend=backend)
        function(x).backward(grad_output)
        results.append(quantized.weight.main_grad)
    assert_same_bits(*results)
    assert results[0].any()


# Deferred weight gradients.


@recipes
@pytest.mark.parametrize("main_grad", [False, True])
def test_deferred_gradients_are_those_of_the_backward_pass(recipe, main_grad):
    def made(deferred):
        torch.manual_seed(5)
        layer = layer_of(recipe, wgrad=fg.Wgrad(into_main_grad=main_grad, deferred=deferred))
        return with_main_grad(layer) if main_grad else layer

    def finish(layer):
        assert count(layer.deferred_wgrad) == MICROBATCHES
        assert layer.deferred_wgrad.grad is None, "Dynamo looks into gradients of inputs"
        for _ in range(MICROBATCHES):
            layer.backward_dw()

    layer = made(False)
    torch.manual_seed(3)
    expected = train(layer, order=(1, 0, 2))
    assert_same_results(both(made(True), order=(1, 0, 2), between=finish), expected)
    assert graphs() == 2, "one for the first size, one for all"


def test_deferred_gradients_with_inductor():
    def finish(layer):
        for _ in range(MICROBATCHES):
            layer.backward_dw()

    layer = layer_of("fp8-current", wgrad=fg.Wgrad(deferred=True))
    both(layer, "inductor", between=finish)


def test_deferring_costs_no_copy_and_one_node():
    layer = layer_of("fp8-current", wgrad=fg.Wgrad(deferred=True))
    recorder = GraphRecorder()
    saved = []
    x, grad_output = batch(24)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        output = layer(x.requires_grad_())
    output.backward(grad_output)
    (call,) = layer.deferred_wgrad.queue
    kept = {t.data_ptr() for t in saved}
    assert call.tensors["input"].parts.columnwise_data.data_ptr() in kept
    assert call.tensors["grad_output"].parts.columnwise_data.shape == (N, 24)
    assert layer.weight.grad is None
    layer.backward_dw()
    assert count(layer.deferred_wgrad) == 0
    torch.compile(layer, backend=recorder, fullgraph=True)(x).backward(grad_output)
    assert [len(recorder.forward), len(recorder.backward)] == [1, 1]
    layer.backward_dw()


def test_the_operands_are_freed_as_they_are_used():
    layer = layer_of("fp8-current", wgrad=fg.Wgrad(deferred=True))
    x, grad_output = batch(24)
    for _ in range(2):
        layer(x.requires_grad_()).backward(grad_output)
    first = layer.deferred_wgrad.queue[0].tensors["input"].parts.columnwise_data
    address = first.data_ptr()
    del first
    layer.backward_dw()
    gc.collect()
    alive = {
        t.data_ptr() for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype == torch.uint8
    }
    assert address not in alive
    layer.backward_dw()


def test_backward_dw_without_anything_to_do():
    layer = layer_of("fp8-current", wgrad=fg.Wgrad(deferred=True))
    with pytest.raises(ConfigError, match="nothing to compute"):
        layer.backward_dw()
    x, grad_output = batch(8)
    layer(x).backward(grad_output)
    layer.backward_dw()
    grad = layer.weight.grad.clone()
    with pytest.raises(ConfigError, match="nothing to compute"):
        layer.backward_dw()
    assert_same_bits(layer.weight.grad, grad)
    with pytest.raises(ConfigError, match="does not defer"):
        layer_of("fp8-current").backward_dw()
    layer.weight.requires_grad_(False)
    layer(x.requires_grad_()).backward(grad_output)
    with pytest.raises(ConfigError, match="nothing to compute"):
        layer.backward_dw()


@pytest.mark.parametrize("compiled", [False, True])
def test_hooks_of_the_weight_run_once_it_has_its_gradient(compiled):
    """Torch runs hooks for every input of a compiled graph, without a gradient if it got none."""
    layer = layer_of("fp8-current", wgrad=fg.Wgrad(deferred=True))
    seen = []
    layer.weight.register_hook(lambda g: None if g is None else seen.append("gradient"))
    layer.weight.register_post_accumulate_grad_hook(
        lambda p: None if p.grad is None else seen.append(p.grad.shape)
    )
    x, grad_output = batch(8)
    function = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    function(x.requires_grad_()).backward(grad_output)
    assert not seen
    layer.backward_dw()
    assert seen == ["gradient", (N, K)]


def test_a_gradient_left_out_of_a_step_warns():
    layer = layer_of("fp8-current", wgrad=fg.Wgrad(deferred=True))
    other = layer_of("fp8-current")
    x, grad_output = batch(8)
    for _ in range(2):
        layer(x).backward(grad_output)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="2 weight gradients of 1 layers are still to be computed"):
        optimizer.step()
    for _ in range(2):
        layer.backward_dw()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_copies_of_a_layer_warn_too_and_once():
    x, grad_output = batch(8)
    for make in (copied, lambda layer: pickle.loads(pickle.dumps(layer))):
        layer = make(layer_of("fp8-current", wgrad=fg.Wgrad(deferred=True)))
        layer(x).backward(grad_output)
        with pytest.warns(UserWarning, match="still to be computed") as caught:
            torch.optim.SGD(layer.parameters(), lr=0.1).step()
        assert len(caught) == 1
        layer.discard_dw()
        layer.configure("fp8-current")
        layer(x).backward(grad_output)
        torch.optim.SGD(layer.parameters(), lr=0.1).step()


def test_a_deferring_layer_can_be_copied_with_what_it_has_left():
    layer = layer_of("fp8-current", wgrad=fg.Wgrad(deferred=True))
    x, grad_output = batch(8)
    layer(x).backward(grad_output)
    others = [copied(layer), pickle.loads(pickle.dumps(layer))]
    layer.backward_dw()
    others[0].backward_dw()
    assert_same_bits(others[0].weight.grad, layer.weight.grad)
    assert count(others[1].deferred_wgrad) == 0, "a pickle has no gradients, as for any parameter"


def test_what_changes_before_a_deferred_gradient_is_computed_is_noticed():
    layer = layer_of("bf16", wgrad=fg.Wgrad(deferred=True))
    for number in range(2):
        x, grad_output = batch(8)
        layer(x).backward(grad_output)
        (x, grad_output)[number].zero_()
        with pytest.raises(ConfigError, match="was changed in place after the backward pass"):
            layer.backward_dw()
        assert layer.discard_dw() == 1
    layer(batch(8)[0]).backward(grad_output)
    layer.backward_dw()
    assert layer.discard_dw() == 0
    assert layer_of("bf16").discard_dw() == 0


def test_nothing_that_waits_is_lost():
    layer = with_main_grad(layer_of("fp8-current", wgrad=fg.Wgrad(True, deferred=True)))
    x, grad_output = batch(8)
    layer(x).backward(grad_output)
    buffer = layer.weight.main_grad
    del layer.weight.main_grad
    with pytest.raises(ConfigError, match="has no main_grad"):
        layer.backward_dw()
    layer.weight.main_grad = buffer
    layer.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="of a frozen weight"):
        layer.backward_dw()
    layer.weight.requires_grad_(True)
    for change in (layer.float, lambda: layer.configure("bf16")):
        with pytest.raises(ConfigError, match="1 weight gradients are still to be computed"):
            change()
    fg.convert(layer, "mxfp8")
    layer.backward_dw()
    assert buffer.any()


@pytest.mark.parametrize("compiled", [False, True])
def test_deferring_under_checkpointing(compiled):
    layer = layer_of("fp8-delayed", wgrad=fg.Wgrad(deferred=True))

    def function(x):
        return checkpoint(layer, x, use_reentrant=False)

    run = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    x, grad_output = batch(8)
    run(x.requires_grad_()).backward(grad_output)
    layer.backward_dw()
    grad, layer.weight.grad = layer.weight.grad, None
    layer(x).backward(grad_output)
    layer.backward_dw()
    assert_same_bits(grad, layer.weight.grad)


# What is saved.


@recipes
@pytest.mark.parametrize("names", [("input",), ("weight",), ("input", "weight")], ids="+".join)
def test_saving_the_originals_gives_the_same_bits(recipe, names):
    layer = layer_of(recipe)
    torch.manual_seed(3)
    plain = train(copied(layer))
    layer.configure(recipe, **{f"save_{name}": fg.Save.ORIGINAL for name in names})
    assert_same_results(both(layer), plain)


@pytest.mark.parametrize("override", list(BackwardOverride))
def test_saving_the_originals_with_a_backward_pass_in_high_precision(override):
    recipe = fg.recipes.Float8BlockScaling(backward_override=override)
    layer = layer_of(recipe)
    torch.manual_seed(3)
    plain = train(copied(layer))
    layer.configure(recipe, save_input=fg.Save.ORIGINAL, save_weight=fg.Save.ORIGINAL)
    assert_same_results(both(layer), plain)


def test_originals_are_cast_as_in_the_forward_pass_though_scales_have_moved_on():
    x, grad_output = batch(8)
    results = []
    for save in fg.Save:
        torch.manual_seed(3)
        layer = layer_of("fp8-delayed", save_input=save, save_weight=save)
        leaf = x.clone().requires_grad_()
        output = layer(leaf)
        fg.update_scales(layer)
        output.backward(grad_output)
        results.append({"input": leaf.grad, "weight": layer.weight.grad, **state_of(layer)})
    assert_same_results(*results)


@low_precision
def test_what_is_saved(recipe):
    x, _ = batch(24)
    sizes = {}
    for save in fg.Save:
        layer = layer_of(recipe, save_input=save, save_weight=save)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
            layer(x.clone().requires_grad_())
        originals = {t.data_ptr() for t in (layer.weight,)}
        own = [t for t in saved if t.data_ptr() not in originals and t.dtype == torch.uint8]
        sizes[save] = sum(t.numel() for t in own)
        assert (layer.weight.data_ptr() in {t.data_ptr() for t in saved}) is (
            save is fg.Save.ORIGINAL
        )
    codes = (24 * K + N * K) // (2 if recipe == "nvfp4" else 1)
    assert sizes[fg.Save.ORIGINAL] == 0
    assert codes <= sizes[fg.Save.QUANTIZED] <= 1.3 * codes


# Options.


def test_options_that_cannot_be():
    with pytest.raises(ConfigError, match="placeholder_grad=True without into_main_grad"):
        fg.Wgrad(placeholder_grad=True)
    with pytest.raises(ConfigError, match="deferred"):
        fg.Wgrad(deferred="yes")
    for options in ({"wgrad": True}, {"save_input": "original"}, {"save_weight": True}):
        (name,) = options
        with pytest.raises(ConfigError, match=f"{name} must be a fullgraph"):
            layer_of("fp8-current", **options)


def test_options_can_be_changed():
    layer = with_main_grad(layer_of("fp8-current"))
    function = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, grad_output = batch(8)
    for into_main_grad in (False, True, False, True):
        layer.weight.grad = None
        layer.weight.main_grad.zero_()
        layer.configure("fp8-current", wgrad=fg.Wgrad(into_main_grad=into_main_grad))
        function(x.requires_grad_()).backward(grad_output)
        assert layer.weight.main_grad.any() == into_main_grad
        assert (layer.weight.grad is None) == into_main_grad
    assert graphs() == 2


def test_looking_at_a_layer_changes_no_gradient():
    x, grad_output = batch(8)
    summed = with_main_grad(layer_of("fp8-current", wgrad=fg.Wgrad(into_main_grad=True)))
    summed.weight.main_grad.fill_(3.0)
    deferring = layer_of("fp8-current", wgrad=fg.Wgrad(deferred=True))
    deferring(x).backward(grad_output)
    for layer in (summed, deferring):
        fg.explain(layer, x)
        fg.testing.assert_compiles_once(layer, (x,), (batch(9)[0],), dynamic=True)
    assert torch.equal(summed.weight.main_grad, torch.full((N, K), 3.0))
    assert count(deferring.deferred_wgrad) == 1


def test_new_graphs_while_gradients_wait():
    """Dynamo looks into the gradients of its inputs."""
    layer = layer_of("fp8-current", wgrad=fg.Wgrad(deferred=True))
    function = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for run in (layer, function):
        torch.manual_seed(0)
        layer.zero_grad()
        for tokens in (8, 16, 24):
            x, grad_output = batch(tokens)
            run(x, is_first_microbatch=tokens == 8).backward(grad_output)
        for _ in range(3):
            layer.backward_dw()
        results.append(layer.weight.grad.clone())
    assert_same_bits(*results)


def test_as_many_tokens_as_features_cost_one_graph_at_most():
    layer = layer_of("fp8-current", wgrad=fg.Wgrad(deferred=True))
    function = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for run in (layer, function):
        torch.manual_seed(0)
        layer.zero_grad()
        for tokens in (8, 16, N, 24, N):
            x, grad_output = batch(tokens)
            run(x).backward(grad_output)
            layer.backward_dw()
        results.append(layer.weight.grad.clone())
    assert_same_bits(*results)
    assert graphs() == (3 if torch.__version__ >= "2.14" else 2)
