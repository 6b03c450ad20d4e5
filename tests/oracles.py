"""A second opinion on numbers: NumPy and plain Python, written from the format tables alone.

Nothing here calls a cast of torch's, and nothing is shared with the package under test.
"""

import numpy as np
import torch

# name: (exponent bits, mantissa bits, bias, first code that is not finite)
FIELDS = {
    "E4M3": (4, 3, 7, 0x7F),
    "E5M2": (5, 2, 15, 0x7C),
    "E2M1": (2, 1, 1, 8),
    "E8M0": (8, 0, 127, 0xFF),
}
FORMAT_MAX = {"E4M3": 448.0, "E5M2": 57344.0}
DTYPE_MAX = {
    torch.float32: 3.4028234663852886e38,
    torch.bfloat16: 3.3895313892515355e38,
    torch.float16: 65504.0,
}
NAN_CODE = 0x7F
SIGN = 0x80


def decode_code(name, code):
    """One code without its sign bit, digit by digit."""
    exponent_bits, mantissa_bits, bias, first_special = FIELDS[name]
    if code >= first_special:
        return float("inf") if name == "E5M2" and code == first_special else float("nan")
    digits = format(code, f"0{exponent_bits + mantissa_bits}b")
    exponent = int(digits[:exponent_bits], 2)
    fraction = sum(2.0 ** -(i + 1) for i, d in enumerate(digits[exponent_bits:]) if d == "1")
    if exponent == 0 and name != "E8M0":
        return fraction * 2.0 ** (1 - bias)
    return (1 + fraction) * 2.0 ** (exponent - bias)


def finite_values(name):
    """The values of the non-negative finite codes, which stand in the order of the codes."""
    return np.array([decode_code(name, code) for code in range(FIELDS[name][3])])


def encode(values, name):
    """float32 array to uint8 codes: nearest, ties to the even code, saturating, one NaN."""
    table = finite_values(name)
    is_nan = np.isnan(values)
    magnitude = np.minimum(np.abs(np.where(is_nan, 0, values)).astype(np.float64), table[-1])
    lower = np.searchsorted(table, magnitude, side="right") - 1
    upper = np.minimum(lower + 1, len(table) - 1)
    down, up = magnitude - table[lower], table[upper] - magnitude
    goes_up = (up < down) | ((up == down) & (lower % 2 == 1))
    codes = np.where(goes_up, upper, lower) + np.where(np.signbit(values), SIGN, 0)
    return np.where(is_nan, NAN_CODE, codes).astype(np.uint8)


def scale_from_amax(amax, name, input_dtype, *, eps=0.0, power_of_two=False):
    """The encode scale of one float32 amax, as a float32."""
    amax = np.float32(amax)
    if not np.isnan(amax):
        amax = max(amax, np.float32(eps))
    if amax == 0 or np.isinf(amax) or np.isnan(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(FORMAT_MAX[name]) / amax
    if np.isinf(scale):
        scale = np.float32(DTYPE_MAX[input_dtype])
    return np.float32(2.0 ** (np.frexp(scale)[1] - 1)) if power_of_two else scale


def cast_per_tensor(x, amax, name, *, eps=0.0, power_of_two=False):
    """Rowwise bytes and scale_inv of a float32 array that holds values of `input_dtype`."""
    scale = scale_from_amax(amax, name, x.dtype, eps=eps, power_of_two=power_of_two)
    with np.errstate(over="ignore", invalid="ignore"):
        return encode(x.to(torch.float32).numpy() * scale, name), np.float32(1) / scale


def assert_same_bits(actual, expected):
    """Equal dtype, shape and every bit; NaN is not special."""
    actual, expected = (
        t.detach().cpu() if isinstance(t, torch.Tensor) else torch.from_numpy(np.asarray(t))
        for t in (actual, expected)
    )
    assert actual.dtype == expected.dtype, f"{actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = [t.contiguous().view(integers[t.element_size()]) for t in (actual, expected)]
    wrong = (bits[0] != bits[1]).nonzero()
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{len(wrong)} of {actual.numel()} differ, first at {place}: "
            f"{actual[place].item()} is not {expected[place].item()}"
        )


def relative_error(actual, expected):
    """Frobenius norm of the difference over that of the expected, in float64."""
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    return ((actual - expected).norm() / expected.norm()).item()
