"""Gradients that are computed later, without anything of low precision: calls that a leaf collects."""

import copy
import dataclasses

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from fullgraph.customop import Carry, Pass, Plan, TensorSpec, define
from fullgraph.customop.deferred import DeferredGradient, count, no_calls, take
from fullgraph.errors import CompileError, ConfigError

backends = pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])


@dataclasses.dataclass
class ScaleArguments:
    x: Tensor
    later: Carry[Tensor | None] = None
    wrong: bool = False


@dataclasses.dataclass
class ScaleBackwardArguments:
    grad_output: Tensor
    x: Tensor
    wrong: bool
    needs: tuple[str, ...] = ()


def plan_backward(a):
    deferred = {"later": ("squares", {"x": "x", "doubled": "twice"})}
    if a.wrong:
        return Plan({"x": a.grad_output}, saved={"twice": a.grad_output})
    if "later" not in a.needs:
        return Plan({"x": a.grad_output})
    made = TensorSpec((2, *a.grad_output.shape), a.x.dtype, a.x.device)
    return Plan({"x": a.grad_output}, saved={"twice": made}, deferred=deferred)


def backward(plan, a):
    results = {"x": a.grad_output * 3}
    if plan.saved:
        results["twice"] = torch.stack([a.grad_output, a.grad_output])
    return results


op = define(
    "tests::deferring",
    forward=Pass(
        ScaleArguments,
        lambda a: Plan({"output": a.x}, saved_inputs={"x": "x"}),
        lambda plan, a: {"output": a.x * 3},
    ),
    backward=Pass(ScaleBackwardArguments, plan_backward, backward),
    gradients=("x", "later"),
)


def run(backend, leaf):
    def function(x):
        return op(ScaleArguments(x, leaf))

    return function if backend is None else torch.compile(function, backend=backend, fullgraph=True)


@backends
def test_a_leaf_collects_calls_in_the_order_of_the_backward_passes(backend):
    leaf = no_calls(torch.device("cpu"))
    function = run(backend, leaf)
    inputs = [torch.randn(size, requires_grad=True) for size in (3, 4, 5)]
    outputs = [function(x) for x in inputs]
    for i in (1, 0, 2):
        outputs[i].backward(torch.full_like(outputs[i], float(i)))
    assert count(leaf) == 3
    if backend is not None:
        assert counters["stats"]["unique_graphs"] == 2
    for i in (1, 0, 2):
        call = take(leaf)
        assert call.token == "squares"
        assert list(call.tensors) == ["x", "doubled"]
        assert call.tensors["x"].data_ptr() == inputs[i].data_ptr(), "saved tensors are not copied"
        assert torch.equal(call.tensors["doubled"], torch.full((2, len(inputs[i])), float(i)))
        assert torch.equal(inputs[i].grad, torch.full_like(inputs[i], 3.0 * i))
    assert take(leaf) is None
    assert count(leaf) == 0
    assert leaf.grad is None


@backends
def test_a_leaf_that_is_not_there_or_frozen_collects_nothing(backend):
    x = torch.randn(3, requires_grad=True)
    frozen = no_calls(torch.device("cpu")).requires_grad_(False)
    for leaf in (None, frozen):
        run(backend, leaf)(x).sum().backward()
    assert frozen.grad is None


def test_the_leaf_never_reaches_the_forward_op():
    leaf = no_calls(torch.device("cpu"))
    graphs = []

    def backend(module, inputs):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def keep(graph, _):
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(module, inputs)

    run(backend, leaf)(torch.randn(3, requires_grad=True)).sum().backward()
    nodes = [[n for n in g.graph.nodes if "tests.deferring" in str(n.target)] for g in graphs]
    assert [len(found) for found in nodes] == [1, 1]
    assert len(nodes[0][0].args[0]) == 1


def test_copies():
    leaf = no_calls(torch.device("cpu"))
    x = torch.randn(3, requires_grad=True)
    run(None, leaf)(x).sum().backward()
    other = copy.deepcopy(leaf)
    assert (count(leaf), count(other)) == (1, 1)
    assert take(leaf).tensors["x"].data_ptr() != take(other).tensors["x"].data_ptr()


def test_what_cannot_be_done_with_it():
    leaf = no_calls(torch.device("cpu"))
    x = torch.randn(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(run(None, leaf)(x).sum(), leaf)
    assert isinstance(gradient, DeferredGradient)
    assert repr(gradient) == "DeferredGradient(1 calls)"
    assert repr(gradient + gradient) == "DeferredGradient(2 calls)"
    assert count(leaf) == 0
    for operation in (torch.abs, torch.sum, lambda t: t + torch.zeros(0)):
        with pytest.raises(ConfigError, match="what its computation needs, not numbers"):
            operation(gradient)


def test_results_without_a_call_that_takes_them():
    with pytest.raises(CompileError, match=r"the backward plan has the results \['twice'\]"):
        op(ScaleArguments(torch.randn(3, requires_grad=True), None, True)).sum().backward()
