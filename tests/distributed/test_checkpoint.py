"""`torch.distributed.checkpoint` on two ranks: replicated models with quantized weights, and sharded ones.

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
CHECKS = ["replicated", "sharded"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Exit code, output and errors of each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join([str(SOURCES), *sys.path])
    common = {"PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, folder],
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


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks(check, results):
    for rank, (_, output, errors) in enumerate(results):
        assert f"{check} ok on {rank}\n" in output, errors


def test_both_ranks_end_well(results):
    assert [code for code, _, _ in results] == [0] * RANKS


def main(folder):
    import torch
    import torch.distributed.checkpoint as dcp
    from torch import distributed, nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    import fullgraph as fg
    from linear_cases import bytes_of
    from oracles import assert_same_bits

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()

    def new(seed, quantized_weight=False, shard=None):
        torch.manual_seed(seed)
        options = {"recipe": "fp8-delayed", "quantized_weight": quantized_weight}
        model = nn.Sequential(fg.Linear(32, 16, **options), nn.ReLU(), fg.Linear(16, 8, **options))
        if shard is not None:
            shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer, seed, different_ranks):
        torch.manual_seed(seed + (rank if different_ranks else 0))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
            fg.update_scales(model)

    def local(state):
        tensors = {}
        for name, tensor in state.items():
            plain = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            tensors.update(bytes_of(plain, name))
        return tensors

    def assert_same(a, b):
        a, b = local(a[0].state_dict()), local(b[0].state_dict())
        assert a.keys() == b.keys()
        for name, tensor in b.items():
            assert_same_bits(a[name], tensor)

    def round_trip(name, different_ranks, **options):
        pair, resumed = new(1, **options), new(2, **options)
        train(*pair, 0, different_ranks)
        model, optimizer = get_state_dict(*pair)
        path = f"{folder}/{name}"
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        model, optimizer = get_state_dict(*resumed)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            *resumed, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        assert resumed[0][0].fp8_scale[0] != 1
        assert_same(resumed, pair)
        for each in (pair, resumed):
            train(*each, 5, different_ranks)
        assert_same(resumed, pair)
        print(f"{name} ok on {rank}", flush=True)

    def shard(model):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    round_trip("replicated", different_ranks=False, quantized_weight=True)
    round_trip("sharded", different_ranks=True, shard=shard)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
