"""Custom ops under torch.compile: one node forward, one backward, the same bits as eager."""

import copy
import pickle

import pytest
import torch

import customop_ops as ops
from customop_ops import Linear, Numerics, int8, plain, same
from fullgraph.customop.graphs import GraphRecorder
from fullgraph.errors import CompileError, ConfigError

STRUCTURED = Numerics(structured_output=True)
BACKENDS = ("aot_eager", "inductor")


def compiled(function, **options):
    """A function compiled with a recorder of its graphs, and the recorder."""
    recorder = GraphRecorder(options.pop("compiler", "aot_eager"))
    return torch.compile(function, fullgraph=True, backend=recorder, **options), recorder


def train(model, function, steps=3, microbatches=1):
    """Steps of all forwards, then all backwards: every output, gradient and state."""
    torch.manual_seed(1)
    seen = []
    for step in range(steps):
        inputs = [
            torch.randn(3 + step, 16, dtype=torch.bfloat16).requires_grad_()
            for _ in range(microbatches)
        ]
        outputs = [function(x) for x in inputs]
        seen += [plain(o).detach().clone() for o in outputs]
        for output in outputs:
            plain(output).float().pow(2).sum().backward()
        seen += [x.grad for x in inputs] + [p.grad for p in model.parameters()]
        model.zero_grad()
    return seen + [b.clone() for b in model.buffers()]


def stack(first=None, second=None):
    torch.manual_seed(0)
    return torch.nn.Sequential(Linear(16, 32, **(first or {})), Linear(32, 8, **(second or {})))


MODELS = {
    "plain": lambda: stack(),
    "no bias": lambda: stack({"bias": False}, {"bias": False}),
    "structured weight": lambda: stack({"int8_weight": True}, {"int8_weight": True}),
    "structured activation": lambda: stack({"numerics": STRUCTURED}, {"int8_weight": True}),
    "structured output": lambda: stack({}, {"numerics": STRUCTURED}),
    "state": lambda: stack({"state": True}, {"state": True}),
    "main_grad": lambda: stack({"main_grad": True}, {"main_grad": True}),
    "everything": lambda: stack(
        {"numerics": STRUCTURED, "state": True, "main_grad": True, "int8_weight": True},
        {"numerics": STRUCTURED, "state": True, "main_grad": True, "int8_weight": True},
    ),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("compiler", BACKENDS)
def test_one_graph_with_one_node_each_way(model, compiler):
    """Two layers, three batch sizes, two microbatches in flight: outputs, gradients and state equal eager's."""
    eager, traced = MODELS[model](), MODELS[model]()
    expected = train(eager, eager, microbatches=2)
    function, recorder = compiled(traced, compiler=compiler, dynamic=True)
    assert same(train(traced, function, microbatches=2), expected)
    assert len(recorder.graphs) == 1
    assert [n.op for n in recorder.forward] == ["tests::linear"] * 2
    assert [n.op for n in recorder.backward] == ["tests::linear"] * 2
    assert recorder.recomputed == []


def test_frozen_tensors_cost_nothing():
    """What needs no gradient is not saved, and not computed."""
    model = stack()
    model[0].weight.requires_grad_(False)
    function, recorder = compiled(model)
    function(torch.randn(3, 16, dtype=torch.bfloat16)).sum().backward()
    first, second = recorder.forward
    assert first.arguments.needs == ("bias",)
    assert list(first.plan.results) == ["output"]
    assert second.arguments.needs == ("x", "weight", "bias")
    assert list(second.plan.results) == ["output", "x", "weight"]
    assert [list(n.plan.results) for n in recorder.backward] == [["x", "weight", "bias"], ["bias"]]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("model", ["plain", "structured activation", "structured output", "state"])
def test_inference(mode, model):
    eager, traced = MODELS[model](), MODELS[model]()
    function, recorder = compiled(traced)
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    with mode():
        expected, found = eager(x), function(x)
    assert same(found, expected)
    assert [b.item() for b in traced.buffers()] == [b.item() for b in eager.buffers()]
    assert len(recorder.forward) == 2
    assert all(n.arguments.needs == () for n in recorder.forward)


def test_train_eval_train():
    """Two graphs, and the second kind of training step takes the first graph again."""
    model, reference = stack(), stack()
    function, recorder = compiled(model)
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    for grad in (True, False, True, False):
        with torch.set_grad_enabled(grad):
            assert same(function(x), reference(x))
    assert len(recorder.graphs) == 2


@pytest.mark.parametrize(
    "shape", [(16,), (3, 16), (2, 3, 16), (2, 1, 3, 16), (0, 16), (1, 16)], ids=str
)
def test_leading_dimensions(shape):
    eager, traced = stack(), stack()
    function, recorder = compiled(traced)
    x = torch.randn(shape, dtype=torch.bfloat16)
    left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, found = eager(left), function(right)
    assert same(found, expected)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    found.backward(grad)
    assert same(right.grad, left.grad)
    assert same([p.grad for p in traced.parameters()], [p.grad for p in eager.parameters()])
    assert len(recorder.graphs) == 1


def test_a_scalar():
    x = torch.randn(()).requires_grad_()
    function, recorder = compiled(lambda x: ops.swiglu(ops.SwigluForward(x, x)))
    expected, found = ops.swiglu(ops.SwigluForward(x, x)), function(x)
    assert same(found, expected)
    assert same(torch.autograd.grad(found, x), torch.autograd.grad(expected, x))
    assert len(recorder.backward) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[1:, 1:],
        lambda x: x[:1].expand(5, 8),
        lambda x: x[:, :1].expand(5, 8),
    ],
    ids=["transposed", "strided", "misaligned", "expanded rows", "expanded columns"],
)
def test_views(view):
    base = torch.randn(5, 8)

    def run(function):
        x = base.clone().requires_grad_()
        y = function(view(x), view(x) * 2)
        y.backward(torch.ones_like(y).t().contiguous().t())
        return y, x.grad

    def swiglu(gate, up):
        return ops.swiglu(ops.SwigluForward(gate, up))

    assert same(run(compiled(swiglu)[0]), run(swiglu))
    inside, recorder = compiled(lambda x: swiglu(view(x), view(x) * 2))
    x = base.clone().requires_grad_()
    y = inside(x)
    y.backward(torch.ones_like(y))
    assert same((y, x.grad), run(swiglu))
    assert (len(recorder.forward), len(recorder.backward)) == (1, 1)


