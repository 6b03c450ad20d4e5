"""A second opinion on NVFP4: NumPy and plain Python, written from the definition, block by block.

Nothing here is shared with the package under test. All arithmetic on values is that of NumPy's float32.
"""

import numpy as np
import torch

import oracles

CODES = oracles.finite_values("E2M1")  # 0 0.5 1 1.5 2 3 4 6
E4M3 = np.array([oracles.decode_code("E4M3", code) for code in range(128)], np.float32)
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
FLOAT_MAX = np.float32(oracles.DTYPE_MAX[torch.float32])
SIXTH = np.float32(1 / 6)


def philox(counter, key):
    """Philox4x32-10 of integers, step by step."""
    c, k = list(counter), list(key)
    for _ in range(10):
        products = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        (high0, low0), (high1, low1) = (divmod(p, 1 << 32) for p in products)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return c


def random_bytes(seed, block, stream):
    """The 16 random bytes of a block."""
    seed %= 1 << 64
    counter = [block % (1 << 32), block >> 32, stream, 0]
    words = philox(counter, [seed % (1 << 32), seed >> 32])
    return list(b"".join(word.to_bytes(4, "little") for word in words))


def encode(values, random=None):
    """Float32 to codes in 0..15: nearest, ties to the even code; or up if fraction + (r + 1/2) / 256 reaches 1."""
    is_nan = np.isnan(values)
    magnitude = np.minimum(np.abs(np.where(is_nan, 0, values)).astype(np.float64), 6)
    lower = np.searchsorted(CODES, magnitude, side="right") - 1
    upper = np.minimum(lower + 1, 7)
    if random is None:
        down, up = magnitude - CODES[lower], CODES[upper] - magnitude
        goes_up = (up < down) | ((up == down) & (lower % 2 == 1))
    else:
        gap = np.where(upper > lower, CODES[upper] - CODES[lower], 1)
        goes_up = (magnitude - CODES[lower]) / gap + (random + 0.5) / 256 >= 1
    codes = np.where(goes_up, upper, lower) + np.where(np.signbit(values), 8, 0)
    return np.where(is_nan, 7, codes).astype(np.uint8)


def values_of(codes):
    """Codes in 0..15 to float32."""
    return np.where(codes < 8, CODES[codes % 8], -CODES[codes % 8]).astype(np.float32)


def bfloat16(values):
    """Float32 rounded to the nearest number of 16 bits, ties to even; still float32."""
    bits = values.view(np.uint32).astype(np.uint64)
    kept, rest = bits >> 16, bits & 0xFFFF
    kept += (rest > 0x8000) | ((rest == 0x8000) & (kept % 2 == 1))
    rounded = (kept << 16).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(values), np.float32(np.nan), rounded)


def hadamard_matrix():
    """16 x 16, +-1: the sign is the parity of the bits that row and column have in common."""
    return np.array([[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)])


