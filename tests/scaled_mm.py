"""A stand-in for `torch.nn.functional.scaled_mm` that is as strict as a CUDA device, and multiplies what it was given.

CPUs take almost anything, or nothing. The rules are those of PyTorch's aten/src/ATen/native/cuda/ScaledBlas.cpp and
RowwiseScaledMM.cuh; codes and scales are read by tables and the written definition of the swizzled order.
"""

import dataclasses

import numpy as np
import torch
from torch.nn.functional import ScalingType, SwizzleType

from oracles_nvfp4 import values_of
from oracles_quantizers import table_of

NAMES = {torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2"}
FP4 = torch.float4_e2m1fn_x2
SWIZZLED, PLAIN = SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE


def round_up(size, multiple):
    return -(-size // multiple) * multiple


def codes_to_values(matrix):
    """A matrix of codes with the contraction last, decoded; float64 [rows, contraction]."""
    codes = matrix.view(torch.uint8).numpy()
    if matrix.dtype != FP4:
        return table_of(NAMES[matrix.dtype])[codes].astype(np.float64)
    return np.stack([values_of(codes & 15), values_of(codes >> 4)], -1).reshape(len(codes), -1)


def unswizzled(flat, rows, columns):
    """The byte of row r, column c of a tile of 128 x 4 is number (r % 32) * 16 + (r // 32) * 4 + c of it."""
    r, c = np.arange(rows)[:, None], np.arange(columns)
    tile = r // 128 * -(-columns // 4) + c // 4
    inside = r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    return flat.view(torch.uint8).numpy()[tile * 512 + inside]


@dataclasses.dataclass
class StrictScaledMM:
    """`scaled_mm` of a device with this compute capability; remembers the keyword arguments of each call."""

    capability: tuple[int, int]
    calls: list = dataclasses.field(default_factory=list)

    def __call__(
        self,
        mat_a,
        mat_b,
        *,
        scale_a,
        scale_recipe_a,
        scale_b,
        scale_recipe_b,
        swizzle_a=None,
        swizzle_b=None,
        bias=None,
        output_dtype=torch.bfloat16,
        use_fast_accum=False,
    ):
        self.calls.append(
            {
                "dtypes": (mat_a.dtype, mat_b.dtype),
                "shapes": (tuple(mat_a.shape), tuple(mat_b.shape)),
                "recipes": (_first(scale_recipe_a), _first(scale_recipe_b)),
                "bias": bias,
                "output_dtype": output_dtype,
                "use_fast_accum": use_fast_accum,
            }
        )
        (m, k), n = mat_a.shape, mat_b.shape[1]
        assert mat_b.shape[0] == k
        b = mat_b.t()
        for matrix in (mat_a, b):
            assert matrix.is_contiguous(), "a must be row-major, b column-major"
            assert matrix.data_ptr() % 16 == 0
        packing = 2 if mat_a.dtype == FP4 else 1
        assert k * packing % 16 == 0
        assert n % 16 == 0
        assert (mat_a.dtype == FP4) == (mat_b.dtype == FP4)
        assert [mat_a.dtype, mat_b.dtype] != [torch.float8_e5m2] * 2
        assert not (use_fast_accum and mat_a.dtype == FP4)
        if bias is not None:
            assert output_dtype != torch.float32
            assert bias.dtype == output_dtype
            assert bias.shape == (n,)
        if 0 in (m, k, n):
            return torch.zeros(m, n, dtype=output_dtype)  # without the bias
        sides = (
            (mat_a, scale_a, scale_recipe_a, swizzle_a, True),
            (b, scale_b, scale_recipe_b, swizzle_b, False),
        )
        self._check_recipes(mat_a, b, output_dtype)
        left, right = (codes_to_values(side[0]) * self._scales(*side) for side in sides)
        product = torch.from_numpy(left @ right.T)
        if bias is not None:
            product += bias.double()
        return product.to(torch.float32).to(output_dtype)

    def _check_recipes(self, a, b, output_dtype):
        recipes = self.calls[-1]["recipes"]
        pairs = {
            (ScalingType.TensorWise, ScalingType.TensorWise): self.capability >= (8, 9),
            (ScalingType.RowWise, ScalingType.RowWise): self.capability >= (8, 9),
            (ScalingType.BlockWise1x128, ScalingType.BlockWise1x128): self.capability[0] == 9,
            (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128): self.capability[0] == 9,
            (ScalingType.BlockWise1x32, ScalingType.BlockWise1x32): self.capability[0] == 10,
            (ScalingType.BlockWise1x16, ScalingType.BlockWise1x16): self.capability[0] == 10,
        }
        assert pairs.get(recipes), f"{recipes} on {self.capability}"
        assert (recipes[0] is ScalingType.BlockWise1x16) == (a.dtype == FP4)
        if recipes[0] is ScalingType.RowWise and self.capability[0] != 9:
            assert output_dtype == torch.bfloat16
            assert b.dtype == torch.float8_e4m3fn

    def _scales(self, matrix, scale, recipe, swizzle, is_left):
        """The scale of each element, after a look at their form; float64, broadcasts with the values."""
        rows, k = matrix.shape
        if recipe is ScalingType.TensorWise:
            _check_scale(scale, torch.float32)
            assert scale.numel() == 1
            assert swizzle is None
            return scale.double().item()
        if recipe is ScalingType.RowWise:
            _check_scale(scale, torch.float32)
            assert scale.shape == ((rows, 1) if is_left else (1, rows))
            assert scale.is_contiguous()
            assert swizzle is None
            return scale.double().numpy().reshape(rows, 1)
        if recipe is ScalingType.BlockWise1x128:
            _check_scale(scale, torch.float32)
            assert scale.shape == (rows, -(-k // 128))
            assert scale.stride(0) == 1
            assert scale.stride(1) == rows
            assert rows % 4 == 0  # the next column of scales begins at a multiple of 16 bytes
            assert swizzle is None
            return scale.double().numpy().repeat(128, 1)[:, :k]
        if recipe is ScalingType.BlockWise128x128:
            assert not is_left
            _check_scale(scale, torch.float32)
            down = round_up(-(-k // 128), 4)
            assert scale.shape == (down, -(-rows // 128))
            assert scale.stride() == (1, down)
            assert swizzle is None
            return scale.double().numpy().T.repeat(128, 0).repeat(128, 1)[:rows, :k]
        if recipe is ScalingType.BlockWise1x32:
            assert swizzle is SWIZZLED
            return 2.0 ** (self._swizzled(scale, torch.float8_e8m0fnu, rows, k, 32) - 127)
        assert recipe == [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        assert swizzle == [SWIZZLED, PLAIN]
        of_blocks, of_tensor = scale
        _check_scale(of_tensor, torch.float32)
        assert of_tensor.numel() == 1
        codes = self._swizzled(of_blocks, torch.float8_e4m3fn, rows, 2 * k, 16).astype(np.uint8)
        return table_of("E4M3")[codes] * of_tensor.double().item()

    def _swizzled(self, scale, dtype, rows, contraction, block):
        _check_scale(scale, dtype)
        blocks = -(-contraction // block)
        assert scale.shape == (round_up(rows, 128) * round_up(blocks, 4),)
        assert scale.is_contiguous()
        return unswizzled(scale, rows, blocks).repeat(block, 1)[:, :contraction].astype(np.float64)


def _check_scale(scale, dtype):
    assert scale.dtype == dtype
    assert scale.data_ptr() % 16 == 0


def _first(recipe):
    return recipe[0] if isinstance(recipe, list) else recipe


def pretend(monkeypatch, capability):
    """Let CPUs be taken for a CUDA device, as far as GEMMs go; plans of other devices are forgotten.

    Returns:
        The stand-in, which remembers its calls.
    """
    from fullgraph import gemm
    from fullgraph.customop import token

    strict = StrictScaledMM(capability)
    monkeypatch.setattr(gemm, "compute_capability", lambda device: capability)
    monkeypatch.setattr(gemm, "scaled_mm", strict)
    for cache in token.CACHES:
        cache.clear()
    return strict
