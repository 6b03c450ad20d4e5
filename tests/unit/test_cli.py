"""The command line: options, refusals, and what each command reports, on models small enough for a unit test."""
# ruff: noqa: E402 (most of this needs the extra)

import dataclasses
import importlib.util
import itertools
import json
import subprocess
import sys

import pytest
import torch

for extra in ("typer", "rich", "matplotlib"):
    pytest.importorskip(extra, reason="needs the extra cli")

from typer.main import get_command
from typer.testing import CliRunner

import cli_runs
import fullgraph
import fullgraph.cli
from fullgraph import gemm
from fullgraph.cli import app as app_module
from fullgraph.cli import curves, doctor, text, train
from fullgraph.cli.app import app
from fullgraph.cli.gpt import GPT
from fullgraph.cli.train import learning_rate_factor
from fullgraph.errors import ConfigError
from fullgraph.formats import Format
from fullgraph.nn import Linear
from fullgraph.recipes import BY_NAME, BackwardOverride, Float8CurrentScaling, Float8PerRowScaling

KEYS = {
    *("recipe", "device", "torch", "steps", "loss", "compare_loss", "num_linears"),
    *("forward_nodes", "backward_nodes", "graph_breaks", "recompiles"),
    *("cold_seconds", "step_seconds", "tokens_per_second", "versions", "final_loss"),
    *("compare", "compare_step_seconds", "compare_final_loss", "relative_difference"),
}


