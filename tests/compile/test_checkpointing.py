"""Activation checkpointing: the gradients of no checkpointing, bit for bit, and no linear layer run more than needed.

How a layer without a recipe of its own finds it again is in tests/unit/test_autocast.py, training with delayed scaling
in tests/compile/test_delayed_training.py.
"""

import functools
import threading

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.flop_counter import FlopCounterMode

import fullgraph as fg
from fullgraph.customop.graphs import GraphRecorder
from fullgraph.ops.linear import linear_op
from linear_cases import (
    RECIPES,
    assert_same_results,
    batch,
    gradients,
    same_random_numbers,
    state_of,
    step,
)

WIDTH, HIDDEN, TOKENS = 32, 64, 16
FEW = ["bf16", "fp8-current", "fp8-delayed"]
by_recipe = pytest.mark.parametrize("recipe", RECIPES)
by_few = pytest.mark.parametrize("recipe", FEW)
compiled_or_not = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])

full = functools.partial(checkpoint, use_reentrant=False)
reentrant = functools.partial(checkpoint, use_reentrant=True)
selective = functools.partial(checkpoint, use_reentrant=False, context_fn=fg.save_linears)


class Block(nn.Module):
    """Two layers with something between them that autograd saves too."""

    def __init__(self, recipe=None, **options):
        super().__init__()
        options = {"recipe": recipe, "dtype": torch.bfloat16, **options}
        self.up, self.down = (
            fg.Linear(WIDTH, HIDDEN, **options),
            fg.Linear(HIDDEN, WIDTH, **options),
        )

    def forward(self, x):
        return self.down(nn.functional.silu(self.up(x)))

    def with_relu(self, x):
        """Rounded alike by Inductor and eager mode."""
        return self.down(self.up(x).relu())


class Runs(TorchDispatchMode):
    """Counts how often the ops of linear layers really run in eager mode: entered first, it sees what others let by."""

    def __init__(self):
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.forward += function in fg.LINEAR_OPS
        self.backward += function in linear_op.bwd_ops
        return function(*args, **(kwargs or {}))


def states(model):
    return {
        f"{name}.{key}": value
        for name, layer in model.named_modules()
        for key, value in state_of(layer).items()
    }


def one_step(model, function, x, grad_output):
    """Output, gradients and states of one step from fresh scales and amaxes."""
    for layer in model.modules():
        if isinstance(layer, fg.Linear):
            layer.scaling_state.reset()
    return {**step(model, x, grad_output, function), **states(model)}


def results(model, function, x, grad_output):
    """That of eager mode, and how often ops ran forward and backward."""
    with Runs() as runs:
        found = one_step(model, function, x, grad_output)
    return found, (runs.forward, runs.backward)


def compiled_results(model, function, x, grad_output, compiler="aot_eager"):
    """The same compiled, with the nodes that run forward, again, and backward."""
    recorder = GraphRecorder(compiler)
    function = torch.compile(function, backend=recorder, fullgraph=True)
    for _ in range(2):
        found = one_step(model, function, x, grad_output)
    assert len(recorder.graphs) == 1
    nodes = recorder.forward, recorder.recomputed, recorder.backward
    return found, tuple([len(n) for n in nodes])


def bound(way, model):
    return lambda x: way(model, x)


# Every recipe, every way.


@pytest.mark.parametrize("quantized_weight", [False, True], ids=["plain", "quantized-weight"])
@by_recipe
def test_gradients_are_those_without_checkpointing(recipe, quantized_weight):
    model = Block(recipe, quantized_weight=quantized_weight)
    x, grad_output = batch(TOKENS, WIDTH, WIDTH)
    expected, ran = results(model, model, x, grad_output)
    assert ran == (2, 2)
    # What is recomputed last is run whole in eager mode. Without low precision, backward needs no result of it, and a
    # compiler leaves it out.
    last = 1 if recipe == "bf16" else 2
    for way, forward, again in ((full, 4, last), (reentrant, 4, last), (selective, 2, 0)):
        found, ran = results(model, bound(way, model), x, grad_output)
        assert_same_results(found, expected)
        assert ran == (forward, 2)
        found, nodes = compiled_results(model, bound(way, model), x, grad_output)
        assert_same_results(found, expected)
        assert nodes == (2, again, 2)


def test_inductor():
    model = Block("fp8-delayed")
    x, grad_output = batch(TOKENS, WIDTH, WIDTH)
    expected, _ = results(model, model.with_relu, x, grad_output)
    way = bound(selective, model.with_relu)
    found, nodes = compiled_results(model, way, x, grad_output, "inductor")
    assert_same_results(found, expected)
    assert nodes == (2, 0, 2)