def hadamard_groups(x):
    """Float32 [rows, 16 n] to bfloat16 values in float32: sums and differences at distances 1, 2, 4 and 8."""
    rows, columns = x.shape
    y = x.reshape(rows, columns // 16, 16) * np.array(SIGNS, np.float32)
    for distance in (1, 2, 4, 8):
        z = np.empty_like(y)
        for i in range(16):
            if i & distance:
                z[:, :, i] = y[:, :, i ^ distance] - y[:, :, i]
            else:
                z[:, :, i] = y[:, :, i] + y[:, :, i ^ distance]
        y = z
    return bfloat16(y * np.float32(0.25)).reshape(rows, columns)


def hadamard_exact(x):
    """The same by a product of matrices in float64, not rounded."""
    groups = x.astype(np.float64).reshape(-1, 16)
    return (groups @ (np.diag(SIGNS) @ hadamard_matrix()) / 4).reshape(x.shape)


def amax_of(x):
    """The magnitude that is largest, one NaN; 0 for nothing."""
    largest = np.abs(x).max(initial=0.0).astype(np.float32)
    return np.float32(np.nan) if np.isnan(largest) else largest


def tensor_scale(amax, largest):
    """The factor before the cast."""
    if amax == 0 or not np.isfinite(amax):
        return np.float32(1)
    return min(np.float32(largest) / amax, FLOAT_MAX)


def encode_block(block, byte, scale, random=None):
    """One row of a block by its scale's byte."""
    decoded = E4M3[byte] * (np.float32(1) / scale)
    factor = np.float32(1) / decoded
    if not np.isnan(factor):
        factor = min(factor, FLOAT_MAX)
    return encode(block * factor, random)


def e4m3(value):
    return oracles.encode(np.array([value], np.float32), "E4M3")[0]


def block_error(codes, byte, block, amax, measure):
    """Summed from left to right in float32."""
    difference = values_of(codes) * E4M3[byte] * amax / np.float32(6 * 256) - block
    total = np.float32(0)
    for term in np.abs(difference) if measure == "mae" else difference * difference:
        total += term
    return total


def tree(terms):
    """Sixteen numbers, the second half onto the first, until one is left."""
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [a + b for a, b in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


def cast_tile(rows, amax, scale, measure, random):
    """The rows of one tile, one or sixteen: a list of codes and the byte that they share."""
    block_amax = amax_of(np.stack(rows))
    if measure is None:
        byte = e4m3(block_amax * (scale * SIXTH))
        return [encode_block(r, byte, scale, u) for r, u in zip(rows, random, strict=True)], byte
    wanted = block_amax / np.float32(6) * scale
    tried = []
    for factor in (1.0, 1.5):
        byte = e4m3(wanted * np.float32(factor))
        codes = [encode_block(row, byte, scale) for row in rows]
        pairs = zip(codes, rows, strict=True)
        errors = [block_error(c, byte, row, amax, measure) for c, row in pairs]
        tried.append((tree(errors), codes, byte))
    six, four = tried
    return four[1:] if four[0] < six[0] else six[1:]


@np.errstate(all="ignore")
def cast_rows(x, *, square=1, four_over_six=None, row_scaled=False, seed=None, stream=0):
    """Codes [rows, contraction], bytes [rows, blocks] and tensor_scale_inv of a float32 matrix."""
    rows, contraction = x.shape
    blocks = -(-contraction // 16)
    filled = np.zeros((-(-rows // square) * square, blocks * 16), np.float32)
    filled[:rows, :contraction] = x
    largest = 6 * (448 if four_over_six is None else 256)
    codes = np.zeros(filled.shape, np.uint8)
    scale_inv = np.zeros((filled.shape[0], blocks), np.uint8)
    for top in range(0, filled.shape[0], square):
        amax = amax_of(x[top] if row_scaled else x)
        scale = tensor_scale(amax, largest)
        for block in range(blocks):
            here = slice(16 * block, 16 * block + 16)
            band = range(top, top + square)
            random = [
                None if seed is None else np.array(random_bytes(seed, r * blocks + block, stream))
                for r in band
            ]
            tile, byte = cast_tile(
                [filled[r, here] for r in band], amax, scale, four_over_six, random
            )
            for r, line in zip(band, tile, strict=True):
                codes[r, here], scale_inv[r, block] = line, byte
    amaxes = np.array([amax_of(row) for row in x], np.float32) if row_scaled else amax_of(x)
    return codes[:rows, :contraction], scale_inv[:rows], amaxes / np.float32(largest)


def pack(codes, pad):
    """Two codes a byte."""
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns // pad) * pad), np.uint8)
    padded[:, :columns] = codes
    return padded[:, 0::2] + 16 * padded[:, 1::2]


def swizzle(scale_inv):
    """Scales in tiles of 128 x 4, byte by byte."""
    rows, columns = scale_inv.shape
    across = -(-columns // 4)
    flat = np.zeros(-(-rows // 128) * across * 512, np.uint8)
    for r in range(rows):
        for c in range(columns):
            tile = r // 128 * across + c // 4
            flat[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scale_inv[r, c]
    return flat


def cast_nvfp4(
    x,
    *,
    rowwise=True,
    columnwise=True,
    two_dimensional=False,
    hadamard=False,
    four_over_six=None,
    row_scaled=False,
    seed=None,
    pad=2,
    swizzled=False,
):
    """The six results for a torch tensor, as arrays or None; `four_over_six` is "mae", "mse" or None."""
    matrix = x.detach().cpu().float().numpy()
    same = {"four_over_six": four_over_six, "seed": seed, "square": 16 if two_dimensional else 1}
    copies = [None, None]
    if rowwise:
        copies[0] = cast_rows(matrix, row_scaled=row_scaled, **same)
    if columnwise and two_dimensional:
        codes, scale_inv, tensor_scale_inv = cast_rows(matrix, **same)
        wide = np.zeros((codes.shape[1], -(-codes.shape[0] // 16)), np.uint8)
        for k in range(wide.shape[0]):
            for band in range(wide.shape[1]):
                wide[k, band] = scale_inv[16 * band, k // 16]
        copies[1] = codes.T, wide, tensor_scale_inv
    elif columnwise:
        transpose = matrix.T
        if hadamard:
            rows, columns = transpose.shape
            whole = np.zeros((rows, -(-columns // 16) * 16), np.float32)
            whole[:, :columns] = transpose
            with np.errstate(all="ignore"):
                transpose = hadamard_groups(whole)
        copies[1] = cast_rows(transpose, stream=1, **same)
    results = []
    for copy in copies:
        if copy is None:
            results.append((None, None, None))
            continue
        codes, scale_inv, tensor_scale_inv = copy
        if swizzled:
            scale_inv = swizzle(scale_inv)
        results.append((pack(codes, pad), scale_inv, np.float32(tensor_scale_inv)))
    return [part for pair in zip(*results, strict=True) for part in pair]


def decode(data, scale_inv):
    """Codes times the scales of their blocks, float32 [rows, 2 * bytes]; 0 behind the last block."""
    rows, width = data.shape
    values = np.zeros((rows, 2 * width), np.float32)
    for r in range(rows):
        for k in range(min(2 * width, 16 * scale_inv.shape[1])):
            code = data[r, k // 2] >> 4 if k % 2 else data[r, k // 2] & 15
            values[r, k] = values_of(code) * E4M3[scale_inv[r, k // 16]]
    return values
