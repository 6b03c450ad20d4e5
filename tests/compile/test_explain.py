"""`fg.explain`: the report is what the graphs hold, for whole graphs and broken ones."""

import json

import pytest
import torch
from torch import nn

from fullgraph import gemm
from fullgraph.convert import convert
from fullgraph.errors import ConfigError
from fullgraph.explain import explain
from fullgraph.formats import BOTH, Format
from fullgraph.nn import Linear, autocast
from fullgraph.quantizers import PerTensorQuantizer, quantize
from fullgraph.statistics import collect_statistics

# Dynamo looks for the gradient of what a broken graph hands over; hidden from users, an error here.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

layer = Linear(16, 16, recipe="fp8-current")


def model():
    model = nn.Sequential(nn.Linear(20, 40), nn.GELU(), nn.Linear(40, 6))
    convert(model, "fp8-current")
    return model


def test_counts_and_nodes():
    report = explain(model(), torch.randn(3, 20))
    assert (report.num_linears, report.forward_nodes, report.backward_nodes) == (2, 2, 2)
    assert (report.num_graphs, report.graph_breaks, report.recompiles) == (1, 0, 0)
    assert report.recomputed_nodes == 0
    first, second, second_back, first_back = report.nodes
    assert (first.layer, first.direction, first.op) == ("0", "forward", "fullgraph::linear")
    assert first.tensors == {
        "input": "float32[3, 20]",
        "weight": "float32[40, 20]",
        "bias": "float32[40]",
    }
    # The input needs no gradient, so dgrad does not run and the weight is cast for fprop only.
    assert first.casts == {
        "input": "PerTensorQuantizer(E4M3) both",
        "weight": "PerTensorQuantizer(E4M3) rowwise",
    }
    assert second.casts["weight"] == "PerTensorQuantizer(E4M3) both"
    assert first.gemms == {"fprop": "emulated"}
    assert (second_back.layer, second_back.direction) == ("2", "backward")
    assert second_back.tensors["weight"] == "E4M3 of float32[6, 40]"
    assert second_back.casts == {"grad_output": "PerTensorQuantizer(E5M2) both"}
    assert second_back.gemms == {"dgrad": "emulated", "wgrad": "emulated"}
    assert first_back.gemms == {"wgrad": "emulated"}
    assert first.padding == {}


def test_high_precision_and_the_enclosing_autocast():
    plain = Linear(8, 8)
    report = explain(plain, torch.randn(2, 8))
    assert report.nodes[0].gemms == {"fprop": "high precision"}
    assert report.nodes[0].casts == {}
    with autocast("fp8-current"):
        assert explain(plain, torch.randn(2, 8)).nodes[0].gemms == {"fprop": "emulated"}


PADDING = {
    "fp8-current": ((9, 0), 32, 48, 16),
    "fp8-per-row": ((9, 0), 32, 48, 16),
    "fp8-block": ((9, 0), 128, 128, 128),
    "mxfp8": ((10, 0), 32, 64, 32),
    "nvfp4": ((10, 0), 32, 64, 32),
}
"""Recipe -> a compute capability that has its GEMMs, and what K = 20, N = 40 and M = 3 become there."""


@pytest.mark.parametrize("recipe", PADDING)
def test_padding_on_the_native_route(recipe, monkeypatch):
    capability, k, n, m = PADDING[recipe]
    monkeypatch.setattr(gemm, "compute_capability", lambda device: capability)
    # Only described: run on meta tensors, nothing is multiplied.
    layer = Linear(20, 40, recipe=recipe, device="meta")
    report = explain(layer, torch.randn(3, 20, device="meta", requires_grad=True))
    forward, backward = report.nodes
    assert forward.gemms == {"fprop": "native"}
    assert backward.gemms == {"dgrad": "native", "wgrad": "native"}
    assert forward.padding == {"fprop": f"K 20 -> {k}"}
    assert backward.padding == {"dgrad": f"N 40 -> {n}", "wgrad": f"M 3 -> {m}"}


def test_quantized_operands_and_other_ops():
    quantizer = PerTensorQuantizer(Format.E4M3, power_of_two=True)

    def function(x):
        return layer(quantize(x, quantizer, BOTH))

    report = explain(function, torch.randn(3, 16, requires_grad=True))
    assert report.num_linears is None
    cast, linear = report.nodes[:2]
    assert (cast.op, cast.gemms) == ("fullgraph::quantize", {})
    assert linear.tensors["input"] == "E4M3 of float32[3, 16]"
    assert list(linear.casts) == ["weight"]
    assert (report.forward_nodes, report.backward_nodes) == (2, 1)


def test_nothing_is_left_behind():
    net = nn.Sequential(Linear(8, 8, recipe="fp8-current"), nn.Dropout(0.5))
    x = torch.randn(4, 8, requires_grad=True)
    net[0].weight.grad = kept = torch.ones(8, 8)
    random_state = torch.get_rng_state()
    explain(net, x)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert net[0].weight.grad is kept
    assert torch.equal(kept, torch.ones(8, 8))
    assert net[0].bias.grad is None
    assert x.grad is None


