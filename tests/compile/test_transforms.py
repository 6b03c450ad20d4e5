"""Looking into an op from outside: function transforms, forward-mode AD, second derivatives, autograd's own tools.

What works gives the same bits as a plain call; the rest is refused in our words before anything ran, never computed
as something else in silence.
"""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    functionalize,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

import fullgraph as fg
from fullgraph.customop.graphs import GraphRecorder
from fullgraph.errors import CompileError
from linear_cases import E4M3, LOW_PRECISION, RECIPES, K, N, assert_same_results, batch, gradients

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is a native function of PyTorch"),
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True"),
]

ROWS = 8


def new_layer(recipe="fp8-current", quantized_weight=False, **options):
    options = {"dtype": torch.bfloat16, **options}
    return fg.Linear(K, N, recipe=recipe, quantized_weight=quantized_weight, **options)


def traced(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@contextlib.contextmanager
def refused(*words):
    """Our error, alone or inside of torch's while a graph is traced, with all of these words."""
    with pytest.raises(
        (CompileError, RuntimeError, torch._dynamo.exc.TorchDynamoException)
    ) as found:
        yield
    for word in (*words, "Why: ", "Do: "):
        assert word in str(found.value).replace("\\n", "\n")


MODES = pytest.mark.parametrize("mode", [lambda f: f, traced], ids=["eager", "compiled"])
WEIGHTS = pytest.mark.parametrize("quantized_weight", [False, True], ids=["plain", "quantized"])


# functional_call.


@pytest.mark.parametrize("recipe", RECIPES)
@WEIGHTS
def test_functional_call_uses_the_given_tensors(recipe, quantized_weight):
    torch.manual_seed(0)
    layer, other = (new_layer(recipe, quantized_weight) for _ in range(2))
    x, grad_output = batch(ROWS)
    names = dict(layer.named_parameters())

    def run(function, given):
        leaf = x.detach().requires_grad_()
        wanted = [given[name] for name in names]
        torch.manual_seed(1)
        output = function(given, leaf)
        found = torch.autograd.grad(output, [leaf, *wanted], grad_output)
        return {"output": output.detach(), **{f"grad{i}": g for i, g in enumerate(found)}}

    def called(given, leaf):
        return functional_call(layer, given, (leaf,))

    given = {n: p.detach().clone().requires_grad_() for n, p in other.named_parameters()}
    expected = run(lambda given, leaf: other(leaf), dict(other.named_parameters()))
    recorder = GraphRecorder()
    assert_same_results(run(called, given), expected)
    function = torch.compile(called, fullgraph=True, backend=recorder)
    for _ in range(2):
        assert_same_results(run(function, given), expected)
    assert len(recorder.graphs) == 1
    assert not gradients(layer)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_quantized_layer_called_with_plain_weights(compiled):
    layer, other = new_layer(quantized_weight=True), new_layer()
    x, grad_output = batch(ROWS)
    given = {n: p.detach().clone().requires_grad_() for n, p in other.named_parameters()}

    def called(given, x):
        return functional_call(layer, given, (x,))

    (traced(called) if compiled else called)(given, x).backward(grad_output)
    other(x).backward(grad_output)
    for name, parameter in other.named_parameters():
        assert torch.equal(given[name].grad, parameter.grad)


# torch.func.


def of_layer(layer):
    """Each transform around a layer: name -> (the call, the words that name it)."""

    def scalar(x):
        return layer(x).sum()

    return {
        "grad": (lambda x: grad(scalar)(x), "grad is not supported"),
        "vjp": (lambda x: vjp(layer, x)[1](layer(x))[0], "grad is not supported"),
        "jacrev": (lambda x: jacrev(layer)(x), "grad is not supported"),
        "vmap": (lambda x: vmap(layer)(x), "vmap is not supported"),
        "jvp": (lambda x: jvp(layer, (x,), (x,))[1], "jvp is not supported"),
        "jacfwd": (lambda x: jacfwd(layer)(x), "jvp is not supported"),
        "hessian": (lambda x: hessian(scalar)(x), "grad is not supported"),
    }


TRANSFORMS = list(of_layer(None))


@pytest.mark.parametrize("transform", TRANSFORMS)
@MODES
def test_function_transforms_are_refused(transform, mode):
    layer = new_layer()
    call, words = of_layer(layer)[transform]
    with refused("fullgraph::linear", words):
        mode(call)(batch(ROWS)[0])


@pytest.mark.parametrize("recipe", LOW_PRECISION)
@pytest.mark.parametrize("transform", TRANSFORMS)
@WEIGHTS
def test_in_every_recipe(recipe, transform, quantized_weight):
    layer = new_layer(recipe, quantized_weight)
    before = layer.scaling_state.history()
    call, words = of_layer(layer)[transform]
    with refused("fullgraph::linear", words):
        call(batch(ROWS)[0])
    assert torch.equal(layer.scaling_state.history(), before)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_where_no_gradient_is_asked_for(transform):
    layer = new_layer().requires_grad_(False)
    call, words = of_layer(layer)[transform]
    with torch.no_grad(), refused("fullgraph::linear", words):
        call(batch(ROWS)[0])


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_around_a_compiled_layer(transform):
    layer = new_layer()
    call, words = of_layer(torch.compile(layer, backend="aot_eager"))[transform]
    with refused("fullgraph::linear", words):
        call(batch(ROWS)[0])


def test_other_transforms_are_refused():
    layer = new_layer()
    x, _ = batch(ROWS)
    with refused("jvp is not supported"):
        linearize(layer, x)
    with refused("functionalize is not supported"):
        functionalize(layer)(x)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
@MODES
def test_quantize_is_refused_likewise(transform, mode):
    def cast(x):
        return fg.quantize(x, E4M3).dequantize()

    call = {
        "vmap": lambda x: vmap(cast)(x),
        "grad": lambda x: grad(lambda x: cast(x).sum())(x),
        "jvp": lambda x: jvp(cast, (x,), (x,))[1],
    }[transform]
    with refused("fullgraph::quantize", f"{transform} is not supported"):
        mode(call)(batch(ROWS)[0])


@WEIGHTS
def test_an_ensemble_of_layers_is_refused(quantized_weight):
    layers = [new_layer(quantized_weight=quantized_weight) for _ in range(3)]
    parameters, buffers = stack_module_state(layers)
    x, _ = batch(ROWS)

    def one(parameters, buffers, x):
        return functional_call(layers[0], (parameters, buffers), (x,))

    with refused("vmap is not supported", "in a loop"):
        vmap(one, in_dims=(0, 0, None))(parameters, buffers, x)


# Forward-mode AD.


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad])
def test_tangents_are_refused(frozen, context):
    layer = new_layer().requires_grad_(not frozen)
    x, _ = batch(ROWS)
    with forward_ad.dual_level(), context(), refused("jvp is not supported"):
        layer(forward_ad.make_dual(x, x))
    with forward_ad.dual_level(), context(), refused("fullgraph::quantize", "jvp is not supported"):
        fg.quantize(forward_ad.make_dual(x, x), E4M3)