# Several outputs.


@pytest.mark.parametrize("with_mean", [True, False])
@pytest.mark.parametrize("used", [("output",), ("mean",), ("output", "mean"), ()], ids=str)
def test_several_outputs(used, with_mean):
    """All of them come back, absent ones as None; any of them may go unused in the backward pass."""
    if not with_mean and "mean" in used:
        return

    def run(function):
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        output, mean, count = function(x)
        assert (mean is None) is not with_mean
        assert not count.requires_grad
        outputs = {"output": output, "mean": mean}
        if used:
            sum(outputs[name].pow(2).sum() for name in used).backward()
        return output, mean, count, x.grad

    def stats(x):
        return ops.stats(ops.StatsForward(x, with_mean))

    function, recorder = compiled(stats)
    assert same(run(function), run(stats))
    assert len(recorder.forward) == 1
    assert len(recorder.graphs) == 1


def test_gradients_of_several_outputs_are_right():
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ops.stats(ops.StatsForward(x))[:2], x)
    assert torch.autograd.gradcheck(lambda x: ops.swiglu(ops.SwigluForward(x, x * 2)), x)


@pytest.mark.parametrize("compiler", BACKENDS)
def test_outputs_used_twice(compiler):
    def twice(x, weight):
        arguments = ops.LinearForward(x, weight)
        y = ops.linear(arguments, token=token)
        return y.decode() * 2 + torch.relu(y.decode()), y

    def run(function):
        x, weight = (
            torch.randn(3, 8, generator=seed()).requires_grad_(),
            torch.randn(8, 8, generator=seed()),
        )
        z, y = function(x, weight)
        (z.sum() + y.decode().pow(2).sum()).backward()
        return z, y, x.grad

    def seed():
        return torch.Generator().manual_seed(0)

    token = ops.linear.encode(numerics=STRUCTURED)
    function, recorder = compiled(twice, compiler=compiler)
    assert same(run(function), run(twice))
    assert len(recorder.graphs) == 1
    assert [n.op for n in recorder.backward] == ["tests::linear"]


# Structured inputs.


@pytest.mark.parametrize("name", ["x", "weight"])
def test_structured_leaves_have_plain_gradients(name):
    token = ops.linear.encode(numerics=Numerics())

    def run(function):
        torch.manual_seed(0)
        tensors = {"x": torch.randn(3, 8), "weight": torch.randn(5, 8)}
        tensors[name] = int8(tensors[name])
        for tensor in tensors.values():
            tensor.requires_grad_()
        y = function(**tensors)
        y.backward(torch.ones_like(y))
        assert type(tensors[name].grad) is torch.Tensor
        return [y] + [t.grad for t in tensors.values()]

    def linear(x, weight):
        return ops.linear(ops.LinearForward(x, weight), token=token)

    function, recorder = compiled(linear)
    assert same(run(function), run(linear))
    assert (len(recorder.forward), len(recorder.backward)) == (1, 1)


