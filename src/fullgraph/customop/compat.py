"""Every private or version-dependent symbol of torch that the framework touches, in one place.

Supported: torch 2.11 to 2.15. What lives here is checked by tests/compile on each of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor


def process_group(name: str) -> Any | None:
    """The process group of this name in this process, or None.

    `torch.distributed` has no public look-up by name; functional collectives use this one.
    """
    if not torch.distributed.is_available():
        return None
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._resolve_process_group(name)
    except (RuntimeError, ValueError):  # both in use for an unknown name
        return None


def mark_no_version_check(tensors: Iterable[torch.Tensor]) -> None:
    """Tell AOTAutograd that these graph inputs may change between forward and backward.

    State that a later op mutates (an amax, a gradient buffer) is handed to the backward op by reference; without
    the mark a second microbatch in flight trips the saved-tensor version check. `autograd.Function` under Dynamo
    sets the same mark. Outside of a trace there is nothing to mark.
    """
    if proxy_tensor.get_proxy_mode() is None:
        return
    for tensor in tensors:
        for proxy in proxy_tensor._get_proxies(tensor):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True


def is_symbolic(shape: Iterable[Any]) -> bool:
    """Whether any size is symbolic, so that a plan for it cannot be cached by value."""
    return any(isinstance(size, torch.SymInt) for size in shape)
