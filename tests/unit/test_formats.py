"""Formats against the published tables, code by code."""

import copy
import math
import pickle

import pytest
import torch

import fullgraph as fg
import oracles
import oracles_nvfp4
from fullgraph.errors import ConfigError
from fullgraph.formats import (
    BOTH,
    COLUMNWISE,
    HADAMARD_SIGN_CHANGES,
    ROWWISE,
    Format,
    FormatSpec,
    FourOverSix,
    MXScaleMode,
    Orientation,
    Scaling,
    check_nvfp4_options,
    largest_finite,
)

# From the format documents: bits, bias, max, its code, min normal, min subnormal, inf, nan.
TABLE = {
    "E4M3": (8, 7, 448.0, 0x7E, 2.0**-6, 2.0**-9, None, 0x7F),
    "E5M2": (8, 15, 57344.0, 0x7B, 2.0**-14, 2.0**-16, 0x7C, 0x7F),
    "E2M1": (4, 1, 6.0, 0x7, 1.0, 0.5, None, None),
    "E8M0": (8, 127, 2.0**127, 0xFE, 2.0**-127, 2.0**-127, None, 0xFF),
}
DTYPES = {
    "E4M3": torch.float8_e4m3fn,
    "E5M2": torch.float8_e5m2,
    "E2M1": torch.uint8,
    "E8M0": torch.float8_e8m0fnu,
}


def test_every_format_has_a_row():
    assert {f.name for f in Format} == set(TABLE)


@pytest.mark.parametrize("format", Format, ids=lambda f: f.name)
def test_derived_numbers(format):
    bits, bias, largest, largest_code, min_normal, min_subnormal, inf, nan = TABLE[format.name]
    assert format.bits == bits
    assert format.value.bias == bias
    assert (format.max, format.max_code) == (largest, largest_code)
    assert (format.min_normal, format.min_subnormal) == (min_normal, min_subnormal)
    assert (format.inf_code, format.nan_code) == (inf, nan)
    assert format.max_exponent == math.floor(math.log2(largest))
    assert format.dtype == DTYPES[format.name]
    assert format.codes_per_byte == (2 if format is Format.E2M1 else 1)


@pytest.mark.parametrize("format", Format, ids=lambda f: f.name)
def test_decode_agrees_with_the_oracle(format):
    positive = 1 << (format.bits - format.value.is_signed)
    for code in range(positive):
        expected = oracles.decode_code(format.name, code)
        for actual, sign in ((format.decode(code), 1), (format.decode(code + positive), -1)):
            if sign == -1 and not format.value.is_signed:
                continue
            assert math.isnan(actual) if math.isnan(expected) else actual == sign * expected


@pytest.mark.parametrize(
    "format", [f for f in Format if f.codes_per_byte == 1], ids=lambda f: f.name
)
def test_decode_agrees_with_torch(format):
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(format.dtype).to(torch.float32)
    actual = torch.tensor([format.decode(code) for code in range(256)])
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


