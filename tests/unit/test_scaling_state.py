"""The state of delayed scaling in a layer: where it lives, how it moves, is saved, loaded and updated."""

import copy
import dataclasses
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import fullgraph as fg
import oracles_delayed
from fullgraph.customop.token import encode
from fullgraph.delayed import ScalingRule
from fullgraph.errors import CompileError, ConfigError
from fullgraph.nn import ScalingState, attach, linear, update_scales
from linear_cases import K, N, batch, step
from oracles import assert_same_bits

LENGTH = 4
RECIPE = fg.recipes.DelayedScaling(history_length=LENGTH)
RULE = RECIPE.scaling_rule_text
PLAIN_KEYS = ["weight", "bias"]
KEYS = [*PLAIN_KEYS, "fp8_scale", "fp8_amax_history"]
TENSORS = ["forward_scale", "forward_amax", "backward_scale", "backward_amax", "amax_history"]


def new_layer(recipe=RECIPE, **options):
    return fg.Linear(K, N, dtype=torch.bfloat16, recipe=recipe, **options)


def trained_layer(steps=2, recipe=RECIPE, layer=None):
    """A layer after some updates and, not followed by one, another forward and backward pass."""
    layer = new_layer(recipe) if layer is None else layer
    for _ in range(steps):
        step(layer, *batch(8))
        update_scales(layer)
    step(layer, *batch(8))
    return layer


def assert_same_state(actual, expected):
    for name in TENSORS:
        assert_same_bits(getattr(actual, name), getattr(expected, name))


def assert_fresh(state, rows=LENGTH - 1):
    assert state.is_fresh
    assert state.scales().tolist() == [1] * 4
    assert state.history().tolist() == [[0] * 4] * (rows + 1)


# What there is, and when.


def test_every_layer_has_a_state_from_the_beginning():
    for layer in (new_layer(None), new_layer("fp8-current"), new_layer()):
        state = layer.scaling_state
        assert_fresh(state, rows=LENGTH - 1 if layer.recipe is RECIPE else 0)
        assert [getattr(state, name).dtype for name in TENSORS[:4]] == [torch.float32] * 4
        assert [tuple(getattr(state, name).shape) for name in TENSORS[:4]] == [
            (3,),
            (3,),
            (1,),
            (1,),
        ]
        assert list(dict(layer.named_parameters())) == PLAIN_KEYS
        assert not list(layer.buffers())
    assert new_layer(None).scaling_state.amax_history is None
    converted = nn.Sequential(nn.Linear(K, N))
    fg.convert(converted, RECIPE)
    assert_fresh(converted[0].scaling_state)
    assert converted[0].scaling_state.rule == RULE


def test_a_step_records_and_an_update_scales():
    layer, oracle = new_layer(), oracles_delayed.Layer(LENGTH, "max", 0, ["E4M3"] * 3 + ["E5M2"])
    for _ in range(2 * LENGTH):
        amaxes = [0.0] * 4
        for _ in range(2):
            x, grad_output = batch(8)
            step(layer, x, grad_output)
            for slot, tensor in ((0, x), (1, layer.weight), (3, grad_output)):
                amaxes[slot] = oracles_delayed.raised(amaxes[slot], tensor)
        oracle.record(amaxes)
        assert_same_bits(layer.fp8_amax_history, oracle.history)
        update_scales(layer)
        oracle.update()
        assert_same_bits(layer.fp8_amax_history, oracle.history)
        assert_same_bits(layer.fp8_scale, oracle.scale)
    assert layer.fp8_scale[2] == 1  # the output is never cast


def test_a_quantized_output_has_a_scale():
    layer = new_layer()
    x, _ = batch(8)
    output = layer(x, quantized_output=True)
    assert layer.scaling_state.forward_amax[2] > 0
    assert output.scale_inv == 1
    update_scales(layer)
    assert_same_bits(layer(x, quantized_output=True).scale_inv, 1 / layer.fp8_scale[2])


def test_the_scale_of_the_last_update_is_used():
    layer = trained_layer()
    x, grad_output = batch(8)
    before = layer.fp8_scale
    first = step(layer, 1000 * x, grad_output)["output"]
    assert_same_bits(step(layer, 1000 * x, grad_output)["output"], first)
    assert_same_bits(layer.fp8_scale, before)
    update_scales(layer)
    assert layer.fp8_scale[0] < before[0] / 100
    assert (step(layer, 1000 * x, grad_output)["output"] != first).any()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_records_nothing(context):
    layer = trained_layer()
    before = copy.deepcopy(layer.scaling_state)
    with context():
        layer(1000 * batch(8)[0])
    assert_same_state(layer.scaling_state, before)


