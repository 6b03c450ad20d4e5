"""Seeds: drawn from torch's own generators, repeatable, one for each rank; and the order of the ops that draw.

What compiled, checkpointed and distributed training makes of them is in tests/compile/test_stochastic_rounding.py.
"""

import pytest
import torch

from fullgraph import random
from fullgraph.random import draw_seed, new_seed, of_rank, order_of, prepare

CPU = torch.device("cpu")
draws = pytest.mark.parametrize(
    "draw", [lambda: new_seed(CPU), lambda: draw_seed(torch.empty(3))], ids=["in-op", "node"]
)


@draws
def test_seeds_are_wide_and_differ(draw):
    seeds = [draw() for _ in range(100)]
    assert {(s.dtype, tuple(s.shape), s.device) for s in seeds} == {(torch.int64, (), CPU)}
    values = [s.item() for s in seeds]
    assert len(set(values)) == 100
    assert min(values) >= 0
    # 62 bits and more, every one of them zero in some seed and one in another.
    ones = sum(torch.tensor([[v >> bit & 1 for bit in range(62)] for v in values]))
    assert ((ones > 20) & (ones < 80)).all()


@draws
def test_torch_s_seed_repeats_them(draw):
    torch.manual_seed(3)
    first = [draw().item(), draw().item()]
    torch.manual_seed(3)
    assert [draw().item(), draw().item()] == first
    torch.manual_seed(4)
    assert draw().item() != first[0]
    state = torch.get_rng_state()
    third = draw().item()
    torch.set_rng_state(state)
    assert draw().item() == third


@draws
def test_drawing_moves_the_generator(draw):
    before = torch.get_rng_state()
    draw()
    assert not torch.equal(torch.get_rng_state(), before)


def test_fake_tensors_have_seeds():
    with torch._subclasses.FakeTensorMode():
        for seed in (draw_seed(torch.empty(3)), new_seed(CPU)):
            assert (seed.dtype, tuple(seed.shape)) == (torch.int64, ())
    assert draw_seed(torch.empty(3, device="meta")).device.type == "meta"


def of(monkeypatch, rank, seed):
    """`of_rank` of a seed where this process has this rank."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_rank", lambda: rank)
        return of_rank(torch.tensor(seed))


def test_every_rank_has_seeds_of_its_own(monkeypatch):
    """A permutation for each rank, which leaves the sign alone, and none of the first ranks meets another."""
    for seed in (0, 1, 2**63 - 1, 123456789):
        assert of_rank(torch.tensor(seed)).item() == seed  # no ranks
        found = [of(monkeypatch, rank, seed) for rank in range(2000)]
        assert {(t.dtype, tuple(t.shape)) for t in found} == {(torch.int64, ())}
        values = [t.item() for t in found]
        assert values[0] == seed
        assert len(set(values)) == 2000
        assert min(values) >= 0
    assert of(monkeypatch, 5, of(monkeypatch, 5, 77).item()).item() == 77


def test_the_order_is_one_tensor_for_each_device(monkeypatch):
    monkeypatch.setattr(random, "_ORDERS", {})
    assert order_of(CPU) is None
    prepare(CPU)
    order = order_of(CPU)
    prepare(CPU)
    assert order_of(CPU) is order
    assert (order.device, order.numel(), order.requires_grad) == (CPU, 1, False)
    prepare(torch.device("meta"))
    assert order_of(torch.device("meta")) is None
