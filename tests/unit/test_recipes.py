"""Recipes: which quantizer for which tensor, which accumulation for which GEMM, names, and what is refused."""

import copy
import dataclasses
import itertools
import pickle

import pytest
import torch

import fullgraph as fg
from fullgraph import gemm
from fullgraph.customop.token import parse
from fullgraph.errors import ConfigError
from fullgraph.quantizers import PerTensorQuantizer
from fullgraph.recipes import BY_NAME, Float8CurrentScaling, LinearNumerics, Recipe, Role
from linear_cases import E4M3, E5M2, Case, batch

SPLIT = ("fprop_split_accumulator", "dgrad_split_accumulator", "wgrad_split_accumulator")


def test_names():
    assert list(BY_NAME) == ["bf16", "fp8-current"]
    for name, recipe in BY_NAME.items():
        assert fg.recipes.get(name) is recipe
        assert fg.recipes.resolve(name) is recipe
        assert fg.recipes.resolve(recipe) is recipe


def test_unknown_names_are_refused():
    with pytest.raises(
        ConfigError, match=r"unknown recipe 'fp8'\nWhy: the recipes are bf16, fp8-current"
    ):
        fg.recipes.get("fp8")
    with pytest.raises(
        ConfigError, match=r"a recipe is needed, got <class '.*Float8CurrentScaling'>"
    ):
        fg.recipes.resolve(Float8CurrentScaling)
    with pytest.raises(ConfigError, match="a recipe is needed, got None"):
        fg.recipes.resolve(None)


def test_high_precision_quantizes_nothing():
    recipe = fg.recipes.get("bf16")
    assert [recipe.quantizer(role) for role in Role] == [None] * 4
    numerics = recipe.linear_numerics()
    assert numerics.input is numerics.weight is numerics.grad_output is None
    assert not numerics.low_precision_fprop
    assert not numerics.low_precision_dgrad
    assert not numerics.low_precision_wgrad


def test_what_is_kept_quantized_always_has_a_quantizer():
    assert fg.recipes.get("bf16").stored_quantizer(Role.WEIGHT) == E4M3
    assert fg.recipes.get("bf16").linear_numerics().output == E4M3
    recipe = Float8CurrentScaling(forward_format=fg.Format.E5M2)
    assert recipe.stored_quantizer(Role.OUTPUT) == E5M2


def test_current_scaling_is_hybrid_by_default():
    """TransformerEngine's defaults: E4M3 forward, E5M2 for gradients; fprop accumulates fast, the others split."""
    assert Float8CurrentScaling().linear_numerics() == LinearNumerics(
        input=E4M3,
        weight=E4M3,
        grad_output=E5M2,
        output=E4M3,
        fprop_split_accumulator=False,
        dgrad_split_accumulator=True,
        wgrad_split_accumulator=True,
    )


def test_options_reach_every_quantizer():
    recipe = Float8CurrentScaling(
        forward_format=fg.Format.E5M2,
        backward_format=fg.Format.E4M3,
        power_of_two=True,
        amax_epsilon=1e-12,
    )
    options = {"power_of_two": True, "amax_epsilon": 1e-12}
    forward = PerTensorQuantizer(fg.Format.E5M2, **options)
    backward = PerTensorQuantizer(fg.Format.E4M3, **options)
    expected = {Role.GRAD_OUTPUT: backward}
    for role in Role:
        assert recipe.quantizer(role) == expected.get(role, forward)


@pytest.mark.parametrize("split", list(itertools.product([False, True], repeat=3)), ids=str)
def test_accumulation_reaches_each_gemm(split, monkeypatch):
    seen, multiply = [], gemm.gemm

    def watching(*args, split_accumulator, **kwargs):
        seen.append(split_accumulator)
        return multiply(*args, split_accumulator=split_accumulator, **kwargs)

    monkeypatch.setattr(gemm, "gemm", watching)
    layer = fg.Linear(48, 32, recipe=Float8CurrentScaling(**dict(zip(SPLIT, split, strict=True))))
    x, grad_output = batch(3, dtype=torch.float32)
    layer(x.requires_grad_()).backward(grad_output)
    assert tuple(seen) == split


