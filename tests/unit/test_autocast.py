"""`fg.autocast`: which recipe a layer uses, in nested contexts, threads, graphs, backward and recomputation."""

import contextlib
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fullgraph as fg
from fullgraph.errors import ConfigError
from fullgraph.nn import current_recipe
from fullgraph.recipes import BY_NAME, Float8CurrentScaling
from linear_cases import Case, K, N, assert_same_results, batch, gradients, step
from oracles import assert_same_bits

BF16, FP8 = BY_NAME["bf16"], BY_NAME["fp8-current"]
E5M2 = Float8CurrentScaling(forward_format=fg.Format.E5M2)
RECIPES = [BF16, FP8, E5M2]


@pytest.fixture
def layer():
    """A layer that leaves the recipe to the context."""
    return fg.Linear(K, N, dtype=torch.bfloat16)


def under(recipe, function, *args):
    with fg.autocast(recipe):
        return function(*args)


def expected_outputs(layer, x):
    """The output of each recipe, all different."""
    own = {}
    for recipe in RECIPES:
        layer.configure(recipe)
        own[recipe] = layer(x).detach()
    layer.configure(None)
    assert len({tuple(o.flatten().tolist()) for o in own.values()}) == len(RECIPES)
    return own


# Which recipe is in force.


def test_outside_it_is_high_precision():
    assert current_recipe() is BF16


def test_contexts_nest():
    with fg.autocast("fp8-current"):
        assert current_recipe() is FP8
        with fg.autocast(E5M2):
            assert current_recipe() is E5M2
            with fg.autocast(E5M2, enabled=False):
                assert current_recipe() is BF16
            assert current_recipe() is E5M2
        assert current_recipe() is FP8
    assert current_recipe() is BF16


def test_one_context_can_be_entered_twice():
    context = fg.autocast(FP8)
    with context, fg.autocast(E5M2), context as inner:
        assert inner is context
        assert current_recipe() is FP8
    assert current_recipe() is BF16


def test_an_exception_restores_the_recipe():
    with fg.autocast(E5M2):
        with pytest.raises(ZeroDivisionError, match="division"), fg.autocast(FP8):
            1 / 0  # noqa: B018
        assert current_recipe() is E5M2
    assert current_recipe() is BF16


def test_wrong_recipes_are_refused_where_they_are_written():
    with pytest.raises(ConfigError, match="unknown recipe 'fp9'"):
        fg.autocast("fp9")
    with pytest.raises(ConfigError, match="a recipe is needed, got None"):
        fg.autocast(None)


def test_a_context_belongs_to_its_thread():
    seen = []
    with fg.autocast(FP8):
        thread = threading.Thread(target=lambda: seen.append(current_recipe()))
        thread.start()
        thread.join()
        assert current_recipe() is FP8
    assert seen == [BF16]


# What a layer does with it.


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_layer_uses_the_recipe_of_the_context(layer, recipe):
    x, grad_output = batch(24)
    own = fg.Linear(K, N, dtype=torch.bfloat16, recipe=recipe)
    own.load_state_dict(layer.state_dict())
    got = under(recipe, step, layer, x, grad_output)
    assert_same_results(got, step(own, x, grad_output))
    with fg.autocast(recipe):
        assert_same_bits(fg.linear(x, layer.weight, layer.bias), got["output"])


def test_a_recipe_of_the_layer_wins(layer):
    x, _ = batch(24)
    expected = expected_outputs(layer, x)
    layer.configure(E5M2)
    assert_same_bits(under(FP8, layer, x), expected[E5M2])
    assert_same_bits(fg.linear(x, layer.weight, layer.bias, recipe=E5M2), expected[E5M2])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_backward_uses_the_recipe_of_its_forward(layer, compiled):
    function = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x, grad_output = batch(24)
    for recipe in RECIPES:
        expected = under(recipe, step, layer, x, grad_output)
        for elsewhere in (contextlib.nullcontext(), fg.autocast(BF16), fg.autocast(E5M2)):
            layer.zero_grad()
            leaf = x.clone().requires_grad_()
            output = under(recipe, function, leaf)
            with elsewhere:
                output.backward(grad_output)
            got = {"output": output.detach(), "grad_input": leaf.grad, **gradients(layer)}
            assert_same_results(got, expected)


# Compiled.


@pytest.mark.parametrize(
    ("backend", "dynamic"), [("aot_eager", None), ("aot_eager", True), ("inductor", None)]
)
def test_outside_a_compiled_function(layer, backend, dynamic):
    x, grad_output = batch(24)
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=dynamic)
    for _ in range(2):
        for recipe in RECIPES:
            got = under(recipe, step, layer, x, grad_output, compiled)
            assert_same_results(got, under(recipe, step, layer, x, grad_output))
    assert counters["stats"]["unique_graphs"] == len(RECIPES)


