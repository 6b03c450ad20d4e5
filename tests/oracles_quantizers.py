"""A second opinion on quantizers: the fields that a tensor has after quantization, and the values they stand for.

The codes come from the NumPy oracles of the families; what is added here is their arrangement in a quantized tensor.
"""

import dataclasses
import functools
import math

import numpy as np
import torch

import fullgraph as fg
import oracles
import oracles_block
import oracles_mx
import oracles_nvfp4
from fullgraph.formats import Scaling
from fullgraph.random import draw_seed
from fullgraph.tensor import CastState

FIELDS = (
    "data",
    "columnwise_data",
    "scale_inv",
    "columnwise_scale_inv",
    "tensor_scale_inv",
    "columnwise_tensor_scale_inv",
    "sizes",
)
# What native GEMMs want the contraction to be a multiple of.
ALIGNMENTS = {
    fg.PerTensorQuantizer: (Scaling.TENSOR, 16),
    fg.DelayedQuantizer: (Scaling.TENSOR, 16),
    fg.PerRowQuantizer: (Scaling.ROW, 16),
    fg.MXQuantizer: (Scaling.BLOCK_1X32, 32),
    fg.NVFP4Quantizer: (Scaling.BLOCK_1X16, 32),
}


def matrix_of(x):
    """[..., K] as [M, K]."""
    return x.detach().cpu().reshape(math.prod(x.shape[:-1]), x.shape[-1])


def table_of(name):
    """The value of every byte."""
    positive = [oracles.decode_code(name, code) for code in range(128)]
    return np.array(positive + [-value for value in positive], np.float32)


@dataclasses.dataclass
class Copy:
    """One copy as a matrix: stored codes and scales, and the float32 values [rows, contraction] that they stand for."""

    data: np.ndarray
    scale_inv: np.ndarray
    values: np.ndarray
    tensor_scale_inv: np.ndarray | None = None


def copies_of(quantizer, x, *, native=frozenset(), scale=None, seed=None):
    """Both copies of a matrix; None where a hybrid quantizer has none."""
    if isinstance(quantizer, fg.HybridQuantizer):
        state = {"native": native, "scale": scale, "seed": seed}
        source = x
        if quantizer.columnwise_from_rowwise:
            source = Expected(quantizer.rowwise, x, seed=seed).values()
        members = ((quantizer.rowwise, x), (quantizer.columnwise, source))
        return tuple(
            None if member is None else copies_of(member, tensor, **state)[i]
            for i, (member, tensor) in enumerate(members)
        )
    with np.errstate(all="ignore"):
        return _FAMILIES[type(quantizer)](quantizer, x, native, scale, seed)


def _pad(quantizer, native):
    if isinstance(quantizer, fg.BlockQuantizer):
        scaling = Scaling.BLOCK_128X128 if quantizer.two_dimensional else Scaling.BLOCK_1X128
        return 128 if scaling in native else 1
    scaling, alignment = ALIGNMENTS[type(quantizer)]
    return alignment if scaling in native else 1


def _one_scale(codes, scale_inv, name, pad):
    copies = []
    for matrix in (codes, codes.T):
        values = table_of(name)[matrix] * scale_inv
        copies.append(Copy(oracles_mx.padded(matrix, pad), np.float32(scale_inv), values))
    return copies


def _per_tensor(quantizer, x, native, scale, seed):
    name = quantizer.format.name
    amax = np.abs(x.float().numpy()).max(initial=0.0)
    codes, scale_inv = oracles.cast_per_tensor(
        x, amax, name, eps=quantizer.amax_epsilon, power_of_two=quantizer.power_of_two
    )
    return _one_scale(codes, scale_inv, name, _pad(quantizer, native))


def _delayed(quantizer, x, native, scale, seed):
    name, scale = quantizer.format.name, np.float32(scale)
    codes = oracles.encode(x.float().numpy() * scale, name)
    return _one_scale(codes, np.float32(1) / scale, name, _pad(quantizer, native))


def _per_row(quantizer, x, native, scale, seed):
    name = quantizer.format.name
    options = {"eps": quantizer.amax_epsilon, "power_of_two": quantizer.power_of_two}
    data = oracles_block.cast_per_row(x, name, pad=_pad(quantizer, native), **options)
    copies = []
    for codes, scale_inv, contraction in zip(data[:2], data[2:], x.shape[::-1], strict=True):
        values = table_of(name)[codes[:, :contraction]] * scale_inv[:, None]
        copies.append(Copy(codes, scale_inv, values))
    return copies


