"""Every feature with every recipe and with every other feature: one graph, the bits of eager mode, no node too many.

The combinations come from `tests/feature_cases.py`; its table is docs/features.md.
"""

import dataclasses
import itertools

import pytest
import torch

import feature_cases
import feature_table
from feature_cases import (
    FEATURES,
    PAIRS,
    RECIPES,
    SINGLES,
    STEPS,
    FeatureCase,
    Recorded,
    assert_same_record,
    check,
    covering,
    expected_counts,
    possible,
    train,
)

pytestmark = [
    # Dynamo looks for the gradient of a quantized input that is no leaf; hidden from users, an error here.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
COVERING = covering(12)
CHEAPEST = min(COVERING, key=lambda case: expected_counts(case.setup()).forward)


def allowed(cases):
    return [case for case in cases if case.excluded is None]


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_pairs(case):
    """Each pair of features is in one of these."""
    check(case, "aot_eager")


def test_inductor():
    check(CHEAPEST, "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("case", allowed(SINGLES), ids=str)
def test_every_feature_with_every_recipe(case):
    check(case, "aot_eager")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", allowed(PAIRS), ids=str)
def test_every_pair_alone(case):
    check(case, "aot_eager")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [c for c in COVERING if c != CHEAPEST], ids=str)
def test_every_pair_with_inductor(case):
    check(case, "inductor")


# What is left out, and that it is left out for the reason that is given.


def rules():
    """(rule, a case that it forbids); none for a rule about other versions of torch."""
    seen = set()
    for name, feature in FEATURES.items():
        for never in feature.never:
            cases = [FeatureCase(recipe, (name, *never.features)).sorted for recipe in RECIPES]
            for case in [case for case in cases if case.excluded is never][:1]:
                marks = [pytest.mark.slow] if never.reason in seen else []
                seen.add(never.reason)
                yield pytest.param(never, case, id=str(case), marks=marks)


@pytest.mark.parametrize(("never", "case"), list(rules()))
def test_what_is_excluded_does_not_work(never, case):
    if never.error:
        with pytest.raises(Exception, match=never.error):
            train(case.setup(), Recorded("aot_eager"))
        return
    # Two values of one thing: there is a field that both of them set, to different values.
    default, *alone = [
        dataclasses.asdict(FeatureCase(case.recipe, features).setup())
        for features in ((), *[(name,) for name in case.features])
    ]
    assert any(len({repr(s[field]) for s in (default, *alone)}) == 3 for field in default)


# The registry and the table.


def test_the_covering_covers():
    met = {pair for case in COVERING for pair in itertools.combinations(case.features, 2)}
    for pair in itertools.combinations(FEATURES, 2):
        assert (pair in met) == any(possible(recipe, pair) for recipe in RECIPES), pair
    assert all(case.excluded is None for case in COVERING)
    assert {case.recipe for case in COVERING} == set(RECIPES)


def test_every_feature_changes_the_setup():
    plain = FeatureCase("fp8-delayed").setup()
    for name in FEATURES:
        assert FeatureCase("fp8-delayed", (name,)).setup() != plain, name


def test_a_difference_is_found():
    """The comparison sees one bit in one result of one step, a graph too many, and a GEMM too many."""
    case = FeatureCase("fp8-delayed", ("two microbatches in flight",))
    record, other = train(case.setup()), train(case.setup())
    assert_same_record(record, other)
    other[2]["layers.1.weight"].view(torch.int16)[3, 4] ^= 1
    with pytest.raises(AssertionError, match=r"step 2: layers\.1\.weight: 1 of 1024 differ"):
        assert_same_record(record, other)
    compiled = Recorded("aot_eager")
    train(case.setup(), compiled)
    feature_cases.assert_expected(case.setup(), compiled.graphs)
    for change in ({"frozen_weight": True}, {"frozen_input": True}, {"evaluates": True}):
        with pytest.raises(AssertionError, match="is not Counts"):
            feature_cases.assert_expected(
                dataclasses.replace(case.setup(), **change), compiled.graphs
            )


def test_training_does_something():
    record = train(FeatureCase("fp8-delayed").setup())
    assert len(record) == STEPS
    for name in (
        "layers.0.weight",
        "layers.2.bias",
        "layers.1.forward_scale",
        "layers.1.backward_scale",
    ):
        assert not torch.equal(record[0][name], record[-1][name])


def test_the_table_is_that_of_the_registry():
    """Whoever adds a feature or a recipe writes the page anew: `./dev features`."""
    page = feature_table.PAGE.read_text(encoding="utf-8")
    assert page == feature_table.page(dict.fromkeys(feature_table.cells(), True))