@pytest.mark.parametrize(
    ("backend", "dynamic"), [("aot_eager", None), ("aot_eager", True), ("inductor", None)]
)
def test_inside_a_compiled_function(layer, backend, dynamic):
    def function(x):
        outputs = [layer(x)]
        with fg.autocast(Float8CurrentScaling(power_of_two=True, amax_epsilon=0.5)):
            outputs.append(layer(x))
            with fg.autocast("bf16"):
                outputs.append(layer(x))
            with fg.autocast(E5M2):
                outputs.append(layer(x))
            with fg.autocast("fp8-current", enabled=False):
                outputs.append(layer(x))
            outputs.append(layer(x))
        return *outputs, layer(x)

    x, _ = batch(24)
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    for outer in (BF16, FP8):
        for got, expected in zip(under(outer, compiled, x), under(outer, function, x), strict=True):
            assert_same_bits(got, expected)
        with fg.autocast(outer):
            compiled(x)
            assert current_recipe() is outer
    assert current_recipe() is BF16
    assert counters["stats"]["unique_graphs"] == 2


def test_a_function_that_raises_restores_the_recipe(layer):
    def function(x):
        with fg.autocast(FP8):
            return layer(x[:, :7])

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with fg.autocast(E5M2):
        for each in (function, compiled):
            with pytest.raises(Exception, match="must be in_features = 48"):
                each(batch(3)[0])
            assert current_recipe() is E5M2


