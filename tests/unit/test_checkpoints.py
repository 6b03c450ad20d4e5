"""Checkpoints: whole models, state_dicts and optimizers come back bit for bit, and training goes on as if nothing was.

By `torch.save` and by `torch.distributed.checkpoint`, which asks only for what the state_dict of the fresh model has.
"""

import copy
import io
import itertools
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import fullgraph as fg
from fullgraph.recipes import Role
from linear_cases import RECIPES, bytes_of
from oracles import assert_same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.filterwarnings("ignore:.*will be deprecated.*"),
]

WIDTHS = (48, 32, 16)
WEIGHTS = pytest.mark.parametrize("quantized_weight", [False, True], ids=["plain", "quantized"])
DELAYED = fg.recipes.DelayedScaling(history_length=3)


def recipe_of(name):
    return DELAYED if name == "fp8-delayed" else name


def new_model(recipe, quantized_weight=False, seed=0):
    torch.manual_seed(seed)
    layers = [
        fg.Linear(k, n, recipe=recipe, quantized_weight=quantized_weight, dtype=torch.bfloat16)
        for k, n in itertools.pairwise(WIDTHS)
    ]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1])


def new_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps=2, seed=0):
    torch.manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(16, WIDTHS[0], dtype=torch.bfloat16)
        model(x).float().square().mean().backward()
        optimizer.step()
        if model[0].scaling_state.rule:
            fg.update_scales(model)


def trained(recipe, quantized_weight=False):
    model = new_model(recipe, quantized_weight, seed=1)
    optimizer = new_optimizer(model)
    train(model, optimizer)
    model(torch.randn(4, WIDTHS[0], dtype=torch.bfloat16))  # amaxes that no update has taken yet
    return model, optimizer


def fresh(recipe, quantized_weight=False):
    model = new_model(recipe, quantized_weight, seed=2)
    return model, new_optimizer(model)


def bits(value, name=""):
    """Every tensor in a nested state, as plain ones, by name."""
    if isinstance(value, torch.Tensor):
        return bytes_of(value, name)
    if not isinstance(value, (dict, list)):
        return {}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: t for n, v in items for k, t in bits(v, f"{name}.{n}").items()}


def assert_same_state(actual, expected):
    actual, expected = bits(actual), bits(expected)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor)


def assert_resumed(model, optimizer, resumed, resumed_optimizer):
    """The same bits now and after more training, which does change them."""
    assert_same_state(resumed.state_dict(), model.state_dict())
    assert_same_state(resumed_optimizer.state_dict(), optimizer.state_dict())
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, seed=5)
    train(resumed, resumed_optimizer, seed=5)
    assert_same_state(resumed.state_dict(), model.state_dict())
    assert_same_state(resumed_optimizer.state_dict(), optimizer.state_dict())
    with pytest.raises(AssertionError, match="differ"):
        assert_same_state(before, model.state_dict())


def saved_and_loaded(value, weights_only=True):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


# Round trips.


