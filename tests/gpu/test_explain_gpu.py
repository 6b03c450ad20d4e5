"""`fg.explain` and `fullgraph.testing` on a GPU: native routes, padding, random numbers, tensors there."""

import pytest
import torch

from fullgraph.explain import explain
from fullgraph.kernels import compute_capability
from fullgraph.nn import Linear
from fullgraph.testing import assert_bitwise, assert_compiles_once, assert_one_graph

pytestmark = pytest.mark.gpu


@pytest.fixture
def layer():
    return Linear(20, 40, recipe="fp8-current", device="cuda", dtype=torch.bfloat16)


def batch(tokens):
    return torch.randn(tokens, 20, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def test_routes_and_padding(layer):
    if compute_capability(torch.device("cuda")) < (8, 9):
        pytest.skip("needs FP8 units")
    forward, backward = explain(layer, batch(3)).nodes
    assert forward.gemms == {"fprop": "native"}
    assert forward.padding == {"fprop": "K 20 -> 32"}
    assert backward.gemms == {"dgrad": "native", "wgrad": "native"}
    assert backward.padding == {"dgrad": "N 40 -> 48", "wgrad": "M 3 -> 16"}
    forward, backward = explain(layer, batch(3), dynamic=True).nodes
    assert backward.padding["wgrad"].endswith("-> a multiple of 16")


def test_random_numbers_are_restored(layer):
    dropping = torch.nn.Sequential(layer, torch.nn.Dropout(0.5))
    x = batch(4)
    state = torch.cuda.get_rng_state()
    explain(dropping, x)
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_assertions(layer):
    graphs = assert_one_graph(layer, batch(4))
    assert (len(graphs.forward), len(graphs.backward)) == (1, 1)
    assert_compiles_once(layer, (batch(4),), (batch(9),), dynamic=True)
    x = batch(4).detach()
    assert_bitwise(x, x.clone())
    with pytest.raises(AssertionError, match=r"on cuda:0 is not bfloat16.* on cpu"):
        assert_bitwise(x, x.cpu())
    changed = x.clone()
    changed[1, 2] += 1
    with pytest.raises(AssertionError, match=r"1 of 80 elements .* the first at \[1, 2\]"):
        assert_bitwise(x, changed)
