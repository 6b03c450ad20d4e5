"""Number formats as data, and the orientation of a quantized copy.

A format is one small record (`FormatSpec`); its largest value, its NaN code, its dtype and so
on are derived from the record, so no such number is written down anywhere else in the package.
How a tensor is cast to a format is the business of `fullgraph.reference` (the oracle) and
`fullgraph.kernels` (its GPU twin).

Sources: E4M3 and E5M2 as in "FP8 Formats for Deep Learning" (Micikevicius et al., 2022,
arXiv:2209.05433); E2M1 and E8M0 as in the OCP Microscaling Formats (MX) specification 1.0.
"""

from __future__ import annotations

import dataclasses
import enum

import torch

from fullgraph.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class FormatSpec:
    """The bits of a number format, from which everything else follows.

    Args:
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the mantissa field; 0 means powers of two only, without a zero.
        bias: subtracted from the exponent field; field 0 holds the subnormals, if there are any.
        has_inf: the largest exponent is reserved for infinity and NaN, as in IEEE 754.
        has_nan: there is a NaN; without infinity it is the all-ones code alone.
        is_signed: one more bit, the highest, is the sign.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_inf: bool = False
    has_nan: bool = True
    is_signed: bool = True


class Format(enum.Enum):
    """A number format of eight bits or fewer.

    ========  =====  =====  =====  ==========  =============  ==================
    member    bits   bias   max    min normal  min subnormal  specials
    ========  =====  =====  =====  ==========  =============  ==================
    E4M3      1-4-3  7      448    2^-6        2^-9           NaN 0x7F, no inf
    E5M2      1-5-2  15     57344  2^-14       2^-16          inf 0x7C, NaN 0x7F
    E2M1      1-2-1  1      6      1           0.5            none
    E8M0      0-8-0  127    2^127  2^-127      none           NaN 0xFF, no zero
    ========  =====  =====  =====  ==========  =============  ==================

    Example:
        >>> Format.E4M3.max, Format.E5M2.dtype
        (448.0, torch.float8_e5m2)
    """

    E4M3 = FormatSpec(exponent_bits=4, mantissa_bits=3, bias=7)
    E5M2 = FormatSpec(exponent_bits=5, mantissa_bits=2, bias=15, has_inf=True)
    E2M1 = FormatSpec(exponent_bits=2, mantissa_bits=1, bias=1, has_nan=False)
    E8M0 = FormatSpec(exponent_bits=8, mantissa_bits=0, bias=127, is_signed=False)

    def __repr__(self) -> str:
        return f"Format.{self.name}"

    @property
    def bits(self) -> int:
        """Bits of one code, the sign included."""
        return self.value.exponent_bits + self.value.mantissa_bits + self.value.is_signed

    @property
    def codes_per_byte(self) -> int:
        """Codes that share one byte: two for E2M1, the even element in the low nibble."""
        return 8 // self.bits

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the payload.

        E2M1 is `torch.uint8`, two codes to a byte: torch's own packed type can be viewed but not
        transposed, so its name is only put on at the GEMM call.
        """
        return _DTYPES[self.name]

    @property
    def has_subnormals(self) -> bool:
        """Whether exponent field 0 means subnormals (and zero) rather than one more power."""
        return self.value.mantissa_bits > 0

    @property
    def max_code(self) -> int:
        """The code of `max`."""
        spec = self.value
        if spec.has_inf:
            return (((1 << spec.exponent_bits) - 1) << spec.mantissa_bits) - 1
        return (1 << (spec.exponent_bits + spec.mantissa_bits)) - 1 - spec.has_nan

    @property
    def inf_code(self) -> int | None:
        """The code of plus infinity, `None` where there is none."""
        return self.max_code + 1 if self.value.has_inf else None

    @property
    def nan_code(self) -> int | None:
        """The NaN that our casts write: all ones, sign clear. `None` where there is none."""
        spec = self.value
        return (1 << (spec.exponent_bits + spec.mantissa_bits)) - 1 if spec.has_nan else None

    @property
    def max(self) -> float:
        """The largest finite value."""
        return self.decode(self.max_code)

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest power of two in the format (`emax` in the MX specification)."""
        spec = self.value
        return (self.max_code >> spec.mantissa_bits) - spec.bias

    @property
    def min_normal(self) -> float:
        """The smallest positive value with full precision."""
        return 2.0 ** (int(self.has_subnormals) - self.value.bias)

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value; equal to `min_normal` in E8M0, without subnormals."""
        return self.min_normal * self.eps

    @property
    def eps(self) -> float:
        """The distance from 1 to the next larger value."""
        return 2.0**-self.value.mantissa_bits

    def decode(self, code: int) -> float:
        """The value of one code, as a Python float (exact).

        Args:
            code: 0 <= code < 2**bits; one unpacked code in the case of E2M1.

        Example:
            >>> [Format.E2M1.decode(code) for code in range(8)]
            [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        """
        spec = self.value
        magnitude_bits = spec.exponent_bits + spec.mantissa_bits
        magnitude = code & ((1 << magnitude_bits) - 1)
        sign = -1.0 if code >> magnitude_bits else 1.0
        if magnitude > self.max_code:
            return sign * float("inf") if magnitude == self.inf_code else float("nan")
        exponent, fraction = divmod(magnitude, 1 << spec.mantissa_bits)
        if exponent == 0 and self.has_subnormals:
            return sign * fraction * self.min_subnormal
        return sign * (1.0 + fraction * self.eps) * 2.0 ** (exponent - spec.bias)


