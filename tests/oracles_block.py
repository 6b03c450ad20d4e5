"""A second opinion on scales per row and per block: NumPy and plain loops over the groups that share a scale.

Written from the definitions alone; only the scale of one amax and the cast of one value come from `oracles`.
"""

import numpy as np
import torch

import oracles

BLOCK = 128
NAN, INF = float("nan"), float("inf")


def cast_per_row(x, name, *, eps=0.0, power_of_two=False, rowwise=True, columnwise=True, pad=1):
    """What `cast_per_row` returns, as arrays: data, columnwise_data, scale_inv, columnwise_scale_inv."""
    values = x.to(torch.float32).numpy()
    copies = []
    for matrix in (values if rowwise else None, values.T if columnwise else None):
        if matrix is None:
            copies.append((None, None))
            continue
        groups = {m: (m, slice(None)) for m in range(len(matrix))}
        data, inverses = _cast_groups(matrix, groups, name, x.dtype, eps, power_of_two)
        stored = np.zeros(len(matrix), np.float32)
        for m, inverse in inverses.items():
            stored[m] = inverse
        copies.append((_padded(data, pad), stored))
    return copies[0][0], copies[1][0], copies[0][1], copies[1][1]


def cast_block(
    x,
    name,
    *,
    eps=0.0,
    power_of_two=True,
    two_dimensional=False,
    rowwise=True,
    columnwise=True,
    pad=1,
):
    """What `cast_block` returns, as arrays: data, columnwise_data, scale_inv, columnwise_scale_inv."""
    values = x.to(torch.float32).numpy()
    copies = []
    for matrix in (values if rowwise else None, values.T if columnwise else None):
        if matrix is None:
            copies.append((None, None))
            continue
        rows, columns = matrix.shape
        height = BLOCK if two_dimensional else 1
        groups = {
            (m, k): (slice(m, m + height), slice(k, k + BLOCK))
            for m in range(0, rows, height)
            for k in range(0, columns, BLOCK)
        }
        data, inverses = _cast_groups(matrix, groups, name, x.dtype, eps, power_of_two)
        across = -(-columns // BLOCK)
        if two_dimensional:
            stored = np.zeros((-(-rows // BLOCK), -(-across // 4) * 4), np.float32)
        else:
            stored = np.zeros((across, rows), np.float32)
        for (m, k), inverse in inverses.items():
            place = (m // BLOCK, k // BLOCK) if two_dimensional else (k // BLOCK, m)
            stored[place] = inverse
        copies.append((_padded(data, pad), stored))
    return copies[0][0], copies[1][0], copies[0][1], copies[1][1]


def decode_block(data, stored, name, *, two_dimensional):
    """Code times scale, one by one; a code without a scale is padding."""
    positive = [oracles.decode_code(name, code) for code in range(oracles.SIGN)]
    values = np.array(positive + [-value for value in positive], np.float32)
    decoded = np.zeros(data.shape, np.float32)
    for m, k in np.ndindex(*data.shape):
        place = (m // BLOCK, k // BLOCK) if two_dimensional else (k // BLOCK, m)
        has_scale = place[1] < stored.shape[1] and place[0] < stored.shape[0]
        decoded[m, k] = values[data[m, k]] * (stored[place] if has_scale else np.float32(0))
    return decoded


def _cast_groups(values, groups, name, dtype, eps, power_of_two):
    """The codes of a matrix and the scale_inv of each group of its elements."""
    factors, inverses = np.ones_like(values), {}
    for key, group in groups.items():
        magnitudes = np.abs(values[group])
        amax = np.nan if np.isnan(magnitudes).any() else magnitudes.max(initial=0.0)
        scale = oracles.scale_from_amax(amax, name, dtype, eps=eps, power_of_two=power_of_two)
        factors[group] = scale
        inverses[key] = np.float32(1) / scale
    with np.errstate(over="ignore", invalid="ignore"):
        return oracles.encode(values * factors, name), inverses


def _padded(data, pad):
    rows, columns = data.shape
    result = np.zeros((rows, -(-columns // pad) * pad), np.uint8)
    result[:, :columns] = data
    return result


def _ties(name, dtype):
    """Every code and every tie between two, of both signs, in stretches of 128 that begin with the largest value."""
    table = torch.from_numpy(oracles.finite_values(name))
    positive = torch.cat([table, (table[1:] + table[:-1]) / 2])
    values = torch.cat([positive, -positive])
    values = torch.nn.functional.pad(values, (0, -len(values) % (BLOCK - 1))).view(-1, BLOCK - 1)
    largest = torch.full((len(values), 1), oracles.FORMAT_MAX[name])
    return torch.cat([largest, values], 1).to(dtype)


def _beside_ties(name, dtype):
    """The two numbers next to every tie."""
    ties = _ties(name, dtype)
    away = torch.nextafter(ties, torch.full_like(ties, INF).copysign(ties))
    towards = torch.nextafter(ties, torch.zeros_like(ties))
    beside = torch.cat([away, towards])
    beside[:, 0] = oracles.FORMAT_MAX[name]
    return beside


def _with(x, **places):
    """A matrix with single elements replaced; `r3_c5=1.0` replaces row 3, column 5."""
    for place, value in places.items():
        row, column = place.split("_")
        x[int(row[1:]), int(column[1:])] = value
    return x


def _heavy(*shape):
    return torch.distributions.StudentT(3.0).sample(shape)


# What a cast may meet: each takes another path through the scale or the rounding. Whole blocks and ragged ones.
SAMPLES = {
    "normal": lambda _, dtype: torch.randn(130, 300).to(dtype),
    "heavy-tailed": lambda _, dtype: _heavy(130, 300).to(dtype),
    "zeros": lambda _, dtype: torch.zeros(5, 140, dtype=dtype),
    "minus zeros": lambda _, dtype: -torch.zeros(5, 140, dtype=dtype),
    "zero blocks": lambda _, dtype: (
        torch.randn(3, 2, 3).repeat_interleave(128, 2).mul(torch.tensor([[1.0], [0.0]])).view(6, -1)
    ).to(dtype),
    "one outlier": lambda _, dtype: _with(torch.randn(9, 260), r3_c200=-3e4).to(dtype),
    "codes and ties": _ties,
    "beside ties": _beside_ties,
    "subnormals of the dtype": lambda _, dtype: (
        torch.randn(9, 260).mul(torch.finfo(dtype).tiny / 4).to(dtype)
    ),
    "smallest of the dtype": lambda _, dtype: torch.full(
        (3, 130), torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    ).to(dtype),
    "largest of the dtype": lambda _, dtype: torch.full(
        (3, 130), -torch.finfo(dtype).max, dtype=dtype
    ),
    "rows of all magnitudes": lambda _, dtype: (
        torch.randn(40, 260) * 2.0 ** torch.arange(-140, 20, 4)[:, None]
    ).to(dtype),
    "infinite": lambda _, dtype: _with(torch.randn(9, 260), r1_c7=INF, r8_c255=-INF).to(dtype),
    "not a number": lambda _, dtype: _with(
        torch.randn(9, 260), r1_c7=NAN, r8_c255=-NAN, r8_c256=INF
    ).to(dtype),
    "one element": lambda _, dtype: torch.tensor([[-3.3]], dtype=dtype),
    "one block": lambda _, dtype: torch.randn(1, 128).to(dtype),
    "no rows": lambda _, dtype: torch.empty(0, 5, dtype=dtype),
    "no columns": lambda _, dtype: torch.empty(5, 0, dtype=dtype),
}