# Selective.

SAVED = {"MUST_SAVE": 2, "PREFER_SAVE": 2, "MUST_RECOMPUTE": 4, "PREFER_RECOMPUTE": 4}


@by_few
def test_a_policy_sees_our_ops(recipe):
    model = Block(recipe)
    x, grad_output = batch(TOKENS, WIDTH, WIDTH)
    expected, _ = results(model, model, x, grad_output)
    for name, forward in SAVED.items():
        seen = set()

        def policy(context, op, *args, name=name, seen=seen, **kwargs):
            seen.add(op)
            ours = op in fg.LINEAR_OPS
            return CheckpointPolicy[name] if ours else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        way = functools.partial(full, context_fn=contexts)
        found, ran = results(model, bound(way, model), x, grad_output)
        assert_same_results(found, expected)
        assert ran == (forward, 2)
        assert seen & set(fg.LINEAR_OPS)
        found, nodes = compiled_results(model, bound(way, model), x, grad_output)
        assert_same_results(found, expected)
        again = 0 if forward == 2 else 1 if recipe == "bf16" else 2
        assert nodes == (2, again, 2)


@compiled_or_not
def test_linear_ops_in_a_list_with_others(compiled):
    model = Block("fp8-delayed")
    x, grad_output = batch(TOKENS, WIDTH, WIDTH)
    expected, _ = results(model, model, x, grad_output)
    ops = [*fg.LINEAR_OPS, torch.ops.aten.silu.default]
    way = functools.partial(
        full, context_fn=functools.partial(create_selective_checkpoint_contexts, ops)
    )
    measure = compiled_results if compiled else results
    found, counts = measure(model, bound(way, model), x, grad_output)
    assert_same_results(found, expected)
    assert counts == ((2, 0, 2) if compiled else (2, 2))


@compiled_or_not
def test_keeping_one_of_two(compiled):
    """A policy may tell our ops apart by their arguments, as those of matrix products."""
    model = Block("fp8-current")
    x, grad_output = batch(TOKENS, WIDTH, WIDTH)
    expected, _ = results(model, model, x, grad_output)

    def policy(context, op, tensors=(), *args, **kwargs):
        kept = op in fg.LINEAR_OPS and tensors[0].shape[-1] == WIDTH
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    way = functools.partial(
        full, context_fn=functools.partial(create_selective_checkpoint_contexts, policy)
    )
    measure = compiled_results if compiled else results
    found, counts = measure(model, bound(way, model), x, grad_output)
    assert_same_results(found, expected)
    assert counts == ((2, 1, 2) if compiled else (3, 2))


# Torch's own choice of what to keep.


@pytest.mark.parametrize("quantized_weight", [False, True], ids=["plain", "quantized-weight"])
@by_few
def test_flops_are_counted(recipe, quantized_weight):
    layer = fg.Linear(WIDTH, HIDDEN, recipe=recipe, quantized_weight=quantized_weight)
    x = torch.randn(3, 5, WIDTH)
    gemm = 2 * 15 * WIDTH * HIDDEN
    with FlopCounterMode(display=False) as counter:
        output = layer(x)
        assert counter.get_total_flops() == gemm
        output.sum().backward()
        assert counter.get_total_flops() == 2 * gemm  # no gradient of the input
        layer(x.requires_grad_()).sum().backward()
        assert counter.get_total_flops() == 5 * gemm
        layer.weight.requires_grad_(False)
        layer(x.detach()).sum().backward()  # only a gradient of the bias
        assert counter.get_total_flops() == 6 * gemm
    with FlopCounterMode(display=False) as counter:
        nn.Linear(WIDTH, HIDDEN)(x.detach())
    assert counter.get_total_flops() == gemm


def test_flops_of_a_cached_weight_and_a_deferred_gradient():
    wgrad = fg.Wgrad(deferred=True)
    layer = fg.Linear(WIDTH, HIDDEN, recipe="fp8-current", wgrad=wgrad)
    x = torch.randn(15, WIDTH, requires_grad=True)
    gemm = 2 * 15 * WIDTH * HIDDEN
    with FlopCounterMode(display=False) as counter:
        layer(x, is_first_microbatch=True).sum().backward()
        assert counter.get_total_flops() == 2 * gemm
        layer(x, is_first_microbatch=False).sum().backward()
        assert counter.get_total_flops() == 4 * gemm
        layer.backward_dw()
        layer.backward_dw()
    assert counter.get_total_flops() == 6 * gemm


