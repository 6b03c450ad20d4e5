"""Of which weight the quantized copies are that a layer keeps over microbatches.

The op notes it when it fills them and checks it when it reads them, in eager mode and in compiled functions. It goes by
the weight, which it only reads: a compiler may hand it the copies at another address. Replays of a CUDA graph run no
Python, so nothing is known of copies that were filled while one was captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullgraph.errors import ConfigError
from fullgraph.tensor import Quantizer

_FILLED: dict[tuple[int, Quantizer], tuple[int, ...] | None] = {}
"""Address of a weight and what quantized it -> its version and that of its scale; None if these are not known."""


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple([0 if t.is_inference() else t._version for t in tensors if t is not None])


def _captures(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def forget(weight: Tensor) -> None:
    """Count the copies of a weight as not filled.

    Args:
        weight: the tensor itself.
    """
    address = weight.data_ptr()
    for key in [key for key in list(_FILLED) if key[0] == address]:
        _FILLED.pop(key, None)


def note(weight: Tensor, quantizer: Quantizer, scales: Tensor | None) -> None:
    """Remember that copies were filled.

    Args:
        weight: what was quantized.
        quantizer: by what.
        scales: of delayed scaling.
    """
    versions = None if _captures(weight) else _versions(weight, scales)
    _FILLED[weight.data_ptr(), quantizer] = versions


def holds(weight: Tensor, quantizer: Quantizer, scales: Tensor | None) -> bool:
    """Whether copies are known to be what would be made now.

    Args:
        weight: what would be quantized.
        quantizer: by what.
        scales: of delayed scaling.
    """
    return _FILLED.get((weight.data_ptr(), quantizer)) == _versions(weight, scales)


def check(weight: Tensor, quantizer: Quantizer) -> None:
    """Refuse copies of another weight, or of none.

    Args:
        weight: what copies stand for that are about to be read.
        quantizer: what made them.

    Raises:
        ConfigError: they were never filled, or an optimizer has stepped since, or the weight is another one now.
    """
    if _captures(weight):
        return
    key = weight.data_ptr(), quantizer
    if key not in _FILLED:
        raise ConfigError(
            "Linear: is_first_microbatch=False, but no first microbatch has filled the copies of the weight",
            why="they are those of before the last optimizer step or of another weight, or there are none yet",
            do="pass is_first_microbatch=True to the first microbatch after each optimizer step",
        )
    filled = _FILLED[key]
    if filled is not None and filled[0] != _versions(weight)[0]:
        raise ConfigError(
            "Linear: is_first_microbatch=False, but the weight has changed since the first microbatch",
            why="its quantized copies are those of the weight before the change",
            do="pass is_first_microbatch=True to the first microbatch after each change, or None",
        )
