"""`QuantizedTensor`: payload bytes, decode scales, and the quantizer that made them.

Outside of ops it is a tensor like any other: a parameter, an activation, a leaf, with `torch.optim`, `copy_`, deepcopy,
pickle and `torch.save`. Inside an op it is its `QuantizedParts`. How the bytes are made and read is the quantizer's
business (`quantizers.py`); how a structured tensor crosses ops and graphs is `customop/structured.py`'s.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
from torch import Tensor

from fullgraph.customop.structured import StructuredTensor, flatten, map_parts, run_decoded
from fullgraph.errors import ConfigError
from fullgraph.formats import BOTH, COLUMNWISE, ROWWISE, Format, Orientation

aten = torch.ops.aten

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that can be quantized, and that a quantized tensor can stand for."""


class Quantizer(Protocol):
    """How one tensor is cast: a frozen dataclass, so that it can stand in an op's token.

    A quantizer of your own needs these five and no registration. All sizes may be symbolic in `spec`.
    """

    @property
    def format(self) -> Format:
        """Format of the payload."""
        ...

    def quantize(self, x: Tensor, orientation: Orientation, *, pad: int = 1) -> QuantizedParts:
        """Cast `x`, any floating dtype [..., K], making the copies of `orientation`.

        `pad` > 1 rounds the last dimension of each copy of a matrix up to a multiple, filling with zeros.
        """
        ...

    def spec(
        self,
        shape: tuple[Any, ...],
        dtype: torch.dtype,
        device: torch.device,
        orientation: Orientation,
        *,
        pad: int = 1,
    ) -> QuantizedParts:
        """What `quantize` returns, filled with `TensorSpec`s."""
        ...

    def dequantize(self, parts: QuantizedParts) -> Tensor:
        """The values that `parts` stand for, `parts.dtype` [`parts.shape`]."""
        ...

    def matrix(
        self, parts: QuantizedParts, orientation: Orientation, *, pad: int = 1
    ) -> tuple[Tensor, Tensor]:
        """One copy as a GEMM reads it: payload uint8 [M, K_pad] or [K, M_pad], and its decode scales."""
        ...


@dataclasses.dataclass
class QuantizedParts:
    """A quantized tensor inside an op, or its spec.

    Args:
        data: payload of the rowwise copy, uint8 [..., K], or None.
        columnwise_data: payload of the columnwise copy, uint8 [K, ...]: a physical transpose, last dimension first.
        scale_inv: decode scales; for one scale a tensor float32 [], shared by both copies.
        quantizer: what made it, and can read it.
        dtype: the logical, high-precision dtype.
    """

    data: Tensor | None
    columnwise_data: Tensor | None
    scale_inv: Tensor
    quantizer: Quantizer
    dtype: torch.dtype

    @property
    def shape(self) -> Any:
        """Logical shape [..., K]."""
        if self.data is not None:
            return self.data.shape
        assert self.columnwise_data is not None
        return (*self.columnwise_data.shape[1:], self.columnwise_data.shape[0])

    @property
    def device(self) -> torch.device:
        """Where the payload lives."""
        return self.scale_inv.device

    @property
    def orientation(self) -> Orientation:
        """Which copies there are."""
        if self.columnwise_data is None:
            return ROWWISE
        return COLUMNWISE if self.data is None else BOTH

    def only(self, orientation: Orientation) -> QuantizedParts:
        """The same tensor with only one of its copies."""
        return dataclasses.replace(
            self,
            data=self.data if orientation.rowwise else None,
            columnwise_data=self.columnwise_data if orientation.columnwise else None,
        )

    def decode(self) -> Tensor:
        """The values as a plain tensor."""
        return self.quantizer.dequantize(self)

    def encode_(self, value: Tensor) -> None:
        """Quantize `value` anew into the same memory."""
        new = self.quantizer.quantize(value.to(self.dtype), self.orientation)
        for ours, theirs in zip(flatten(self), flatten(new), strict=True):
            ours.copy_(theirs)


