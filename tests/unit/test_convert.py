"""`fg.convert`: what becomes of each kind of layer, and that nothing else about a model changes."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fullgraph as fg
from fullgraph.convert import convert
from fullgraph.errors import ConfigError
from fullgraph.nn import Linear, autocast
from fullgraph.recipes import Float8CurrentScaling
from fullgraph.testing import assert_bitwise


class Model(nn.Module):
    """One of each: plain layers, tied weights, a layer used twice, attention with a subclass of nn.Linear."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 48)
        self.middle = nn.Sequential(nn.ReLU(), nn.Linear(48, 32, bias=False))
        self.tied = nn.Linear(48, 32, bias=False)
        self.tied.weight = self.middle[1].weight
        self.same = self.first
        self.attention = nn.MultiheadAttention(32, 2)

    def forward(self, x):
        return self.tied(self.same(self.middle(self.first(x))))


def names(layers):
    return [layer.name for layer in layers]


def reason_for(report, name):
    return next(layer.reason for layer in report.layers if layer.name == name)


def test_only_the_class_changes():
    model = Model()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    seen = []
    model.first.register_forward_hook(lambda *_: seen.append("forward"))
    model.first.weight.register_hook(lambda _: seen.append("gradient"))
    model.first.weight.requires_grad_(True)
    model.middle[1].weight.requires_grad_(False)
    model.middle.eval()
    model.first.note = "mine"
    state = copy.deepcopy(model.state_dict())

    report = convert(model, "fp8-current")

    assert names(report.converted) == ["first", "middle.1", "tied"]
    assert type(model.first) is type(model.tied) is type(model.middle[1]) is Linear
    assert model.first.recipe == Float8CurrentScaling()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter is parameters[name]
    for name, module in model.named_modules(remove_duplicate=False):
        assert module is modules[name]
    assert model.tied.weight is model.middle[1].weight
    assert model.same is model.first
    assert model.first.note == "mine"
    assert not model.middle[1].training
    assert model.first.training
    assert not model.middle[1].weight.requires_grad
    assert_bitwise(model.state_dict(), state)
    model(torch.randn(4, 32)).sum().backward()
    assert seen == ["forward", "forward", "gradient"]


def test_checkpoints_go_both_ways():
    plain, converted = Model(), Model()
    convert(converted, "fp8-current")
    converted.load_state_dict(plain.state_dict(), strict=True)
    assert_bitwise(converted.state_dict(), plain.state_dict())
    Model().load_state_dict(converted.state_dict(), strict=True)


def test_bf16_is_what_it_was():
    model, x = Model(), torch.randn(5, 32)
    expected = model(x)
    convert(model, "bf16")
    assert_bitwise(model(x).detach(), expected.detach())


def test_the_recipe_reaches_the_op():
    model, x = nn.Linear(32, 16), torch.randn(5, 32)
    plain = model(x)
    convert(model, None)
    assert_bitwise(model(x), plain)
    with autocast("fp8-current"):
        low = model(x)
    assert not torch.equal(low, plain)
    convert(model, Float8CurrentScaling())
    assert_bitwise(model(x), low)


def test_the_model_may_be_the_layer():
    layer = nn.Linear(3, 2)
    report = convert(layer, "fp8-current")
    assert type(layer) is Linear
    assert names(report.converted) == [""]
    assert "(the model)" in str(report)


def test_filter_by_name_and_by_shape():
    model = Model()
    asked = []

    def large_and_not_tied(name, layer):
        asked.append(name)
        return name != "tied" and layer.in_features * layer.out_features >= 48 * 32

    report = convert(model, "fp8-current", filter=large_and_not_tied)
    assert asked == ["first", "middle.1", "tied"]
    assert names(report.converted) == ["first", "middle.1"]
    assert reason_for(report, "tied") == "left out by the filter"
    assert type(model.tied) is nn.Linear


def test_an_fg_linear_gets_the_recipe_only():
    layer = Linear(4, 4, return_bias=True, recipe="bf16")
    report = convert(layer, "fp8-current")
    assert layer.recipe == Float8CurrentScaling()
    assert layer.return_bias
    assert reason_for(report, "") == "only its recipe was set"
    convert(layer, None)
    assert layer.recipe is None


class Special(nn.Linear):
    """A subclass of somebody else's."""


def with_attribute(name):
    layer = nn.Linear(4, 4)
    setattr(layer, name, "mine")
    return layer


def with_own_forward():
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x
    return layer