class Orientation(enum.Enum):
    """Which copies of a quantized matrix [M, K] are made.

    ROWWISE: [M, K], groups along K. COLUMNWISE: [K, M], the rowwise copy of the transpose, stored
    as a physical transpose because 8-bit GEMMs read both operands along the contraction. BOTH: one
    pass makes the two. It says nothing about granularity or about parallelism.
    """

    ROWWISE = "rowwise"
    COLUMNWISE = "columnwise"
    BOTH = "both"

    @property
    def rowwise(self) -> bool:
        """Whether the rowwise copy is made."""
        return self is not Orientation.COLUMNWISE

    @property
    def columnwise(self) -> bool:
        """Whether the columnwise copy is made."""
        return self is not Orientation.ROWWISE


class Scaling(enum.Enum):
    """Which elements of a GEMM operand [rows, contraction] share a decode scale, and how the scales are stored.

    They are stored as GEMMs read them. A columnwise copy is the operand of the transpose, so the table holds for it
    with rows and contraction exchanged. `QuantizedTensor.scale_inv` shows them as [rows, blocks].

    ============= ================= ============================================================================
    member        one scale for     stored as
    ============= ================= ============================================================================
    TENSOR        the whole         float32 [], one for both copies
    ROW           a row             float32 [rows]
    BLOCK_1X128   128 of a row      float32 [ceil(contraction / 128), rows]
    BLOCK_128X128 a square of 128   float32 [ceil(rows / 128), round_up(ceil(contraction / 128), 4)], padded with 0
    BLOCK_1X32    32 of a row (MX)  E8M0 uint8 [rows, ceil(contraction / 32)], or swizzled and flat
    BLOCK_1X16    16 of a row (NV)  E4M3 uint8 [rows, ceil(contraction / 16)], or swizzled and flat; and a tensor scale,
                                    float32 [] or [rows]
    CUSTOM        anything          as its quantizer likes; GEMMs read its decoded values
    ============= ================= ============================================================================

    Source: PyTorch, torch.nn.functional.scaled_mm and aten/src/ATen/native/cuda/ScaledBlas.cpp.
    """

    TENSOR = "per tensor"
    ROW = "per row"
    BLOCK_1X128 = "1x128"
    BLOCK_128X128 = "128x128"
    BLOCK_1X32 = "1x32"
    BLOCK_1X16 = "1x16"
    CUSTOM = "custom"

    @property
    def block(self) -> int:
        """How many elements along the contraction share a scale; 1 where all or none do."""
        return _BLOCKS.get(self, 1)

    @property
    def alignment(self) -> int:
        """What a native GEMM wants the contraction to be a multiple of."""
        return _ALIGNMENTS.get(self, 16)


