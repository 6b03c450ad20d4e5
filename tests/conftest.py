"""What every test gets: its own caches, one thread, a seed, no leftover graphs, verified plans.

Settings that torch reads when it is imported stand before the first import of torch.
"""

import atexit
import os
import random
import shutil
import sys
import tempfile
from collections import Counter

# Every process compiles from nothing: a stale cache would hide a change of our Python, which the
# caches do not see. xdist workers inherit the environment and need a directory each all the same.
_inductor_cache = tempfile.mkdtemp(prefix="fullgraph-tests-")
atexit.register(shutil.rmtree, _inductor_cache, ignore_errors=True)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _inductor_cache
# The tests run in parallel already.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import pytest
import torch

from fullgraph import customop

torch.set_num_threads(1)
customop.set_verify_plans(True)


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter):
    """Say how many tests were skipped, and why."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    terminalreporter.write_line(f"skipped: {sum(reasons.values())}")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"  {count} x {reason}")


@pytest.fixture(autouse=True)
def seed():
    """The same random numbers in every test, alone or among others."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """No compiled code, counter or recompile limit reaches the next test."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
