"""Forward, backward, optimizer and scales in one compiled function: the bits of the parts, one graph, no recompilation.

`docs/training.md` says how to write such a step, and what of it is torch's to say.
"""

import itertools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fullgraph as fg
from fullgraph.customop.graphs import GraphRecorder
from linear_cases import RECIPES, assert_same_results
from whole_step_cases import (
    MICROBATCHES,
    OPTIMIZERS,
    Step,
    batches,
    keep_gradients,
    main_grad_step,
    new_model,
    run,
)

BEFORE_2_12 = torch.__version__ < "2.12"
NOT_IN_2_11 = "torch 2.11 does not differentiate by a quantized parameter inside of a graph"


def apart(function):
    """How an optimizer is compiled where it is not in the graph of the step."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def whole_and_parts(optimizer, *arguments, compiler="aot_eager", **options):
    """A step in one graph, and a twin whose optimizer alone is compiled; (model, optimizer, step) each."""
    pairs = []
    for compile_update in (None, apart):
        model = new_model(*arguments, **options)
        made = OPTIMIZERS[optimizer](model.parameters())
        pairs.append((model, made, Step(model, made, compile_update)))
    recorder = GraphRecorder(compiler)
    model, made, step = pairs[0]
    pairs[0] = model, made, torch.compile(step, fullgraph=True, backend=recorder)
    return recorder, *pairs


def set_rate(optimizer, value):
    rate = optimizer.param_groups[0]["lr"]
    if isinstance(rate, torch.Tensor):
        rate.fill_(value)


COMBINATIONS = list(itertools.product(RECIPES, (False, True)))
QUICK = [(recipe, i % 2 == 1) for i, recipe in enumerate(RECIPES)]


@pytest.mark.parametrize(
    ("recipe", "quantized_weight"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in COMBINATIONS],
)
def test_the_whole_equals_its_parts(recipe, quantized_weight):
    if quantized_weight and BEFORE_2_12:
        pytest.skip(NOT_IN_2_11)
    options = {"quantized_weight": quantized_weight}
    recorder, whole, parts = whole_and_parts("adamw", recipe, **options)
    before = new_model(recipe, **options)
    for number in range(4):
        results = []
        for model, optimizer, step in (whole, parts):
            set_rate(optimizer, 0.01 / (1 + number))
            results.append(run(step, model, number))
        got, expected = results
        assert_same_results(got, expected)
    assert not torch.equal(got["0.bias"], before[0].bias)
    assert len(recorder.graphs) == 1
    layers = 2 * MICROBATCHES
    assert (len(recorder.forward), len(recorder.backward)) == (layers, layers)


@pytest.mark.parametrize(
    ("optimizer", "graphs", "quantized_weight"),
    [("sgd", 2, False), ("adamw-foreach", 1, False), ("adamw-foreach", 1, True)],
)
def test_optimizers(optimizer, graphs, quantized_weight):
    """SGD makes its momentum in the first step: a graph of its own."""
    if quantized_weight and BEFORE_2_12:
        pytest.skip(NOT_IN_2_11)
    options = {"quantized_weight": quantized_weight, "bias": False}
    recorder, whole, parts = whole_and_parts(optimizer, "fp8-delayed", **options)
    for number in range(4):
        got, expected = [run(step, model, number) for model, _, step in (whole, parts)]
        assert_same_results(got, expected)
    assert len(recorder.graphs) == graphs
    plain = [type(p.grad) is torch.Tensor for p in whole[0].parameters()]
    assert plain == [True, True]


def by_hand(model):
    """A step with `.backward()` and an update of products that are exact, so that eager mode gives the same bits."""

    def step(inputs, targets):
        losses = []
        for x, target in zip(inputs, targets, strict=True):
            loss = (model(x).float() - target).square().mean()
            loss.backward()
            losses.append(loss.detach())
        gradients = [parameter.grad for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.125)
                parameter.grad = None
        if model[0].scaling_state.rule:
            fg.update_scales(model)
        return [*losses, *gradients]

    return step


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "nvfp4"])
def test_backward_as_a_method_equals_eager(recipe):
    recorder = GraphRecorder()
    models = new_model(recipe), new_model(recipe)
    compiled = torch.compile(by_hand(models[0]), fullgraph=True, backend=recorder)
    for number in range(4):
        got = run(compiled, models[0], number)
        assert_same_results(got, run(by_hand(models[1]), models[1], number))
        assert all(parameter.grad is None for parameter in models[0].parameters())
    assert len(recorder.graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_inductor(recipe):
    """Gradients and scales have the bits of eager mode. Losses, norms and AdamW are sums and quotients that Inductor
    rounds otherwise, so the twin starts each step from the weights of the compiled model.
    """
    recorder = GraphRecorder("inductor")
    models = new_model(recipe, bias=False), new_model(recipe, bias=False)
    steps = [Step(model, OPTIMIZERS["adamw"](model.parameters())).unclipped for model in models]
    compiled = torch.compile(steps[0], fullgraph=True, backend=recorder)
    for number in range(4):
        with torch.no_grad():
            for ours, theirs in zip(*[model.parameters() for model in models], strict=True):
                theirs.copy_(ours)
        with torch._inductor.config.patch(emulate_precision_casts=True):
            got = run(compiled, models[0], number)
        expected = run(steps[1], models[1], number)
        for name in ("0.weight", "2.weight"):
            difference = (got.pop(name) - expected.pop(name)).abs().max()
            assert difference <= 2e-3
        assert_same_results(got, expected)
    assert len(recorder.graphs) == 1
    layers = 2 * MICROBATCHES
    assert (len(recorder.forward), len(recorder.backward)) == (layers, layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "fp8-block"])
def test_main_grad(recipe, dtype):
    recorder = GraphRecorder()
    options = {"wgrad": fg.Wgrad(into_main_grad=True), "bias": False}
    models = new_model(recipe, **options), new_model(recipe, **options)
    steps = [main_grad_step(model, dtype) for model in models]
    compiled = torch.compile(steps[0], fullgraph=True, backend=recorder)
    for number in range(4):
        got = run(compiled, models[0], number)
        assert_same_results(got, run(steps[1], models[1], number))
        assert got["value0"].any()
        for parameter in models[0].parameters():
            assert parameter.grad is None
            assert not parameter.main_grad.any()
    assert len(recorder.graphs) == 1


def test_everything_but_the_batch_stays_where_it_is():
    """CUDA graphs may change in place only what has a static address: weights, gradients, moments, scales."""
    found = []

    def compiler(graph, inputs):
        from functorch.compile import make_boxed_func

        metadata = torch._guards.TracingContext.get().fw_metadata
        found.append((len(inputs), metadata))
        return make_boxed_func(graph.forward)

    from torch._dynamo.backends.common import aot_autograd

    model = new_model("fp8-delayed")
    step = Step(model, OPTIMIZERS["adamw"](model.parameters()))
    backend = aot_autograd(fw_compiler=compiler)
    run(torch.compile(step, fullgraph=True, backend=backend), model, 0)
    ((count, metadata),) = found
    mutated = {i for i, info in enumerate(metadata.input_info) if info.mutates_data}
    assert len(mutated) >= 4 * 4  # weight, gradient and two moments of four parameters
    assert mutated <= set(metadata.static_input_indices)
    assert count - len(metadata.static_input_indices) <= 2 + 1  # the batch, the learning rate


# What torch does not trace. `docs/training.md` says what to write instead; each of these says when that may go.


def refused(function, **config):
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(**{"trace_autograd_ops": True, **config}):
        compiled(*batches(0))


def test_tracing_a_backward_pass_must_be_turned_on():
    assert torch._dynamo.config.trace_autograd_ops is False
    with pytest.raises(torch._dynamo.exc.Unsupported, match="trace_autograd_ops"):
        refused(by_hand(new_model("fp8-current")), trace_autograd_ops=False)


def test_the_step_of_an_optimizer_breaks_the_graph():
    model = new_model("fp8-current")
    optimizer = torch.optim.AdamW(model.parameters())
    keep_gradients(model)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\._dynamo\.graph_break\(\)"):
        refused(lambda inputs, targets: optimizer.step())
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Optimizer\.zero_grad"):
        refused(lambda inputs, targets: optimizer.zero_grad())


def test_an_optimizer_does_not_see_gradients_that_the_graph_has_assigned():
    model = new_model("fp8-current")
    step = Step(model, OPTIMIZERS["adamw"](model.parameters()))
    model.zero_grad()

    def function(inputs, targets):
        model(inputs[0]).float().sum().backward()
        step.update()

    with pytest.raises(torch._dynamo.exc.Unsupported, match="pending mutation on parameter"):
        refused(function)


@pytest.mark.skipif(not BEFORE_2_12, reason="later versions of torch can")
def test_quantized_weights_in_torch_2_11():
    model = new_model("fp8-current", quantized_weight=True)
    with pytest.raises(AssertionError, match=r"loss\.backward\(\)"):
        refused(by_hand(model))


def test_without_one_graph_for_all_it_is_three():
    """The ordinary way: forward and backward a graph, the optimizer another, the scales an op."""
    model = new_model("fp8-delayed")
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    update = torch.compile(optimizer.step, backend="aot_eager")
    for number in range(4):
        set_rate(optimizer, 0.01 / (1 + number))
        for x, target in zip(*batches(number), strict=True):
            nn.functional.mse_loss(compiled(x).float(), target).backward()
        update()
        fg.update_scales(model)
        optimizer.zero_grad()
        if number == 1:
            made = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == made