def _block(quantizer, x, native, scale, seed):
    name, squares = quantizer.format.name, quantizer.two_dimensional
    data = oracles_block.cast_block(
        x,
        name,
        eps=quantizer.amax_epsilon,
        power_of_two=quantizer.power_of_two,
        two_dimensional=squares,
        pad=_pad(quantizer, native),
    )
    copies = []
    for codes, scale_inv, contraction in zip(data[:2], data[2:], x.shape[::-1], strict=True):
        # The scale of each element, by repetition of those of the blocks.
        blocks = scale_inv.repeat(128, 0) if squares else scale_inv.T
        scales = blocks.repeat(128, 1)[: len(codes), :contraction]
        copies.append(Copy(codes, scale_inv, table_of(name)[codes[:, :contraction]] * scales))
    return copies


def _mx(quantizer, x, native, scale, seed):
    name, is_native = quantizer.format.name, Scaling.BLOCK_1X32 in native
    same = {"square": quantizer.two_dimensional, "pad": _pad(quantizer, native)}
    data = oracles_mx.cast_both(x, name, quantizer.scale_mode.value, swizzled=is_native, **same)
    plain = oracles_mx.cast_both(x, name, quantizer.scale_mode.value, square=same["square"])
    return [
        Copy(data[i], data[2 + i], oracles_mx.decode(plain[i], plain[2 + i], name))
        for i in range(2)
    ]


def _nvfp4(quantizer, x, native, scale, seed):
    options = {
        "two_dimensional": quantizer.two_dimensional,
        "hadamard": quantizer.hadamard,
        "four_over_six": quantizer.four_over_six and quantizer.four_over_six.value,
        "row_scaled": quantizer.row_scaled,
        "seed": seed if quantizer.stochastic_rounding else None,
    }
    is_native = Scaling.BLOCK_1X16 in native
    pad = max(2, _pad(quantizer, native))
    data = oracles_nvfp4.cast_nvfp4(x, pad=pad, swizzled=is_native, **options)
    plain = oracles_nvfp4.cast_nvfp4(x, **options) if is_native else data
    copies = []
    for i, contraction in enumerate(x.shape[::-1]):
        values = oracles_nvfp4.decode(plain[i], plain[2 + i])
        tensor_scale_inv = plain[4 + i]
        values = values * (tensor_scale_inv[:, None] if tensor_scale_inv.ndim else tensor_scale_inv)
        if i == 1 and quantizer.hadamard:
            values = inverse_hadamard(values)
        copies.append(Copy(data[i], data[2 + i], values[:, :contraction], tensor_scale_inv))
    return copies