def test_a_layer_made_in_inference_mode_can_be_trained():
    with torch.inference_mode():
        state = ScalingState(torch.device("cpu"))
        state.set_rule(RULE)
    state.forward_amax.add_(1)
    state.amax_history.add_(1)
    state.reset()
    assert_fresh(state)


def test_the_function_has_no_state():
    layer = new_layer()
    x, _ = batch(8)
    with pytest.raises(ConfigError, match="linear: DelayedScaling needs a layer"):
        linear(x, layer.weight, recipe=RECIPE)
    with fg.autocast("fp8-delayed"), pytest.raises(ConfigError, match=r"Do: use fullgraph\.Linear"):
        fg.linear(x, layer.weight)


# Rules.


def test_the_rule_comes_from_the_recipe_or_the_autocast():
    layer = new_layer(None)
    x, grad_output = batch(8)
    step(layer, x, grad_output)
    assert layer.scaling_state.rule == ""
    with fg.autocast(RECIPE):
        step(layer, x, grad_output)
    assert layer.scaling_state.rule == RULE
    with fg.autocast("fp8-current"):
        step(layer, x, grad_output)
    update_scales(layer)
    assert layer.fp8_scale[0] != 1
    layer.configure("fp8-current")
    assert layer.scaling_state.rule == ""
    assert layer.fp8_scale[0] != 1
    layer.configure(RECIPE)
    assert layer.scaling_state.rule == RULE


def test_another_history_length_keeps_the_newest_rows():
    layer = trained_layer(LENGTH)
    before, rows = layer.fp8_scale, layer.scaling_state.amax_history.clone()
    layer.configure(fg.recipes.DelayedScaling(history_length=LENGTH - 1))
    assert_same_bits(layer.scaling_state.amax_history, rows[1:])
    layer.configure(fg.recipes.DelayedScaling(history_length=LENGTH + 1))
    assert_same_bits(layer.scaling_state.amax_history[2:], rows[1:])
    assert not layer.scaling_state.amax_history[:2].any()
    layer.configure(fg.recipes.DelayedScaling(history_length=1))
    assert layer.scaling_state.amax_history.shape == (0, 4)
    assert_same_bits(layer.fp8_scale, before)


# Devices and copies.


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float32], ids=str)
def test_other_dtypes_leave_the_state_alone(dtype):
    layer = trained_layer()
    before = {name: getattr(layer.scaling_state, name) for name in TENSORS}
    layer.to(dtype)
    for name, tensor in before.items():
        assert getattr(layer.scaling_state, name) is tensor


def test_meta_device_to_empty_reset():
    with torch.device("meta"):
        layer = new_layer()
    assert {getattr(layer.scaling_state, name).device.type for name in TENSORS} == {"meta"}
    layer.scaling_state.reset()
    assert list(layer.state_dict()) == KEYS
    assert {tensor.device.type for tensor in layer.state_dict().values()} == {"meta"}
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert_fresh(layer.scaling_state)
    trained_layer(layer=layer)
    state = layer.scaling_state
    layer.reset_parameters()
    assert layer.scaling_state is state
    assert_fresh(state)
    assert state.rule == RULE


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))],
    ids=["deepcopy", "pickle"],
)
def test_copies_are_independent(copied):
    layer = trained_layer()
    other = copied(layer)
    assert_same_state(other.scaling_state, layer.scaling_state)
    assert other.scaling_state.rule == RULE
    before = copy.deepcopy(layer.scaling_state)
    x, grad_output = batch(8)
    step(other, 100 * x, grad_output)
    update_scales(other)
    assert_same_state(layer.scaling_state, before)
    step(layer, 100 * x, grad_output)
    update_scales(layer)
    assert_same_state(layer.scaling_state, other.scaling_state)


# Checkpoints.


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_keys_follow_from_the_recipe_used_or_not():
    for recipe in (None, "bf16", "fp8-current"):
        assert list(new_layer(recipe).state_dict()) == PLAIN_KEYS
    assert list(new_layer().state_dict()) == KEYS
    assert list(trained_layer().state_dict()) == KEYS
    model = nn.Sequential(nn.ReLU(), new_layer())
    assert list(model.state_dict()) == [f"1.{key}" for key in KEYS]
    layer = trained_layer()
    layer.configure("fp8-current")
    assert list(layer.state_dict()) == KEYS  # there is something to save