def test_tangents_do_not_get_past_a_compiled_graph():
    layer = new_layer().requires_grad_(False)
    x, _ = batch(ROWS)
    function = traced(layer)
    function(x)
    with forward_ad.dual_level(), refused("jvp is not supported"):
        function(forward_ad.make_dual(x, x))


def test_a_call_without_tangents_works_anywhere():
    layer = new_layer()
    x, _ = batch(ROWS)
    expected = layer(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        assert torch.equal(layer(x), expected)
        assert forward_ad.unpack_dual(2 * dual).tangent is not None


# Second derivatives, batched gradients.


@WEIGHTS
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_second_derivative_is_refused_in_eager_mode(recipe, quantized_weight):
    layer = new_layer(recipe, quantized_weight)
    leaf = batch(ROWS)[0].requires_grad_()
    with refused("fullgraph::linear: create_graph=True is not supported", "torch.nn.Linear"):
        torch.autograd.grad(layer(leaf).square().sum(), leaf, create_graph=True)
    with refused("create_graph=True is not supported"):
        layer(leaf).sum().backward(create_graph=True)
    assert leaf.grad is None


@pytest.mark.parametrize("name", ["hessian", "hvp", "vhp", "jvp"])
def test_no_second_derivative_is_silently_zero(name):
    """These fill in zeros for what has no graph."""
    layer, x = new_layer(), batch(ROWS)[0]

    def scalar(x):
        return layer(x).square().sum()

    call = getattr(torch.autograd.functional, name)
    with refused("create_graph=True is not supported"):
        call(scalar, x, *([] if name == "hessian" else [x]))


def test_the_first_derivatives_of_torch_autograd_functional_work():
    layer, x = new_layer(), batch(2)[0]
    jacobian = torch.autograd.functional.jacobian(layer, x)
    leaf = x.detach().requires_grad_()
    seed = torch.zeros(2, N, dtype=x.dtype)
    seed[1, 3] = 1
    layer(leaf).backward(seed)
    assert torch.equal(jacobian[1, 3], leaf.grad)
    found = torch.autograd.functional.vjp(layer, x, seed)[1]
    assert torch.equal(found, leaf.grad)
    with refused("vmap is not supported"):
        torch.autograd.functional.jacobian(layer, x, vectorize=True)


def test_a_compiled_second_derivative_is_refused_by_torch():
    layer = new_layer()
    leaf = batch(ROWS)[0].requires_grad_()
    (first,) = torch.autograd.grad(traced(layer)(leaf).square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        first.sum().backward()


def test_casting_is_linear_for_autograd_twice_over():
    """The gradient of a cast is its output's: straight through, as often as one likes."""
    leaf = torch.randn(ROWS, K).requires_grad_()
    values = fg.quantize(leaf, E4M3).dequantize()
    (first,) = torch.autograd.grad(values.pow(3).sum(), leaf, create_graph=True)
    assert torch.equal(first, 3 * values.square())
    first.sum().backward()
    assert torch.equal(leaf.grad, 6 * values)


@MODES
def test_batched_gradients_are_refused(mode):
    layer = new_layer()
    leaf = batch(ROWS)[0].requires_grad_()
    output = mode(layer)(leaf)
    several = torch.ones(3, *output.shape, dtype=output.dtype)
    with refused("fullgraph::linear_backward: vmap is not supported"):
        torch.autograd.grad(output, leaf, several, is_grads_batched=True)


# What autograd offers besides.


@MODES
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_retained_graph_gives_the_same_again(mode, recipe):
    layer = new_layer(recipe)
    x, grad_output = batch(ROWS)
    leaf = x.requires_grad_()
    output = mode(layer)(leaf)
    wanted = [leaf, layer.weight, layer.bias]
    random_state = torch.get_rng_state()
    first = torch.autograd.grad(output, wanted, grad_output, retain_graph=True)
    torch.set_rng_state(random_state)  # NVFP4 rounds the gradient stochastically
    second = torch.autograd.grad(output, wanted, grad_output)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(output, wanted, grad_output)


@MODES
@WEIGHTS
def test_gradients_of_some_inputs(mode, quantized_weight):
    layer = new_layer(quantized_weight=quantized_weight)
    x, grad_output = batch(ROWS)
    leaf = x.requires_grad_()
    output = mode(layer)(leaf)
    wanted = {"leaf": leaf, "weight": layer.weight, "bias": layer.bias}
    alone = {
        name: torch.autograd.grad(output, [tensor], grad_output, retain_graph=True)[0]
        for name, tensor in wanted.items()
    }
    pair = torch.autograd.grad(output, [layer.bias, leaf], grad_output, retain_graph=True)
    assert torch.equal(pair[0], alone["bias"])
    assert torch.equal(pair[1], alone["leaf"])
    output.backward(grad_output)
    for name, tensor in wanted.items():
        assert torch.equal(alone[name], tensor.grad)


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autograd.set_multithreading_enabled(False),
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
        lambda: torch.autograd.detect_anomaly(check_nan=True),
    ],
    ids=["one thread", "no hooks", "anomaly mode"],
)
@WEIGHTS
def test_modes_of_autograd_change_nothing(context, quantized_weight):
    layer = new_layer(quantized_weight=quantized_weight)
    x, grad_output = batch(ROWS)

    def step():
        layer.zero_grad()
        leaf = x.detach().requires_grad_()
        layer(leaf).backward(grad_output)
        return gradients(layer, [leaf])

    expected = step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anomaly mode warns that it is slow
        with context():
            assert_same_results(step(), expected)


def test_anomaly_mode_names_the_op():
    layer = new_layer()
    with torch.no_grad():
        layer.weight[0, 0] = float("nan")
    x, grad_output = batch(ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(check_nan=True):
            output = layer(x.requires_grad_())
            with pytest.raises(RuntimeError, match="Function 'linearBackward' returned nan values"):
                output.backward(grad_output)


# TorchScript.


def test_torchscript_is_refused():
    model = nn.Sequential(new_layer().eval())
    with (
        refused("fullgraph::linear: torch.jit.trace is not supported", "torch.export.export"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # deprecated
        torch.jit.trace(model, (batch(ROWS)[0],))
    with (
        refused("Linear: torch.jit.script is not supported", "torch.export.export"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        torch.jit.script(model)
