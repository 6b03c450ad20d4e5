"""The command line as a user runs it: real processes, Inductor, Ctrl-C."""

import json
import signal
import subprocess
import sys
import time

import pytest

for extra in ("typer", "rich", "matplotlib"):
    pytest.importorskip(extra, reason="needs the extra cli")
pytestmark = pytest.mark.slow

from fullgraph.cli.gpt import GPTSize  # noqa: E402 (needs the extra)
from fullgraph.cli.train import TrainOptions, train  # noqa: E402
from fullgraph.recipes import BY_NAME  # noqa: E402

TRAIN = [sys.executable, "-m", "fullgraph.cli", "train", "--recipe", "fp8-current"]


def test_the_default_run(tmp_path):
    """FP8 within 3 % of bf16 after the default run, in one graph, in under five minutes."""
    options = ["--compare", "bf16", "--out", tmp_path / "out", "--json", tmp_path / "r.json"]
    start = time.perf_counter()
    subprocess.run([*TRAIN, *options], check=True)
    assert time.perf_counter() - start < 300
    result = json.loads((tmp_path / "r.json").read_text())
    assert abs(result["relative_difference"]) < 0.03
    assert result["loss"][0] > 5.4
    assert result["final_loss"] < 2.7
    for prefix in ("", "compare_"):
        assert result[f"{prefix}graph_breaks"] == result[f"{prefix}recompiles"] == 0
        counts = {
            result[f"{prefix}{n}"] for n in ("num_linears", "forward_nodes", "backward_nodes")
        }
        assert counts == {17}


@pytest.mark.parametrize("recipe", [name for name in BY_NAME if name != "bf16"])
def test_every_recipe_learns_what_bf16_learns(tmp_path, recipe):
    """Final losses within 3 % of bf16 for 8-bit recipes and 6 % for NVFP4, with Inductor."""
    size = GPTSize(num_layers=2, features=64, context=64)
    result = train(TrainOptions(recipe, compare="bf16", steps=80, out=tmp_path, size=size))
    assert result["compare_final_loss"] < 0.65 * result["compare_loss"][0], "bf16 learns nothing"
    assert abs(result["relative_difference"]) < (0.06 if recipe == "nvfp4" else 0.03)
    assert result["loss"] != result["compare_loss"], "nothing was quantized"
    assert result["graph_breaks"] == result["recompiles"] == 0


@pytest.mark.parametrize("moment", ["compiling", "training"])
def test_ctrl_c(tmp_path, moment):
    options = ["--compare", "bf16", "--out", tmp_path / "out", "--json", tmp_path / "r.json"]
    with subprocess.Popen([*TRAIN, *options], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("step 1/" if moment == "training" else "compiling"):
                break
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(timeout=60) == 130
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["interrupted"]
    assert (result["steps"] > 0) == (moment == "training")
    lines = (tmp_path / "out" / "loss.jsonl").read_text().splitlines()
    assert len(lines) == result["steps"] == len(result["loss"]) == len(result["compare_loss"])
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
