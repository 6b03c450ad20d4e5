"""Random numbers of stochastic rounding: repeatable from a seed, never shared, the same compiled and checkpointed."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint

import fullgraph as fg
from fullgraph import random
from fullgraph.recipes import Recipe
from linear_cases import batch, gradients, tensors
from oracles import assert_same_bits

backends = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
K, N = 48, 32


@dataclasses.dataclass(frozen=True)
class StochasticEverywhere(Recipe):
    """Rounds stochastically in the forward pass as well."""

    def quantizer(self, role):
        return fg.NVFP4Quantizer(stochastic_rounding=True)


RECIPES = {"backward": "nvfp4", "everywhere": StochasticEverywhere()}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def train(function, module, x, grad_output, seed=3):
    """Output and all gradients after `torch.manual_seed(seed)`."""
    module.zero_grad()
    leaf = x.detach().requires_grad_()
    torch.manual_seed(seed)
    output = function(leaf)
    output.backward(grad_output)
    return {"output": output.detach(), "grad_input": leaf.grad, **gradients(module)}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


class Siblings(nn.Module):
    """Layers whose backward passes do not depend on each other, and one that reads them all."""

    def __init__(self, recipe):
        super().__init__()
        options = {
            "recipe": recipe
        }  # float32: Inductor rounds sums of bfloat16 otherwise than eager mode
        self.siblings = nn.ModuleList([fg.Linear(K, n, **options) for n in (64, 32, 96, 16)])
        self.last = fg.Linear(208, N, **options)

    def forward(self, x):
        hidden = torch.cat([layer(x).relu() for layer in self.siblings], -1)
        return self.last(hidden)


@pytest.fixture(autouse=True)
def _inductor_draws_as_eager_does():
    with inductor_config.patch(fallback_random=True):
        yield


@backends
@recipes
def test_compiled_equals_eager(recipe, backend):
    model = Siblings(recipe)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x, grad_output = batch(40, K, N, dtype=torch.float32)
    for seed in (3, 4):
        expected = train(model, model, x, grad_output, seed)
        got = train(compiled, model, x, grad_output, seed)
        for name, value in expected.items():
            assert_same_bits(got[name], value)


@recipes
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_repeatable_from_a_seed_and_different_without(recipe, compiled):
    layer = fg.Linear(K, N, recipe=recipe, dtype=torch.bfloat16)
    function = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x, grad_output = batch(40, K, N)
    first = train(function, layer, x, grad_output)
    assert same(train(function, layer, x, grad_output), first)
    assert not same(train(function, layer, x, grad_output, seed=4), first)
    torch.manual_seed(3)
    steps = []
    for _ in range(3):
        layer.zero_grad()
        function(x).backward(grad_output)
        steps.append(layer.weight.grad.clone())
    assert_same_bits(steps[0], first["grad_weight"])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(steps, 2))


def test_the_forward_pass_draws_only_if_it_rounds():
    x, _ = batch(40, K, N)
    for recipe, draws in (("nvfp4", False), (StochasticEverywhere(), True), ("mxfp8", False)):
        layer = fg.Linear(K, N, recipe=recipe, dtype=torch.bfloat16)
        before = torch.get_rng_state()
        layer(x)
        assert torch.equal(torch.get_rng_state(), before) != draws


def test_layers_do_not_share():
    one = fg.Linear(K, N, recipe="nvfp4", dtype=torch.bfloat16, bias=False)
    other = fg.Linear(K, N, recipe="nvfp4", dtype=torch.bfloat16, bias=False)
    other.load_state_dict(one.state_dict())
    x, grad_output = batch(40, K, N)
    torch.manual_seed(3)
    torch.autograd.backward([one(x), other(x)], [grad_output, grad_output])
    assert not torch.equal(one.weight.grad, other.weight.grad)


def test_ranks_do_not_share(monkeypatch):
    distributed = torch.distributed
    seeds = []
    for rank in range(4):
        monkeypatch.setattr(distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(distributed, "get_rank", lambda rank=rank: rank)
        torch.manual_seed(3)
        seeds.append(random.new_seed(torch.device("cpu")).item())
    assert len(set(seeds)) == 4
    monkeypatch.undo()
    torch.manual_seed(3)
    assert random.new_seed(torch.device("cpu")).item() == seeds[0]


@pytest.mark.parametrize("how", ["eager", "aot_eager", "inductor"])
@recipes
def test_checkpointing_repeats_the_same_bits(recipe, how):
    model = Siblings(recipe)
    x, grad_output = batch(40, K, N, dtype=torch.float32)

    def checkpointed(x):
        return checkpoint(model, x, use_reentrant=False)

    function = checkpointed
    if how != "eager":
        function = torch.compile(checkpointed, backend=how, fullgraph=True)
    expected = train(model, model, x, grad_output)
    got = train(function, model, x, grad_output)
    for name, value in expected.items():
        assert_same_bits(got[name], value)


def test_a_copy_of_the_columns_rounds_differently():
    x = torch.full((64, 64), 0.3)
    x[0, 0] = 6.0
    q = fg.quantize(x, fg.NVFP4Quantizer(stochastic_rounding=True), fg.BOTH)
    assert not torch.equal(q.data, q.columnwise_data)


def test_rounding_is_unbiased():
    x = torch.empty(64, 64).uniform_(-6, 6)
    x[:, ::16] = 6.0  # one scale for all blocks
    quantizer = fg.NVFP4Quantizer(stochastic_rounding=True)
    mean = torch.stack([fg.quantize(x, quantizer).dequantize() for _ in range(400)]).mean(0)
    nearest = fg.quantize(x, fg.NVFP4Quantizer()).dequantize()
    assert (mean - x).abs().mean() < 0.25 * (nearest - x).abs().mean()
    assert (mean - x).mean().abs() < 0.005


def test_eager_draws_are_those_of_the_default_generator():
    x = tensors((8, 16))
    quantizer = fg.NVFP4Quantizer(stochastic_rounding=True)
    torch.manual_seed(5)
    first = fg.quantize(x, quantizer)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(fg.quantize(x, quantizer).data, first.data)