LEFT_ALONE = {
    "subclass": (lambda: Special(4, 4), "Special is a subclass of torch.nn.Linear"),
    "attention": (lambda: nn.MultiheadAttention(4, 1).out_proj, "NonDynamically.* is a subclass"),
    "lazy": (lambda: nn.LazyLinear(4), "a lazy layer .* run the model once"),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), "parametrized: .*"),
    "float64": (lambda: nn.Linear(4, 4, dtype=torch.float64), "float64 cannot be quantized"),
    "complex": (lambda: nn.Linear(4, 4, dtype=torch.complex64), "complex64 cannot be quantized"),
    "own forward": (with_own_forward, "its forward was replaced on the instance"),
    "own attribute": (lambda: with_attribute("recipe"), "an attribute recipe of its own"),
}


@pytest.mark.parametrize(("make", "reason"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_is_left_alone_and_why(make, reason):
    layer = make()
    kind, attributes = type(layer), dict(vars(layer))
    report = convert(nn.Sequential(layer), "fp8-current")
    assert names(report.skipped) == ["0"]
    assert re.search(reason, report.skipped[0].reason)
    assert type(layer) is kind
    assert vars(layer) == attributes


def test_a_lazy_layer_converts_once_it_has_parameters():
    layer = nn.LazyLinear(4)
    layer(torch.randn(2, 3))
    assert names(convert(layer, "fp8-current").converted) == [""]


def test_compiled_models_notice():
    model, x = nn.Sequential(nn.Linear(32, 16)), torch.randn(5, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain = compiled(x)
    convert(compiled, "fp8-current")
    assert_bitwise(compiled(x), model(x))
    assert not torch.equal(compiled(x), plain)


def test_the_report_is_a_table_and_data():
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 3, dtype=torch.float64))
    report = convert(model, "fp8-current")
    lines = str(report).splitlines()
    assert lines[0].split() == ["layer", "was", "features", "dtype", "converted", "reason"]
    assert lines[2].split() == ["0", "Linear", "32", "->", "16", "float32", "yes"]
    assert lines[3].startswith("1      Linear  16 -> 3   float64  no         float64 cannot be")
    assert lines[-1] == "1 of 2 linear layers follow Float8CurrentScaling"
    data = report.to_dict()
    assert [layer["converted"] for layer in data["layers"]] == [True, False]
    assert str(convert(nn.ReLU(), None)) == "0 of 0 linear layers follow the enclosing autocast"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, "bf16", None), "convert: a torch.nn.Module is needed, got int"),
        ((nn.Linear(2, 2), "fp9", None), "unknown recipe 'fp9'"),
        ((nn.Linear(2, 2), 8, None), "a recipe is needed, got 8"),
        ((nn.Linear(2, 2), "bf16", "first"), "convert: filter must be callable, got 'first'"),
    ],
)
def test_wrong_arguments(arguments, message):
    model, recipe, filter = arguments
    with pytest.raises(ConfigError, match=message):
        convert(model, recipe, filter=filter)


def test_nothing_changes_if_the_filter_raises():
    model = Model()

    def broken(name, layer):
        return {"first": True}[name]

    with pytest.raises(KeyError, match=r"middle\.1"):
        convert(model, "fp8-current", filter=broken)
    assert type(model.first) is nn.Linear


def test_a_custom_recipe_goes_by_the_path_of_a_layer():
    asked = []

    def factory(role):
        asked.append(role.name)
        return fg.IdentityQuantizer() if role.name == "1" else fg.MXQuantizer()

    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    fg.convert(model, fg.recipes.CustomRecipe(factory))
    assert set(asked) == {"", "0", "1"}
    asked.clear()
    report = fg.explain(model, torch.randn(4, 32))
    assert [node.gemms["fprop"] for node in report.nodes[:2]] == ["emulated", "high precision"]
    assert asked == []  # the answers are kept


def test_a_factory_that_fails_changes_nothing():
    def factory(role):
        return None if role.name == "1" else fg.MXQuantizer()

    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with pytest.raises(ConfigError, match="the factory returned None for input of 1"):
        fg.convert(model, fg.recipes.CustomRecipe(factory))
    assert all(type(layer) is nn.Linear for layer in model)


def test_options_of_layers():
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))
    convert(model, "fp8-current", save_weight=fg.Save.ORIGINAL)
    convert(model, "mxfp8", wgrad=fg.Wgrad(deferred=True), filter=lambda name, _: name == "2")
    first, _, last = model
    assert (first.save_weight, first.wgrad) == (fg.Save.ORIGINAL, fg.Wgrad())
    assert (last.save_weight, last.wgrad) == (fg.Save.ORIGINAL, fg.Wgrad(deferred=True))
    assert "save_weight=Save.ORIGINAL, " not in repr(first)
    assert repr(first).endswith("save_weight=Save.ORIGINAL)")
    assert "wgrad=Wgrad(into_main_grad=False, deferred=True" in repr(last)
    with pytest.raises(ConfigError, match="save_input must be a fullgraph.Save"):
        convert(model, "bf16", save_input="original")
    assert first.recipe == Float8CurrentScaling()
