"""Delayed scaling on a GPU: the cast and the update against the reference, bit for bit; training under CUDA graphs."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fullgraph as fg
import oracles
from fullgraph import kernels, reference
from fullgraph.customop.token import encode
from fullgraph.delayed import ScalingRule
from fullgraph.formats import BOTH, Format, Orientation
from fullgraph.nn import update_scales
from fullgraph.ops import scaling
from linear_cases import assert_same_results
from oracles import assert_same_bits

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
NAN, INF, TINY, FLT_MAX = float("nan"), float("inf"), 1.4e-45, 3.4028234663852886e38

FORMATS = [Format.E4M3, Format.E5M2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
# One element, one row, one column, ragged, one whole tile (64 x 128), just over a tile, many; nothing.
SHAPES = [
    (1, 1),
    (1, 300),
    (300, 1),
    (13, 767),
    (64, 128),
    (65, 129),
    (1000, 2050),
    (0, 5),
    (16, 0),
]
FACTORS = [1.0, 448 / 3.3, 0.37, 1e-20, 1e20, FLT_MAX, TINY]

by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _kernels_run_here():
    if not kernels.available(GPU):
        pytest.skip("the kernels need compute capability 9.0 and Triton")


def gaussian(shape, dtype):
    return torch.randn(shape, device=GPU).to(dtype)


def random_bits(shape, dtype):
    """Any bit pattern: NaNs of all payloads, infinities, subnormals, 76 orders of magnitude."""
    limits = torch.iinfo(INTEGERS[dtype])
    bits = torch.randint(limits.min, limits.max + 1, shape, dtype=torch.int64, device=GPU)
    return bits.to(INTEGERS[dtype]).view(dtype)


def assert_same_cast(x, factor, format, *, before=0.0, slot=0, **options):
    """Kernel on the GPU = reference on the CPU, the whole state included; the transpose = the rowwise copy."""
    results = []
    for backend, device in ((kernels, GPU), (reference, torch.device("cpu"))):
        scales = torch.full((3,), 7.0, device=device)
        amaxes = torch.full((3,), 0.25, device=device)
        scales[slot], amaxes[slot] = factor, before
        copies = backend.cast_delayed(x.to(device), scales[slot], amaxes[slot], format, **options)
        results.append([*copies, scales, amaxes])
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_same_bits(ours, theirs)
            assert ours.stride() == torch.empty(ours.shape).stride()
    rowwise, columnwise, *_ = results[0]
    if rowwise is not None and columnwise is not None:
        rows, columns = x.shape
        assert_same_bits(columnwise[:, :rows], rowwise[:, :columns].t())


@by_format
@by_dtype
def test_cast_over_shapes(format, dtype):
    for number, shape in enumerate(SHAPES):
        for pad in (1, 16):
            x = gaussian(shape, dtype)
            options = {"slot": number % 3, "orientation": BOTH, "pad": pad}
            assert_same_cast(x, 100.0, format, **options)


@by_format
@by_dtype
def test_cast_over_scales_and_amaxes(format, dtype):
    x = torch.tensor([[1.0, -1e-30, 0.0, -0.0, 1e-44, 6e4, -3.3]], device=GPU).to(dtype)
    special = torch.tensor([[INF, -INF, NAN, -NAN, 2.0]], device=GPU).to(dtype)
    for factor in FACTORS:
        for before in (0.0, 1e-40, 5.0, FLT_MAX, INF):
            assert_same_cast(x, factor, format, before=before, slot=1)
            assert_same_cast(special, factor, format, before=before, slot=2)
            assert_same_cast(special[:, 2:4], factor, format, before=before)


@by_format
@by_dtype
def test_cast_over_bit_patterns(format, dtype):
    x = random_bits((512, 1024), dtype)
    for factor in (1.0, 3.3, 1e-20):
        assert_same_cast(x, factor, format, orientation=BOTH)


@by_format
def test_cast_over_ties(format):
    table = torch.from_numpy(oracles.finite_values(format.name))
    ties = ((table[1:] + table[:-1]) / 2).float()
    up = torch.nextafter(ties, torch.full_like(ties, INF))
    down = torch.nextafter(ties, torch.zeros_like(ties))
    x = torch.stack([up, -ties, ties, down], 1).to(GPU)
    for factor in (1.0, 2.0**-10):
        assert_same_cast(x / factor, factor, format, orientation=BOTH)


@pytest.mark.parametrize("orientation", Orientation)
def test_cast_over_orientations_and_strides(orientation):
    x = gaussian((128, 256), torch.bfloat16)
    views = [x, x.t(), x[::2, 3:], x[:1].expand_as(x), x[:, :1].expand_as(x), x[3:70]]
    for view in views:
        for pad in (1, 16):
            assert_same_cast(view, 50.0, Format.E4M3, orientation=orientation, pad=pad)


@by_format
@by_dtype
def test_large_matrices(format, dtype):
    """Every transposed byte over thousands of tiles, the place of a known miscompile; one amax out of all tiles."""
    for shape in ((4096, 4096), (2050, 1030)):
        x = gaussian(shape, dtype)
        x[-1, -1], x[shape[0] // 2, 5] = -300.0, NAN
        amax, scale = torch.zeros((), device=GPU), torch.tensor(50.0, device=GPU)
        rowwise, columnwise, _ = kernels.cast_delayed(
            x, scale, amax, format, orientation=BOTH, pad=16
        )
        rows, columns = shape
        assert amax.item() == 300
        assert_same_bits(columnwise[:, :rows], rowwise[:, :columns].t())
        assert_same_bits(rowwise, reference.cast_delayed(x, scale, None, format, pad=16)[0])


def test_no_amax_and_twice():
    x = gaussian((65, 129), torch.bfloat16)
    scale, amax = torch.tensor(50.0, device=GPU), torch.zeros((), device=GPU)
    first = kernels.cast_delayed(x, scale, amax, Format.E4M3, orientation=BOTH)
    once = amax.clone()
    for state in (amax, None):
        again = kernels.cast_delayed(x, scale, state, Format.E4M3, orientation=BOTH)
        for ours, theirs in zip((*again, amax), (*first, once), strict=True):
            assert_same_bits(ours, theirs)


# The update.

RULES = [
    ScalingRule(4),
    ScalingRule(1),
    ScalingRule(7, "most_recent", margin=1),
    ScalingRule(1024, margin=-2.5, formats=(*[Format.E5M2] * 2, *[Format.E4M3] * 2)),
]


def states_of(rules, device):
    """The arguments of the update but for the group."""
    made = [
        [torch.zeros(3, device=device) for _ in rules],
        [torch.zeros(1, device=device) for _ in rules],
        [torch.zeros(rule.history_length - 1, 4, device=device) for rule in rules],
        [torch.ones(3, device=device) for _ in rules],
        [torch.ones(1, device=device) for _ in rules],
    ]
    return [*made, scaling.encode_rules([encode(rule) for rule in rules])]


def record(states, amaxes):
    for i, row in enumerate(amaxes):
        states[0][i].copy_(row[:3])
        states[1][i].copy_(row[3:])


def random_amaxes(layers):
    pool = torch.tensor([0.0, 0.0, INF, NAN, TINY, 1e-39, 1e-5, 3.3, 448.0, 6e4, FLT_MAX])
    special = pool[torch.randint(len(pool), (layers, 4))]
    usual = torch.rand(layers, 4) * 2.0 ** torch.randint(-20, 20, (layers, 4))
    return torch.where(torch.rand(layers, 4) < 0.5, special, usual)


def assert_same_states(ours, theirs):
    for left, right in zip(ours[:5], theirs[:5], strict=True):
        for a, b in zip(left, right, strict=True):
            assert_same_bits(a, b)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_update_equals_the_cpu_and_waits_for_nothing():
    rules = RULES * 50
    here, there = states_of(rules, GPU), states_of(rules, "cpu")
    for _ in range(12):
        amaxes = random_amaxes(len(rules))
        for states in (here, there):
            record(states, amaxes)
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            scaling.update_scales(*here, "")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        scaling.update_scales(*there, "")
        assert_same_states(here, there)


def test_update_in_a_cuda_graph():
    rules = RULES * 3
    here, there = states_of(rules, GPU), states_of(rules, "cpu")
    scaling.update_scales(*here, "")  # nothing recorded: nothing changes
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaling.update_scales(*here, "")
    for _ in range(6):
        amaxes = random_amaxes(len(rules))
        for states in (here, there):
            record(states, amaxes)
        graph.replay()
        scaling.update_scales(*there, "")
        assert_same_states(here, there)


# Layers.


def new_model(device=GPU):
    torch.manual_seed(0)
    recipe = fg.recipes.DelayedScaling(history_length=4)
    layers = [fg.Linear(256, 256, dtype=torch.bfloat16, recipe=recipe) for _ in range(2)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1]).to(device)


def everything(model):
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    found |= {
        f"grad of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    for i in (0, 2):
        found |= {f"{i}.scale": model[i].fp8_scale, f"{i}.history": model[i].fp8_amax_history}
    return found


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_training_compiled_equals_eager(mode, microbatches):
    models = new_model(), new_model()
    compiled = torch.compile(models[0], fullgraph=True, mode=mode)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    for number in range(12):
        data = [
            (
                gaussian((50, 256), torch.bfloat16) * 2.0 ** (number % 5),
                gaussian((50, 256), torch.bfloat16),
            )
            for _ in range(microbatches)
        ]
        torch.compiler.cudagraph_mark_step_begin()
        results = []
        for model, forward in zip(models, (compiled, models[1]), strict=True):
            model.zero_grad()
            outputs = [forward(x) for x, _ in data]
            copies = {f"output{i}": output.detach().clone() for i, output in enumerate(outputs)}
            for output, (_, grad_output) in zip(outputs, data, strict=True):
                output.backward(grad_output * 1e-3)
            results.append({**copies, **everything(model)})
        assert_same_results(*results)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.step()
            update_scales(model)
        assert_same_results(*[everything(model) for model in models])
    assert models[0][0].fp8_scale[0] != 1
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_the_state_moves_with_the_layer():
    model = new_model()
    model(gaussian((8, 256), torch.bfloat16)).sum().backward()
    update_scales(model)
    model(2 * gaussian((8, 256), torch.bfloat16)).sum().backward()
    before = copy.deepcopy(everything(model))
    for device in ("cpu", GPU):
        model.to(device)
        for i in (0, 2):
            assert model[i].scaling_state.device == torch.device(device)
            assert model[i].scaling_state.amax_history.device == torch.device(device)
        moved = everything(model)
        for name in ("0.scale", "0.history", "2.scale", "2.history"):
            assert_same_bits(moved[name], before[name])
    resumed = new_model("cpu")
    resumed.load_state_dict(model.state_dict())
    for i in (0, 2):
        assert_same_bits(resumed[i].fp8_amax_history, model[i].fp8_amax_history)


def test_a_state_that_was_left_behind_follows():
    """Parameters that something moves without `Module.to`, as FSDP does."""
    model = new_model("cpu")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(GPU)
    model(gaussian((8, 256), torch.bfloat16)).sum().backward()
    assert model[0].scaling_state.device == GPU
    assert model[0].scaling_state.forward_amax[0] > 0