class QuantizedTensor(StructuredTensor, parts=QuantizedParts):
    """A low-precision tensor that looks like a high-precision one.

    x ~ data * scale_inv

    It has the dtype and shape of what it stands for. Ops that do not know it decode it first; in-place ops, those of
    optimizers among them, decode, compute and quantize again into the same memory. Made by `fg.quantize`, by
    `Linear(quantized_weight=True)` and by `Linear.forward(quantized_output=True)`; `nn.Parameter(q)` makes it a weight.

    Args:
        parts: payloads, scales and quantizer.
        requires_grad: as for any tensor; its gradient is a plain tensor of its logical dtype.

    Numerics: `copy_` from a quantized tensor of the same layout copies bytes; from anything else it quantizes.
    """

    part_quantizer: Quantizer
    part_data: Tensor | None
    part_columnwise_data: Tensor | None
    part_scale_inv: Tensor

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer that made it."""
        return self.part_quantizer

    @property
    def orientation(self) -> Orientation:
        """Which copies it holds."""
        return self.parts.orientation

    @property
    def data(self) -> Tensor:
        """Payload of the rowwise copy, `quantizer.format.dtype` [..., K]; a copy that refuses to be written.

        Not padded. Code that writes `parameter.data` means the values, not the bytes; it gets torch's error about
        inference tensors.

        Inside a compiled function Dynamo takes `.data` of any tensor for torch's own attribute, so there it is the
        logical tensor; read payloads outside of compiled code.

        Raises:
            ConfigError: it holds no rowwise copy.
        """
        return self._payload(self.part_data, ROWWISE)

    @data.setter
    def data(self, value: Tensor) -> None:
        raise ConfigError(
            "QuantizedTensor: .data cannot be assigned",
            why="a tensor cannot stop being quantized in place",
            do="write values with copy_(...), or replace the parameter in its module",
        )

    @property
    def columnwise_data(self) -> Tensor:
        """Payload of the columnwise copy, `quantizer.format.dtype` [K, ...]; a copy like `data`, not padded.

        Raises:
            ConfigError: it holds no columnwise copy.
        """
        return self._payload(self.part_columnwise_data, COLUMNWISE)

    @property
    def scale_inv(self) -> Tensor:
        """Decode scales as the quantizer defines them; not swizzled, not padded."""
        return self.part_scale_inv

    def dequantize(self) -> Tensor:
        """The values as a plain tensor, differentiable; the gradient passes straight through.

        Returns:
            The logical dtype, [..., K].
        """
        return self.decode()

    def __setitem__(self, index: Any, value: Any) -> None:
        """Decode, assign, and quantize again into the same memory."""
        values = self.dequantize()
        values[index] = value
        self.copy_(values)

    def share_memory_(self) -> QuantizedTensor:
        """Move payloads and scales to shared memory."""
        for tensor in flatten(self):
            tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether payloads and scales are in shared memory."""
        return all(tensor.is_shared() for tensor in flatten(self))

    def _payload(self, payload: Tensor | None, orientation: Orientation) -> Tensor:
        if payload is None:
            raise ConfigError(
                f"QuantizedTensor: it holds no {orientation.value} copy, only {self.orientation.value}",
                why="a copy exists only if it was asked for when quantizing",
                do=f"fg.quantize(x, quantizer, orientation=fg.{orientation.name} or fg.BOTH)",
            )
        with torch.inference_mode():
            return payload.view(self.part_quantizer.format.dtype).clone()


@QuantizedTensor.implements(aten.view.default, aten._unsafe_view.default)
def _view(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Keep the bytes where only leading dimensions change; decode otherwise."""
    tensor, shape = args
    shape = list(torch.empty(tensor.shape, device="meta").view(shape).shape)
    if tensor.dim() == 0 or not shape or shape[-1] != tensor.shape[-1]:
        return func(tensor.parts.decode(), *args[1:], **kwargs)
    parts = dataclasses.replace(
        map_parts(lambda t: t, tensor.parts),
        data=None if tensor.part_data is None else tensor.part_data.view(shape),
        columnwise_data=None
        if tensor.part_columnwise_data is None
        else tensor.part_columnwise_data.view([shape[-1], *shape[:-1]]),
    )
    return QuantizedTensor(parts)


@QuantizedTensor.implements(aten._to_copy.default)
def _to_copy(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Keep the bytes on another device, and as another dtype that a quantized tensor can stand for."""
    parts = args[0].parts
    dtype = kwargs.get("dtype") or parts.dtype
    if dtype not in HIGH_PRECISION:
        return run_decoded(func, args, kwargs)
    moves = {k: v for k, v in kwargs.items() if k in ("device", "non_blocking", "pin_memory")}
    moved = map_parts(lambda t: func(t, **moves), parts)
    return QuantizedTensor(dataclasses.replace(moved, dtype=dtype))


@QuantizedTensor.implements(aten.empty_like.default)
def _empty_like(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Leaving the meta device (`Module.to_empty`) keeps the form; other new tensors are plain, as for any factory."""
    parts, device = args[0].parts, kwargs.get("device")
    if parts.device.type != "meta" or device is None or torch.device(device).type == "meta":
        return func(torch.empty(parts.shape, dtype=parts.dtype, device=parts.device), **kwargs)
    return QuantizedTensor(map_parts(lambda t: torch.empty_like(t, device=device), parts))


torch.serialization.add_safe_globals([QuantizedTensor])
