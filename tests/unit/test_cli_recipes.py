"""`fullgraph train` in every recipe, and its checkpoints: a resumed run is one that was never interrupted."""
# ruff: noqa: E402 (most of this needs the extra)

import dataclasses

import pytest
import torch

for extra in ("typer", "rich", "matplotlib"):
    pytest.importorskip(extra, reason="needs the extra cli")

import cli_runs
from fullgraph.cli import checkpoint, train
from fullgraph.errors import ConfigError
from fullgraph.recipes import BY_NAME


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    yield from cli_runs.tiny(monkeypatch, tmp_path)


@pytest.mark.parametrize("recipe", BY_NAME)
def test_every_recipe_trains(tiny, recipe):
    result = train.train(dataclasses.replace(tiny, recipe=recipe, compare=None, steps=3))
    assert result["forward_nodes"] == result["backward_nodes"] == result["num_linears"] == 5
    assert result["graph_breaks"] == result["recompiles"] == 0
    assert result["gemms"] == ["high precision" if recipe == "bf16" else "emulated"]
    assert 5.4 < result["loss"][2] < result["loss"][0] < 5.6


@pytest.mark.parametrize(("recipe", "compare"), [("fp8-delayed", "bf16"), ("nvfp4", None)])
def test_a_resumed_run_has_the_losses_of_one_that_was_not(tiny, recipe, compare):
    whole = dataclasses.replace(tiny, recipe=recipe, compare=compare, steps=6)
    half = dataclasses.replace(whole, save=tiny.out / "half.pt", stop_after=3)
    expected = train.train(whole)
    assert train.train(half)["loss"] == expected["loss"][:3]
    result = train.train(dataclasses.replace(whole, resume=half.save, out=tiny.out / "rest"))
    assert (result["first_step"], result["steps"]) == (4, 6)
    assert result["loss"] == expected["loss"]
    assert result["compare_loss"] == expected["compare_loss"]
    assert len((tiny.out / "rest" / "loss.jsonl").read_text().splitlines()) == 6


FORGOTTEN = {
    "scales": ("fp8-delayed", "model", "fp8_scale"),
    "histories": ("fp8-delayed", "model", "fp8_amax_history"),
    "optimizer": ("bf16", "optimizer", "state"),
    "schedule": ("bf16", "schedule", "last_epoch"),
    "batches": ("bf16", None, "batches"),
    "random numbers": ("nvfp4", None, "random"),
}


@pytest.mark.parametrize(("recipe", "part", "name"), FORGOTTEN.values(), ids=FORGOTTEN)
def test_nothing_in_a_checkpoint_could_be_left_out(tiny, monkeypatch, recipe, part, name):
    """What is forgotten changes the losses to come, so that the test above would see it."""
    save = checkpoint.save

    def save_the_third(path, state):
        if len(state["records"]) == 3:
            save(path, state)

    monkeypatch.setattr(checkpoint, "save", save_the_third)
    options = dataclasses.replace(tiny, recipe=recipe, compare=None, steps=6)
    path = tiny.out / "half.pt"
    expected = train.train(dataclasses.replace(options, save=path, save_every=3))["loss"]
    saved = torch.load(path)
    fresh = torch.Generator().manual_seed(99).get_state()
    if part is None:
        saved[name] = fresh if name == "batches" else {"cpu": fresh}
    else:
        forget(saved["trainees"][0][part], name)
    torch.save(saved, path)
    result = train.train(dataclasses.replace(options, resume=path))["loss"]
    assert result[:3] == expected[:3]
    assert result[3:] != expected[3:]


def forget(state, name):
    """Put something else where a name ends like this."""
    keys = [key for key in state if key.endswith(name)]
    assert keys
    for key in keys:
        if isinstance(state[key], torch.Tensor):
            state[key] = torch.full_like(state[key], 2.0**-7)
        else:
            state[key] = {} if isinstance(state[key], dict) else state[key] + 2


def test_delayed_scales_are_updated_and_saved(tiny):
    options = dataclasses.replace(tiny, recipe="fp8-delayed", compare=None, steps=2)
    train.train(dataclasses.replace(options, save=tiny.out / "checkpoint.pt"))
    (trainee,) = torch.load(tiny.out / "checkpoint.pt", weights_only=True)["trainees"]
    scales = [value for key, value in trainee["model"].items() if key.endswith("fp8_scale")]
    assert len(scales) == 5
    # output is never cast here, so its scale stays; the others follow what they scale
    assert all(s[0] > 1 and s[1] > 1 and s[2] == 1 and s[3] > 1 for s in scales)


def test_when_checkpoints_are_written(tiny, monkeypatch):
    steps = []
    monkeypatch.setattr(
        train.checkpoint, "save", lambda path, state: steps.append(len(state["records"]))
    )
    options = dataclasses.replace(tiny, recipe="bf16", compare=None, steps=8, save_every=3)
    train.train(options)
    assert steps == []
    result = train.train(dataclasses.replace(options, save=tiny.out / "c.pt", stop_after=7))
    assert steps == [3, 6, 7]
    assert (result["steps"], result["requested_steps"], result["interrupted"]) == (7, 8, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "has seed 0, this run 1"),
        ({"recipe": "mxfp8"}, "has recipe bf16, this run mxfp8"),
        ({"compare": "bf16"}, "has compare None, this run bf16"),
        ({"steps": 9}, "has steps 4, this run 9"),
        ({"data": "other"}, r"has text \d+ bytes, \w+, this run 200 bytes"),
        ({"size": dataclasses.replace(cli_runs.TINY, num_heads=1)}, "has size"),
        ({"stop_after": 2}, r"has 2 steps of 2\nWhy: nothing is left"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_run_is_not_resumed(tiny, tmp_path, change, message):
    options = dataclasses.replace(tiny, recipe="bf16", compare=None, steps=4)
    save = tmp_path / "c.pt"
    train.train(dataclasses.replace(options, save=save, stop_after=2))
    if "data" in change:
        (tmp_path / "other").write_text("x" * 200)
        change = {"data": tmp_path / "other"}
    with pytest.raises(ConfigError, match=message):
        train.train(dataclasses.replace(options, resume=save, **change))


def test_a_checkpoint_is_complete_or_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "c.pt"
    checkpoint.save(path, {"options": {"seed": 1}})

    def interrupted(state, file):
        file.write_bytes(b"half")
        raise KeyboardInterrupt("in the middle")

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt, match="in the middle"):
        checkpoint.save(path, {"options": {"seed": 2}})
    assert checkpoint.load(path, {"seed": 1})["options"] == {"seed": 1}