@pytest.mark.parametrize("recipe", RECIPES)
@WEIGHTS
def test_torch_save(recipe, quantized_weight):
    model, optimizer = trained(recipe_of(recipe), quantized_weight)
    saved = saved_and_loaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    resumed, resumed_optimizer = fresh(recipe_of(recipe), quantized_weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not any(resumed.load_state_dict(saved["model"], strict=True))
    resumed_optimizer.load_state_dict(saved["optimizer"])
    assert_resumed(model, optimizer, resumed, resumed_optimizer)


@pytest.mark.parametrize("recipe", RECIPES)
@WEIGHTS
def test_whole_models(recipe, quantized_weight):
    for copied in (
        lambda pair: saved_and_loaded(pair, weights_only=False),
        lambda pair: pickle.loads(pickle.dumps(pair)),
        copy.deepcopy,
    ):
        pair = trained(recipe_of(recipe), quantized_weight)
        assert_resumed(*pair, *copied(pair))


def by_plain_state_dicts(path, save, load):
    state = {"model": save[0].state_dict(), "optimizer": get_optimizer_state_dict(*save)}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    state = {"model": load[0].state_dict(), "optimizer": get_optimizer_state_dict(*load)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    load[0].load_state_dict(state["model"], strict=True)
    set_optimizer_state_dict(*load, state["optimizer"])


def by_helpers(path, save, load, **options):
    chosen = StateDictOptions(**options)
    model, optimizer = get_state_dict(*save, options=chosen)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path, no_dist=True)
    model, optimizer = get_state_dict(*load, options=chosen)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    set_state_dict(
        *load,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=chosen,
    )


def on_the_cpu(path, save, load):
    by_helpers(path, save, load, cpu_offload=True)


def asynchronously(path, save, load):
    """What is saved is the state when the save began."""
    state = {"model": save[0].state_dict(), "optimizer": get_optimizer_state_dict(*save)}
    expected = copy.deepcopy(state)
    future = dcp.async_save(state, checkpoint_id=path, no_dist=True)
    train(*save)
    future.result()
    set_state_dict(
        *save, model_state_dict=expected["model"], optim_state_dict=expected["optimizer"]
    )
    state = {"model": load[0].state_dict(), "optimizer": get_optimizer_state_dict(*load)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    load[0].load_state_dict(state["model"])
    set_optimizer_state_dict(*load, state["optimizer"])


@pytest.mark.parametrize("way", [by_plain_state_dicts, by_helpers, on_the_cpu, asynchronously])
@pytest.mark.parametrize("recipe", RECIPES)
@WEIGHTS
def test_distributed_checkpoint(way, recipe, quantized_weight, tmp_path):
    pair = trained(recipe_of(recipe), quantized_weight)
    resumed = fresh(recipe_of(recipe), quantized_weight)
    way(tmp_path, pair, resumed)
    assert_resumed(*pair, *resumed)


def test_distributed_checkpoint_of_a_model_that_never_ran(tmp_path):
    """Nothing to say, and nothing said."""
    model, other = new_model(DELAYED, seed=1), new_model(DELAYED, seed=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        other.load_state_dict(saved_and_loaded(model.state_dict()))
    assert_same_state(other.state_dict(), model.state_dict())


# Recipes that come from an autocast.


def run_once(model):
    model(torch.randn(4, WIDTHS[0], dtype=torch.bfloat16)).float().sum().backward()


def trained_under_autocast():
    model = new_model(None, seed=1)
    with fg.autocast(DELAYED):
        run_once(model)
        fg.update_scales(model)
    return model


@pytest.mark.parametrize("inside", [True, False], ids=["inside of the autocast", "converted"])
def test_a_recipe_of_an_autocast_resumes(inside, tmp_path):
    model, resumed = trained_under_autocast(), new_model(None, seed=2)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    if inside:
        with fg.autocast(DELAYED):
            state = resumed.state_dict()
    else:
        fg.convert(resumed, DELAYED)
        state = resumed.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    resumed.load_state_dict(state)
    assert_same_state(resumed.state_dict(), model.state_dict())
    assert resumed[0].fp8_scale[0] != 1
    with warnings.catch_warnings(), fg.autocast(DELAYED):
        warnings.simplefilter("error", UserWarning)
        run_once(resumed)


def test_a_recipe_of_an_autocast_is_never_lost_in_silence(tmp_path):
    model, resumed = trained_under_autocast(), new_model(None, seed=2)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    state = resumed.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    with warnings.catch_warnings():  # who knows that it will have delayed scaling?
        warnings.simplefilter("error", UserWarning)
        resumed.load_state_dict(state)
        with fg.autocast("fp8-current"):
            run_once(resumed)
    with warnings.catch_warnings(record=True) as caught, fg.autocast(DELAYED):
        warnings.simplefilter("always")
        run_once(resumed)
        run_once(resumed)
    (warning,) = [w for w in caught if issubclass(w.category, UserWarning)]
    for words in ("no scales for delayed scaling", "they start anew", "inside of the autocast"):
        assert words in str(warning.message)


# Between plain and quantized weights.


def stored_weights(model):
    return {name: parameter for name, parameter in model.named_parameters() if "weight" in name}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("by_dcp", [False, True])
def test_plain_into_quantized(recipe, by_dcp, tmp_path):
    model, _ = trained(recipe_of(recipe))
    resumed = new_model(recipe_of(recipe), quantized_weight=True, seed=2)
    load(resumed, model, tmp_path if by_dcp else None)
    own = (fg.recipes.get(recipe)).stored_quantizer(Role.WEIGHT)
    for name, weight in stored_weights(resumed).items():
        original = dict(model.named_parameters())[name].detach()
        assert isinstance(weight, fg.QuantizedTensor)
        assert isinstance(weight, nn.Parameter)
        assert_same_state(weight, fg.quantize(original, own, fg.BOTH))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("by_dcp", [False, True])
def test_quantized_into_plain(recipe, by_dcp, tmp_path):
    model, _ = trained(recipe_of(recipe), quantized_weight=True)
    resumed = new_model(recipe_of(recipe), seed=2)
    load(resumed, model, tmp_path if by_dcp else None)
    for name, weight in stored_weights(resumed).items():
        assert type(weight) is nn.Parameter
        assert_same_bits(
            weight.detach(), dict(model.named_parameters())[name].detach().dequantize()
        )


def load(resumed, model, path):
    if path is None:
        resumed.load_state_dict(saved_and_loaded(model.state_dict()), strict=True)
        return
    dcp.save(model.state_dict(), checkpoint_id=path, no_dist=True)
    state = get_model_state_dict(resumed)
    dcp.load(state, checkpoint_id=path, no_dist=True)
    set_model_state_dict(resumed, state)


def test_another_quantizer_requantizes_what_was_stored():
    model = new_model("mxfp8", quantized_weight=True)
    resumed = new_model("fp8-block", quantized_weight=True, seed=2)
    resumed.load_state_dict(model.state_dict())
    own = fg.recipes.get("fp8-block").stored_quantizer(Role.WEIGHT)
    expected = fg.quantize(model[0].weight.detach().dequantize(), own, fg.BOTH)
    assert_same_state(resumed[0].weight, expected)


@pytest.mark.parametrize("from_quantized", [False, True])
@pytest.mark.parametrize("into_quantized", [False, True])
def test_assign_takes_what_the_checkpoint_holds(from_quantized, into_quantized):
    """The rule of torch: parameters become the tensors of the checkpoint, of whatever kind."""
    model, _ = trained(DELAYED, from_quantized)
    resumed = new_model(DELAYED, into_quantized, seed=2)
    resumed[2].weight.requires_grad_(False)
    resumed.load_state_dict(saved_and_loaded(model.state_dict()), assign=True)
    assert_same_state(resumed.state_dict(), model.state_dict())
    for weight in stored_weights(resumed).values():
        assert isinstance(weight, nn.Parameter)
        assert isinstance(weight, fg.QuantizedTensor) == from_quantized
    assert [w.requires_grad for w in stored_weights(resumed).values()] == [True, False]
    x = torch.randn(4, WIDTHS[0], dtype=torch.bfloat16)
    assert torch.equal(resumed(x), model(x))
    assert ("quantized_weight=True" in repr(resumed[0])) == from_quantized


# Meta device.


@pytest.mark.parametrize("recipe", RECIPES)
@WEIGHTS
def test_into_a_meta_model(recipe, quantized_weight):
    model, _ = trained(recipe_of(recipe), quantized_weight)
    for assign in (False, True):
        with torch.device("meta"):
            resumed = new_model(recipe_of(recipe), quantized_weight)
        if not assign:
            resumed.to_empty(device="cpu")
        resumed.load_state_dict(model.state_dict(), assign=assign)
        assert_same_state(resumed.state_dict(), model.state_dict())
        x = torch.randn(4, WIDTHS[0], dtype=torch.bfloat16)
        assert torch.equal(resumed(x), model(x))


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4", "fp8-delayed"])
def test_plain_into_a_quantized_meta_model(recipe):
    model, _ = trained(recipe_of(recipe))
    expected = new_model(recipe_of(recipe), quantized_weight=True)
    expected.load_state_dict(model.state_dict())
    with torch.device("meta"):
        resumed = new_model(recipe_of(recipe), quantized_weight=True)
    resumed.to_empty(device="cpu")
    resumed.load_state_dict(model.state_dict())
    assert_same_state(resumed.state_dict(), expected.state_dict())


def test_distributed_checkpoint_into_a_meta_model(tmp_path):
    model, _ = trained(DELAYED, quantized_weight=True)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    with torch.device("meta"):
        resumed = new_model(DELAYED, quantized_weight=True)
    resumed.to_empty(device="cpu")
    state = resumed.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    resumed.load_state_dict(state)
    assert_same_state(resumed.state_dict(), model.state_dict())


# Odd values.


SCALES, HISTORY = torch.ones(4), torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ((SCALES * float("nan"), HISTORY), "fp8_scale must hold finite positive numbers"),
        ((torch.tensor([1.0, 0, 1, 1]), HISTORY), "fp8_scale must hold finite positive numbers"),
        ((SCALES * float("inf"), HISTORY), "fp8_scale must hold finite positive numbers"),
        ((-SCALES, HISTORY), "fp8_scale must hold finite positive numbers"),
        ((SCALES, HISTORY * float("nan")), "fp8_amax_history must hold amaxes"),
        ((SCALES, HISTORY - 1), "fp8_amax_history must hold amaxes"),
        ((SCALES.bfloat16(), HISTORY), r"must be float32 .* got bfloat16\[4\]"),
        ((SCALES, HISTORY.long()), r"must be float32 .* and int64\[3, 4\]"),
        ((SCALES[:3], HISTORY), r"got float32\[3\]"),
        ((SCALES, HISTORY[:, :3]), r"and float32\[3, 3\]"),
        ((SCALES, HISTORY[:0]), r"and float32\[0, 4\]"),
        ((SCALES, HISTORY[0]), r"and float32\[4\]"),
        (([1.0] * 4, HISTORY), r"got list and float32\[3, 4\]"),
        ((SCALES, None), r"got float32\[4\] and NoneType"),
    ],
)
def test_scales_that_are_none(entries, words):
    model, _ = trained(DELAYED)
    before = copy.deepcopy(model.state_dict())
    odd = dict(zip(("0.fp8_scale", "0.fp8_amax_history"), entries, strict=True))
    with pytest.raises(RuntimeError, match=words):
        model.load_state_dict({**before, **odd})
    for key in odd:
        assert_same_bits(model.state_dict()[key], before[key])


def test_half_of_the_state():
    model, _ = trained(DELAYED)
    state = model.state_dict()
    del state["0.fp8_amax_history"]
    with pytest.raises(RuntimeError, match=r"got float32\[4\] and NoneType"):
        model.load_state_dict(state)


def test_an_infinite_amax_is_a_value_like_any_other():
    model, _ = trained(DELAYED)
    state = copy.deepcopy(model.state_dict())
    state["0.fp8_amax_history"][1, 0] = float("inf")
    model.load_state_dict(state)
    assert_same_state(model.state_dict(), state)


@WEIGHTS
def test_weights_that_do_not_fit(quantized_weight):
    model = new_model("mxfp8", quantized_weight)
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight"):
        model.load_state_dict({**state, "0.weight": torch.zeros(3, 3)})
    with pytest.raises(RuntimeError, match=r'"0.weight", expected torch.Tensor .* received .*list'):
        model.load_state_dict({**state, "0.weight": [0.0]})
    other = new_model("mxfp8", not quantized_weight)
    wrong = {**state, "0.weight": other[2].weight.detach()}
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight"):
        model.load_state_dict(wrong)


# Formats that hold plain tensors only.


def test_plain_state_of_a_quantized_model():
    """What docs/checkpoints.md says to do for safetensors: every entry plain and with memory of its own."""
    model, _ = trained(DELAYED, quantized_weight=True)
    plain = {
        name: tensor.dequantize() if isinstance(tensor, fg.QuantizedTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    assert {type(tensor) for tensor in plain.values()} == {torch.Tensor}
    addresses = [tensor.untyped_storage().data_ptr() for tensor in plain.values()]
    assert len(set(addresses)) == len(addresses)
    resumed = new_model(DELAYED)
    resumed.load_state_dict(plain)
    assert torch.equal(resumed[0].weight, model[0].weight.dequantize())