class MXScaleMode(enum.Enum):
    """How the scale of an MX block, a power of two, is chosen from its amax.

    RCEIL: the smallest with which nothing saturates. FLOOR: that of the OCP specification, with which values above
    format.max times the scale saturate. CEIL: FLOOR, doubled unless amax is a power of two. EVEN: FLOOR of amax
    rounded to the mantissa width of the format.

    Source: OCP Microscaling Formats 1.0; TransformerEngine 2.20 (RCEIL); torchao 0.18, prototype/mx_formats.
    """

    RCEIL = "rceil"
    FLOOR = "floor"
    CEIL = "ceil"
    EVEN = "even"


class FourOverSix(enum.Enum):
    """By which error an NVFP4 block chooses between two scales: one maps its amax to 6, the other to 4.

    MAE: sum of |decoded - x| over the block; MSE: sum of (decoded - x)^2. The smaller wins, 6 at a tie.

    Source: "Four Over Six" (Cook et al., 2025, arXiv:2512.02010); TransformerEngine 2.20.
    """

    MAE = "mae"
    MSE = "mse"

    @property
    def scale_max(self) -> float:
        """The largest scale that maps to 6; E4M3 has room above it for one that maps to 4, 6/4 as large."""
        return 256.0


def check_nvfp4_options(
    pad: int,
    *,
    two_dimensional: bool,
    hadamard: bool,
    four_over_six: FourOverSix | None,
    row_scaled: bool,
    seed: torch.Tensor | None,
) -> None:
    """Refuse what `cast_nvfp4` cannot mean, for the reference and for the kernel.

    Args:
        pad: as given to `cast_nvfp4`.
        two_dimensional: likewise.
        hadamard: likewise.
        four_over_six: likewise.
        row_scaled: likewise.
        seed: likewise; not read.

    Raises:
        ConfigError: `pad` is odd, or two options exclude each other.
    """
    if pad < 2 or pad % 2:
        raise ConfigError(
            f"cast_nvfp4: pad must be a positive even number, got {pad}",
            why="two codes share a byte",
        )
    asked = {
        "two_dimensional": two_dimensional,
        "hadamard": hadamard,
        "four_over_six": four_over_six is not None,
        "row_scaled": row_scaled,
        "seed": seed is not None,
    }
    for (one, other), why in NVFP4_EXCLUSIONS.items():
        if asked[one] and asked[other]:
            raise ConfigError(
                f"cast_nvfp4: {one} and {other} exclude each other, got both",
                why=why,
                do="turn one of them off",
            )


def largest_finite(dtype: torch.dtype) -> float:
    """The largest finite value of a floating dtype and of float32, in which scales are kept."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


# Bit i is set where the random Hadamard transform of NVFP4 changes the sign of element i of 16.
# Source: TransformerEngine 2.20, custom_recipes/reference_nvfp4.py, get_wgrad_sign_vector.
HADAMARD_SIGN_CHANGES = 0xD7E8

ROWWISE = Orientation.ROWWISE
COLUMNWISE = Orientation.COLUMNWISE
BOTH = Orientation.BOTH

_BLOCKS = {
    Scaling.BLOCK_1X128: 128,
    Scaling.BLOCK_128X128: 128,
    Scaling.BLOCK_1X32: 32,
    Scaling.BLOCK_1X16: 16,
}

NVFP4_EXCLUSIONS = {
    ("four_over_six", "hadamard"): "errors of what was not transformed are compared",
    ("four_over_six", "seed"): "errors of rounding to nearest are compared",
    ("two_dimensional", "row_scaled"): "the rows of a square share a scale",
    ("two_dimensional", "hadamard"): "the copies of a cast in squares are transposes of each other",
}
"""Options of an NVFP4 cast that exclude each other, and why; "seed" is the one of stochastic rounding."""

_ALIGNMENTS = {
    Scaling.BLOCK_1X128: 128,
    Scaling.BLOCK_128X128: 128,
    Scaling.BLOCK_1X32: 32,
    Scaling.BLOCK_1X16: 32,
}

_DTYPES = {
    "E4M3": torch.float8_e4m3fn,
    "E5M2": torch.float8_e5m2,
    "E2M1": torch.uint8,
    "E8M0": torch.float8_e8m0fnu,
}
