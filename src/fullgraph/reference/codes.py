"""Values to 8-bit codes and back, without a scale."""

from __future__ import annotations

import torch
from torch import Tensor

from fullgraph.formats import Format


def encode(x: Tensor, format: Format) -> Tensor:
    """Cast to an 8-bit format.

    Args:
        x: float32, any shape.
        format: E4M3 or E5M2.

    Returns:
        uint8, the shape of `x`.

    Numerics: nearest-even, saturates at +-format.max (infinity too); -0 stays -0; every NaN
        becomes `format.nan_code`. The same on every torch version: PyTorch's own cast saturates
        E4M3 only from 2.13 on and E5M2 never, and keeps the sign of a NaN.
    """
    codes = x.clamp(-format.max, format.max).to(format.dtype).view(torch.uint8)
    return torch.where(x.isnan(), format.nan_code, codes)  # type: ignore[arg-type]


def decode(data: Tensor, format: Format) -> Tensor:
    """The values of 8-bit codes.

    Args:
        data: uint8, any shape.
        format: E4M3 or E5M2.

    Returns:
        float32, the shape of `data`. Exact; NaN codes give NaN.
    """
    if data.is_cuda:
        return data.view(format.dtype).to(torch.float32)
    # A table of all codes: on a CPU PyTorch decodes E4M3 five times slower than it looks up.
    codes = torch.arange(1 << format.bits, dtype=torch.uint8, device=data.device)
    table = codes.view(format.dtype).to(torch.float32)
    return table.index_select(0, data.reshape(-1).to(torch.int32)).view(data.shape)
