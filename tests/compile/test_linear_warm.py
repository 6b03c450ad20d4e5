"""A second process starts warm: torch's caches hit in every recipe and use, until the package's version changes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fullgraph
import warm_start

PACKAGE = Path(fullgraph.__file__).parent
TESTS = Path(__file__).parent.parent
FEW = ("fp8-delayed", "quantized-weight")
"""Uses for what does not depend on the use."""


def run(cache, *arguments, package=PACKAGE):
    """Run `warm_start` in a process of its own: (use, mode) -> (digest of the results, cache counters)."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(package.parent), str(TESTS)]),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
    }
    command = [sys.executable, str(TESTS / "warm_start.py"), *map(str, arguments)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout.splitlines()[-1])
    return {(use, mode): tuple(v) for use, modes in report.items() for mode, v in modes.items()}


def copy_of(package, folder, version):
    """The package at another place, perhaps with another version."""
    copied = folder / "fullgraph"
    shutil.copytree(package, copied, ignore=shutil.ignore_patterns("__pycache__"))
    (copied / "_version.py").write_text(f'"""Copied for a test."""\n\n__version__ = "{version}"\n')
    return copied


def assert_caches(report, *, hit):
    for key, (_, found) in report.items():
        for cache, counts in found.items():
            happened = {what: count > 0 for what, count in counts.items()}
            assert happened == {"hit": hit, "miss": not hit, "bypass": False}, (key, cache, counts)


def digests(report):
    return {key: digest for key, (digest, _) in report.items()}


@pytest.mark.timeout(600)
def test_caches_hit_until_the_version_changes(tmp_path):
    """One test, because each process takes seconds and later ones need what earlier ones left."""
    cache, version = tmp_path / "cache", fullgraph.__version__
    cold = run(cache)
    assert_caches(cold, hit=False)
    assert len(cold) == 2 * len(warm_start.USES)
    assert len(set(digests(cold).values())) == len(cold)
    warm = run(cache)
    assert_caches(warm, hit=True)
    assert digests(warm) == digests(cold)
    for name, hit in ((version, True), (f"{version}.post1", False)):
        moved = run(cache, *FEW, package=copy_of(PACKAGE, tmp_path / name, name))
        assert_caches(moved, hit=hit)
        assert digests(moved) == {key: digests(cold)[key] for key in moved}


def test_caches_travel_as_one_file(tmp_path):
    """`torch.compiler.save_cache_artifacts`: another machine, an empty cache directory."""
    file = tmp_path / "artifacts"
    cold = run(tmp_path / "here", "--save", file, *FEW)
    assert_caches(cold, hit=False)
    warm = run(tmp_path / "there", "--load", file, *FEW)
    assert_caches(warm, hit=True)
    assert digests(warm) == digests(cold)
