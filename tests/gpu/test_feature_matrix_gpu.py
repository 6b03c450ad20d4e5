"""Every feature with every recipe, and every pair of features, on a GPU: the bits of eager mode, in CUDA graphs too."""

import dataclasses

import pytest
import torch
from torch._dynamo.utils import counters

from feature_cases import (
    SINGLES,
    STEPS,
    Training,
    assert_near,
    assert_same_record,
    covering,
    expected_counts,
    train,
)

pytestmark = [
    pytest.mark.gpu,
    # Dynamo looks for the gradient of a quantized input that is no leaf; hidden from users, an error here.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore::fullgraph.errors.EmulationWarning"),
]
SINGLE = [case for case in SINGLES if case.excluded is None]
COVERING = covering(12)


def check(case, mode):
    """Train a case eagerly and compiled, and compare everything; every graph is captured.

    Gradients are there before the first step: a CUDA graph that adds to them needs that.
    """

    def compile(function, **options):
        return torch.compile(function, fullgraph=True, mode=mode, **options)

    setup = dataclasses.replace(case.setup("cuda"), keeps_gradients=True)
    expected = train(dataclasses.replace(case.plain.setup("cuda"), keeps_gradients=True))
    record = []
    with torch._inductor.config.patch(emulate_precision_casts=True):
        training = Training(setup, compile)
        for number in range(STEPS):
            torch.compiler.cudagraph_mark_step_begin()
            record.append(training.step(number))
            if number == 1:
                made = counters["stats"]["unique_graphs"]
    if case.rounds:
        assert_near(record, expected)
    else:
        assert_same_record(record, expected)
    assert counters["stats"]["unique_graphs"] == made
    if setup.copies_after < 0:
        assert made == expected_counts(setup).graphs
    else:  # a copy may share the graphs of the original
        assert made <= expected_counts(setup).graphs
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_every_feature_with_every_recipe(case):
    check(case, "reduce-overhead")


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_pairs(case, mode):
    check(case, mode)