@compiled_or_not
def test_originals_spare_the_last_layer(compiled):
    """With nothing quantized to keep, backward needs no result of what is recomputed last."""
    save = {"save_input": fg.Save.ORIGINAL, "save_weight": fg.Save.ORIGINAL}
    model = Block("fp8-current", **save)
    x, grad_output = batch(TOKENS, WIDTH, WIDTH)
    expected, _ = results(model, model, x, grad_output)
    measure = compiled_results if compiled else results
    found, counts = measure(model, bound(full, model), x, grad_output)
    assert_same_results(found, expected)
    assert counts == ((2, 1, 2) if compiled else (4, 2))


@pytest.mark.parametrize(("budget", "again"), [(0.0, 3), (0.5, 0)])
def test_a_memory_budget(budget, again):
    """The partitioner knows what our ops cost, and runs them again only where the budget leaves it nothing else."""
    options = {"recipe": "fp8-delayed", "dtype": torch.bfloat16}
    layers = [fg.Linear(WIDTH, WIDTH, **options) for _ in range(3)]
    model = nn.Sequential(*[m for layer in layers for m in (layer, nn.ReLU())])
    x, grad_output = batch(TOKENS, WIDTH, WIDTH)
    expected, _ = results(model, model, x, grad_output)
    with functorch_config.patch(activation_memory_budget=budget):
        found, nodes = compiled_results(model, model, x, grad_output, "inductor")
    assert_same_results(found, expected)
    assert nodes == (3, again, 3)


# Where the backward pass runs.


def elsewhere(kind, run):
    """Run a backward pass in another thread, or under another autocast."""
    if kind == "thread":
        failures = []

        def work():
            try:
                run()
            except Exception as error:  # noqa: BLE001 (shown in the thread of the test)
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert failures == []
    else:
        with fg.autocast("mxfp8"), torch.autocast("cpu", torch.float16):
            run()


@compiled_or_not
@pytest.mark.parametrize("where", ["thread", "autocast"])
@by_few
def test_backward_elsewhere(recipe, where, compiled):
    model = Block()
    x, grad_output = batch(TOKENS, WIDTH, WIDTH)
    with fg.autocast(recipe):
        expected = step(model, x, grad_output)
    for way in (full, reentrant, selective):
        function = bound(way, model)
        if compiled:
            function = torch.compile(function, backend="aot_eager", fullgraph=True)
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        with fg.autocast(recipe), same_random_numbers():
            output = function(leaf)
        elsewhere(where, lambda output=output: output.backward(grad_output))
        found = {"output": output.detach(), "grad_input": leaf.grad, **gradients(model)}
        assert_same_results(found, expected)


@compiled_or_not
@by_few
def test_within_torch_autocast(recipe, compiled):
    model = Block(recipe, dtype=torch.float32)
    x, grad_output = batch(TOKENS, WIDTH, WIDTH, dtype=torch.float32)
    grad_output = grad_output.bfloat16()

    def under_autocast(function):
        def run(x):
            with torch.autocast("cpu", torch.bfloat16):
                return function(x)

        return run

    expected, _ = results(model, under_autocast(model), x, grad_output)
    assert expected["output"].dtype == torch.bfloat16
    for way in (full, reentrant, selective):
        function = under_autocast(bound(way, model))
        measure = compiled_results if compiled else results
        assert_same_results(measure(model, function, x, grad_output)[0], expected)


# What torch.utils.checkpoint offers.


@pytest.mark.parametrize("early_stop", [False, True])
@by_few
def test_early_stop(recipe, early_stop):
    """Recomputation stops at the last tensor that backward reads: what follows the last layer is not run again."""
    model = Block(recipe)
    ran = []

    def function(x):
        output = model(x)
        ran.append(1)
        return output

    x, grad_output = batch(TOKENS, WIDTH, WIDTH)
    expected, _ = results(model, model, x, grad_output)
    with set_checkpoint_early_stop(early_stop):
        found, counts = results(model, bound(full, function), x, grad_output)
    assert_same_results(found, expected)
    assert counts == (4, 2)
    assert len(ran) == (1 if early_stop else 2)