def invoke(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    yield from cli_runs.tiny(monkeypatch, tmp_path)


def test_commands_and_options():
    commands = get_command(app).commands
    options = {
        name: sorted(option for p in command.params for option in p.opts)
        for name, command in commands.items()
    }
    common = ["--device", "--json", "--recipe"]
    assert options == {
        "train": sorted(
            [
                *common,
                *("--compare", "--data", "--out", "--seed", "--steps"),
                *("--save", "--save-every", "--stop-after", "--resume"),
                *("--statistics-every", "--size"),
            ]
        ),
        "explain": common,
        "doctor": ["--json"],
    }


def test_version():
    assert invoke("--version").output == f"{fullgraph.cli.app.__version__}\n"


RECIPES = "bf16, fp8-delayed, fp8-current, fp8-per-row, fp8-block, mxfp8, nvfp4"

REFUSED = {
    "recipe": (
        ["--recipe", "fp9"],
        f"unknown recipe 'fp9'\nWhy: the recipes are {RECIPES}\n",
    ),
    "compare": (["--compare", "fp9"], "unknown recipe 'fp9'"),
    "steps": (["--steps", 0], "at least one step is needed, got 0\nDo: raise --steps"),
    "save every": (
        ["--save-every", 0],
        "at least one step is needed, got 0\nDo: raise --save-every",
    ),
    "stop after": (
        ["--stop-after", 0],
        "at least one step is needed, got 0\nDo: raise --stop-after",
    ),
    "statistics every": (
        ["--statistics-every", 0],
        "at least one step is needed, got 0\nDo: raise --statistics-every",
    ),
    "save": (["--save", "nothing"], "cannot write nothing"),
    "resume": (["--resume", "no/such"], "cannot read the checkpoint no/such: No such file"),
    "resume what": (["--resume", "short.txt"], "short.txt is no checkpoint of `fullgraph train`"),
    "resume nothing": (["--resume", "empty.txt"], "empty.txt is no checkpoint"),
    "resume another": (["--resume", "other.pt"], "other.pt is no checkpoint"),
    "device": (["--device", "cuda:77"], "cuda:77 is not there"),
    "device name": (["--device", "abacus"], "unknown device 'abacus'\nDo: use one of cpu"),
    "device that does not compute": (["--device", "meta"], "meta computes nothing"),
    "missing": (["--data", "no/such"], "train: no such file or directory: no/such"),
    "empty file": (["--data", "empty.txt"], "got 0 bytes from empty.txt"),
    "short file": (["--data", "short.txt"], "longer than one sequence of 128 bytes, got 5 bytes"),
    "empty directory": (["--data", "nothing"], "got 0 bytes from nothing"),
    "out": (["--out", "short.txt/below"], "cannot write short.txt/below/loss.jsonl"),
    "json": (["--json", "nothing"], "cannot write nothing"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_train_refuses(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "nothing").mkdir()
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pt")
    result = invoke("train", "--recipe", "bf16", "--json", "result.json", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) <= 3
    assert not list(tmp_path.rglob("*.json*"))


def test_explain_refuses():
    result = invoke("explain", "--recipe", "fp9")
    assert result.exit_code == 2
    assert f"the recipes are {RECIPES}" in result.stderr


@pytest.mark.parametrize("missing", fullgraph.cli.NEEDED)
def test_the_extra_is_asked_for(missing, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == missing else found(n))
    with pytest.raises(SystemExit, match="2"):
        fullgraph.cli.main()
    assert f"the command line needs {missing}" in capsys.readouterr().err


def test_both_modules_start_it():
    for module in ("fullgraph", "fullgraph.cli"):
        code = f"import sys, runpy; sys.argv = ['x', '--version']; runpy.run_module('{module}', run_name='__main__')"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (result.returncode, result.stdout) == (0, f"{app_module.__version__}\n")


def test_a_run_and_what_it_leaves(tiny):
    result = train.train(tiny)
    assert result.keys() >= KEYS
    assert json.loads(json.dumps(result)) == result
    assert (result["recipe"], result["compare"], result["device"]) == ("fp8-current", "bf16", "cpu")
    for prefix in ("", "compare_"):
        assert len(result[f"{prefix}loss"]) == result["steps"] == 8
        assert result[f"{prefix}num_linears"] == 5
        assert result[f"{prefix}forward_nodes"] == result[f"{prefix}backward_nodes"] == 5
        assert result[f"{prefix}graph_breaks"] == result[f"{prefix}recompiles"] == 0
        assert result[f"{prefix}loss"][-1] < result[f"{prefix}loss"][0]
        assert result[f"{prefix}tokens_per_second"] == pytest.approx(
            train.BATCH_SIZE * cli_runs.TINY.context / result[f"{prefix}step_seconds"]
        )
    assert result["gemms"] == ["emulated"]
    assert result["compare_gemms"] == ["high precision"]
    # ln 256 is the loss of knowing nothing; the same start, but not the same arithmetic
    assert result["loss"][0] == pytest.approx(5.545, abs=0.05)
    assert 0 < abs(result["loss"][0] - result["compare_loss"][0]) < 0.01
    expected = result["final_loss"] / result["compare_final_loss"] - 1
    assert result["relative_difference"] == pytest.approx(expected)

    lines = [json.loads(line) for line in (tiny.out / "loss.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["loss"] for line in lines] == result["loss"]
    assert [line["compare_loss"] for line in lines] == result["compare_loss"]
    assert (tiny.out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_statistics_of_a_run(tiny):
    plain = train.train(dataclasses.replace(tiny, compare=None, steps=5))
    result = train.train(dataclasses.replace(tiny, compare=None, steps=5, statistics_every=2))
    assert plain["statistics"] is None
    assert result["statistics"] == str(tiny.out / "statistics.jsonl")
    assert result["loss"] == plain["loss"]
    assert result["recompiles"] == 0
    assert result["forward_nodes"] == 2 * plain["forward_nodes"]  # of two graphs
    records = fullgraph.read_statistics(result["statistics"])
    assert {record.step for record in records} == {1, 3, 5}
    assert len({record.layer for record in records}) == 5
    assert (tiny.out / "statistics.png").read_bytes().startswith(b"\x89PNG")


def test_statistics_of_nothing(tiny):
    result = train.train(
        dataclasses.replace(tiny, recipe="bf16", compare=None, steps=1, statistics_every=1)
    )
    assert fullgraph.read_statistics(result["statistics"]) == []
    assert not (tiny.out / "statistics.png").exists()


def test_statistics_of_a_run_that_is_resumed(tiny):
    options = dataclasses.replace(tiny, compare=None, steps=5, save=tiny.out / "a.pt")
    options = dataclasses.replace(options, statistics_every=2)
    train.train(dataclasses.replace(options, stop_after=3))
    result = train.train(dataclasses.replace(options, resume=options.save))
    records = fullgraph.read_statistics(result["statistics"])
    assert list(dict.fromkeys(record.step for record in records)) == [1, 3, 5]


def test_seeds(tiny):
    alone = dataclasses.replace(tiny, compare=None, steps=3)
    first = train.train(alone)["loss"]
    assert train.train(alone)["loss"] == pytest.approx(first, rel=1e-6)
    assert train.train(dataclasses.replace(alone, seed=1))["loss"][0] != first[0]


def test_one_recipe_alone(tiny):
    result = train.train(dataclasses.replace(tiny, compare=None, steps=1))
    assert result["compare"] is None
    assert result["compare_loss"] == []
    assert (result["step_seconds"], result["tokens_per_second"]) == (None, None)
    assert len(train.summary(result).columns) == 2


@pytest.mark.parametrize("steps_done", [0, 2])
def test_an_interruption_leaves_everything_complete(tiny, monkeypatch, steps_done):
    step = train.Trainee.step

    def interrupted(self, *batch):
        if self.name == "bf16" and len(self.losses) == steps_done:
            raise KeyboardInterrupt
        step(self, *batch)

    monkeypatch.setattr(train.Trainee, "step", interrupted)
    result = train.train(tiny)
    assert result["interrupted"]
    assert result["steps"] == len(result["loss"]) == len(result["compare_loss"]) == steps_done
    assert result["requested_steps"] == 8
    assert len((tiny.out / "loss.jsonl").read_text().splitlines()) == steps_done
    assert (tiny.out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (result["final_loss"] is None) == (steps_done == 0)
    assert train.summary(result).row_count == 9


def test_train_exits_with_130_when_interrupted(tiny, monkeypatch):
    monkeypatch.setattr(train, "_run", lambda *_: True)
    result = invoke("train", "--recipe", "bf16", "--out", tiny.out, "--json", tiny.out / "a.json")
    assert result.exit_code == 130
    assert "interrupted after 0 of 200 steps" in result.output
    assert json.loads((tiny.out / "a.json").read_text())["interrupted"]


def test_the_command_prints_a_table_and_says_what_compiles(tiny, monkeypatch):
    monkeypatch.setattr(train, "TrainOptions", lambda *args: dataclasses.replace(tiny, steps=2))
    result = invoke("train", "--recipe", "fp8-current", "--json", tiny.out / "deep" / "r.json")
    assert result.exit_code == 0
    assert "There is no C++ compiler" in result.output
    assert "step 2/2: fp8-current loss" in result.output
    assert "forward / backward nodes" in result.output
    assert "Final loss: fp8-current" in result.output
    assert "Emulated:" in result.output
    assert json.loads((tiny.out / "deep" / "r.json").read_text())["steps"] == 2


def test_learning_rate():
    factors = [learning_rate_factor(step, 100) for step in range(101)]
    assert factors[0] == pytest.approx(1 / 30)
    assert max(factors) == factors[29] == 1
    assert factors[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(factors[30:]))
    assert learning_rate_factor(0, 1) == 1


def test_every_linear_of_the_gpt_is_ours():
    model = GPT(cli_runs.TINY, train.get("bf16"))
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert len(linears) == 5
    assert {type(m) for m in linears} == {Linear}


def test_the_gpt_does_not_see_the_future():
    model = GPT(cli_runs.TINY, train.get("bf16"))
    x = torch.randint(256, (2, 16))
    changed = x.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    logits = []
    model.head.register_forward_hook(lambda module, args, output: logits.append(output))
    for tokens in (x, changed):
        model(tokens, tokens)
    assert torch.equal(logits[0][:, :-1], logits[1][:, :-1])
    assert not torch.equal(logits[0][:, -1], logits[1][:, -1])


def test_text_of_a_directory(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"b" * 30)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.txt").write_bytes(b"a" * 30)
    (tmp_path / "binary").write_bytes(b"\xff\xfe" * 30)
    (tmp_path / ".hidden").write_bytes(b"h" * 30)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"h" * 30)
    assert bytes(text.read_text(tmp_path, 16).tolist()) == b"a" * 30 + b"b" * 30
    assert len(text.read_text(tmp_path / "binary", 16)) == 60


def test_the_default_text_is_the_standard_library():
    found = text.read_text(None, 128)
    assert found.dtype == torch.uint8
    assert len(found) > 10**6
    assert b"import" in bytes(found[:10000].tolist())


def test_no_more_text_than_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "LONGEST", 50)
    for name in "ab":
        (tmp_path / name).write_text(name * 40)
    assert bytes(text.read_text(tmp_path, 16).tolist()) == b"a" * 40 + b"b" * 10


def test_unreadable_text(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("a")

    def refused(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(text.Path, "open", refused)
    with pytest.raises(ConfigError, match=r"cannot read .*a: Permission denied"):
        text.read_text(tmp_path / "a", 16)


def test_batches():
    source = torch.arange(200, dtype=torch.uint8)
    draw = text.Batches(source, 4, 16, torch.device("cpu"), seed=3).draw
    x, y = draw()
    assert x.shape == y.shape == (4, 16)
    assert x.dtype == torch.int64
    assert torch.equal(y, x + 1)
    again = text.Batches(source, 4, 16, torch.device("cpu"), seed=3)
    assert torch.equal(again.draw()[0], x)
    assert again.tokens == 64
    # a text with room for one sequence and its last byte
    only = text.Batches(source[:17], 4, 16, torch.device("cpu"), seed=0).draw()
    assert torch.equal(only[1], torch.arange(1, 17).expand(4, 16))


def test_smoothed():
    assert curves.smoothed([4.0, 2.0, 0.0], window=2) == [4.0, 3.0, 1.0]
    assert curves.smoothed([]) == []


def test_explain_reports_the_gpt(tmp_path):
    result = invoke("explain", "--recipe", "fp8-current", "--json", tmp_path / "report.json")
    assert result.exit_code == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["num_linears"] == report["forward_nodes"] == report["backward_nodes"] == 5
    assert (report["graph_breaks"], report["recompiles"], report["num_graphs"]) == (0, 0, 1)
    assert {route for node in report["nodes"] for route in node["gemms"].values()} == {"emulated"}
    assert "blocks.0.qkv" in result.output


def test_doctor_reports_this_machine(tmp_path):
    result = invoke("doctor", "--json", tmp_path / "doctor.json")
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert result.exit_code == int(any(problem["blocks"] for problem in found["problems"]))
    assert found["versions"]["torch"] == torch.__version__
    assert found["tangent_shim"] is True
    cpu = found["devices"][0]
    assert cpu["device"] == "cpu"
    assert cpu["casts"] == "reference"
    assert list(cpu["recipes"]) == list(BY_NAME)
    for recipe, found in cpu["recipes"].items():
        route = "high precision" if recipe == "bf16" else "emulated"
        assert found == dict.fromkeys(("fprop", "dgrad", "wgrad"), route)
        assert recipe in result.output


NATIVE = {
    (0, 0): [],
    (8, 9): ["fp8-delayed", "fp8-current", "fp8-per-row"],
    (9, 0): ["fp8-delayed", "fp8-current", "fp8-per-row", "fp8-block"],
    (10, 0): ["fp8-delayed", "fp8-current", "fp8-per-row", "mxfp8", "nvfp4"],
}


@pytest.mark.parametrize("capability", NATIVE, ids=str)
def test_doctor_knows_what_is_native(capability, monkeypatch, recwarn):
    monkeypatch.setattr(gemm, "compute_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    gemm.layout_of.cache_clear()
    device = torch.device("cuda", 0)
    found = {n: doctor.routes(recipe.linear_numerics(), device) for n, recipe in BY_NAME.items()}
    gemm.layout_of.cache_clear()
    all_native = dict.fromkeys(("fprop", "dgrad", "wgrad"), "native")
    assert [name for name, routes in found.items() if routes == all_native] == NATIVE[capability]
    others = [set(r.values()) for n, r in found.items() if n not in ("bf16", *NATIVE[capability])]
    assert all(other == {"emulated"} for other in others)
    assert not recwarn.list


def test_doctor_tells_gemms_apart(monkeypatch):
    monkeypatch.setattr(gemm, "compute_capability", lambda device: (9, 0))
    gemm.layout_of.cache_clear()
    device = torch.device("cuda", 0)

    def routes(recipe):
        return list(doctor.routes(recipe.linear_numerics(), device).values())

    assert routes(Float8PerRowScaling(high_precision_wgrad=True)) == [
        *["native"] * 2,
        "high precision",
    ]
    override = Float8CurrentScaling(backward_override=BackwardOverride.HIGH_PRECISION)
    assert routes(override) == ["native", "high precision", "high precision"]
    e5m2 = Float8CurrentScaling(forward_format=Format.E5M2, backward_format=Format.E4M3)
    assert routes(e5m2) == ["emulated", "native", "native"]
    gemm.layout_of.cache_clear()


SICK = {
    "no compiler": ("cpp_compiler", lambda: None, 1, "no C++ compiler"),
    "no shim": ("has_tangent_shim", lambda: False, 0, "the tangent shim is off"),
    "old torch": (
        "torch",
        type("torch", (), {"__version__": "2.4.1"}),
        1,
        "torch 2.4.1 is not one",
    ),
    "new torch": (
        "torch",
        type("torch", (), {"__version__": "2.99.0"}),
        0,
        "torch 2.99.0 is not one",
    ),
}


@pytest.mark.parametrize(("name", "value", "code", "message"), SICK.values(), ids=SICK)
def test_doctor_finds_problems(name, value, code, message, monkeypatch):
    monkeypatch.setattr(doctor, "present_devices", list)
    monkeypatch.setattr(doctor, "cpp_compiler", lambda: "g++")
    monkeypatch.setattr(doctor, name, value)
    result = invoke("doctor")
    assert result.exit_code == code
    assert message in result.output
    assert "Do: " in result.output


def test_doctor_wants_triton_beside_a_gpu():
    versions = {"torch": "2.13.0+cu130", "triton": None}
    (problem,) = doctor._problems(versions, "g++", has_gpu=True)
    assert "no Triton" in problem.what
    assert problem.blocks
    assert doctor._problems(versions, "g++", has_gpu=False) == []