def test_keys_of_a_recipe_of_an_autocast():
    layer = new_layer(None)
    assert list(layer.state_dict()) == PLAIN_KEYS
    with fg.autocast("fp8-current"):
        assert list(layer.state_dict()) == PLAIN_KEYS
    with fg.autocast(RECIPE):
        assert list(layer.state_dict()) == KEYS
        assert layer.state_dict()["fp8_amax_history"].shape == (LENGTH, 4)
    ran = new_layer(None)
    with fg.autocast(RECIPE):
        step(ran, *batch(8))
    assert list(ran.state_dict()) == KEYS


def test_saved_tensors_are_plain_and_laid_out_as_transformer_engine_does():
    layer = trained_layer()
    state, saved = layer.scaling_state, layer.state_dict()
    assert {type(t) for t in saved.values()} == {torch.Tensor}
    forward, backward = saved["fp8_scale"].split([3, 1])
    assert_same_bits(forward, state.forward_scale)
    assert_same_bits(backward, state.backward_scale)
    recorded, rows = saved["fp8_amax_history"].split([1, LENGTH - 1])
    assert_same_bits(recorded[0], torch.cat([state.forward_amax, state.backward_amax]))
    assert_same_bits(rows, state.amax_history)
    before = {k: t.clone() for k, t in saved.items()}
    update_scales(layer)
    step(layer, *batch(8))
    for key in KEYS[2:]:  # copies
        assert_same_bits(saved[key], before[key])


@pytest.mark.parametrize("assign", [False, True])
def test_resume_is_exact(assign):
    layer = trained_layer()
    resumed = new_layer()
    assert not resumed.load_state_dict(saved_and_loaded(layer.state_dict()), assign=assign)[0]
    for _ in range(LENGTH):
        assert_same_state(resumed.scaling_state, layer.scaling_state)
        update_scales(layer)
        update_scales(resumed)
        x, grad_output = batch(8)
        got = step(resumed, x, grad_output)
        for name, value in step(layer, x, grad_output).items():
            assert_same_bits(got[name], value)


def test_loading_is_in_place():
    layer, resumed = trained_layer(), trained_layer(1)
    before = {name: getattr(resumed.scaling_state, name) for name in TENSORS}
    resumed.load_state_dict(layer.state_dict())
    assert_same_state(resumed.scaling_state, layer.scaling_state)
    for name, tensor in before.items():
        assert getattr(resumed.scaling_state, name) is tensor


def test_loading_into_a_meta_layer():
    layer = trained_layer()
    with torch.device("meta"):
        resumed = new_layer()
    resumed.load_state_dict(layer.state_dict(), assign=True)
    assert_same_state(resumed.scaling_state, layer.scaling_state)


@pytest.mark.parametrize("recipe", [None, "fp8-current"])
def test_loading_before_the_layer_knows_its_recipe(recipe):
    layer, resumed = trained_layer(), new_layer(recipe)
    resumed.load_state_dict(layer.state_dict(), strict=True)
    assert list(resumed.state_dict()) == KEYS
    x, grad_output = batch(8)
    if recipe is None:
        with fg.autocast(RECIPE):
            got = step(resumed, x, grad_output)
    else:
        resumed.configure(RECIPE)
        got = step(resumed, x, grad_output)
    for name, value in step(layer, x, grad_output).items():
        assert_same_bits(got[name], value)
    assert_same_state(resumed.scaling_state, layer.scaling_state)


@pytest.mark.parametrize("length", [1, LENGTH - 1, LENGTH + 2])
def test_loading_a_history_of_another_length(length):
    layer = trained_layer(LENGTH)
    resumed = new_layer(fg.recipes.DelayedScaling(history_length=length))
    resumed.load_state_dict(layer.state_dict())
    rows = layer.scaling_state.amax_history
    kept = min(length - 1, LENGTH - 1)
    expected = torch.zeros(length - 1, 4)
    if kept:
        expected[-kept:] = rows[-kept:]
    assert_same_bits(resumed.scaling_state.amax_history, expected)
    assert_same_bits(resumed.fp8_scale, layer.fp8_scale)
    assert_same_bits(resumed.fp8_amax_history[0], layer.fp8_amax_history[0])


