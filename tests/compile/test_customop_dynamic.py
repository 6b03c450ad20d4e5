"""Sizes that vary: how many graphs torch makes of them, and integers that are no constants."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import customop_ops as ops
from customop_ops import Linear, Numerics, int8, same
from fullgraph.customop.graphs import GraphRecorder
from fullgraph.errors import ConfigError


def compiled(function, **options):
    recorder = GraphRecorder()
    return torch.compile(function, fullgraph=True, backend=recorder, **options), recorder


def batch(rows, mark=None):
    """A leaf of this many rows; `mark` says that the number may vary."""
    x = torch.randn(rows, 8, dtype=torch.bfloat16).requires_grad_()
    if mark is not None:
        mark(x, 0)
    return x


def run(function, layer, x):
    """Output and gradients of one step."""
    layer.zero_grad()
    x.grad = None
    y = function(x)
    y.sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in layer.parameters()]]


mark_dynamic = torch._dynamo.mark_dynamic
mark_unbacked = torch._dynamo.decorators.mark_unbacked


@pytest.mark.parametrize(
    ("rows", "mark", "dynamic", "graphs"),
    [
        # One graph for every size of two or more, from the first on ...
        ((5, 2, 33, 7), None, True, 1),
        ((5, 2, 33, 7), mark_dynamic, None, 1),
        # ... and without a word, from the second on: torch takes the first size for a constant.
        ((5, 2, 33, 7), None, None, 2),
        # Sizes 0 and 1 have a graph each: torch always specialises on them, because they broadcast and
        # make strides and emptiness ambiguous. `mark_unbacked` is torch's way to forbid that.
        ((5, 0, 1, 7), None, True, 3),
        ((5, 0, 1, 7), mark_dynamic, None, 3),
        ((0, 1, 5, 7), None, True, 3),
        ((5, 0, 1, 7), mark_unbacked, None, 1),
        ((0, 1, 33), mark_unbacked, None, 1),
    ],
)
@pytest.mark.parametrize("int8_weight", [False, True])
def test_graphs_of_batch_sizes(rows, mark, dynamic, graphs, int8_weight):
    layer = Linear(8, 6, int8_weight=int8_weight)
    function, recorder = compiled(layer, dynamic=dynamic)
    for n in rows:
        x = batch(n, mark)
        expected = run(layer, layer, x)
        assert same(run(function, layer, x), expected)
    assert len(recorder.graphs) == graphs
    assert len(recorder.forward) == len(recorder.backward) == graphs


@pytest.mark.parametrize("mark", [None, mark_unbacked])
def test_a_structured_output_of_any_size(mark):
    layer = Linear(8, 6, Numerics(structured_output=True))
    function, recorder = compiled(lambda x: layer(x).decode(), dynamic=None if mark else True)
    for n in (5, 2, 33):
        x = batch(n, mark)
        expected = run(lambda x: layer(x).decode(), layer, x)
        assert same(run(function, layer, x), expected)
    assert len(recorder.graphs) == 1


def test_a_structured_input_of_any_size():
    layer = Linear(8, 6)
    function, recorder = compiled(layer, dynamic=True)
    for n in (5, 2, 33):
        x = int8(torch.randn(n, 8, dtype=torch.bfloat16), requires_grad=True)
        expected = run(layer, layer, x)
        assert same(run(function, layer, x), expected)
    assert len(recorder.graphs) == 1


def test_state_and_any_size():
    layer = Linear(8, 6, state=True, main_grad=True)
    reference = Linear(8, 6, state=True, main_grad=True)
    reference.load_state_dict(layer.state_dict())
    function, recorder = compiled(layer)
    for n in (5, 0, 1, 33):
        x = batch(n, mark_unbacked)
        assert same(
            run(function, layer, x), run(reference, reference, x.detach().clone().requires_grad_())
        )
        assert same(list(layer.buffers()), list(reference.buffers()))
    assert len(recorder.graphs) == 1


def test_features_may_vary_too():
    token = ops.linear.encode(numerics=Numerics())

    def linear(x, weight):
        return ops.linear(ops.LinearForward(x, weight), token=token)

    function, recorder = compiled(linear, dynamic=True)
    for k, n in ((8, 6), (7, 33), (16, 2)):
        x, weight = torch.randn(5, k), torch.randn(n, k)
        assert same(function(x, weight), linear(x, weight))
    assert len(recorder.graphs) == 1


# Dyn fields.


def repeat(x, times):
    return ops.repeat(ops.RepeatForward(x, times))


def repeated(function, x, times):
    x = x.clone().requires_grad_()
    y = function(x, times)
    y.sum().backward()
    return y, x.grad


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_dyn_integer_varies_without_a_new_graph(compiler):
    recorder = GraphRecorder(compiler)
    function = torch.compile(repeat, fullgraph=True, backend=recorder, dynamic=True)
    for times, rows in ((3, 4), (5, 4), (2, 7)):
        x = torch.randn(rows, 3)
        assert same(repeated(function, x, times), repeated(repeat, x, times))
    assert len(recorder.graphs) == 1
    assert (len(recorder.forward), len(recorder.backward)) == (1, 1)


def test_a_dyn_integer_may_be_a_size():
    def by_size(x, times):
        return repeat(x, x.shape[0] * 2)

    function, recorder = compiled(by_size, dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 4)  # another number: torch takes equal sizes for the same one
        assert same(repeated(function, x, None), repeated(by_size, x, None))
    assert len(recorder.graphs) == 1


def test_a_dyn_integer_may_be_a_constant():
    function, recorder = compiled(lambda x, times: repeat(x, 3))
    x = torch.randn(3, 3)
    assert same(repeated(function, x, None), repeated(repeat, x, 3))
    assert len(recorder.graphs) == 1


# Symbolic integers where a constant belongs.


@pytest.mark.parametrize(
    ("field", "function"),
    [
        ("size", lambda x, n: ops.tagged(ops.TaggedForward(x, size=n))),
        ("size", lambda x, n: ops.tagged(ops.TaggedForward(x, size=x.shape[0]))),
        ("sizes", lambda x, n: ops.tagged(ops.TaggedForward(x, sizes=(1, x.shape[0] + 1)))),
        ("options", lambda x, n: ops.tagged(ops.TaggedForward(x, options={"a": n}))),
    ],
    ids=["argument", "size", "tuple", "dict"],
)
def test_a_symbolic_integer_is_refused_in_a_compiled_function(field, function):
    traced, recorder = compiled(function, dynamic=True)
    with pytest.raises(
        Exception, match=rf"(?s)tests::tagged.{field}: a symbolic integer.*{field}: Dyn\[int\]"
    ):
        traced(torch.randn(5, 3), 7)
    assert recorder.graphs == []


def test_a_symbolic_integer_in_an_encoded_token_is_refused():
    def function(x):
        token = ops.tagged.encode(
            level=None,
            sizes=(),
            options={},
            mode=ops.Mode.FAST,
            dtype=torch.float32,
            device=None,
            size=x.shape[0],
        )
        return ops.tagged(ops.TaggedForward(x), token=token)

    with pytest.raises(Exception, match="tests::tagged.size: a symbolic integer"):
        compiled(function, dynamic=True)[0](torch.randn(5, 3))


@pytest.mark.parametrize(
    ("field", "function"),
    [
        ("size", lambda x: ops.tagged(ops.TaggedForward(x, size=x.shape[0]))),
        ("sizes", lambda x: ops.tagged(ops.TaggedForward(x, sizes=(x.shape[0],)))),
        ("level", lambda x: ops.tagged(ops.TaggedForward(x, level=ops.Level(depth=x.shape[0])))),
    ],
)
def test_a_symbolic_integer_is_refused_by_the_kernel(field, function):
    with pytest.raises(
        ConfigError, match=rf"(?s)tests::tagged.{field}: a symbolic integer.*{field}: Dyn\[int\]"
    ):
        make_fx(function, tracing_mode="symbolic")(torch.randn(5, 3))


def test_an_integer_that_does_not_vary_is_a_constant():
    traced, recorder = compiled(
        lambda x, n: ops.tagged(ops.TaggedForward(x, size=n)), dynamic=False
    )
    for n in (7, 8, 7):
        assert same(traced(torch.ones(2), n), torch.ones(2) * (1.5 + n))
    assert len(recorder.graphs) == 2


@pytest.mark.parametrize("source", ["argument", "size"])
def test_integers_of_a_configuration_are_constants(source):
    """A dataclass is a configuration: its integers are frozen, also under `dynamic=True`; one graph for each."""

    def function(x, level):
        level = ops.Level(depth=x.shape[0]) if source == "size" else level
        return ops.tagged(ops.TaggedForward(x, level))

    traced, recorder = compiled(function, dynamic=True)
    for n in (5, 7, 5):
        x, level = torch.randn(n, 3), ops.Level(depth=n)
        assert same(traced(x, level), function(x, level))
    assert len(recorder.graphs) == 2
