"""A second process starts warm from torch's compile caches, and does not when the ops have changed."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import customop_ops as ops
import fullgraph
from fullgraph.errors import CompileError

TESTS = Path(__file__).parent.parent
SCRIPT = """
    import json, sys

    import torch
    import customop_ops as ops
    from fullgraph.customop import define
    from torch._dynamo.utils import counters

    ops.linear = define(
        "tests::cached",
        forward=ops.linear._forward,
        backward=ops.linear._backward,
        gradients=("x", "weight", "bias"),
        version=sys.argv[1],
    )

    def run(name, model):
        compiled = torch.compile(model, fullgraph=True)
        torch.manual_seed(1)
        tensors = []
        for _ in range(2):
            x = torch.randn(3, 8, dtype=torch.bfloat16).requires_grad_()
            y = compiled(x)
            ops.plain(y).sum().backward()
            tensors += [ops.plain(y).detach(), x.grad]
        tensors += [p.grad for p in model.parameters()] + list(model.buffers())
        with torch.no_grad():
            tensors.append(ops.plain(compiled(x)))
        results[name] = [t.double().flatten().tolist() for t in tensors if t is not None]

    results = {}
    structured = ops.Numerics(structured_output=True)
    torch.manual_seed(0)
    run("plain", torch.nn.Sequential(ops.Linear(8, 8), ops.Linear(8, 8)))
    run("structured", torch.nn.Sequential(ops.Linear(8, 8, structured), ops.Linear(8, 8, structured, int8_weight=True)))
    run("state", ops.Linear(8, 8, state=True, main_grad=True))
    counts = {
        "fx": [counters["inductor"][f"fxgraph_cache_{what}"] for what in ("hit", "miss", "bypass")],
        "aot": [counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("hit", "miss", "bypass")],
    }
    print(json.dumps({"results": results, **counts}))
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """Run the script in a process of its own; all share one cache directory."""
    cache = tmp_path_factory.mktemp("inductor")

    def run(version="0"):
        path = os.pathsep.join(str(p) for p in (TESTS.parent / "src", TESTS))
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": path}
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), version]
        out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        assert out.returncode == 0, out.stderr
        return json.loads(out.stdout.splitlines()[-1])

    run.cold = run()
    return run


GRAPHS = 6
"""Three models, each trained and evaluated."""


def test_the_first_process_compiles(process):
    assert process.cold["aot"] == [0, GRAPHS, 0]
    hits, misses, bypasses = process.cold["fx"]
    assert (hits, bypasses) == (0, 0)
    assert misses >= GRAPHS


def test_a_second_process_starts_warm(process):
    warm = process()
    assert warm["aot"] == [GRAPHS, 0, 0]
    assert warm["fx"][1:] == [0, 0]
    assert warm["results"] == process.cold["results"]


def test_a_new_version_of_an_op_compiles_anew(process):
    changed = process(version="1")
    assert changed["aot"] == [0, GRAPHS, 0]
    assert changed["fx"][0] == 0
    assert changed["results"] == process.cold["results"]


def test_tokens_carry_the_versions_of_package_and_op():
    """Caches know our Python by these alone."""
    token = ops.linear.encode(numerics=ops.Numerics())
    assert token.startswith(f"salt='{fullgraph.__version__}/0/")


def test_a_graph_of_another_version_is_recognised():
    """A cached graph that calls an op as it used to be, because its version stayed the same."""
    token = ops.swiglu.encode()
    x = torch.ones(2)
    with pytest.raises(
        CompileError, match=r"fields \['gate', 'up'\], a compiled graph calls it with \['gate'\]"
    ):
        ops.swiglu.fwd_op([x], f"{token},gate=T[torch.float32],needs=()")