def inverse_hadamard(values):
    """Float32 [rows, 16 n] back: sums and differences at distances 1, 2, 4 and 8, a quarter, signs."""
    y = values.reshape(len(values), values.shape[1] // 16, 16)
    for distance in (1, 2, 4, 8):
        z = np.empty_like(y)
        for i in range(16):
            other = y[:, :, i ^ distance]
            z[:, :, i] = other - y[:, :, i] if i & distance else y[:, :, i] + other
        y = z
    return (y * np.float32(0.25) * np.array(oracles_nvfp4.SIGNS, np.float32)).reshape(values.shape)


_FAMILIES = {
    fg.PerTensorQuantizer: _per_tensor,
    fg.DelayedQuantizer: _delayed,
    fg.PerRowQuantizer: _per_row,
    fg.BlockQuantizer: _block,
    fg.MXQuantizer: _mx,
    fg.NVFP4Quantizer: _nvfp4,
}


def _members(quantizer):
    if isinstance(quantizer, fg.HybridQuantizer):
        return quantizer.rowwise, quantizer.columnwise
    return quantizer, quantizer


class Expected:
    """What must come of quantizing one tensor.

    Args:
        quantizer: any of ours.
        x: a torch tensor [..., K].
        state: native (scalings that are padded and swizzled), scale, seed.
    """

    def __init__(self, quantizer, x, **state):
        self.quantizer, self.x = quantizer, x
        self.rowwise, self.columnwise = copies_of(quantizer, matrix_of(x), **state)

    def parts(self, orientation=fg.BOTH):
        """The fields of `QuantizedParts` by name, each an array or None."""
        x, (first, second) = self.x, _members(self.quantizer)
        found = dict.fromkeys(FIELDS)
        made = []
        if orientation.rowwise:
            made.append(first)
            found["data"] = self.rowwise.data.reshape(*x.shape[:-1], self.rowwise.data.shape[1])
            found["scale_inv"] = _flat(self.rowwise.scale_inv)
            found["tensor_scale_inv"] = self.rowwise.tensor_scale_inv
        if orientation.columnwise:
            made.append(second)
            data = self.columnwise.data
            if isinstance(second, fg.NVFP4Quantizer):
                data = data.reshape(-1)
            elif x.ndim != 2:
                data = data.reshape(x.shape[-1], *x.shape[:-1])
            found["columnwise_data"] = data
            shares = isinstance(self.quantizer, (fg.PerTensorQuantizer, fg.DelayedQuantizer))
            name = "scale_inv" if shares else "columnwise_scale_inv"
            found[name] = _flat(self.columnwise.scale_inv)
            found["columnwise_tensor_scale_inv"] = self.columnwise.tensor_scale_inv
        if any(isinstance(member, fg.NVFP4Quantizer) for member in made):
            found["sizes"] = np.zeros((0, *x.shape), np.uint8)
        return found

    def values(self, orientation=fg.ROWWISE):
        """The values in the dtype and shape of `x`: of the rowwise copy, if it is there."""
        values = self.rowwise.values if orientation.rowwise else self.columnwise.values.T
        values = torch.from_numpy(np.ascontiguousarray(values))
        return values.to(self.x.dtype).view(self.x.shape)

    def shown_scales(self, *, columnwise=False):
        """The decode scales of one copy as `QuantizedTensor` shows them; one-byte ones as bytes."""
        *leading, contraction = self.x.shape
        if columnwise:
            leading, contraction = [contraction], math.prod(leading)
        member = _members(self.quantizer)[columnwise]
        scale_inv = (self.columnwise if columnwise else self.rowwise).scale_inv
        if isinstance(member, fg.PerRowQuantizer):
            return scale_inv.reshape(leading)
        if isinstance(member, fg.BlockQuantizer):
            blocks = -(-contraction // 128)
            if member.two_dimensional:
                return scale_inv[:, :blocks]
            return scale_inv.T.reshape(*leading, blocks)
        if isinstance(member, (fg.MXQuantizer, fg.NVFP4Quantizer)):
            return scale_inv.reshape(*leading, scale_inv.shape[1])
        return scale_inv


def _flat(scale_inv):
    return scale_inv.reshape(-1) if scale_inv.ndim > 1 else scale_inv


E4M3, E5M2 = fg.Format.E4M3, fg.Format.E5M2
MAE, MSE = fg.FourOverSix.MAE, fg.FourOverSix.MSE
QUANTIZERS = {
    "per-tensor": fg.PerTensorQuantizer(E4M3),
    "per-tensor-options": fg.PerTensorQuantizer(E5M2, power_of_two=True, amax_epsilon=1e-3),
    "per-row": fg.PerRowQuantizer(),
    "per-row-options": fg.PerRowQuantizer(E5M2, power_of_two=True, amax_epsilon=1.0),
    "block": fg.BlockQuantizer(),
    "block-options": fg.BlockQuantizer(E5M2, power_of_two=False, amax_epsilon=1.0),
    "block-2d": fg.BlockQuantizer(two_dimensional=True),
    "block-2d-options": fg.BlockQuantizer(E5M2, two_dimensional=True, power_of_two=False),
    "mx": fg.MXQuantizer(),
    "mx-floor": fg.MXQuantizer(scale_mode=fg.MXScaleMode.FLOOR),
    "mx-ceil": fg.MXQuantizer(E5M2, scale_mode=fg.MXScaleMode.CEIL),
    "mx-even": fg.MXQuantizer(E5M2, scale_mode=fg.MXScaleMode.EVEN),
    "mx-2d": fg.MXQuantizer(two_dimensional=True),
    "nvfp4": fg.NVFP4Quantizer(),
    "nvfp4-2d": fg.NVFP4Quantizer(two_dimensional=True),
    "nvfp4-2d-stochastic": fg.NVFP4Quantizer(two_dimensional=True, stochastic_rounding=True),
    "nvfp4-hadamard": fg.NVFP4Quantizer(hadamard=True),
    "nvfp4-stochastic": fg.NVFP4Quantizer(stochastic_rounding=True),
    "nvfp4-hadamard-stochastic": fg.NVFP4Quantizer(hadamard=True, stochastic_rounding=True),
    "nvfp4-4over6-mae": fg.NVFP4Quantizer(four_over_six=MAE),
    "nvfp4-4over6-mse-2d": fg.NVFP4Quantizer(four_over_six=MSE, two_dimensional=True),
    "nvfp4-rows": fg.NVFP4Quantizer(row_scaled=True),
    "nvfp4-rows-all": fg.NVFP4Quantizer(row_scaled=True, hadamard=True, stochastic_rounding=True),
    "nvfp4-rows-4over6": fg.NVFP4Quantizer(row_scaled=True, four_over_six=MSE),
    "hybrid-rows-tensor": fg.HybridQuantizer(fg.PerRowQuantizer(), fg.PerTensorQuantizer(E5M2)),
    "hybrid-tensor-tensor": fg.HybridQuantizer(
        fg.PerTensorQuantizer(E4M3), fg.PerTensorQuantizer(E5M2)
    ),
    "hybrid-nvfp4-mx": fg.HybridQuantizer(fg.NVFP4Quantizer(), fg.MXQuantizer()),
    "hybrid-block-nvfp4": fg.HybridQuantizer(
        fg.BlockQuantizer(), fg.NVFP4Quantizer(hadamard=True, stochastic_rounding=True)
    ),
    "hybrid-row-only": fg.HybridQuantizer(fg.PerTensorQuantizer(E4M3), None),
    "hybrid-column-only": fg.HybridQuantizer(fg.IdentityQuantizer(), fg.MXQuantizer()),
    "hybrid-again": fg.HybridQuantizer(
        fg.NVFP4Quantizer(), fg.MXQuantizer(), columnwise_from_rowwise=True
    ),
    "hybrid-again-stochastic": fg.HybridQuantizer(
        fg.NVFP4Quantizer(stochastic_rounding=True),
        fg.PerRowQuantizer(),
        columnwise_from_rowwise=True,
    ),
}
REPRESENTATIVES = ("per-tensor", "per-row", "block", "block-2d", "mx", "nvfp4", "hybrid-nvfp4-mx")
"""One of each way to store a quantized tensor."""


def orientations_of(quantizer):
    """The copies that it can make."""
    rowwise, columnwise = _members(quantizer)
    if rowwise is None or columnwise is None:
        return [fg.ROWWISE if columnwise is None else fg.COLUMNWISE]
    return list(fg.Orientation)


CASES = [
    (name, orientation)
    for name, quantizer in QUANTIZERS.items()
    for orientation in orientations_of(quantizer)
]
"""Every quantizer with every set of copies that it can make, for `parametrize`."""


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Every rank from 1 to 4, ragged, odd, empty in each place; the dtypes take turns.
SHAPES = [
    (24,),
    (1,),
    (0,),
    (3, 7),
    (0, 5),
    (5, 0),
    (18, 33),
    (2, 3, 20),
    (2, 0, 3),
    (2, 3, 4, 5),
]
SAMPLES = [(shape, DTYPES[i % 3]) for i, shape in enumerate(SHAPES)]

SEED = 7
"""For `torch.manual_seed`."""


@functools.cache
def drawn_seed():
    """What a cast draws after `torch.manual_seed(SEED)`."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return draw_seed(torch.empty(0)).item()


def quantized(x, quantizer, orientation=fg.BOTH):
    """`fg.quantize` with `drawn_seed`."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return fg.quantize(x, quantizer, orientation)


def state_of(quantizer):
    """What its cast takes, to make what `quantized` makes."""
    return CastState(seed=torch.tensor(drawn_seed()) if quantizer.is_stochastic else None)


@functools.cache
def sample(shape, dtype):
    """The same normal values for the same shape."""
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator).to(dtype)


@functools.cache
def expected(name, shape, dtype, native=frozenset()):
    """What must come of `sample` by one of `QUANTIZERS`, with `drawn_seed`; the oracles are slow."""
    return Expected(QUANTIZERS[name], sample(shape, dtype), native=native, seed=drawn_seed())


def assert_same_fields(parts, expected):
    """The fields of parts, or of a quantized tensor, against arrays by name; None is None."""
    parts = parts.parts if isinstance(parts, fg.QuantizedTensor) else parts
    for name in FIELDS:
        actual, wanted = getattr(parts, name), expected[name]
        assert (actual is None) == (wanted is None), name
        if wanted is not None:
            try:
                oracles.assert_same_bits(actual, wanted)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
