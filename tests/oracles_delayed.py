"""A second opinion on delayed scaling: the cast with a given scale, and the update, slot by slot, in plain loops."""

import math

import numpy as np
import torch

import oracles

SLOTS = 4
FLT_MAX = np.float32(3.4028234663852886e38)


def cast(x, encode_scale, name):
    """Rowwise bytes and scale_inv of a matrix that is cast with a given float32 factor."""
    with np.errstate(over="ignore", invalid="ignore"):
        data = oracles.encode(x.to(torch.float32).numpy() * np.float32(encode_scale), name)
        return data, np.float32(1) / np.float32(encode_scale)


def raised(amax, x):
    """An amax after x was cast: the largest magnitude of both, without NaN."""
    for value in x.to(torch.float32).reshape(-1).tolist():
        if not math.isnan(value):
            amax = max(amax, abs(value))
    return np.float32(amax)


class Layer:
    """What a layer keeps, in TransformerEngine's layout: history[0] is what the step recorded, history[1] the oldest.

    Args:
        length: rows of the history.
        algorithm: "max", "most_recent" or a function of a list of floats, oldest first.
        margin: see the specification.
        formats: names, one for each slot.
    """

    def __init__(self, length, algorithm, margin, formats):
        self.length, self.algorithm, self.margin, self.formats = length, algorithm, margin, formats
        self.scale = [np.float32(1)] * SLOTS
        self.history = np.zeros((length, SLOTS), np.float32)

    def record(self, amaxes):
        """Set what the step recorded."""
        self.history[0] = amaxes

    def update(self):
        """The end of a step."""
        for slot in range(SLOTS):
            column = self.history[:, slot]
            newest = column[0] if np.isfinite(column[0]) else np.float32(0)
            column[0] = 0
            if newest == 0:
                continue
            window = [*column[1:].tolist(), float(newest)]
            for row in range(1, self.length):
                column[row] = window[row]
            numbers = [0.0 if math.isnan(a) else a for a in window]
            if self.algorithm == "max":
                amax = max(numbers)
            elif self.algorithm == "most_recent":
                amax = numbers[-1]
            else:
                amax = self.algorithm(numbers)
            if 0 < amax < math.inf:
                largest = np.float32(oracles.FORMAT_MAX[self.formats[slot]] * 2.0**-self.margin)
                with np.errstate(over="ignore"):
                    scale = largest / np.float32(amax)
                self.scale[slot] = FLT_MAX if np.isinf(scale) else scale