def test_a_changed_recipe_of_a_layer_is_noticed(layer):
    x, _ = batch(24)
    expected = expected_outputs(layer, x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for recipe in (*RECIPES, *RECIPES):
        layer.configure(recipe)
        assert_same_bits(compiled(x), expected[recipe])
    assert counters["stats"]["unique_graphs"] == len(RECIPES)


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_threads_do_not_see_the_recipes_of_others(layer, where):
    """Through one compiled function, compiling at the same time to begin with.

    torch 2.11 crashes when threads compile, with torch.nn.Linear too: there, compile before, and take turns.
    """
    x, grad_output = batch(24)
    function = layer
    if where == "inside":

        def function(x, recipe):
            with fg.autocast(recipe):
                return layer(x)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    expected = {}
    for recipe in RECIPES:
        leaf = x.clone().requires_grad_()
        output = under(recipe, layer, leaf)
        expected[recipe] = output.detach(), *torch.autograd.grad(output, leaf, grad_output)
    wrong, finished, rounds = [], [], 30
    turn = contextlib.nullcontext()
    barrier = threading.Barrier(2 * len(RECIPES))

    def compiled_step(recipe):
        leaf = x.clone().requires_grad_()
        output = compiled(leaf, recipe) if where == "inside" else under(recipe, compiled, leaf)
        return output.detach(), *torch.autograd.grad(output, leaf, grad_output)

    if torch.__version__ < "2.12":
        turn = threading.Lock()
        for recipe in RECIPES:
            compiled_step(recipe)

    def work(recipe):
        barrier.wait()
        for i in range(rounds):
            with turn:
                got = compiled_step(recipe)
            if not all(map(torch.equal, got, expected[recipe])) or current_recipe() is not BF16:
                wrong.append((recipe, i))
        finished.append(recipe)

    threads = [threading.Thread(target=work, args=(recipe,)) for recipe in RECIPES * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(finished) == len(threads)


# Activation checkpointing: forward again, in backward.


def checkpointed_step(layer, function, x, grad_output, *, backward_inside):
    """A step under FP8 with the backward pass inside or outside of the context."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    with fg.autocast(FP8):
        output = function(leaf)
        if backward_inside:
            output.backward(grad_output)
    if not backward_inside:
        output.backward(grad_output)
    return {"output": output.detach(), "grad_input": leaf.grad, **gradients(layer)}


reentrant = pytest.mark.parametrize(
    "use_reentrant", [False, True], ids=["non-reentrant", "reentrant"]
)
anywhere = pytest.mark.parametrize("backward_inside", [True, False], ids=["inside", "outside"])


@reentrant
@pytest.mark.parametrize("compiled_inside", [False, True], ids=["eager", "around-compiled"])
def test_recomputation_inside_the_context(layer, use_reentrant, compiled_inside):
    x, grad_output = batch(24)
    module = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled_inside else layer
    got = checkpointed_step(
        layer,
        lambda x: checkpoint(module, x, use_reentrant=use_reentrant),
        x,
        grad_output,
        backward_inside=True,
    )
    assert_same_results(got, under(FP8, step, layer, x, grad_output))


@reentrant
@anywhere
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_recomputation_uses_the_recipe_of_its_forward(
    layer, backend, use_reentrant, backward_inside
):
    x, grad_output = batch(24)
    compiled = torch.compile(
        lambda x: checkpoint(layer, x, use_reentrant=use_reentrant), backend=backend, fullgraph=True
    )
    got = checkpointed_step(layer, compiled, x, grad_output, backward_inside=backward_inside)
    assert_same_results(got, under(FP8, step, layer, x, grad_output))


@reentrant
@anywhere
def test_recomputation_of_layers_with_their_own_recipe(use_reentrant, backward_inside):
    layer = Case("fp8-current").layer()
    x, grad_output = batch(24)
    got = checkpointed_step(
        layer,
        lambda x: checkpoint(layer, x, use_reentrant=use_reentrant),
        x,
        grad_output,
        backward_inside=backward_inside,
    )
    assert_same_results(got, step(layer, x, grad_output))


@reentrant
@anywhere
def test_recomputation_of_a_context_of_its_own(layer, use_reentrant, backward_inside):
    def function(x):
        with fg.autocast(E5M2):
            return layer(x)

    x, grad_output = batch(24)
    got = checkpointed_step(
        layer,
        lambda x: checkpoint(function, x, use_reentrant=use_reentrant),
        x,
        grad_output,
        backward_inside=backward_inside,
    )
    assert_same_results(got, under(E5M2, step, layer, x, grad_output))


def keeping_recipe(function):
    """The function in the recipe that is in force now, whenever and in whichever thread it runs."""
    recipe = current_recipe()
    return lambda *args: under(recipe, function, *args)


@reentrant
@anywhere
def test_recomputation_of_a_function_that_keeps_its_recipe(use_reentrant, backward_inside):
    model = nn.Sequential(
        fg.Linear(K, N, dtype=torch.bfloat16), nn.ReLU(), fg.Linear(N, K, dtype=torch.bfloat16)
    )
    x, grad_output = batch(24, K, K)
    got = checkpointed_step(
        model,
        lambda x: checkpoint(keeping_recipe(model), x, use_reentrant=use_reentrant),
        x,
        grad_output,
        backward_inside=backward_inside,
    )
    assert_same_results(got, under(FP8, step, model, x, grad_output))


@reentrant
def test_eager_recomputation_outside_the_context(layer, use_reentrant):
    x, grad_output = batch(24)
    got = checkpointed_step(
        layer,
        lambda x: checkpoint(layer, x, use_reentrant=use_reentrant),
        x,
        grad_output,
        backward_inside=False,
    )
    assert_same_results(got, under(FP8, step, layer, x, grad_output))


class RunsAgain(torch.autograd.Function):
    """Runs a function in its backward pass, as activation checkpointing does."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            ctx.function()
        return gradient, None


def test_an_autocast_inside_of_a_backward_pass_wins():
    layer = fg.Linear(K, N, dtype=torch.bfloat16)
    x, _ = batch(24)
    expected = fg.linear(x, layer.weight, layer.bias, recipe="mxfp8")
    with fg.autocast("fp8-current"):
        remembered = layer(x)
    seen = []

    def function():
        seen.append(layer(x).detach())
        with fg.autocast("mxfp8"):
            seen.append(layer(x).detach())

    leaf = torch.ones(1, requires_grad=True)
    with fg.autocast("nvfp4"):  # around the backward pass: not what the layer ran with
        RunsAgain.apply(leaf, function).sum().backward()
    assert_same_bits(seen[0], remembered.detach())
    assert_same_bits(seen[1], expected.detach())


@reentrant
def test_a_layer_that_ran_with_two_recipes_does_not_guess(layer, use_reentrant):
    """Both with FP8 codes of the same form: torch would not notice that the other recipe is taken."""
    x, grad_output = batch(24)

    def output(recipe, function=layer):
        with fg.autocast(recipe):
            return checkpoint(function, x.requires_grad_(), use_reentrant=use_reentrant)

    outputs = output(FP8), output(E5M2)
    with pytest.raises(ConfigError, match="runs again in a backward pass, and before it ran with"):
        outputs[0].backward(grad_output)
    with torch.no_grad():
        layer.weight.mul_(1)  # an optimizer step: what ran before is over
    for recipe in (FP8, FP8, E5M2):
        layer.zero_grad()
        output(recipe).backward(grad_output)
        assert_same_bits(
            layer.weight.grad, under(recipe, step, layer, x, grad_output)["grad_weight"]
        )
        with torch.no_grad():
            layer.weight.mul_(1)

    def inside(recipe):
        return lambda x: under(recipe, layer, x)

    layer.zero_grad()
    for recipe in (FP8, E5M2):
        output("bf16", inside(recipe)).backward(grad_output)
    got = layer.weight.grad.clone()
    layer.zero_grad()
    for recipe in (FP8, E5M2):
        under(recipe, layer, x).backward(grad_output)
    assert_same_bits(got, layer.weight.grad)


def test_an_evaluation_between_forward_and_backward_is_not_remembered():
    layer = fg.Linear(K, N, dtype=torch.bfloat16)
    x, grad_output = batch(24)

    def step(evaluate):
        layer.zero_grad()
        with fg.autocast("fp8-current"):
            output = checkpoint(layer, x.requires_grad_(), use_reentrant=False)
        if evaluate:
            layer.eval()
            with fg.autocast("mxfp8"), torch.no_grad():
                layer(x)
            layer.train()
        output.backward(grad_output)
        return layer.weight.grad.clone()

    assert_same_bits(step(evaluate=True), step(evaluate=False))