def test_a_history_that_is_no_history():
    layer = new_layer()
    saved = trained_layer().state_dict()
    saved["fp8_amax_history"] = saved["fp8_amax_history"][:, :3]
    with pytest.raises(
        RuntimeError, match=r"must be float32 \[4\] and \[history_length, 4\], got float32\[4\]"
    ):
        layer.load_state_dict(saved)
    assert_fresh(layer.scaling_state)


@pytest.mark.parametrize("used", [False, True])
def test_a_checkpoint_without_scales_starts_anew_and_says_so_once(used):
    model = nn.Sequential(*[trained_layer() if used else new_layer() for _ in range(3)])
    plain = nn.Sequential(*[nn.Linear(K, N, dtype=torch.bfloat16) for _ in range(3)]).state_dict()
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.load_state_dict(plain, strict=True)
        (warning,) = caught
        assert "no scales for delayed scaling (0.fp8_scale and 0.fp8_amax_hist" in str(
            warning.message
        )
        assert "they start anew" in str(warning.message)
    for layer in model:
        assert_fresh(layer.scaling_state)
        assert layer.scaling_state.rule == RULE


def test_loads_that_have_nothing_to_say():
    plain = nn.Linear(K, N, dtype=torch.bfloat16).state_dict()
    for recipe in (None, "fp8-current", "bf16"):
        new_layer(recipe).load_state_dict(plain, strict=True)
    # A part of a checkpoint, without this layer.
    layer = trained_layer()
    before = copy.deepcopy(layer.scaling_state)
    nn.Sequential(layer).load_state_dict({}, strict=False)
    assert_same_state(layer.scaling_state, before)


def test_other_unexpected_keys_still_are():
    saved = trained_layer().state_dict()
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "fp8_other"\.'):
        new_layer().load_state_dict({**saved, "fp8_other": torch.zeros(4)})


def test_tools_that_look_the_keys_up_in_the_module():
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, resumed = nn.Sequential(trained_layer()), nn.Sequential(new_layer())
    saved = get_model_state_dict(model)
    assert list(saved) == [f"0.{key}" for key in KEYS]
    set_model_state_dict(resumed, saved)
    assert_same_state(resumed[0].scaling_state, model[0].scaling_state)


# The update of a model.


class Block(nn.Module):
    """Layers in several places, one of them twice, with several rules and without."""

    def __init__(self):
        super().__init__()
        self.first = new_layer()
        self.again = self.first
        self.others = nn.ModuleList(
            [
                new_layer("bf16"),
                new_layer(fg.recipes.DelayedScaling(2, "most_recent", 1.0)),
                nn.ReLU(),
            ]
        )
        self.plain = nn.Linear(K, N, dtype=torch.bfloat16)

    def forward(self, x):
        layers = (self.first, self.again, *self.others[:2], self.plain)
        return sum(layer(x) for layer in layers)


def test_all_layers_of_a_model_in_one_op(monkeypatch):
    model = Block()
    apart = copy.deepcopy(model)
    calls = []
    op = torch.ops.fullgraph.update_scales
    monkeypatch.setattr(torch.ops.fullgraph, "update_scales", lambda *a: (calls.append(a), op(*a)))
    for number in range(3):
        x, grad_output = batch(8)
        for each in (model, apart):
            each(x).backward(grad_output)
        update_scales(model)
        assert len(calls) == 3 * number + 1
        update_scales(apart.first)
        update_scales(apart.others[1])
    assert [len(argument) for argument in calls[0][:5]] == [2] * 5
    for ours, theirs in ((model.first, apart.first), (model.others[1], apart.others[1])):
        assert_same_state(ours.scaling_state, theirs.scaling_state)
    assert model.first.fp8_scale[0] != model.others[1].fp8_scale[0]
    assert_fresh(model.others[0].scaling_state, 0)


def test_a_model_without_delayed_scaling():
    for model in (nn.ReLU(), nn.Sequential(new_layer("fp8-current"), new_layer(None))):
        message = f"update_scales: no layer of {type(model).__name__} has delayed scaling"
        with pytest.raises(ConfigError, match=message):
            update_scales(model)


def test_update_before_the_first_step_changes_nothing():
    layer = new_layer()
    update_scales(layer)
    assert_fresh(layer.scaling_state)


def test_inside_of_an_autocast_layers_without_a_recipe_get_its_rule():
    model = nn.Sequential(new_layer(None), new_layer("bf16"))
    with fg.autocast(RECIPE):
        update_scales(model)
    assert model[0].scaling_state.rule == RULE
    assert model[1].scaling_state.rule == ""


