"""The benchmarks of casts, errors and training run, say what they promise, and agree with the documentation.

Times are no test: they come from a GPU, and are in benchmarks/results.
"""

import dataclasses
import importlib
import json
import re
from pathlib import Path

import pytest
import torch

import fullgraph as fg
from fullgraph.recipes import BY_NAME

ROOT = Path(__file__).parents[2]
LOW_PRECISION = [name for name in BY_NAME if name != "bf16"]


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a module of benchmarks/, which is not installed."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def page():
    return (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")


def test_quantize_on_a_cpu(benchmark, tmp_path, capsys):
    options = ["--device", "cpu", "--shapes", "24x40", "7x33", "--rounds", "2"]
    benchmark("quantize").main([*options, "--out", str(tmp_path)])
    (file,) = tmp_path.glob("quantize_cpu_*.json")
    results = json.loads(file.read_text())
    assert results["casts"] == "reference"
    assert set(results["shapes"]) == {"24x40", "7x33"}
    for rows in results["shapes"].values():
        tensors = {(r["recipe"], role) for r in rows for role in r["roles"].split(", ")}
        roles = ("input", "weight", "grad_output")
        assert tensors == {(recipe, role) for recipe in LOW_PRECISION for role in roles}
        assert {row["copies"] for row in rows} == {"rowwise", "columnwise", "both"}
        assert all(row["equal"] for row in rows)
        assert all(row["eager_ms"] > 0 and row["share"] > 0 for row in rows)
        assert all(row["device_ms"] is row["memory"] is None for row in rows)
        has_api = {(r["recipe"], r["copies"]) for r in rows if r["api_ms"] is not None}
        assert has_api == {(recipe, "both") for recipe in LOW_PRECISION if recipe != "fp8-delayed"}
    page = file.with_suffix(".md").read_text()
    assert page in capsys.readouterr().out
    assert page.count("| yes |") == sum(map(len, results["shapes"].values()))


def test_bytes_that_must_be_moved(benchmark):
    module = benchmark("quantize")
    (case,) = module.cases(["mxfp8"])
    rows, columns = 96, 64
    inputs = [torch.randn(rows, columns, dtype=torch.bfloat16)]
    moved = {row["copies"]: row["bytes"] for row in module.run_case(case, inputs, rounds=2)}
    copy = rows * columns + rows * columns // 32  # a byte a code, one for 32 of them
    assert moved == {
        "rowwise": 2 * rows * columns + copy,
        "columnwise": 2 * rows * columns + copy,
        "both": 2 * rows * columns + 2 * copy,
    }


@pytest.mark.parametrize("recipe", LOW_PRECISION)
def test_bytes_that_differ_are_seen(benchmark, monkeypatch, recipe):
    """What differs is one bit of one code of the columnwise copy, or the recorded amax."""
    module = benchmark("quantize")
    case = module.cases([recipe])[0]
    x = torch.randn(32, 32, dtype=torch.bfloat16)
    assert module.is_equal_to_reference(case, x, fg.BOTH)
    kind = type(case.quantizer)
    quantize = kind.quantize
    wrong = [True, False]

    def off_by_one_bit(self, x, orientation, layout, state):
        parts = quantize(self, x, orientation, layout, state)
        if wrong.pop(0):
            parts.columnwise_data[-1:].bitwise_xor_(1)
        return parts

    monkeypatch.setattr(kind, "quantize", off_by_one_bit)
    assert not module.is_equal_to_reference(case, x, fg.BOTH)
    if case.quantizer.is_delayed:
        monkeypatch.setattr(kind, "quantize", quantize)
        fresh = case.state(x.device)
        started = [dataclasses.replace(fresh, amax=torch.tensor(9e9)), fresh]
        monkeypatch.setattr(type(case), "state", lambda self, device: started.pop())
        assert not module.is_equal_to_reference(case, x, fg.BOTH)


def test_quantize_fails_where_bytes_differ(benchmark, monkeypatch, tmp_path):
    module = benchmark("quantize")
    monkeypatch.setattr(module, "is_equal_to_reference", lambda *_: False)
    options = ["--device", "cpu", "--shapes", "8x16", "--recipes", "fp8-current", "--rounds", "2"]
    with pytest.raises(SystemExit, match="bytes differ from the reference"):
        module.main([*options, "--out", str(tmp_path)])
    (file,) = tmp_path.glob("*.md")
    assert "| NO |" in file.read_text()


def test_quantize_refuses_without_a_gpu(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        benchmark("quantize").main(["--out", str(tmp_path)])
    assert "there is no CUDA device here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_reference_is_what_quantizers_use_inside(benchmark, monkeypatch):
    module = benchmark("quantize")
    called = []
    casts = type("casts", (), {"cast_mx": lambda *_, **__: called.append(1)})
    monkeypatch.setattr(module, "reference", casts)
    with module.the_reference(), pytest.raises(TypeError, match="NoneType"):
        fg.quantize(torch.ones(2, 32), fg.MXQuantizer())
    assert called
    fg.quantize(torch.ones(2, 32), fg.MXQuantizer())
    assert len(called) == 1


def test_errors_are_measured(benchmark, capsys):
    benchmark("errors").main(["--recipes", "mxfp8", "--seeds", "1", "--contraction", "512"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| recipe | options | fprop | dgrad | wgrad | fprop, heavy")
    assert len(lines) == 2 + sum(row.name == "mxfp8" for row in benchmark("errors").ROWS)
    assert re.search(r"\| `mxfp8` \|  \| 3\.\d\d \(3\.76\) \|", lines[2])


def test_errors_outside_of_the_budget_are_reported(benchmark):
    module = benchmark("errors")
    (row,) = [row for row in module.ROWS if (row.name, row.options) == ("nvfp4", "")]
    good = {"normal": [14.5, 17.6, 16.6], "heavy": [20.0, 22.0, 17.0]}
    assert module.outside([row], [good]) == []
    too_good = {**good, "normal": [14.5, 0.17, 16.6]}
    too_bad = {**good, "heavy": [20.0, 22.0, 170.0]}
    assert len(module.outside([row], [too_good])) == len(module.outside([row], [too_bad])) == 1
    assert module.outside([dataclasses.replace(row, budget=None)], [too_bad]) == []


def test_the_page_has_the_errors_of_every_row(benchmark, page):
    """Its budgets are those of the benchmark, its measured values within them."""
    module = benchmark("errors")
    for row in module.ROWS:
        (line,) = re.findall(
            rf"^\| `{row.name}` \| {re.escape(row.options)} \| (\d.*) \|$", page, re.M
        )
        cells = re.findall(r"([\d.]+)(?: \(([\d.]+)\))?", line)
        assert len(cells) == 6
        if row.budget is None:
            assert all(budget == "" for _, budget in cells)
            continue
        assert [float(budget) for _, budget in cells] == [*row.budget[0], *row.budget[1]]
        measured = [float(value) for value, _ in cells]
        found = [{"normal": measured[:3], "heavy": measured[3:]}]
        assert module.outside([row], found) == []
    recipes = {row.name for row in module.ROWS}
    assert recipes == set(BY_NAME)


def test_the_curves_are_within_their_bounds(benchmark, page):
    """Final losses within 3 % of bf16, those of NVFP4 within 6 %; the page shows them."""
    for extra in ("typer", "rich", "matplotlib"):
        pytest.importorskip(extra, reason="needs the extra cli")
    module = benchmark("curves")
    runs = json.loads((ROOT / "docs" / "curves" / "loss.json").read_text())["runs"]
    assert list(runs) == list(BY_NAME)
    assert module.table(runs) in page
    losses = {name: run["loss"] for name, run in runs.items()}
    assert len({tuple(values) for values in losses.values()}) == len(runs), "two recipes are one"
    for name, run in runs.items():
        assert len(run["loss"]) == run["steps"] == 200
        assert run["final_loss"] == pytest.approx(sum(run["loss"][-20:]) / 20, abs=1e-3)
        difference = abs(run["final_loss"] / runs["bf16"]["final_loss"] - 1)
        assert difference < (0.06 if name == "nvfp4" else 0.03), name
    assert (ROOT / "docs" / "curves" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_curves_draw(benchmark, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra cli")
    pytest.importorskip("rich", reason="needs the extra cli")
    module = benchmark("curves")
    module.draw(tmp_path / "a.png", {"bf16": [3.0, 2.0], "mxfp8": [3.1, 2.1, 1.9]})
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    table = module.table({"bf16": {"final_loss": 2.0}, "mxfp8": {"final_loss": 2.02}})
    assert table.splitlines()[-1] == "| `mxfp8` | 2.020 | +1.00% |"