@compiled_or_not
@by_few
def test_nested(recipe, compiled):
    model = nn.ModuleList([Block(recipe), Block(recipe)])

    def plain(x):
        return model[1](model[0](x).relu())

    def nested(way):
        def inner(x):
            return way(model[1], way(model[0], x).relu())

        return lambda x: way(inner, x)

    x, grad_output = batch(TOKENS, WIDTH, WIDTH)
    expected, _ = results(model, plain, x, grad_output)
    measure = compiled_results if compiled else results
    found, _ = measure(model, nested(full), x, grad_output)
    assert_same_results(found, expected)


@pytest.mark.parametrize("check", ["default", "none"])
@by_few
def test_determinism_check(recipe, check):
    model = Block(recipe)
    x, grad_output = batch(TOKENS, WIDTH, WIDTH)
    expected, _ = results(model, model, x, grad_output)
    way = functools.partial(full, determinism_check=check)
    assert_same_results(results(model, bound(way, model), x, grad_output)[0], expected)


def test_a_recipe_that_changes_is_found_by_the_determinism_check():
    layer = fg.Linear(WIDTH, WIDTH, recipe="fp8-current")
    output = full(layer, torch.randn(TOKENS, WIDTH, requires_grad=True))
    layer.configure("bf16")
    with pytest.raises(
        torch.utils.checkpoint.CheckpointError, match="different metadata|different number"
    ):
        output.sum().backward()


@pytest.mark.parametrize("implementation", list(CheckpointImpl), ids=lambda i: i.name)
@compiled_or_not
@by_few
def test_checkpoint_wrapper(recipe, compiled, implementation):
    model = nn.Sequential(Block(), nn.ReLU(), Block())
    keys = list(model.state_dict())
    x, grad_output = batch(TOKENS, WIDTH, WIDTH)
    fg.convert(model, recipe)
    expected, _ = results(model, model, x, grad_output)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=implementation),
        check_fn=lambda module: isinstance(module, Block),
    )
    assert [key for key in model.state_dict() if "fp8_" not in key] == keys
    measure = compiled_results if compiled else results
    found, counts = measure(model, model, x, grad_output)
    plain = {
        name.replace("_checkpoint_wrapped_module.", ""): value for name, value in found.items()
    }
    assert_same_results(plain, expected)
    assert counts == ((4, 2 if recipe == "bf16" else 4, 4) if compiled else (8, 4))


# Random numbers.


@pytest.mark.parametrize(
    "way", [full, reentrant, selective], ids=["full", "reentrant", "selective"]
)
def test_the_same_random_numbers_again(way):
    """The backward pass draws behind the recomputation, and it draws the same."""
    model = Block("nvfp4")
    x, grad_output = batch(TOKENS, WIDTH, WIDTH)
    expected, _ = results(model, model, x, grad_output)
    for preserve in (True, False):
        run = functools.partial(way, preserve_rng_state=preserve)
        assert_same_results(results(model, bound(run, model), x, grad_output)[0], expected)
    other = Block("nvfp4")
    other.load_state_dict(model.state_dict())
    torch.manual_seed(8)
    other(x).backward(grad_output)
    assert not torch.equal(other.up.weight.grad, expected["grad_up.weight"])  # it does draw


# Frozen weights.


@compiled_or_not
@by_few
def test_frozen_weights_make_no_wgrad(recipe, compiled):
    model = Block(recipe)
    model.up.requires_grad_(False)
    model.down.weight.requires_grad_(False)
    x, grad_output = batch(TOKENS, WIDTH, WIDTH)
    expected, _ = results(model, model, x, grad_output)
    assert expected.keys() & {"grad_up.weight", "grad_up.bias", "grad_down.weight"} == set()
    measure = compiled_results if compiled else results
    for way in (full, reentrant, selective):
        found, _ = measure(model, bound(way, model), x, grad_output)
        assert_same_results(found, expected)


@pytest.mark.parametrize("inside", [True, False])
def test_a_compiled_block_that_reentrant_checkpointing_repeats(inside):
    """It has the recipe in force: that of the forward pass inside of its autocast, and an error outside of it."""
    layer = fg.Linear(32, 32, dtype=torch.bfloat16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(8, 32, dtype=torch.bfloat16, requires_grad=True)
    with fg.autocast("fp8-current"):
        output = reentrant(compiled, x)
        if inside:
            output.sum().backward()
    if inside:
        grad, layer.weight.grad = layer.weight.grad, None
        with fg.autocast("fp8-current"):
            layer(x).sum().backward()
        assert torch.equal(grad, layer.weight.grad)
        return
    with pytest.raises(Exception, match="a compiled function runs again in a backward pass"):
        output.sum().backward()
