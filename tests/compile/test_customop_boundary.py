"""Structured tensors across the boundary of a compiled region: with the tangent shim, and without."""

import importlib

import pytest
import torch

import customop_ops as ops
from customop_ops import Int8Tensor, Linear, Numerics, int8, same
from fullgraph import customop
from fullgraph.customop.graphs import GraphRecorder
from fullgraph.customop.tangent import PlainGrad, has_tangent_shim
from fullgraph.errors import CompileError

STRUCTURED = Numerics(structured_output=True)

# Dynamo hides this warning about its own doing from users, but not from a filter that makes it an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def compiled(function, compiler="aot_eager", **options):
    recorder = GraphRecorder(compiler)
    return torch.compile(function, fullgraph=True, backend=recorder, **options), recorder


@pytest.fixture
def layer():
    return Linear(8, 6, STRUCTURED)


@pytest.fixture
def no_shim():
    customop.remove_tangent_shim()
    yield
    customop.install_tangent_shim()


def finish(how, y, x, layer):
    """One way of using a structured output outside of the region, and every gradient it gives."""
    match how:
        case "decode":
            y.decode().pow(2).sum().backward()
        case "aten":
            (y * torch.arange(6)).sum().backward()
        case "backward with a plain gradient":
            y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape))
        case "twice":
            (y.decode() * 2 + torch.relu(y) + y[:1]).sum().backward()
        case "a non-contiguous gradient":
            y.decode().t().contiguous().t().backward(
                torch.randn(6, 3, dtype=y.dtype, generator=seed()).t()
            )
        case "autograd.grad":
            return torch.autograd.grad(
                y, [x, *layer.parameters()], torch.ones(y.shape, dtype=y.dtype)
            )
    return [x.grad, *[p.grad for p in layer.parameters()]]


def seed():
    return torch.Generator().manual_seed(0)


USES = [
    "decode",
    "aten",
    "backward with a plain gradient",
    "twice",
    "a non-contiguous gradient",
    "autograd.grad",
]


@pytest.mark.parametrize("how", USES)
def test_a_structured_output_is_used_outside(layer, how):
    def run(function):
        layer.zero_grad()
        x = torch.randn(3, 8, dtype=torch.bfloat16, generator=seed()).requires_grad_()
        y = function(x)
        assert isinstance(y, Int8Tensor)
        return y, finish(how, y, x, layer)

    function, recorder = compiled(layer)
    assert same(run(function), run(layer))
    assert (len(recorder.forward), len(recorder.backward)) == (1, 1)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_regions_chained_by_a_structured_tensor(layer, compiler, dynamic):
    second = Linear(6, 4)

    def run(first, second_function):
        seen = []
        for rows in (3, 5):
            x = torch.randn(rows, 8, dtype=torch.bfloat16, generator=seed()).requires_grad_()
            y = second_function(first(x))
            y.backward(torch.ones_like(y))
            parameters = [*layer.parameters(), *second.parameters()]
            seen += [y, x.grad, *[p.grad for p in parameters]]
            layer.zero_grad()
            second.zero_grad()
        return seen

    functions = [compiled(f, compiler, dynamic=dynamic) for f in (layer, second)]
    assert same(run(*[f for f, _ in functions]), run(layer, second))
    for _, recorder in functions:
        assert len(recorder.graphs) == (1 if dynamic else 2)


def both(x):
    return ops.both(ops.BothForward(x))


