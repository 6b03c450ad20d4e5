"""Training with delayed scaling: compiled equals eager in every output, gradient, weight and state, step by step.

Scales are read and amaxes raised in the step, so it may hold microbatches in flight, recomputation and both; the update
stands outside of it, or at its end.
"""

import copy
import functools

import pytest
import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.utils import counters
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fullgraph as fg
from fullgraph.customop.graphs import GraphRecorder
from fullgraph.nn import attach, update_scales
from fullgraph.ops.linear import linear_op
from linear_cases import assert_same_results

WIDTH, TOKENS, STEPS = 32, 8, 20
RECIPE = fg.recipes.DelayedScaling(history_length=4, margin=1.0)
STATE = ("forward_scale", "forward_amax", "backward_scale", "backward_amax", "amax_history")


class Block(nn.Module):
    """Two layers, one of which may be used twice."""

    repeats = 2

    def __init__(self, recipe):
        super().__init__()
        make = functools.partial(fg.Linear, WIDTH, WIDTH, dtype=torch.bfloat16, recipe=recipe)
        self.up, self.down = make(), make(bias=False)

    def forward(self, x):
        for _ in range(self.repeats):
            x = self.up(x)
        return self.down(x.relu())


def new_model(recipe=RECIPE):
    torch.manual_seed(1)
    return nn.Sequential(Block(recipe), Block(recipe))


def save_linears(context, op, *args, **kwargs):
    """A policy of selective checkpointing: keep what the linear op returns, recompute the rest."""
    kept = op in linear_op.fwd_ops
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, save_linears)


def plain(model):
    return lambda x: model(x)


def full(model):
    def forward(x):
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    return forward


def selective(model):
    def forward(x):
        for block in model:
            x = checkpoint(block, x, use_reentrant=False, context_fn=SELECTIVE)
        return x

    return forward


MODES = {"plain": plain, "full": full, "selective": selective}
by_mode = pytest.mark.parametrize("mode", MODES)


