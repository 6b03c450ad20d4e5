"""What a cast did to a tensor, as a row of numbers on the device: the arithmetic of `fullgraph.statistics`.

An op adds to a row, in place, for each cast that it makes. Nothing is read on the host, so a row may be filled inside
of a captured graph; what the numbers amount to is worked out later, from the row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullgraph import reference
from fullgraph.delayed import FORWARD_SLOTS, SLOTS
from fullgraph.formats import COLUMNWISE, ROWWISE, Format, Orientation, Scaling
from fullgraph.quantizers import NVFP4Quantizer, as_matrix
from fullgraph.tensor import QuantizedParts, Quantizer

COLUMN_NAMES: tuple[str, ...] = (
    "amax",
    "elements",
    "nonfinite",
    "underflow",
    "saturation",
    "signal",
    "noise",
    "casts",
)
"""What stands where in a row: the largest magnitude; then sums over casts, see `record`."""
COLUMNS = len(COLUMN_NAMES)


class StatisticsBuffers:
    """The rows of one layer, while it collects statistics. Made by `Statistics`, as attribute `statistics` of a layer.

    A copy of a layer, or one out of a pickle, collects nothing: in place of its buffers it has None.

    Args:
        device: of the layer.

    Attributes:
        forward: float32 [3, COLUMNS], zeros at first: input, weight and output. Changed in place by the forward op.
        backward: float32 [1, COLUMNS]: grad_output. Changed in place by the backward op.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.forward = torch.zeros(FORWARD_SLOTS, COLUMNS, device=device, dtype=torch.float32)
            self.backward = self.forward.new_zeros(len(SLOTS) - FORWARD_SLOTS, COLUMNS)
        for rows in (self.forward, self.backward):
            # Or, with dynamic=True, a batch of 3 or COLUMNS tokens would be taken to always have as many.
            torch._dynamo.mark_static(rows)

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.forward.device

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def record(row: Tensor, original: Tensor, parts: QuantizedParts) -> None:
    """Add to a row what one cast did to a tensor.

    amax = max(amax, |x|); signal += sum x^2; noise += sum (x - decoded)^2; the others count

    Elements that are not finite before or after the cast count as `nonfinite` and as nothing else. `underflow` counts
    values other than 0 that decode to 0. `saturation` counts values beyond the range of their scaling group, as IEEE
    754 defines overflow: so far above the largest value that with more exponents they would not be rounded to it, which
    is more than half a step of the format (464 / 448 for E4M3, 7 / 6 for E2M1). No value counts as both.

    - TENSOR, ROW, blocks of 128, with scales from their own amax: none, whichever way the scale was rounded.
    - TENSOR with delayed scaling: what grew beyond the amaxes that the scale was made from.
    - BLOCK_1X32: none with RCEIL and CEIL; with FLOOR and EVEN the top of blocks whose amax is just below a power of
      two, in E4M3.
    - BLOCK_1X16: next to none. The scale of a block is rounded too, but, if it is no subnormal, by 1/16 at most.
    - CUSTOM: unknown, since codes mean what their quantizer likes. The row gets NaN.

    The rowwise copy is looked at if it is there, else the columnwise one. If that one was Hadamard-transformed, so is
    x, filled up with zeros as it was for the cast; then all numbers are those of what was cast. If it was cast from the
    decoded rowwise one, it is compared with the original all the same.

    Args:
        row: float32 [COLUMNS], `COLUMN_NAMES`; changed in place.
        original: what was cast, float32, bfloat16 or float16 [..., K].
        parts: what came of it, in any layout.

    Numerics: float32. Counts are exact up to 2^24 and rounded beyond. Squares of magnitudes outside of 1e-18 to 1e18
        are lost. Capturable in a CUDA graph; may be empty.
    """
    if original.numel() == 0:
        row[-1].add_(1)
        return
    copy = ROWWISE if parts.orientation.rowwise else COLUMNWISE
    quantizer = parts.quantizer.for_copy(copy)
    assert quantizer is not None
    x = as_matrix(original)
    x, decoded = _compared(x if copy is ROWWISE else x.t(), parts, quantizer, copy)
    magnitude = x.abs()
    usable = x.isfinite() & decoded.isfinite()
    numbers = torch.where(usable, magnitude, 0.0)
    error = torch.where(usable, x - decoded, 0.0)
    saturated = row.new_full((), float("nan"))
    if quantizer.scaling is not Scaling.CUSTOM:
        largest = _has_largest_code(parts, quantizer.format, copy)[:, : x.shape[1]]
        beyond = magnitude > decoded.abs() * (1 + _half_step(quantizer.format))
        saturated = (usable & largest & beyond & (decoded != 0)).sum()
    counts = [
        row.new_full((), x.numel()),
        (~usable).sum(),
        (usable & (x != 0) & (decoded == 0)).sum(),
        saturated,
        numbers.square().sum(),
        error.square().sum(),
        row.new_ones(()),
    ]
    added = torch.stack([count.to(row.dtype) for count in counts])
    amax = torch.maximum(row[0], reference.amax(numbers))
    row.copy_(torch.cat([amax.view(1), row[1:] + added]))


def _compared(
    x: Tensor, parts: QuantizedParts, quantizer: Quantizer, copy: Orientation
) -> tuple[Tensor, Tensor]:
    """What was cast and what it decodes to, float32 [rows, contraction], in the basis of the codes."""
    if isinstance(quantizer, NVFP4Quantizer) and quantizer.hadamard and copy is COLUMNWISE:
        filled = reference.pad_columns(x, quantizer.scaling.block)
        x = reference.hadamard_rows(filled)
        decoded = reference.decode_operand(quantizer.operand(parts, copy))
    else:
        decoded = parts.quantizer.decode_matrix(parts, copy)
    return x.to(torch.float32), decoded[:, : x.shape[1]]


def _has_largest_code(parts: QuantizedParts, format: Format, copy: Orientation) -> Tensor:
    """Where the largest code stands, of either sign; bool [rows, contraction], padding included."""
    codes = parts.payload(copy)
    assert codes is not None
    if format.codes_per_byte > 1:
        codes = reference.unpack_codes(codes)
    return (codes & ((1 << (format.bits - 1)) - 1)) == format.max_code


def _half_step(format: Format) -> float:
    """Half of the distance from the largest value to the next one that there would be, relative to it."""
    return format.eps * 2.0**format.max_exponent / 2 / format.max