@pytest.mark.parametrize(
    "used", [("int8",), ("plain",), ("int8", "plain"), ("plain", "int8", "int8")], ids=str
)
def test_a_structured_and_a_plain_output(used):
    def run(function):
        x = torch.randn(3, 4, generator=seed()).requires_grad_()
        outputs = dict(zip(("int8", "plain"), function(x), strict=True))
        sum(ops.plain(outputs[name]).pow(2).sum() for name in used).backward()
        return list(outputs.values()), x.grad

    function, recorder = compiled(both)
    assert same(run(function), run(both))
    assert (len(recorder.forward), len(recorder.backward)) == (1, 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(layer, mode):
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    second = Linear(6, 4)
    with mode():
        y = compiled(layer)[0](x)
        assert same(y, layer(x))
        assert same(compiled(second)[0](y), second(y))
        assert same(compiled(lambda y: y.decode())[0](y), y.decode())


def test_a_structured_tensor_may_pass_through(layer):
    """In and out of a region untouched, and as a leaf."""

    def run(function):
        x = int8(torch.randn(3, 8, dtype=torch.bfloat16, generator=seed()), requires_grad=True)
        y, again = function(x)
        (y.decode().sum() + again.decode().sum()).backward()
        return y, again, x.grad

    def function(x):
        return layer(x), x

    assert same(run(compiled(function)[0]), run(function))


def test_plain_ops_on_structured_tensors_inside_a_region(layer):
    def function(x):
        y = layer(x)
        return (y + 1).relu() * y.decode()

    def run(function):
        x = torch.randn(3, 8, dtype=torch.bfloat16, generator=seed()).requires_grad_()
        y = function(x)
        y.sum().backward()
        return y, x.grad

    traced, recorder = compiled(function)
    assert same(run(traced), run(function))
    assert len([n for n in recorder.forward if n.op == "tests::linear"]) == 1


# The shim.


def test_the_shim_answers_for_its_own_class_only():
    grad = torch.ones(2)
    hook = torch.Tensor.__coerce_same_metadata_as_tangent__  # type: ignore[attr-defined]
    assert hook(grad, None, None) is None
    assert hook(grad, None, Int8Tensor) is None
    assert isinstance(hook(grad, None, PlainGrad), PlainGrad)
    assert torch.equal(PlainGrad(grad) + 1, grad + 1)


def test_torch_still_refuses_the_tangents_of_others():
    """A traceable subclass that is none of ours keeps torch's own error."""
    from torch.testing._internal.two_tensor import TwoTensor

    def function(x):
        return TwoTensor(x * 2, x * 3)

    x = torch.randn(3).requires_grad_()
    y = torch.compile(function, fullgraph=True, backend="aot_eager")(x)
    with pytest.raises(RuntimeError, match=r"(?s)(tangent|metadata).*TwoTensor"):
        y.backward(torch.ones(3))


def test_without_the_shim_a_structured_output_is_refused(layer, no_shim):
    assert not has_tangent_shim()
    function, _ = compiled(layer)
    with pytest.raises(
        Exception,
        match=r"Int8Tensor: a differentiable structured tensor leaves the compiled region(?s:.)*to_container",
    ):
        function(torch.randn(3, 8, dtype=torch.bfloat16).requires_grad_())


def test_without_the_shim_everything_else_works(layer, no_shim):
    second = Linear(6, 4)

    def function(x):
        return second(layer(x))

    x = torch.randn(3, 8, dtype=torch.bfloat16)
    traced, _ = compiled(function)
    y = traced(x.requires_grad_())
    y.sum().backward()
    assert same(y, function(x))
    with torch.no_grad():
        assert same(compiled(layer)[0](x), layer(x))


def test_the_shim_is_not_installed_over_another(no_shim):
    def other(*args):
        return None

    torch.Tensor.__coerce_same_metadata_as_tangent__ = other  # type: ignore[attr-defined]
    try:
        with pytest.raises(
            CompileError, match="__coerce_same_metadata_as_tangent__ is already defined"
        ):
            customop.install_tangent_shim()
        importlib.reload(customop)  # importing is no reason to raise
        customop.remove_tangent_shim()
        assert torch.Tensor.__coerce_same_metadata_as_tangent__ is other  # type: ignore[attr-defined]
    finally:
        del torch.Tensor.__coerce_same_metadata_as_tangent__  # type: ignore[attr-defined]


def test_installing_and_removing_twice_is_harmless():
    customop.install_tangent_shim()
    customop.remove_tangent_shim()
    customop.remove_tangent_shim()
    assert not has_tangent_shim()
    customop.install_tangent_shim()
    assert has_tangent_shim()


# The container.


@pytest.mark.parametrize("how", USES)
def test_a_container_carries_it_out_without_the_shim(layer, no_shim, how):
    def run(function):
        layer.zero_grad()
        x = torch.randn(3, 8, dtype=torch.bfloat16, generator=seed()).requires_grad_()
        container = function(x)
        assert isinstance(container, customop.Container)
        y = container.unpack()
        assert isinstance(y, Int8Tensor)
        assert container.anchor.untyped_storage().nbytes() <= 16
        return y, finish(how, y, x, layer)

    def direct(x):
        return customop.to_container(layer(x))

    function, recorder = compiled(direct)
    assert same(run(function), run(direct))
    assert len(recorder.graphs) == 1
    assert (
        [n.op for n in recorder.forward] == [n.op for n in recorder.backward] == ["tests::linear"]
    )


def test_container_and_shim_agree(layer):
    def gradients(function):
        layer.zero_grad()
        x = torch.randn(3, 8, dtype=torch.bfloat16, generator=seed()).requires_grad_()
        y = function(x)
        finish("decode", y, x, layer)
        return y.decode(), x.grad, [p.grad for p in layer.parameters()]

    assert same(
        gradients(compiled(lambda x: customop.to_container(layer(x)))[0]),
        gradients(compiled(layer)[0]),
    )


def test_a_container_in_inference_mode(layer):
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    with torch.inference_mode():
        container = compiled(lambda x: customop.to_container(layer(x)))[0](x)
        assert same(container.unpack(), layer(x))
        assert same(container.decode(), layer(x).decode())