def test_a_structured_gradient_is_decoded():
    x = torch.randn(3, 8).requires_grad_()
    grad = int8(torch.randn(3, 8))
    ops.swiglu(ops.SwigluForward(x, torch.ones(3, 8))).backward(grad)
    expected = torch.autograd.grad(
        ops.swiglu(ops.SwigluForward(x, torch.ones(3, 8))), x, grad.decode()
    )[0]
    assert same(x.grad, expected)


def test_another_structure_is_another_graph_and_back_again_is_not():
    layers = [Linear(8, 8), Linear(8, 8, int8_weight=True)]
    token = layers[0].token
    function, recorder = compiled(
        lambda x, weight: ops.linear(ops.LinearForward(x, weight), token=token)
    )
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    for layer in (*layers, *layers):
        function(x, layer.weight)
    assert len(recorder.graphs) == 2


# State.


@pytest.mark.parametrize("compiler", BACKENDS)
def test_state_changes_in_both_passes(compiler):
    """Two microbatches in flight, backward in either order; only what is handed over changes, in place."""

    def run(function):
        x = [torch.full((2, 3), value).requires_grad_() for value in (1.0, 2.0)]
        total, grad_total = torch.zeros(()), torch.zeros(())
        outputs = [function(t, total, grad_total) for t in x]
        for output in reversed(outputs):
            output.backward(torch.ones(2, 3))
        return outputs, [t.grad for t in x], total, grad_total

    def track(x, total, grad_total):
        return ops.track(ops.TrackForward(x, total, grad_total))

    function, recorder = compiled(track, compiler=compiler)
    found = run(function)
    assert same(found, run(track))
    assert found[2:] == (18, 12)
    assert (len(recorder.forward), len(recorder.backward)) == (1, 1)


def test_mutation_bumps_the_version():
    total = torch.zeros(())
    before = total._version
    ops.track(ops.TrackForward(torch.ones(2), total))
    assert total._version > before


def test_inductor_passes_state_without_copies():
    from torch._inductor.utils import run_and_get_code

    def track(x, total):
        return ops.track(ops.TrackForward(x, total))

    _, (code,) = run_and_get_code(
        torch.compile(track, fullgraph=True), torch.ones(2), torch.zeros(())
    )
    body = code[code.index("def call(") : code.index("runner = ")]
    assert body.count("= torch.ops.tests.track_forward.mut1(") == 1
    assert "copy_" not in body
    assert "empty_strided" not in body


# Values.


def test_a_change_of_values_is_one_more_graph_and_back_again_is_none():
    x, weight = torch.randn(3, 8), torch.randn(8, 8)
    layer = torch.nn.Module()
    layer.forward = lambda x: ops.linear(ops.LinearForward(x, weight), token=layer.token)
    function, recorder = compiled(layer)
    for numerics in (Numerics(), Numerics(ops.Mode.EXACT), Numerics(), Numerics(ops.Mode.EXACT)):
        layer.token = ops.linear.encode(numerics=numerics)
        factor = 2 if numerics.mode is ops.Mode.EXACT else 1
        assert same(
            function(x), ops.linear(ops.LinearForward(x, weight, numerics=Numerics())) * factor
        )
    assert len(recorder.graphs) == 2


