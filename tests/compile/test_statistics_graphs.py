"""Statistics under `torch.compile`: two graphs in all, the same results with and without, the same rows as in eager."""

import copy
import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fullgraph as fg
from fullgraph.customop.graphs import GraphRecorder
from linear_cases import LOW_PRECISION, assert_same_results, same_random_numbers

WIDTH, TOKENS = 32, 8
FIRST, OTHERS = ("input", "weight"), ("input", "weight", "grad_output")


def new_model(recipe, **options):
    torch.manual_seed(1)
    make = functools.partial(fg.Linear, WIDTH, WIDTH, dtype=torch.bfloat16, recipe=recipe)
    return nn.Sequential(make(**options), nn.ReLU(), make(bias=False, **options))


def batch(number, tokens=TOKENS):
    torch.manual_seed(number)
    x, grad_output = torch.randn(2, tokens, WIDTH).bfloat16()
    return x * 2.0 ** (number % 5), grad_output * 1e-3


def one_step(model, forward, number, tokens=TOKENS):
    """A training step: output and gradients by name; weights change."""
    x, grad_output = batch(number, tokens)
    leaf = x.clone().requires_grad_()
    with same_random_numbers(number):
        output = forward(leaf)
        output.backward(grad_output)
    results = {"output": output.detach(), "grad_input": leaf.grad}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            results[name] = parameter.grad
            parameter.sub_(parameter.grad, alpha=0.125)
            parameter.grad = None
    if any(layer.scaling_state.rule for layer in model[::2]):
        fg.update_scales(model)
    return results


def train(model, forward, steps, every=None, tokens=(TOKENS,)):
    """Results of each step, and records."""
    if every is None:
        return [one_step(model, forward, n, tokens[n % len(tokens)]) for n in range(steps)], []
    results = []
    with fg.collect_statistics(model, every=every) as statistics:
        for number in range(steps):
            results.append(one_step(model, forward, number, tokens[number % len(tokens)]))
            statistics.step()
    return results, statistics.records


@functools.cache
def expected(recipe, steps, every, tokens=(TOKENS,)):
    """What eager mode does, and what it collects."""
    model = new_model(recipe)
    return train(model, model, steps, every, tokens)


def assert_same_steps(actual, expected):
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same_results(ours, theirs)


@pytest.mark.parametrize("recipe", LOW_PRECISION)
def test_every_recipe_in_two_graphs(recipe):
    results, records = expected(recipe, 7, 3)
    assert_same_steps(results, expected(recipe, 7, None)[0])
    assert [(r.step, r.layer, r.tensor) for r in records] == [
        (step, layer, tensor) for step in (1, 4, 7) for layer in "02" for tensor in OTHERS
    ]
    assert all(r.sqnr_db > 8 for r in records if r.underflow < 0.5 and r.saturation == 0)

    model, recorder = new_model(recipe), GraphRecorder()
    forward = torch.compile(model, fullgraph=True, backend=recorder)
    found = train(model, forward, 7, 3)
    assert_same_steps(found[0], results)
    assert found[1] == records
    assert len(recorder.graphs) == 2
    assert [len(graph.forward) for graph in recorder.graphs] == [2, 2]
    assert [len(graph.backward) for graph in recorder.graphs] == [2, 2]
    collecting = [g.forward[0].arguments.forward_statistics is not None for g in recorder.graphs]
    assert collecting == [True, False]


def test_high_precision_records_nothing():
    model = new_model("bf16")
    forward = torch.compile(model, fullgraph=True, backend="aot_eager")
    results, records = train(model, forward, 3, 1)
    assert records == []
    assert_same_steps(results, expected("bf16", 3, None)[0])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_inductor(recipe):
    model, recorder = new_model(recipe), GraphRecorder("inductor")
    forward = torch.compile(model, fullgraph=True, backend=recorder)
    results, records = train(model, forward, 5, 2)
    assert_same_steps(results, expected(recipe, 5, 2)[0])
    assert records == expected(recipe, 5, 2)[1]
    assert len(recorder.graphs) == 2


def test_token_counts_that_change():
    tokens = (8, 5, 3, 16)
    model, recorder = new_model("fp8-current"), GraphRecorder()
    forward = torch.compile(model, fullgraph=True, backend=recorder, dynamic=True)
    results, records = train(model, forward, 12, 3, tokens)
    assert_same_steps(results, expected("fp8-current", 12, 3, tokens)[0])
    assert records == expected("fp8-current", 12, 3, tokens)[1]
    assert {r.elements for r in records if r.tensor == "input"} == {WIDTH * t for t in tokens}
    assert len(recorder.graphs) == 2


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing(use_reentrant, compiled):
    """In eager mode what is recomputed counts twice; what a backward graph recomputes leaves the rows alone."""
    if compiled and use_reentrant:
        pytest.skip("torch.compile checkpoints without reentrance")
    model = new_model("fp8-current")

    def forward(x):
        return checkpoint(model, x, use_reentrant=use_reentrant)

    recorder = GraphRecorder()
    if compiled:
        forward = torch.compile(forward, fullgraph=True, backend=recorder)
    results, records = train(model, forward, 4, 2)
    plain_results, plain = expected("fp8-current", 4, 2)
    assert_same_steps(results, plain_results)
    for found, once in zip(records, plain, strict=True):
        times = 1 if found.tensor == "grad_output" or compiled else 2
        assert (found.casts, found.elements) == (times, times * once.elements)
        assert dataclasses.replace(found, casts=1, elements=once.elements) == once
    if compiled:
        assert len(recorder.graphs) == 2
        assert len(recorder.recomputed) == 4


