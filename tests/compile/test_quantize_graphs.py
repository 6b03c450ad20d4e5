"""`fg.quantize` under `torch.compile`: the bytes of eager code, one graph for every size, the same random numbers."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

import fullgraph as fg
from fullgraph.customop.structured import flatten
from linear_cases import tensors
from oracles import assert_same_bits
from oracles_quantizers import CASES, QUANTIZERS, orientations_of


@pytest.fixture(autouse=True)
def _inductor_draws_as_eager_does():
    with inductor_config.patch(fallback_random=True):
        yield


by_name = {"ids": lambda o: o.name if isinstance(o, fg.Orientation) else str(o)}


def assert_compiled_equals_eager(function, backend, shapes):
    """Values, gradients and every stored byte, in one graph for all shapes."""
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for shape in shapes:
        x, results = tensors(shape), []
        for run in (function, compiled):
            leaf = x.detach().requires_grad_()
            torch.manual_seed(5)
            q, values = run(leaf)
            (values * 2).sum().backward()
            results.append((values.detach(), leaf.grad, *flatten(q)))
        for ours, theirs in zip(*results, strict=True):
            assert_same_bits(ours, theirs)
    assert counters["stats"]["unique_graphs"] == 1


# Every quantizer with both copies; single copies of one for each way to store them.
COMPILED = [
    (name, orientation)
    for name, orientation in CASES
    if orientation is orientations_of(QUANTIZERS[name])[-1]
    or name in ("per-tensor", "block", "nvfp4", "hybrid-nvfp4-mx")
]


@pytest.mark.parametrize(("name", "orientation"), COMPILED, **by_name)
def test_compiled_equals_eager(name, orientation):
    quantizer = QUANTIZERS[name]

    def both(x):
        q = fg.quantize(x, quantizer, orientation)
        return q, q.dequantize()

    # Also sizes of one block, and of one row: what torch would take for constants.
    assert_compiled_equals_eager(both, "aot_eager", [(6, 40), (2, 16), (33, 50)])


# Inductor only ever sees the op, so its own code is the same for all of them.
@pytest.mark.parametrize("name", ["per-tensor", "nvfp4-hadamard-stochastic", "hybrid-again"])
def test_compiled_by_inductor(name):
    def both(x):
        q = fg.quantize(x * 3, QUANTIZERS[name], fg.BOTH)
        return q, q.dequantize()

    assert_compiled_equals_eager(both, "inductor", [(2, 3, 40), (3, 5, 50)])


def test_a_quantizer_made_in_a_compiled_function():
    def both(x):
        first = fg.NVFP4Quantizer(two_dimensional=True)
        q = fg.quantize(x, fg.HybridQuantizer(first, fg.MXQuantizer(fg.Format.E5M2)), fg.BOTH)
        return q, q.dequantize()

    assert_compiled_equals_eager(both, "aot_eager", [(6, 40), (9, 50)])


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["nvfp4-stochastic", "hybrid-again-stochastic"])
def test_compiled_code_draws_what_eager_code_draws(name, backend):
    def twice(x):
        return fg.quantize(x, QUANTIZERS[name]), fg.quantize(x, QUANTIZERS[name])

    x, draws = torch.randn(32, 64), []
    compiled = torch.compile(twice, backend=backend, fullgraph=True)
    for run, seed in ((twice, 1), (compiled, 1), (compiled, 1), (compiled, 2)):
        torch.manual_seed(seed)
        draws.append([q.part_data for q in run(x)])
    for repeated in draws[1:3]:
        for ours, theirs in zip(repeated, draws[0], strict=True):
            assert_same_bits(ours, theirs)
    assert len({d.numpy().tobytes() for pair in draws for d in pair}) == 4
