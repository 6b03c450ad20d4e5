"""Delayed scaling on two ranks: one collective a step, the largest amax of both, the same scales on both.

One pair of processes that talk over gloo does all the checks; each process runs this file.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

SOURCES = Path(__file__).parents[2] / "src"
RANKS = 2
CHECKS = ["eager", "compiled", "switched_off", "subgroup", "one_rank_idle", "compiled_update"]


@pytest.fixture(scope="module")
def results():
    """Exit code, output and errors of each rank."""
    return run_ranks(CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks(check, results):
    for rank, (_, output, errors) in enumerate(results):
        assert f"{check} ok on {rank}\n" in output, errors


def test_both_ranks_end_well(results):
    assert [code for code, _, _ in results] == [0] * RANKS


def test_a_difference_is_noticed():
    assert any("AssertionError" in errors for _, _, errors in run_ranks(["broken"]))


def run_ranks(checks):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join([str(SOURCES), *sys.path])
    common = {"PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, *checks],
            env={**os.environ, **common, "RANK": str(rank), "WORLD_SIZE": str(RANKS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in ranks]
        return [(p.returncode, *output) for p, output in zip(ranks, outputs, strict=True)]
    finally:
        for process in ranks:
            process.kill()


def main(checks):
    import torch
    from torch import distributed, nn

    import fullgraph as fg
    from fullgraph.nn import update_scales
    from oracles import assert_same_bits

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()

    calls = []
    all_reduce = distributed.all_reduce

    def counted(*args, **kwargs):
        calls.append(args)
        return all_reduce(*args, **kwargs)

    distributed.all_reduce = counted

    def new_model(**options):
        recipe = fg.recipes.DelayedScaling(history_length=3, **options)
        other = fg.recipes.DelayedScaling(history_length=2, algorithm="most_recent", **options)
        torch.manual_seed(0)
        return nn.Sequential(fg.Linear(16, 16, recipe=recipe), fg.Linear(16, 16, recipe=other))

    def gathered(tensor):
        both = [torch.empty_like(tensor) for _ in range(RANKS)]
        distributed.all_gather(both, tensor.contiguous())
        return both

    def train(model, forward, *, shared=True, collectives=1, group=None, update=update_scales):
        states = [layer.scaling_state for layer in model]
        for number in range(4):
            torch.manual_seed(10 * number + rank)
            x = torch.randn(8, 16) * 2.0 ** (number + 3 * rank)
            forward(x).sum().backward()
            amaxes = [gathered(state.history()[0]) for state in states]
            before = [state.scales() for state in states]
            calls.clear()
            update(model, group=group)
            assert len(calls) == collectives
            for state, (first, second), old in zip(states, amaxes, before, strict=True):
                assert not torch.equal(first, second)
                mine = torch.maximum(first, second) if shared else (first, second)[rank]
                if len(state.amax_history):
                    assert_same_bits(state.amax_history[-1], torch.where(mine > 0, mine, 0))
                ours, theirs = gathered(state.scales())
                assert torch.equal(ours, theirs) == shared
                assert not torch.equal(state.scales(), old)

    def check_eager():
        model = new_model()
        train(model, model)

    def check_compiled():
        model = new_model()
        train(model, torch.compile(model, fullgraph=True, backend="aot_eager"))

    def check_switched_off():
        model = new_model(reduce_amax=False)
        train(model, model, shared=False, collectives=0)

    def check_subgroup():
        alone = [distributed.new_group([0]), distributed.new_group([1])][rank]
        both = distributed.new_group([0, 1])
        model = new_model()
        train(model, model, shared=False, collectives=0, group=alone)
        model = new_model()
        train(model, model, group=both)

    def check_one_rank_idle():
        """A rank whose layers did not run takes over what the others recorded."""
        model = new_model()
        if rank == 0:
            model(torch.full((4, 16), 2.0)).sum().backward()
        update_scales(model)
        assert model[0].fp8_scale[0] == 448 / 2
        for layer in model:
            assert_same_bits(*gathered(layer.fp8_scale))

    def check_compiled_update():
        def update(model, group):
            update_scales(model, group=group)

        compiled = torch.compile(update, fullgraph=True, backend="aot_eager")
        for group in (None, distributed.new_group([0, 1])):
            model = new_model()
            train(model, model, group=group, update=compiled)

    def check_broken():
        model = new_model(reduce_amax=False)
        train(model, model, shared=True, collectives=0)

    available = {
        "eager": check_eager,
        "compiled": check_compiled,
        "switched_off": check_switched_off,
        "subgroup": check_subgroup,
        "one_rank_idle": check_one_rank_idle,
        "compiled_update": check_compiled_update,
        "broken": check_broken,
    }
    for check in checks:
        available[check]()
        print(f"{check} ok on {rank}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