@pytest.mark.parametrize("compiled", [False, True])
def test_microbatches_in_flight(compiled):
    model = new_model("fp8-current")
    forward = model
    if compiled:
        forward = torch.compile(model, fullgraph=True, backend="aot_eager")
    with fg.collect_statistics(model, every=2) as statistics:
        for _ in range(3):
            outputs = [forward(batch(n)[0].requires_grad_()) for n in range(3)]
            for n in (2, 0, 1):
                outputs[n].backward(batch(n)[1])
            statistics.step()
    one, three = statistics.records[:6], statistics.records[6:]
    assert [record.casts for record in one] == [3] * 6
    assert [dataclasses.replace(record, step=1) for record in three] == one
    largest = max(batch(n)[0].abs().max() for n in range(3))
    assert one[0].amax == largest


def test_a_weight_that_is_kept_for_microbatches():
    model = new_model("fp8-current")
    compiled = torch.compile(
        lambda x, first: model[0](x, is_first_microbatch=first),
        fullgraph=True,
        backend="aot_eager",
    )
    with fg.collect_statistics(model[0], every=1) as statistics:
        for _ in range(2):
            for n in range(3):
                compiled(batch(n)[0].requires_grad_(), n == 0).backward(batch(n)[1])
            statistics.step()
    casts = [(record.tensor, record.casts) for record in statistics.records]
    assert casts == [("input", 3), ("weight", 1), ("grad_output", 3)] * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_kept_for_backward_does_not_change_statistics(compiled):
    """A cast that backward repeats is not another one."""
    options = {"save_input": fg.Save.ORIGINAL, "save_weight": fg.Save.ORIGINAL}
    model = new_model("fp8-delayed", **options)
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    results, records = train(model, forward, 3, 2)
    assert_same_steps(results, expected("fp8-delayed", 3, 2)[0])
    assert records == expected("fp8-delayed", 3, 2)[1]


def test_training_and_evaluation_take_turns():
    model, recorder = new_model("mxfp8"), GraphRecorder()
    forward = torch.compile(model, fullgraph=True, backend=recorder)
    with fg.collect_statistics(model, every=2) as statistics:
        for number in range(4):
            one_step(model, forward, number)
            with torch.no_grad():
                assert torch.equal(forward(batch(number)[0]), model(batch(number)[0]))
            statistics.step()
    assert len(recorder.graphs) == 4
    assert {r.casts for r in statistics.records if r.tensor == "grad_output"} == {1}
    assert {r.casts for r in statistics.records if r.tensor != "grad_output"} == {3}


def test_inference_alone():
    model = new_model("fp8-current").eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for context in (torch.no_grad, torch.inference_mode):
        with context(), fg.collect_statistics(model, every=1) as statistics:
            for forward in (model, compiled):
                forward(batch(0)[0])
                statistics.step()
        records = statistics.records
        assert [r.tensor for r in records] == [*FIRST] * 4
        assert [dataclasses.replace(r, step=1) for r in records[4:]] == records[:4]


def test_a_copy_of_a_compiled_model():
    model = new_model("fp8-current")
    forward = torch.compile(model, fullgraph=True, backend="aot_eager")
    with fg.collect_statistics(model) as statistics:
        one_step(model, forward, 0)
        other = copy.deepcopy(model)
        copied = torch.compile(other, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            one_step(other, copied, 0)
        statistics.step()
    assert {record.casts for record in statistics.records} == {1}


def test_rows_are_static_inputs_of_the_graph():
    """CUDA graphs may change tensors in place only where their addresses stay: all but the input must be such."""
    from torch._dynamo.backends.common import aot_autograd

    found = []

    def compiler(graph, inputs):
        from functorch.compile import make_boxed_func

        metadata = torch._guards.TracingContext.get().fw_metadata
        found.append((len(inputs), metadata))
        return make_boxed_func(graph.forward)

    model = new_model("fp8-current")
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    with fg.collect_statistics(model):
        torch.compile(model, fullgraph=True, backend=backend)(batch(0)[0])
    count, metadata = found[0]
    assert len(metadata.static_input_indices) == count - 1
    mutated = {i for i, info in enumerate(metadata.input_info) if info.mutates_data}
    assert len(mutated) == 2
    assert mutated <= set(metadata.static_input_indices)
