"""A second process starts warm: torch's caches hit, for train and eval, until the package's version changes."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import fullgraph

PACKAGE = Path(fullgraph.__file__).parent
TESTS = Path(__file__).parent.parent

SCRIPT = """
    import hashlib, json
    import torch
    from torch import nn
    from torch._dynamo.utils import counters
    from linear_cases import bytes_of, gradients, tensors
    import fullgraph as fg

    def layer(K, N, **options):
        return fg.Linear(K, N, dtype=torch.bfloat16, **{"recipe": "fp8-current", **options})

    def digest(results):
        text = hashlib.sha256()
        for name, value in results.items():
            text.update(name.encode() + value.reshape(-1).view(torch.uint8).numpy().tobytes())
        return text.hexdigest()

    def hits():
        names = {"fx": ("inductor", "fxgraph_cache"), "aot": ("aot_autograd", "autograd_cache")}
        found = {k: {w: counters[g][f"{n}_{w}"] for w in ("hit", "miss", "bypass")} for k, (g, n) in names.items()}
        torch._dynamo.reset()
        counters.clear()
        return found

    def between_layers(model):
        return lambda x: model[1](model[0](x, quantized_output=True))

    def out_of_the_graph(model):
        return lambda x: model(x, quantized_output=True)

    def autocast_inside(model):
        def run(x):
            with fg.autocast(fg.recipes.Float8CurrentScaling(power_of_two=True)):
                return model(x)
        return run

    torch.manual_seed(0)
    USES = {
        "plain": (layer(48, 32), lambda model: model, None),
        "bf16": (layer(48, 32, recipe="bf16"), lambda model: model, None),
        "dynamic": (layer(48, 24), lambda model: model, True),
        "quantized-weight": (layer(48, 40, quantized_weight=True), lambda model: model, None),
        "between-layers": (nn.ModuleList([layer(48, 32), layer(32, 16)]), between_layers, None),
        "out-of-the-graph": (layer(48, 16), out_of_the_graph, None),
        "autocast-inside": (layer(48, 56, recipe=None), autocast_inside, None),
    }
    report = {}
    for name, (model, use, dynamic) in USES.items():
        function = torch.compile(use(model), fullgraph=True, dynamic=dynamic)
        leaf = tensors((24, 48)).requires_grad_()
        output = function(leaf)
        results = bytes_of(output, "output")
        value = output.dequantize() if isinstance(output, fg.QuantizedTensor) else output
        value.backward(tensors(value.shape))
        report[name, "train"] = digest({**results, **gradients(model, [leaf])}), hits()
        with torch.no_grad():
            report[name, "eval"] = digest(bytes_of(function(leaf), "output")), hits()
    print(json.dumps([[*k, *v] for k, v in report.items()]))
"""


def run(package, cache):
    """Run the script in a process of its own: (use, mode) -> digest of the results, and cache counters."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(package.parent), str(TESTS)]),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
    }
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    rows = json.loads(process.stdout.splitlines()[-1])
    return {(use, mode): (digest, found) for use, mode, digest, found in rows}


def copy_of(package, folder, version):
    """The package at another place, perhaps with another version."""
    copied = folder / "fullgraph"
    shutil.copytree(package, copied, ignore=shutil.ignore_patterns("__pycache__"))
    (copied / "_version.py").write_text(f'"""Copied for a test."""\n\n__version__ = "{version}"\n')
    return copied


def test_caches_hit_until_the_version_changes(tmp_path):
    """One test, because each process takes seconds and later ones need what earlier ones left."""
    cache = tmp_path / "cache"
    version = fullgraph.__version__
    reports = {
        "cold": run(PACKAGE, cache),
        "warm": run(PACKAGE, cache),
        "elsewhere": run(copy_of(PACKAGE, tmp_path / "same", version), cache),
        "bumped": run(copy_of(PACKAGE, tmp_path / "other", f"{version}.post1"), cache),
    }
    digests = {key: digest for key, (digest, _) in reports["cold"].items()}
    assert len(set(digests.values())) == len(digests) == 14
    expected = {
        "cold": {"hit": False, "miss": True, "bypass": False},
        "warm": {"hit": True, "miss": False, "bypass": False},
        "elsewhere": {"hit": True, "miss": False, "bypass": False},
        "bumped": {"hit": False, "miss": True, "bypass": False},
    }
    for name, report in reports.items():
        assert {key: digest for key, (digest, _) in report.items()} == digests, name
        for key, (_, found) in report.items():
            for which, counts in found.items():
                happened = {what: count > 0 for what, count in counts.items()}
                assert happened == expected[name], (name, key, which, counts)
