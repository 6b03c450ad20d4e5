"""Statistics on a GPU: the rows of the CPU, under CUDA graphs, without a skip and without waiting in a step."""

import dataclasses

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fullgraph as fg
from fullgraph import gemm
from fullgraph.ops.statistics import COLUMNS, record
from fullgraph.tensor import PLAIN, CastState
from linear_cases import LOW_PRECISION, assert_same_results, same_random_numbers
from oracles_quantizers import CASES, QUANTIZERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::fullgraph.errors.EmulationWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

GPU = torch.device("cuda", 0)
WIDTH, TOKENS, STEPS = 256, 64, 8


def new_model(recipe):
    torch.manual_seed(1)
    model = nn.Sequential(
        fg.Linear(WIDTH, WIDTH, dtype=torch.bfloat16, recipe=recipe),
        nn.ReLU(),
        fg.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16, recipe=recipe),
    )
    return model.to(GPU)


def data(number, microbatch=0):
    torch.manual_seed(100 * number + microbatch)
    x, grad_output = torch.randn(2, TOKENS, WIDTH).bfloat16().to(GPU)
    return x, grad_output * 1e-3


def train(model, forward, every=None, microbatches=1):
    """Gradients and outputs of each step, and records; weights stay, so that nothing but the graphs is measured."""
    statistics = None if every is None else fg.collect_statistics(model, every=every)
    for (
        parameter
    ) in model.parameters():  # to be added to: torch would keep memory of a graph instead
        parameter.grad = torch.zeros_like(parameter)
    results = []
    for number in range(STEPS):
        found = {}
        torch.compiler.cudagraph_mark_step_begin()
        for microbatch in range(microbatches):
            x, grad_output = data(number, microbatch)
            x.requires_grad_()
            with same_random_numbers(number):
                output = forward(x)
                found[f"output{microbatch}"] = output.detach().clone()
                output.backward(grad_output)
            found[f"grad_input{microbatch}"] = x.grad.clone()
        found |= {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad(set_to_none=False)
        results.append(found)
        if model[0].scaling_state.rule:
            fg.update_scales(model)
        if statistics is not None:
            statistics.step()
    if statistics is None:
        return results, []
    statistics.close()
    return results, statistics.records


def assert_same_steps(actual, expected):
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same_results(ours, theirs)


@pytest.mark.parametrize(("name", "orientation"), CASES, ids=lambda v: getattr(v, "name", v))
def test_a_row_is_that_of_the_cpu(name, orientation):
    """Same codes, so same counts; sums differ by their order."""
    quantizer = QUANTIZERS[name]
    layouts = [PLAIN] if name.startswith("hybrid") else [PLAIN, gemm.layout(GPU)]
    for layout in layouts:
        rows = []
        for device in (torch.device("cpu"), GPU):
            torch.manual_seed(0)
            x = (torch.randn(80, 160) * torch.randn(80, 160).exp()).bfloat16()
            seed = torch.tensor(7, device=device) if quantizer.is_stochastic else None
            x, row = x.to(device), torch.zeros(COLUMNS, device=device)
            record(row, x, quantizer.quantize(x, orientation, layout, CastState(seed=seed)))
            rows.append(row.cpu())
        torch.testing.assert_close(rows[1], rows[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("recipe", LOW_PRECISION)
def test_under_cuda_graphs(recipe):
    """Sampled every second step: two graphs, no skip, results as without, records as in eager mode."""
    eager = new_model(recipe)
    expected, records = train(eager, eager, every=2)
    plain = new_model(recipe)
    assert_same_steps(expected, train(plain, plain)[0])

    counters.clear()
    model = new_model(recipe)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    results, found = train(model, compiled, every=2)
    assert_same_steps(results, expected)
    assert [dataclasses.astuple(r) for r in found] == [dataclasses.astuple(r) for r in records]
    assert {r.step for r in found} == set(range(1, STEPS + 1, 2))
    assert counters["stats"]["unique_graphs"] == 2
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_microbatches_under_cuda_graphs():
    """Replays of one graph add to the same rows."""
    counters.clear()
    model = new_model("fp8-delayed")
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    results, records = train(model, compiled, every=2, microbatches=3)
    eager = new_model("fp8-delayed")
    expected, expected_records = train(eager, eager, every=2, microbatches=3)
    assert_same_steps(results, expected)
    assert records == expected_records
    assert {record.casts for record in records} == {3}
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_a_row_is_captured_by_hand():
    """Nothing in a row needs the host: a graph captured with torch.cuda.graph adds at each replay."""
    x = torch.randn(TOKENS, WIDTH, device=GPU)
    quantizer, row = fg.MXQuantizer(), torch.zeros(COLUMNS, device=GPU)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        record(row, x, quantizer.quantize(x, fg.BOTH))
    torch.cuda.synchronize()
    expected = row.clone()
    row.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        record(row, x, quantizer.quantize(x, fg.BOTH))
    graph.replay()
    assert torch.equal(row, expected)
    graph.replay()
    assert torch.equal(row[1:], 2 * expected[1:])


def test_nothing_waits_in_a_step():
    """The step, and what follows it, are only enqueued: a synchronisation raises."""
    model = new_model("fp8-current")
    batches = [data(number) for number in range(4)]
    with fg.collect_statistics(model, every=1) as statistics:
        statistics.step()  # makes what is made once
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for x, grad_output in batches:
                model(x).backward(grad_output)
                statistics.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert {record.step for record in statistics.records} == {2, 3, 4, 5}