def test_attach_updates_after_every_step():
    layer = new_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    handle = attach(optimizer, layer)
    step(layer, *batch(8))
    weight = oracles_delayed.raised(0.0, layer.weight)
    optimizer.step()
    assert layer.scaling_state.amax_history[-1, 1] == weight
    assert layer.scaling_state.scales()[1] == 448 / weight
    handle.remove()
    step(layer, *batch(8))
    optimizer.step()
    assert layer.scaling_state.forward_amax.any()


def test_rules_that_are_equal_are_one():
    """Recipes are values: layers with equal ones share one group of the update, whoever made them."""
    recipes = [fg.recipes.DelayedScaling(history_length=LENGTH) for _ in range(2)]
    rules = {new_layer(recipe).scaling_state.rule for recipe in recipes}
    assert rules == {encode(ScalingRule(LENGTH))}


def test_layers_that_are_never_updated(monkeypatch):
    from fullgraph.ops import scaling

    monkeypatch.setattr(scaling, "PATIENCE", 3)
    monkeypatch.setattr(scaling, "_COUNTS", {})
    layer = new_layer()
    x, grad_output = batch(8)
    for _ in range(2):
        step(layer, x, grad_output)
    with torch.no_grad():
        layer(x)
    with pytest.warns(UserWarning, match="ran 3 times in a row without an update"):
        step(layer, x, grad_output)


# What others leave behind.


def test_a_copy_does_not_inherit_from_a_layer_that_had_its_address():
    layer = fg.Linear(32, 8)
    for _ in range(50):
        gone = fg.Linear(32, 8)
        with fg.autocast(fg.recipes.DelayedScaling(history_length=2)):
            gone(torch.ones(4, 32)).sum().backward()
        del gone
        for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            with pytest.raises(ConfigError, match="has delayed scaling"):
                fg.update_scales(copied)


def test_methods_of_two_objects_are_two_algorithms():
    @dataclasses.dataclass
    class Clip:
        factor: float

        def amax(self, window):
            return window.amax(0) * self.factor

    fg.recipes.DelayedScaling(algorithm=Clip(1.0).amax)
    with pytest.raises(ConfigError, match="two functions are called"):
        fg.recipes.DelayedScaling(algorithm=Clip(8.0).amax)


def test_an_algorithm_that_does_not_exist_is_refused_before_the_first_step():
    with pytest.raises(CompileError, match="'math:nope' was not found"):
        fg.recipes.DelayedScaling(algorithm="math:nope")


def test_looking_without_gradients_changes_no_history():
    layer = fg.Linear(32, 8)
    with fg.autocast(fg.recipes.DelayedScaling(history_length=8)):
        for _ in range(6):
            layer(torch.ones(4, 32)).sum().backward()
            fg.update_scales(layer)
    before = layer.fp8_scale, layer.fp8_amax_history
    with fg.autocast(fg.recipes.DelayedScaling(history_length=2)), torch.no_grad():
        layer(torch.ones(4, 32))
    after = layer.fp8_scale, layer.fp8_amax_history
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    fg.explain(layer, 100 * torch.ones(4, 32))
    layer.configure(fg.recipes.DelayedScaling(history_length=8))
    fg.explain(layer, 100 * torch.ones(4, 32))
    after = layer.fp8_scale, layer.fp8_amax_history
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_cannot_be_attached():
    layer = fg.Linear(32, 8, recipe="fp8-delayed")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="a torch.nn.Module is needed, got SGD"):
        fg.attach(layer, optimizer)
    with pytest.raises(ConfigError, match="an? torch.optim.Optimizer is needed, got Linear"):
        fg.attach(layer, layer)
    with pytest.raises(ConfigError, match="no layer of Linear has delayed scaling"):
        fg.attach(optimizer, torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="a torch.nn.Module is needed, got int"):
        fg.update_scales(3)


def test_scales_are_shared_with_the_parameters():
    """So that a forked child and its parent have the same ones. An update changes them in place."""
    layer = fg.Linear(32, 8, recipe="fp8-delayed")
    layer.share_memory()
    state = layer.scaling_state
    tensors = (state.forward_scale, state.forward_amax, state.backward_scale, state.backward_amax)
    assert all(t.is_shared() for t in (*tensors, state.amax_history))
    layer(torch.randn(4, 32)).sum().backward()
    fg.update_scales(layer)
    assert all(t.is_shared() for t in tensors)
