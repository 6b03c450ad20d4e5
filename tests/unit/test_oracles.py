"""The comparison helpers can fail, and the second oracle knows the published ties."""

import numpy as np
import pytest
import torch

import oracles
from oracles import assert_same_bits, relative_error


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 3]), r"1 of 2 differ, first at \(1,\): 2 is not 3"),
        (torch.tensor(1.0), torch.tensor(1.0).double(), "float32 is not torch.float64"),
        (torch.zeros(2, 1), torch.zeros(1, 2), "is not torch.Size"),
        (torch.tensor(0.0), torch.tensor(-0.0), "1 of 1 differ"),
        (torch.tensor(float("nan")), torch.tensor(1.0), "1 of 1 differ"),
        (np.float32(1), torch.tensor(2.0), "1 of 1 differ"),
    ],
)
def test_assert_same_bits_can_fail(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_bits(actual, expected)


def test_assert_same_bits_can_pass():
    assert_same_bits(torch.tensor([float("nan"), -0.0]), np.float32([np.nan, -0.0]))


def test_relative_error_sees_a_difference():
    assert relative_error(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)


def test_oracle_rounds_to_nearest_even():
    # 448 | 464 is half way to the next power and saturates; 17 and 19 lie half way in E4M3.
    values = np.float32([17, 19, 464, 1e9, 2.0**-10, 3 * 2.0**-10, -(2.0**-10), np.nan, -np.inf])
    codes = [0x58, 0x5A, 0x7E, 0x7E, 0x00, 0x02, 0x80, 0x7F, 0xFE]
    assert oracles.encode(values, "E4M3").tolist() == codes
