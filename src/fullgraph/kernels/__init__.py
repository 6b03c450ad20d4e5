"""GPU twins of `fullgraph.reference`, in Triton.

The functions here have the names, the signatures and, bit for bit, the results of those in
`fullgraph.reference`, so the two packages can stand in for each other:

    backend = kernels if kernels.available(x.device) else reference
    backend.cast_per_tensor(x, backend.amax(x), Format.E4M3)

Importing this package imports no Triton and touches no GPU; the first use of a kernel does. Only
this package imports Triton. Read `per_tensor` next.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fullgraph.kernels.block import cast_block
    from fullgraph.kernels.mx import cast_mx
    from fullgraph.kernels.nvfp4 import cast_nvfp4
    from fullgraph.kernels.per_row import cast_per_row
    from fullgraph.kernels.per_tensor import amax, cast_delayed, cast_per_tensor

__all__ = [
    "amax",
    "available",
    "cast_block",
    "cast_delayed",
    "cast_mx",
    "cast_nvfp4",
    "cast_per_row",
    "cast_per_tensor",
    "compute_capability",
]

_HOME = {
    "amax": "per_tensor",
    "cast_delayed": "per_tensor",
    "cast_block": "block",
    "cast_mx": "mx",
    "cast_nvfp4": "nvfp4",
    "cast_per_row": "per_row",
    "cast_per_tensor": "per_tensor",
}
# Hopper. On Ada, Triton 3.6 to 3.8 casts by way of a truncation to float16, so its rounding is not
# that of the reference; older devices cannot cast to E4M3 at all. They use the reference.
_FIRST_EXACT = (9, 0)


def available(device: torch.device) -> bool:
    """Whether the kernels run on a device, with the reference's bits, and Triton is installed."""
    return compute_capability(device) >= _FIRST_EXACT and _triton_installed()


def compute_capability(device: torch.device) -> tuple[int, int]:
    """The CUDA compute capability of a device, or (0, 0) where there is no CUDA.

    Starts no CUDA context for a CPU device. AMD devices count as no CUDA: their numbers mean
    something else.
    """
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return 0, 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return _capability_of(index)


@functools.cache
def _capability_of(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def __getattr__(name: str) -> Any:
    """Import a kernel, and with it Triton, on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kernel = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = kernel
    return kernel
