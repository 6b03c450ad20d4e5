"""`customop.graphs`: nodes as they stand in the graphs that run, read through both compilers."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullgraph.customop import Dyn, Mut, Pass, Plan, define
from fullgraph.customop.graphs import COMPILERS, GraphRecorder, isolated, run_both_ways
from fullgraph.customop.op import defined_ops
from fullgraph.errors import ConfigError
from fullgraph.nn import Linear

# Dynamo looks for the gradient of what a broken graph hands over; hidden from users, an error here.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

compilers = pytest.mark.parametrize("compiler", COMPILERS)


def record(function, *inputs, compiler="aot_eager", **options):
    recorder = GraphRecorder(compiler)
    run = torch.compile(isolated(function), backend=recorder, **options)
    run_both_ways(run, inputs, {})
    return recorder


@dataclasses.dataclass
class CountArguments:
    x: Tensor
    total: Mut[Tensor]
    times: Dyn[int]


def plan_count(a):
    return Plan({"output": a.x}, decisions=f"{a.times} times")


def count(plan, a):
    a.total.add_(a.x.sum() * a.times)
    return {"output": a.x + a.times}


count_op = define("fgtest_graphs::count", forward=Pass(CountArguments, plan_count, count))


@compilers
def test_nodes_of_a_model(compiler):
    model = nn.Sequential(Linear(32, 48, recipe="fp8-current"), nn.ReLU(), Linear(48, 8))
    graphs = record(model, torch.randn(3, 32), compiler=compiler)
    assert [node.module for node in graphs.forward] == ["0", "2"]
    assert [node.module for node in graphs.backward] == ["2", "0"]
    assert {node.op for node in (*graphs.forward, *graphs.backward)} == {"fullgraph::linear"}
    assert graphs.forward[0].arguments.input.shape == (3, 32)
    assert graphs.backward[0].arguments.grad_output.shape == (3, 8)
    assert graphs.forward[1].plan.outputs["output"].shape == (3, 8)
    assert graphs.breaks == []
    assert all(parameter.grad is None for parameter in model.parameters())


@compilers
def test_nodes_of_an_op_that_mutates(compiler):
    total = torch.zeros(())

    def twice(x):
        return count_op(CountArguments(count_op(CountArguments(x, total, 2)), total, 3))

    x = torch.ones(4)
    graphs = record(twice, x, compiler=compiler)
    assert [node.op for node in graphs.forward] == ["fgtest_graphs::count"] * 2
    assert [node.plan.decisions for node in graphs.forward] == ["2 times", "3 times"]
    assert graphs.forward[0].arguments.total.shape == ()
    assert total.item() == 4 * 2 + 4 * 3 * 3


def test_symbolic_sizes_stay_symbolic():
    graphs = record(Linear(8, 4), torch.randn(3, 8), dynamic=True)
    size = graphs.forward[0].arguments.input.shape[0]
    assert isinstance(size, torch.SymInt)


def test_checkpointing_shows_as_recomputed_nodes():
    layer = Linear(8, 8, recipe="fp8-current")

    def function(x):
        return checkpoint(lambda x: layer(torch.relu(layer(x))), x, use_reentrant=False)

    graphs = record(function, torch.randn(3, 8, requires_grad=True), fullgraph=True)
    # Backward needs the input of both layers, and the second's needs the first to run again.
    assert len(graphs.forward) == 2
    assert len(graphs.backward) == 2
    assert len(graphs.recomputed) == 2


def test_frozen_and_without_gradients():
    layer = Linear(8, 4, recipe="fp8-current").requires_grad_(False)
    assert len(record(layer, torch.randn(3, 8)).backward) == 0
    graphs = record(layer, torch.randn(3, 8, requires_grad=True))
    assert list(graphs.backward[0].plan.outputs) == ["input"]


def test_inputs_that_are_no_leaves_keep_their_graph():
    source = torch.randn(3, 8, requires_grad=True)
    middle = source * 2
    record(Linear(8, 4), middle)
    assert source.grad is None
    middle.sum().backward()
    assert torch.equal(source.grad, torch.full((3, 8), 2.0))


def test_a_break_starts_another_graph():
    layer = Linear(8, 8)

    def broken(x):
        x = layer(x)
        torch._dynamo.graph_break()
        return layer(x)

    graphs = record(broken, torch.randn(3, 8))
    assert [len(graph.forward) for graph in graphs.graphs] == [1, 1]
    (reason, place) = graphs.breaks[0]
    assert "graph_break" in reason
    assert place.startswith(__file__)
    assert len(graphs.breaks) == 1


def test_what_dynamo_gives_up_and_starts_anew_counts_once():
    # A float attribute under dynamic=True: the first attempt ends inside of the backend.
    embedding = nn.Embedding(8, 4)
    graphs = record(lambda x: embedding(x).sum(), torch.arange(3), dynamic=True)
    assert len(graphs.graphs) == 1


def test_isolated_functions_do_not_share_compiled_code():
    layer, x = Linear(8, 4), torch.randn(3, 8)
    assert len(record(layer, x).forward) == len(record(layer, x).forward) == 1


def test_every_op_is_known():
    assert {"fullgraph::linear", "fullgraph::quantize"} <= {op.name for op in defined_ops()}


def test_an_unknown_compiler_is_refused():
    with pytest.raises(ConfigError, match="unknown compiler 'gcc'"):
        GraphRecorder("gcc")
