"""A second opinion on MX blocks and on the order of swizzled scales: plain Python and NumPy, one block at a time.

Written from the definitions, with exact numbers (a float64 holds every float32 and its products with powers of two) and
with searches in place of the bit arithmetic of the package under test.
"""

import math

import numpy as np
import torch

import oracles

BLOCK = 32
EMAX = {"E4M3": 8, "E5M2": 15}
MANTISSA_BITS = {"E4M3": 3, "E5M2": 2}


def scale_byte(amax, name, mode):
    """The E8M0 byte of one block, from its amax, a float32 number."""
    amax = float(amax)
    if math.isnan(amax):
        return 0xFF
    if math.isinf(amax):
        return 0xFE
    if mode == "rceil":
        ratio = float(np.float32(amax) * np.float32(1 / oracles.FORMAT_MAX[name]))
        return next(byte for byte in range(0xFF) if 2.0 ** (byte - 127) >= ratio)
    if amax == 0:
        return 0
    mantissa, exponent = math.frexp(amax)  # amax = mantissa * 2^exponent, 0.5 <= mantissa < 1
    exponent -= 1
    if mode == "ceil" and mantissa > 0.5:
        exponent += 1
    if mode == "even":
        steps = 2.0 ** (MANTISSA_BITS[name] + 1)
        if round(mantissa * steps) == steps:  # Python rounds ties to even
            exponent += 1
    return min(max(exponent - EMAX[name] + 127, 0), 0xFE)


def cast(x, name, mode="rceil", *, square=False):
    """Rowwise codes [M, K] and scale bytes [M, ceil(K / 32)] of a float32 array."""
    rows, columns = x.shape
    height = BLOCK if square else 1
    codes = np.zeros((rows, columns), np.uint8)
    scales = np.zeros((rows, -(-columns // BLOCK)), np.uint8)
    for top in range(0, rows, height):
        for left in range(0, columns, BLOCK):
            place = slice(top, top + height), slice(left, left + BLOCK)
            byte = scale_byte(np.abs(x[place]).max(), name, mode)  # max of an array keeps NaN
            scales[place[0], left // BLOCK] = byte
            if byte == 0xFF:
                codes[place] = oracles.NAN_CODE
            else:
                codes[place] = oracles.encode(
                    x[place].astype(np.float64) * 2.0 ** (127 - byte), name
                )
    return codes, scales


def decode(codes, scales, name):
    """float32 [rows, contraction]."""
    values = np.zeros(codes.shape, np.float32)
    table = np.array([oracles.decode_code(name, code) for code in range(128)])
    for row in range(codes.shape[0]):
        for block in range(scales.shape[1]):
            place = row, slice(block * BLOCK, (block + 1) * BLOCK)
            byte = int(scales[row, block])
            if byte == 0xFF:
                values[place] = np.nan
                continue
            sign = np.where(codes[place] >= oracles.SIGN, -1.0, 1.0)
            with np.errstate(over="ignore"):
                decoded = sign * table[codes[place] % oracles.SIGN] * 2.0 ** (byte - 127)
                values[place] = decoded.astype(np.float32)
    return values


def swizzle(scales):
    """The written definition, one byte at a time: 128 x 4 tiles row by row, each (r % 32) * 16 + (r // 32) * 4 + c."""
    rows, columns = scales.shape
    across = -(-columns // 4)
    flat = np.zeros(-(-rows // 128) * across * 512, np.uint8)
    for row in range(rows):
        for column in range(columns):
            tile = (row // 128) * across + column // 4
            r, c = row % 128, column % 4
            flat[tile * 512 + (r % 32) * 16 + (r // 32) * 4 + c] = scales[row, column]
    return flat


def padded(matrix, multiple):
    """More columns of zeros, up to a multiple."""
    return np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % multiple)))


def cast_both(x, name, mode="rceil", *, square=False, pad=1, swizzled=False):
    """All four results for a tensor; columnwise is rowwise of the transpose."""
    results = []
    for values in (x.to(torch.float32).numpy(), x.to(torch.float32).numpy().T):
        codes, scales = cast(values, name, mode, square=square)
        results.append((padded(codes, pad), swizzle(scales) if swizzled else scales))
    return results[0][0], results[1][0], results[0][1], results[1][1]