def test_e2m1_is_the_published_list():
    values = [Format.E2M1.decode(code) for code in range(16)]
    assert values[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert values[8:] == [-v for v in values[:8]]
    assert math.copysign(1, values[8]) == -1


@pytest.mark.parametrize("format", Format, ids=lambda f: f.name)
def test_values_rise_with_the_code_and_end_at_max(format):
    values = [format.decode(code) for code in range(format.max_code + 1)]
    assert values == sorted(set(values))
    assert values[-1] == format.max
    assert values[1 if format.has_subnormals else 0] == format.min_subnormal
    assert format.decode(values.index(1.0) + 1) == (
        2.0 if format is Format.E8M0 else 1 + format.eps
    )


def test_members_are_singletons():
    for format in Format:
        assert pickle.loads(pickle.dumps(format)) is format
        assert copy.deepcopy(format) is format
        assert Format[format.name] is format
        assert Format(format.value) is format


def test_specs_are_frozen():
    with pytest.raises(AttributeError, match="bias"):
        Format.E4M3.value.bias = 8
    assert FormatSpec(4, 3, 7) == Format.E4M3.value


@pytest.mark.parametrize(
    ("orientation", "rowwise", "columnwise"),
    [(ROWWISE, True, False), (COLUMNWISE, False, True), (BOTH, True, True)],
)
def test_orientation(orientation, rowwise, columnwise):
    assert (orientation.rowwise, orientation.columnwise) == (rowwise, columnwise)
    assert isinstance(orientation, Orientation)


@pytest.mark.parametrize("dtype", oracles.DTYPE_MAX)
def test_largest_finite(dtype):
    assert largest_finite(dtype) == oracles.DTYPE_MAX[dtype]


def test_largest_finite_stays_in_float32():
    assert largest_finite(torch.float64) == oracles.DTYPE_MAX[torch.float32]


# Scalings: elements of the contraction that share a scale, and what native GEMMs want it to be a multiple of.
SCALINGS = {
    Scaling.TENSOR: (1, 16),
    Scaling.ROW: (1, 16),
    Scaling.BLOCK_1X128: (128, 128),
    Scaling.BLOCK_128X128: (128, 128),
    Scaling.BLOCK_1X32: (32, 32),
    Scaling.BLOCK_1X16: (16, 32),
    Scaling.CUSTOM: (1, 16),
}


def test_scalings():
    assert {s: (s.block, s.alignment) for s in Scaling} == SCALINGS
    assert all(s.alignment % s.block == 0 for s in Scaling)
    assert all(Scaling(s.value) is pickle.loads(pickle.dumps(s)) is s for s in Scaling)


def test_choices_are_public_singletons():
    for kind in (Scaling, MXScaleMode, FourOverSix, Orientation, Format):
        assert getattr(fg, kind.__name__) is kind
        for member in kind:
            assert copy.deepcopy(member) is pickle.loads(pickle.dumps(member)) is member


def test_four_over_six_leaves_room_for_the_larger_scale():
    for error in FourOverSix:
        assert error.scale_max * 6 / 4 <= Format.E4M3.max
        assert error.scale_max == 2.0 ** math.floor(math.log2(Format.E4M3.max * 4 / 6))


def test_signs_of_the_hadamard_transform():
    signs = [-1 if HADAMARD_SIGN_CHANGES >> i & 1 else 1 for i in range(16)]
    assert signs == oracles_nvfp4.SIGNS


NOTHING = {
    "two_dimensional": False,
    "hadamard": False,
    "four_over_six": None,
    "row_scaled": False,
    "seed": None,
}
SOMETHING = {
    "two_dimensional": True,
    "hadamard": True,
    "four_over_six": FourOverSix.MSE,
    "row_scaled": True,
    "seed": torch.tensor(3),
}
EXCLUDED = [
    {"four_over_six", "hadamard"},
    {"four_over_six", "seed"},
    {"two_dimensional", "row_scaled"},
    {"two_dimensional", "hadamard"},
]


def test_options_of_nvfp4_that_exclude_each_other():
    check_nvfp4_options(2, **NOTHING)
    for first in SOMETHING:
        check_nvfp4_options(32, **{**NOTHING, first: SOMETHING[first]})
        for second in SOMETHING:
            asked = {**NOTHING, first: SOMETHING[first], second: SOMETHING[second]}
            if {first, second} in EXCLUDED:
                with pytest.raises(
                    ConfigError, match=r"cast_nvfp4: \w+ and \w+ exclude each other"
                ):
                    check_nvfp4_options(2, **asked)
            else:
                check_nvfp4_options(2, **asked)


@pytest.mark.parametrize("pad", [1, 0, -2, 3])
def test_pads_that_split_a_byte(pad):
    with pytest.raises(ConfigError, match=f"pad must be a positive even number, got {pad}"):
        check_nvfp4_options(pad, **NOTHING)