def test_leaves_other_compiled_code_alone():
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 16)
    compiled(x)
    explain(layer, x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(x)


def test_a_second_call():
    inputs = [torch.randn(size, 16) for size in (3, 5)]
    report = explain(layer, inputs[0], again=(inputs[1],))
    assert (report.recompiles, report.forward_nodes, report.num_graphs) == (1, 1, 1)
    assert "recompiled because input.shape[0] was" in str(report)
    report = explain(layer, inputs[0], again=(inputs[1],), dynamic=True)
    assert (report.recompiles, report.recompile_reasons) == (0, ())


def printing_first(x):
    print("a")
    return layer(x)


def printing_between(x):
    x = layer(x)
    print("b")
    return layer(x)


def printing_twice(x):
    print("a")
    x = layer(x)
    print("b", "c")
    return layer(x)


def printing_in_a_loop(x):
    for _ in range(2):
        x = layer(x)
        print("d")
    return x


def branching(x):
    x = layer(x)
    return layer(x) if x.sum() > 0 else x * 2


BROKEN = {
    printing_first: (1, 1, "Failed to trace builtin operator"),
    printing_between: (1, 2, "Failed to trace builtin operator"),
    printing_twice: (2, 2, "Failed to trace builtin operator"),
    printing_in_a_loop: (1, None, "Failed to trace builtin operator"),
    branching: (1, None, "Data-dependent branching"),
}


@pytest.mark.parametrize(
    ("function", "breaks", "nodes", "reason"),
    [(f, *row) for f, row in BROKEN.items()],
    ids=[f.__name__ for f in BROKEN],
)
def test_graph_breaks_are_reported(function, breaks, nodes, reason):
    report = explain(function, torch.randn(3, 16))
    assert report.graph_breaks == len(report.break_reasons) == breaks
    assert all(reason in text for text in report.break_reasons)
    assert nodes is None or report.forward_nodes == nodes
    assert report.break_reasons[0] in str(report)


def test_breaks_between_operations_have_their_place():
    (reason,) = explain(printing_between, torch.randn(3, 16)).break_reasons
    line = printing_between.__code__.co_firstlineno + 2
    assert reason.startswith(f"graph break at {__file__}:{line}: ")


def test_the_report_prints_and_is_data():
    report = explain(model(), torch.randn(3, 20))
    lines = str(report).splitlines()
    assert lines[0].split() == ["layer", "pass", "operand", "tensor", "cast", "GEMM", "padding"]
    row = "0 forward input float32[3, 20] PerTensorQuantizer(E4M3) both fprop emulated"
    assert " ".join(lines[2].split()) == row
    assert "forward nodes    2" in lines
    data = json.loads(json.dumps(report.to_dict()))
    assert data["nodes"][0]["gemms"] == {"fprop": "emulated"}
    assert data["backward_nodes"] == 2
    assert (
        str(explain(lambda x: x + 1, torch.ones(2))).splitlines()[0] == "linear layers    unknown"
    )


def test_statistics():
    net = model()
    x = torch.randn(3, 20)
    report = explain(net, x, again=(torch.randn(5, 20),), stats=True)
    found = report.statistics
    assert [(record.layer, record.tensor, record.casts) for record in found] == [
        (layer, tensor, 1) for layer in "02" for tensor in ("input", "weight", "grad_output")
    ]
    first = found[0]
    assert (first.elements, first.amax) == (60, x.abs().max())
    assert 25 < first.sqnr_db < 40
    assert found[4].amax == net[2].weight.abs().max()
    assert report.nodes[0].tensors.keys() == {"input", "weight", "bias"}
    assert json.loads(json.dumps(report.to_dict()))["statistics"][0]["amax"] == first.amax
    lines = [" ".join(line.split()) for line in str(report).splitlines()]
    head = "layer tensor amax underflow saturation nonfinite SQNR (dB) elements casts"
    row = lines[lines.index(head) + 2]
    assert row == f"0 input {first.amax:.4g} 0.000% 0.000% 0.000% {first.sqnr_db:.1f} 60 1"
    assert net[0].statistics is None
    assert explain(net, x).statistics is None


def test_statistics_of_a_training_are_left_alone():
    net = model()
    with collect_statistics(net, every=1) as statistics:
        net(torch.randn(3, 20))
        for stats in (False, True):
            report = explain(net, 100 * torch.randn(3, 20), stats=stats)
            assert report.nodes[0].tensors.keys() == {"input", "weight", "bias"}
        statistics.step()
    assert [record.casts for record in statistics.records] == [1] * 4
    assert statistics.records[0].amax < 10


STATELESS = {
    "no module": (lambda x: x, "statistics need a torch.nn.Module, got function"),
    "no layer": (nn.ReLU(), "no fg.Linear in ReLU"),
    "no data": (Linear(2, 2, device="meta"), "the layer '' is on the meta device"),
}


@pytest.mark.parametrize(("function", "message"), STATELESS.values(), ids=STATELESS)
def test_statistics_of_nothing(function, message):
    with pytest.raises(ConfigError, match=f"explain: .*{message}"):
        explain(function, torch.ones(2, 2), stats=True)


def test_not_callable():
    with pytest.raises(ConfigError, match="explain: a module or a function is needed, got Tensor"):
        explain(torch.ones(2))


def test_again_must_be_a_tuple():
    with pytest.raises(ConfigError, match="again must be a tuple of arguments, got Tensor"):
        explain(Linear(8, 8), torch.ones(2, 8), again=torch.ones(3, 8))


def test_a_reason_after_compiled_autograd():
    """Torch then numbers its graphs otherwise, for the rest of the process."""
    layer = Linear(32, 8, recipe="fp8-current")
    x = torch.randn(3, 32)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda x: layer(x).sum().backward(), backend="eager")(x)
    report = explain(layer, x, again=(torch.randn(5, 32),))
    assert "recompiled because input.shape[0] was" in str(report)