@pytest.mark.parametrize("chosen", list(itertools.product([None, E4M3], repeat=3)), ids=str)
def test_a_gemm_is_low_precision_if_both_operands_are(chosen):
    numerics = LinearNumerics(*chosen)
    input, weight, grad_output = (c is not None for c in chosen)
    assert numerics.low_precision_fprop == (input and weight)
    assert numerics.low_precision_dgrad == (grad_output and weight)
    assert numerics.low_precision_wgrad == (grad_output and input)


ALL = [
    *BY_NAME.values(),
    Float8CurrentScaling(power_of_two=True),
    Float8CurrentScaling(amax_epsilon=1e-12),
]


@pytest.mark.parametrize("recipe", ALL, ids=str)
def test_a_recipe_is_a_value(recipe):
    for same in (
        copy.deepcopy(recipe),
        pickle.loads(pickle.dumps(recipe)),
        dataclasses.replace(recipe),
    ):
        assert same == recipe
        assert hash(same) == hash(recipe)
        assert same.numerics_text == recipe.numerics_text
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field"):
        recipe.power_of_two = True


def test_different_recipes_are_different_constants():
    assert len({recipe.numerics_text for recipe in ALL}) == len(set(ALL)) == len(ALL)


@pytest.mark.parametrize("recipe", ALL, ids=str)
def test_the_constant_says_what_the_recipe_says(recipe):
    assert parse(f"numerics={recipe.numerics_text}")["numerics"] == recipe.linear_numerics()


def test_a_replaced_recipe_has_its_own_constant():
    recipe = dataclasses.replace(Float8CurrentScaling(), power_of_two=True)
    assert recipe.numerics_text == Float8CurrentScaling(power_of_two=True).numerics_text


# Recipes of one's own.


@dataclasses.dataclass(frozen=True)
class WeightOnly(Recipe):
    """A recipe with one quantizer."""

    def quantizer(self, role):
        return E4M3 if role is Role.WEIGHT else None


def test_a_recipe_without_all_quantizers():
    numerics = WeightOnly().linear_numerics()
    assert (numerics.input, numerics.weight, numerics.grad_output) == (None, E4M3, None)
    layer = Case("bf16").layer()
    x = batch(3)[0]
    expected = layer(x)
    layer.configure(WeightOnly())
    assert torch.equal(layer(x), expected)


class NoDataclass(Recipe):
    def quantizer(self, role):
        return None


@dataclasses.dataclass(frozen=True)
class ForgetsItsBase(Recipe):
    margin: int = 0

    def __post_init__(self):
        pass

    def quantizer(self, role):
        return None


@dataclasses.dataclass(frozen=True)
class SaysNothing(Recipe):
    margin: int = 0


@pytest.mark.parametrize("recipe", [NoDataclass, ForgetsItsBase])
def test_recipes_must_be_frozen_dataclasses(recipe):
    for use in (
        lambda: fg.Linear(4, 4, recipe=recipe()),
        lambda: fg.autocast(recipe()),
        lambda: fg.linear(torch.zeros(2, 4), torch.zeros(4, 4), recipe=recipe()),
    ):
        with pytest.raises(
            ConfigError, match=rf"{recipe.__name__}: a recipe must be a frozen dataclass"
        ):
            use()


def test_recipes_must_choose_quantizers():
    with pytest.raises(NotImplementedError, match=r"SaysNothing must define quantizer\(role\)"):
        SaysNothing()


def test_formats_without_a_per_tensor_cast_are_refused_early():
    with pytest.raises(ConfigError, match=r"the format must be E4M3 or E5M2, got Format\.E2M1"):
        Float8CurrentScaling(forward_format=fg.Format.E2M1)
    with pytest.raises(ConfigError, match=r"the format must be E4M3 or E5M2, got Format\.E8M0"):
        Float8CurrentScaling(backward_format=fg.Format.E8M0)