def everything(model):
    """Parameters, gradients and states, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter
        if parameter.grad is not None:
            found[f"grad of {name}"] = parameter.grad
    for name, layer in model.named_modules():
        if isinstance(layer, fg.Linear):
            found |= {f"{name}.{key}": getattr(layer.scaling_state, key) for key in STATE}
    return {name: t.detach().clone() for name, t in found.items() if t is not None}


def new_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data_of(number, microbatches=2):
    """Inputs and gradients of a step; they grow and shrink, so that scales matter."""
    torch.manual_seed(number)
    factor = 2.0 ** (number % 7)
    shape = (microbatches, TOKENS, WIDTH)
    x, grad_output = (torch.randn(shape).bfloat16() * f for f in (factor, 1e-3 / factor))
    return list(zip(x, grad_output, strict=True))


def interleaved(forward, number):
    """All forward passes, then all backward passes, in either order."""
    leaves, outputs, data = [], [], data_of(number)
    for x, _ in data:
        leaves.append(x.clone().requires_grad_())
        outputs.append(forward(leaves[-1]))
    for i in (0, 1) if number % 2 else (1, 0):
        outputs[i].backward(data[i][1])
    return outputs, leaves


def accumulated(forward, number):
    """One microbatch after the other."""
    leaves, outputs = [], []
    for x, grad_output in data_of(number, 3):
        leaves.append(x.clone().requires_grad_())
        outputs.append(forward(leaves[-1]))
        outputs[-1].backward(grad_output)
    return outputs, leaves


def train(model, forward, optimizer, numbers, passes=interleaved):
    """Train and return, for each step, everything there is before and after the update."""
    record = []
    for number in numbers:
        optimizer.zero_grad()
        outputs, leaves = passes(forward, number)
        named = {f"output{i}": output.detach() for i, output in enumerate(outputs)}
        named |= {f"grad of input{i}": leaf.grad for i, leaf in enumerate(leaves)}
        record.append({**named, **everything(model)})
        optimizer.step()
        update_scales(model)
        record.append(everything(model))
    return record


@functools.cache
def expected(passes=interleaved):
    """What eager training without checkpointing does."""
    model = new_model()
    record = train(model, model, new_optimizer(model), range(STEPS), passes)
    assert record[-1]["0.up.forward_scale"][0] != 1
    return record


def assert_same_record(actual, expected):
    assert len(actual) == len(expected)
    for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        try:
            assert_same_results(ours, theirs)
        except AssertionError as error:
            raise AssertionError(f"step {i // 2}: {error}") from None


def test_training_does_something():
    record = expected()
    first, last = record[0], record[-1]
    for name in ("0.up.weight", "1.down.weight", "0.up.forward_scale", "1.down.backward_scale"):
        assert not torch.equal(first[name], last[name])
    other = [{**results} for results in record]
    other[7]["1.down.backward_amax"] = other[7]["1.down.backward_amax"] + 1
    with pytest.raises(AssertionError, match=r"step 3: 1\.down\.backward_amax"):
        assert_same_record(other, record)


@by_mode
def test_eager_checkpointing(mode):
    model = new_model()
    record = train(model, MODES[mode](model), new_optimizer(model), range(STEPS))
    assert_same_record(record, expected())


@pytest.mark.parametrize(
    ("mode", "compiler", "recomputed"),
    [
        ("plain", "aot_eager", 0),
        ("full", "aot_eager", 6),
        ("selective", "aot_eager", 0),
        ("full", "inductor", 6),
    ],
)
def test_compiled_equals_eager(mode, compiler, recomputed):
    model, recorder = new_model(), GraphRecorder(compiler)
    forward = torch.compile(MODES[mode](model), fullgraph=True, backend=recorder)
    record = train(model, forward, new_optimizer(model), range(STEPS))
    assert_same_record(record, expected())
    assert len(recorder.graphs) == 1
    nodes = recorder.forward, recorder.recomputed, recorder.backward
    assert [len(found) for found in nodes] == [6, recomputed, 6]


@by_mode
def test_gradient_accumulation(mode):
    model, recorder = new_model(), GraphRecorder()
    forward = torch.compile(MODES[mode](model), fullgraph=True, backend=recorder)
    record = train(model, forward, new_optimizer(model), range(6), accumulated)
    assert_same_record(record, expected(accumulated)[:12])
    assert len(recorder.graphs) == 1


def test_resume_in_the_middle():
    half = STEPS // 2
    model = new_model()
    optimizer = new_optimizer(model)
    forward = torch.compile(full(model), fullgraph=True, backend="aot_eager")
    record = train(model, forward, optimizer, range(half))
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    resumed = nn.Sequential(Block(RECIPE), Block(RECIPE))
    optimizer = new_optimizer(resumed)
    resumed.load_state_dict(saved["model"], strict=True)
    optimizer.load_state_dict(saved["optimizer"])
    forward = torch.compile(selective(resumed), fullgraph=True, backend="aot_eager")
    record += train(resumed, forward, optimizer, range(half, STEPS))
    assert_same_record(record, expected())


# The recipe from an autocast.


@by_mode
@pytest.mark.parametrize("inside", [False, True])
def test_autocast(mode, inside):
    """Where Dynamo traces a checkpointed layer, the layer cannot note its rule; the op does, when it runs."""
    model, recorder = new_model(recipe=None), GraphRecorder()
    forward = MODES[mode](model)

    def with_autocast(function):
        def run(x):
            with fg.autocast(RECIPE):
                return function(x)

        return run

    if inside:
        forward = torch.compile(with_autocast(forward), fullgraph=True, backend=recorder)
    else:
        forward = with_autocast(torch.compile(forward, fullgraph=True, backend=recorder))
    record = train(model, forward, new_optimizer(model), range(4))
    # Without a recipe of its own a layer has no history before it ran.
    first, *rest = expected()[:8]
    first = {name: value for name, value in first.items() if "history" not in name}
    assert_same_record(record, [first, *rest])
    assert len(recorder.graphs) == 1


# The update inside of the graph.


def whole_step(model):
    """Forward, backward, an optimizer and the update as one function of tensors.

    No sum of two gradients and no inexact product in bfloat16: Inductor would not round them as eager mode does.
    """
    for block in model:
        block.repeats = 1

    def run(x, grad_output):
        output = model(x)
        output.backward(grad_output)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.125)
                parameter.grad = None
        update_scales(model)
        return output.detach()

    return run


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_the_whole_step_in_one_graph(compiler):
    models = new_model(), new_model()
    recorder = GraphRecorder(compiler)
    compiled = torch.compile(whole_step(models[0]), fullgraph=True, backend=recorder)
    for number in range(6):
        ((x, grad_output),) = data_of(number, 1)
        with config.patch(trace_autograd_ops=True):
            output = compiled(x, grad_output)
        assert torch.equal(output, whole_step(models[1])(x, grad_output))
        assert_same_results(everything(models[0]), everything(models[1]))
    assert len(recorder.graphs) == 1


def test_the_whole_step_under_an_autocast_needs_rules_first():
    model = new_model(recipe=None)
    compiled = torch.compile(whole_step(model), fullgraph=True, backend="aot_eager")
    ((x, grad_output),) = data_of(0, 1)
    with config.patch(trace_autograd_ops=True), fg.autocast(RECIPE):
        with pytest.raises(Exception, match="no layer of the model has delayed scaling"):
            compiled(x, grad_output)
        update_scales(model)
        compiled(x, grad_output)
    assert model[0].up.fp8_scale[0] != 1


def test_attach_with_a_compiled_optimizer():
    models = new_model(), new_model()
    for model, wrap in zip(models, (torch.compile, lambda f, **options: f), strict=True):
        optimizer = new_optimizer(model)
        attach(optimizer, model)
        forward = wrap(model, fullgraph=True, backend="aot_eager")
        for number in range(4):
            optimizer.zero_grad()
            interleaved(forward, number)
            optimizer.step()
    assert_same_results(everything(models[0]), everything(models[1]))


# What the graphs look like.


def test_the_state_is_a_static_input_of_both_graphs():
    """CUDA graphs may change tensors in place only where their addresses stay: all but the input must be such."""
    found = []

    def compiler(graph, inputs):
        from functorch.compile import make_boxed_func

        metadata = torch._guards.TracingContext.get().fw_metadata
        found.append((len(inputs), metadata))
        return make_boxed_func(graph.forward)

    from torch._dynamo.backends.common import aot_autograd

    model = new_model()
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    torch.compile(model, fullgraph=True, backend=backend)(data_of(0)[0][0])
    count, metadata = found[0]
    assert len(metadata.static_input_indices) == count - 1
    mutated = {i for i, info in enumerate(metadata.input_info) if info.mutates_data}
    assert len(mutated) == 4  # forward_amax of four layers
    assert mutated <= set(metadata.static_input_indices)


def test_layers_compiled_apart_share_a_graph():
    model = new_model()
    recorder = GraphRecorder()
    for block in model:
        block.compile(fullgraph=True, backend=recorder)
    record = train(model, model, new_optimizer(model), range(3))
    assert_same_record(record, expected()[:6])
    assert (
        len(recorder.graphs) <= 2
    )  # the input of the first block needs a gradient of its own kind


def test_train_and_eval_take_turns():
    model, recorder = new_model(), GraphRecorder()
    compiled = torch.compile(model, fullgraph=True, backend=recorder)
    record, optimizer = [], new_optimizer(model)
    for number in range(4):
        record += train(model, compiled, optimizer, [number])
        with torch.no_grad():
            x = 1000 * data_of(number)[0][0]
            assert torch.equal(compiled(x), model(x))
    assert_same_record(record, expected()[:8])
    assert len(recorder.graphs) == 2


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_scales_and_records_nothing(strict):
    model = new_model()
    train(model, model, new_optimizer(model), range(2))
    before = everything(model)
    x = data_of(0)[0][0]
    exported = torch.export.export(model, (x,), strict=strict)
    assert torch.equal(exported.module()(x), model.eval()(x))
    assert not exported.graph_signature.buffers_to_mutate
    assert "fullgraph.linear" in str(exported.graph)
    model.zero_grad()
    for name, value in everything(model).items():
        if "forward_amax" not in name:  # the last forward pass above was an ordinary one
            assert torch.equal(value, before[name]), name


def test_as_many_tokens_as_there_are_scales_are_no_special_size():
    layer = fg.Linear(48, 32, recipe="fp8-delayed")
    function = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (3, 5, 8, 16):
        function(torch.randn(tokens, 48, requires_grad=True)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
