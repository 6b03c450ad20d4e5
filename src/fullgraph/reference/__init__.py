"""The oracle: every cast and every GEMM in plain PyTorch, on any device.

What a result must be, bit for bit, is decided here; `fullgraph.kernels` has the same functions
with the same signatures for CUDA and must return the same bytes. Nothing here reads data on the
host or branches on it, so all of it can be traced, and all of it works with zero elements.

Read `codes` first, then `per_tensor`, then `gemm`.
"""

from __future__ import annotations

from fullgraph.reference.codes import decode, encode
from fullgraph.reference.gemm import gemm_upcast
from fullgraph.reference.per_tensor import (
    amax,
    cast_per_tensor,
    dequantize_per_tensor,
    pad_columns,
    scale_from_amax,
)

__all__ = [
    "amax",
    "cast_per_tensor",
    "decode",
    "dequantize_per_tensor",
    "encode",
    "gemm_upcast",
    "pad_columns",
    "scale_from_amax",
]
