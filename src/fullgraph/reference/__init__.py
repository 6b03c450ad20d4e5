"""The oracle: every cast and every GEMM in plain PyTorch, on any device.

What a result must be, bit for bit, is decided here; `fullgraph.kernels` has the same functions
with the same signatures for CUDA and must return the same bytes. Nothing here reads data on the
host or branches on it, so all of it can be traced, and all of it works with zero elements.

Read `codes` first, then `per_tensor`, then `gemm`.
"""

from __future__ import annotations

from fullgraph.reference.block import cast_block, decode_block
from fullgraph.reference.codes import decode, encode
from fullgraph.reference.gemm import Operand, decode_operand, gemm_upcast
from fullgraph.reference.mx import cast_mx, decode_mx
from fullgraph.reference.nvfp4 import (
    cast_nvfp4,
    decode_nvfp4,
    hadamard_rows,
    inverse_hadamard_rows,
    pack_codes,
    transpose_codes,
    unpack_codes,
)
from fullgraph.reference.per_row import cast_per_row
from fullgraph.reference.per_tensor import (
    amax,
    cast_delayed,
    cast_per_tensor,
    dequantize_per_tensor,
    pad_columns,
    scale_from_amax,
)
from fullgraph.reference.swizzle import swizzle, unswizzle

__all__ = [
    "Operand",
    "amax",
    "cast_block",
    "cast_delayed",
    "cast_mx",
    "cast_nvfp4",
    "cast_per_row",
    "cast_per_tensor",
    "decode",
    "decode_block",
    "decode_mx",
    "decode_nvfp4",
    "decode_operand",
    "dequantize_per_tensor",
    "encode",
    "gemm_upcast",
    "hadamard_rows",
    "inverse_hadamard_rows",
    "pack_codes",
    "pad_columns",
    "scale_from_amax",
    "swizzle",
    "transpose_codes",
    "unpack_codes",
    "unswizzle",
]
