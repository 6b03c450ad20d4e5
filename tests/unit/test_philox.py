"""Philox4x32-10 against its published words and against plain integers."""

import random

import torch

import oracles_nvfp4
from fullgraph.reference.philox import philox4x32, random_bytes

# Source: Random123, kat_vectors, the lines "philox4x32 10".
PUBLISHED = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def words_of(counter, key):
    """Ours, for one counter."""
    words = philox4x32(*(tuple(torch.tensor(w) for w in words) for words in (counter, key)))
    return [w.item() for w in words]


def test_published_words():
    for counter, key, words in PUBLISHED:
        assert words_of(counter, key) == words
        assert oracles_nvfp4.philox(counter, key) == words


def test_random_words():
    for _ in range(200):
        counter, key = ([random.getrandbits(32) for _ in range(n)] for n in (4, 2))
        assert words_of(counter, key) == oracles_nvfp4.philox(counter, key)


def test_counters_broadcast():
    rows, columns = torch.arange(3)[:, None], torch.arange(4)
    zero = torch.tensor(0)
    words = philox4x32((rows, columns, zero, zero), (zero, zero))
    assert [w.shape for w in words] == [(3, 4)] * 4
    assert words[0][2, 1].item() == words_of([2, 1, 0, 0], [0, 0])[0]


def test_bytes_of_blocks():
    for seed in (0, 1, -1, 1 << 62, -(1 << 63), 0x123456789ABCDEF):
        ours = random_bytes(torch.tensor(seed), 3, 5, stream=1)
        assert (ours.dtype, ours.shape) == (torch.int64, (3, 5, 16))
        expected = [oracles_nvfp4.random_bytes(seed, block, 1) for block in range(15)]
        assert ours.view(15, 16).tolist() == expected


def test_bytes_are_uniform():
    counts = random_bytes(torch.tensor(7), 256, 64, stream=0).flatten().bincount(minlength=256)
    chi_squared = ((counts - 1024.0) ** 2 / 1024).sum().item()
    assert 255 - 5 * 22.6 < chi_squared < 255 + 5 * 22.6  # mean and deviation for 255 degrees


def test_seed_and_stream_and_block_all_matter():
    one = random_bytes(torch.tensor(3), 2, 2, stream=0)
    assert torch.equal(one, random_bytes(torch.tensor(3), 2, 2, stream=0))
    for seed, stream in ((4, 0), (3 + (1 << 32), 0), (3, 1)):
        assert (one == random_bytes(torch.tensor(seed), 2, 2, stream=stream)).sum() < 8
    assert len({tuple(block.tolist()) for block in one.view(4, 16)}) == 4


def test_no_blocks():
    assert random_bytes(torch.tensor(3), 0, 5, stream=0).shape == (0, 5, 16)
