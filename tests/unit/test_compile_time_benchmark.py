"""The benchmark of compile time runs and writes what it promises; its numbers are no test."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path):
    file = tmp_path / "numbers.json"
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    options = "--device cpu --blocks 2 --width 32 --recipes fp8-delayed --uses regional --json"
    out = subprocess.run(
        [sys.executable, "-m", "benchmarks", "compile_time", *options.split(), str(file)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert out.returncode == 0, out.stderr
    numbers = json.loads(file.read_text())["seconds"]
    assert numbers["regional"]["fp8-delayed"].keys() == {"cold", "warm", "graphs"}
    assert numbers["regional"]["fp8-delayed"]["graphs"] == 1
    assert out.stdout.startswith("seconds")
