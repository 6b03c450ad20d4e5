"""Philox4x32-10, a counter-based random number generator: the same words from the same counter, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 10
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words of 32 bits for each counter.

    Args:
        counter: four words, int64 with values below 2^32, of shapes that broadcast.
        key: two words, likewise.

    Returns:
        Four words, int64 with values below 2^32, of the common shape.

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011; its published test vectors are in
        tests/unit/test_philox.py.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def random_bytes(seed: Tensor, rows: int, blocks: int, stream: int) -> Tensor:
    """Sixteen random bytes for each block of a matrix.

    The key of Philox is the seed, its low word first. Block b of row r has the counter (low and high word of
    r * blocks + b, stream, 0); its bytes are those of the four words, the lowest first.

    Args:
        seed: int64 [].
        rows: rows of the matrix.
        blocks: blocks in a row.
        stream: tells matrices under one seed apart.

    Returns:
        int64 [rows, blocks, 16], values below 256.
    """
    index = torch.arange(rows * blocks, dtype=torch.int64, device=seed.device)
    zero = torch.zeros_like(seed)
    words = philox4x32(
        (index & _WORD, index >> 32, zero + stream, zero), (seed & _WORD, (seed >> 32) & _WORD)
    )
    shifts = torch.arange(0, 32, 8, dtype=torch.int64, device=seed.device)
    return ((torch.stack(words, -1)[..., None] >> shifts) & 0xFF).view(rows, blocks, 16)


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low word of a product. By half words, for the product of words would overflow the sign of int64."""
    low = word * (multiplier & 0xFFFF)
    high = word * (multiplier >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