VALUES = {
    "level": [ops.Level(), ops.Level("it's", 5, -0.25), ops.Level("\n", 2**40, float("inf"))],
    "sizes": [(), (1,), (2, 3)],
    "options": [{}, {"b": 0.5, "a": 2.0}],
    "mode": list(ops.Mode),
    "dtype": [torch.float32, torch.bfloat16],
    "device": [None, torch.device("cpu")],
    "size": [0, 1, 7],
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", VALUES)
def test_values_are_encoded_inside_the_compiled_function(name, dynamic):
    """With no token at all: every kind of value, from outside or made inside, is encoded while Dynamo traces."""
    if name in ("size", "sizes") and dynamic:
        return  # those are symbolic then: test_customop_dynamic.py
    x = torch.randn(3, 4)
    for value in VALUES[name]:

        def function(x, value=value):
            return ops.tagged(ops.TaggedForward(x, **{name: value}))

        traced, recorder = compiled(function, dynamic=dynamic)
        assert same(traced(x), function(x))
        assert (len(recorder.forward), len(recorder.graphs)) == (1, 1)
        torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_configuration_made_inside_the_compiled_function(dynamic):
    def function(x, depth):
        level = ops.Level("inside", depth=depth, factor=0.5)
        token = ops.tagged.encode(
            level=level,
            sizes=(1, 2),
            options={"a": 1.0},
            mode=ops.Mode.EXACT,
            dtype=torch.float32,
            device=x.device,
            size=1,
        )
        return ops.tagged(ops.TaggedForward(x), token=token)

    traced, recorder = compiled(function, dynamic=dynamic)
    x = torch.randn(3, 4)
    for depth in (3, 3, 4):
        assert same(traced(x, depth), x * ((depth * 0.5 + 3 + 1 + 1) * 2))
    assert len(recorder.graphs) == 2


def test_a_configuration_held_by_a_module():
    class Layer(torch.nn.Module):
        level: ops.Level

        def forward(self, x):
            return ops.tagged(ops.TaggedForward(x, self.level))

    layer, x = Layer(), torch.randn(3, 4)
    for dynamic in (None, True):
        layer.level = ops.Level("held", 4, 0.125)
        traced, recorder = compiled(layer, dynamic=dynamic)
        assert same(traced(x), layer(x))
        layer.level = ops.Level("changed", 4, 0.5)
        assert same(traced(x), layer(x))
        assert len(recorder.graphs) == 2
        torch._dynamo.reset()


# What autograd does, and what it cannot.


def test_saved_tensors_can_be_offloaded():
    layer = Linear(8, 8, state=True)
    x = torch.randn(3, 8, dtype=torch.bfloat16).requires_grad_()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t) or t.clone(), lambda t: t
    ):
        y = layer(x)
    y.sum().backward()
    assert [t.dtype for t in packed].count(torch.uint8) == 2  # input and weight, in 8 bits
    expected = x.grad
    x.grad = None
    layer(x).sum().backward()
    assert same(x.grad, expected)


def test_a_graph_can_be_retained():
    layer = Linear(8, 8, state=True)
    for function in (layer, compiled(layer)[0]):
        x = torch.randn(3, 8, dtype=torch.bfloat16).requires_grad_()
        y = function(x)
        first = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert same(torch.autograd.grad(y.sum(), x), first)


def swiglu(x):
    return ops.swiglu(ops.SwigluForward(x, x))


def test_a_second_derivative_raises():
    x = torch.randn(3, 4).requires_grad_()
    with pytest.raises(CompileError, match="tests::swiglu: create_graph=True is not supported"):
        torch.autograd.grad(swiglu(x).sum(), x, create_graph=True)
    (grad,) = torch.autograd.grad(compiled(swiglu)[0](x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_function_transforms_raise():
    x = torch.randn(3, 4)
    with pytest.raises(CompileError, match="tests::swiglu: vmap is not supported"):
        torch.vmap(swiglu)(x)
    with pytest.raises(CompileError, match="tests::swiglu: grad is not supported"):
        torch.func.grad(lambda x: swiglu(x).sum())(x)


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_compiled_autograd(state, is_compiled):
    """But not of a compiled region that hands state to its backward pass: torch loses such tensors there."""
    layer = Linear(8, 8, state=state)
    x = torch.randn(3, 8, dtype=torch.bfloat16).requires_grad_()
    expected = torch.autograd.grad(layer(x).sum(), x)
    function = compiled(layer)[0] if is_compiled else layer

    def run():
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            function(x).sum().backward()
        return (x.grad,)

    if state and is_compiled:
        with pytest.raises(IndexError, match="list index out of range"):
            run()
    else:
        assert same(run(), expected)


def test_ops_without_backward_have_outputs_without_gradient():
    x = torch.randn(3, 4).requires_grad_()
    assert not ops.tagged(ops.TaggedForward(x)).requires_grad
    assert not compiled(lambda x: ops.tagged(ops.TaggedForward(x)))[0](x).requires_grad


def test_errors_of_definitions_reach_the_compiled_caller():
    def function(x):
        return ops.linear(ops.LinearForward(x, None), token=token)

    token = ops.linear.encode(numerics=Numerics())
    with pytest.raises(Exception, match="tests::linear: weight is required, got None"):
        compiled(function)[0](torch.randn(3, 4))
    with pytest.raises(ConfigError, match="tests::linear: weight is required, got None"):
        function(torch.randn(3, 4))


def test_ops_are_copied_and_pickled_by_name():
    assert copy.deepcopy(ops.linear) is ops.linear
    assert pickle.loads(pickle.dumps(ops.linear)) is ops.linear


def test_models_can_be_copied_between_compilations():
    model = stack({"int8_weight": True})
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    expected = compiled(model)[0](x)
    assert same(compiled(copy.deepcopy(model))[0](x), expected)
