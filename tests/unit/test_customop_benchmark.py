"""The benchmark of host time runs and writes what it promises; its numbers are no test."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def benchmark(*arguments):
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path):
    file = tmp_path / "numbers.json"
    out = benchmark("host_overhead", "--rounds", "2", "--json", str(file))
    assert out.returncode == 0, out.stderr
    numbers = json.loads(file.read_text())
    assert numbers["compiled"].keys() == numbers["eager"].keys()
    assert set(numbers["compiled"]["fullgraph.customop"]) == {"inference", "pair"}
    assert "target: compiled pair" in out.stdout


def test_an_unknown_benchmark_is_refused():
    out = benchmark("none")
    assert out.returncode == 1
    assert out.stderr.startswith(
        "usage: python -m benchmarks {compile_time,curves,errors,host_overhead,"
    )
