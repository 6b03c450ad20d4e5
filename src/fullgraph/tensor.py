"""`QuantizedTensor`: payload bytes, decode scales, and the quantizer that made them.

Outside of ops it is a tensor like any other: a parameter, an activation, a leaf, with `torch.optim`, `copy_`, deepcopy,
pickle and `torch.save`. Inside an op it is its `QuantizedParts`. How the bytes are made and read is the quantizer's
business (`quantizers.py`); how a structured tensor crosses ops and graphs is `customop/structured.py`'s.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fullgraph import reference
from fullgraph.customop import TensorSpec, compat
from fullgraph.customop.structured import (
    StructuredTensor,
    device_of,
    flatten,
    map_parts,
    run_decoded,
)
from fullgraph.errors import ConfigError
from fullgraph.formats import BOTH, COLUMNWISE, ROWWISE, Format, Orientation, Scaling
from fullgraph.reference import Operand

aten = torch.ops.aten

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that can be quantized, and that a quantized tensor can stand for."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the GEMM routines of a device want copies of quantized matrices.

    Args:
        native: the scalings that the device multiplies natively. Their contraction is padded with zeros to a
            multiple of `Scaling.alignment`, and the scales of 1x32 and 1x16 blocks are swizzled.
    """

    native: frozenset[Scaling] = frozenset()

    def pad(self, scaling: Scaling) -> int:
        """What the contraction is rounded up to a multiple of."""
        return scaling.alignment if scaling in self.native else 1

    def swizzles(self, scaling: Scaling) -> bool:
        """Whether the scales are swizzled."""
        return scaling in self.native and scaling in (Scaling.BLOCK_1X32, Scaling.BLOCK_1X16)


PLAIN = Layout()
"""Neither padded nor swizzled: what a user sees, and what the reference multiplies."""


@dataclasses.dataclass(frozen=True)
class CastState:
    """What a cast takes besides the tensor and its quantizer.

    Args:
        encode_scale: the factor before the cast, float32 []; for quantizers with `is_delayed`.
        amax: float32 [], raised in place to the largest magnitude that was met; likewise. None records nothing.
        seed: int64 [], the random numbers of this cast; for quantizers with `is_stochastic`.
    """

    encode_scale: Tensor | None = None
    amax: Tensor | None = None
    seed: Tensor | None = None


NO_STATE = CastState()


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """How one tensor is cast. Subclass it as a frozen dataclass, so that it can stand in an op's token.

    A quantizer of your own has a `format`, a `scaling` and `quantize`. If it stores codes and scales as
    `QuantizedParts` says for its scaling, that is all, and GEMMs multiply its codes. With `Scaling.CUSTOM` it also
    defines `spec` and `decode_matrix`, and GEMMs multiply the decoded values. It needs no registration. Sizes may be
    symbolic in `spec`.
    """

    if TYPE_CHECKING:

        @property
        def format(self) -> Format:
            """Format of the codes; in subclasses a field or a property."""
            ...

    @property
    def scaling(self) -> Scaling:
        """Which elements share a scale."""
        return Scaling.CUSTOM

    @property
    def is_delayed(self) -> bool:
        """Whether its scale comes from earlier steps."""
        return False

    @property
    def is_stochastic(self) -> bool:
        """Whether it rounds stochastically."""
        return False

    @property
    def rotates(self) -> bool:
        """Whether its columnwise copy is one of a rotated tensor, to be multiplied with a copy rotated alike."""
        return False

    def for_copy(self, orientation: Orientation) -> Quantizer | None:
        """What makes the rowwise or the columnwise copy: itself, unless there are two; None for high precision."""
        return self

    def quantize(
        self,
        x: Tensor,
        orientation: Orientation,
        layout: Layout = PLAIN,
        state: CastState = NO_STATE,
    ) -> QuantizedParts:
        """Cast `x`, any floating dtype [..., K], making the copies of `orientation` in a layout."""
        raise self._must_define("quantize(...)")

    def spec(
        self,
        shape: tuple[Any, ...],
        dtype: torch.dtype,
        device: torch.device,
        orientation: Orientation,
        layout: Layout = PLAIN,
    ) -> QuantizedParts:
        """What `quantize` returns, filled with `TensorSpec`s."""
        *leading, columns = shape
        rows = math.prod(leading)
        packing = self.format.codes_per_byte
        pad = max(layout.pad(self.scaling), packing)
        columnwise_pad = max(pad, self.scaling.block) if self.rotates else pad
        spec = functools.partial(TensorSpec, device=device)
        found: dict[str, Any] = {}
        if orientation.rowwise:
            found["data"] = spec((*leading, round_up(columns, pad) // packing), torch.uint8)
            found["scale_inv"] = self._scale_spec(rows, columns, device, layout)
            found["tensor_scale_inv"] = self.tensor_scale_spec(rows, device, ROWWISE)
        if orientation.columnwise:
            last = (*leading[:-1], round_up(leading[-1], pad)) if leading else ()
            columnwise_shape = (columns, *last)
            if packing > 1:
                columnwise_shape = (columns * (round_up(rows, columnwise_pad) // packing),)
            found["columnwise_data"] = spec(columnwise_shape, torch.uint8)
            scale_inv = self._scale_spec(columns, rows, device, layout)
            shared = self.scaling is Scaling.TENSOR
            found["scale_inv" if shared else "columnwise_scale_inv"] = scale_inv
            found["columnwise_tensor_scale_inv"] = self.tensor_scale_spec(
                columns, device, COLUMNWISE
            )
        if packing > 1:
            found["sizes"] = spec((0, *shape), torch.uint8)
        swizzled = layout.swizzles(self.scaling)
        return QuantizedParts(**found, quantizer=self, dtype=dtype, swizzled=swizzled)

    def _scale_spec(
        self, rows: Any, contraction: Any, device: torch.device, layout: Layout
    ) -> TensorSpec:
        """The decode scales of one copy, as `QuantizedParts` hold them."""
        scaling = self.scaling
        if scaling is Scaling.CUSTOM:
            raise self._must_define("spec(...)")
        shape = scale_shape(scaling, rows, contraction)
        if layout.swizzles(scaling):
            shape = round_up(rows, 128), round_up(shape[1], 4)
        dtype = torch.uint8 if scaling in _BYTE_SCALES else torch.float32
        return TensorSpec((math.prod(shape),) if shape else (), dtype, device)

    def tensor_scale_spec(
        self, rows: Any, device: torch.device, orientation: Orientation
    ) -> TensorSpec | None:
        """The second level of scales of one copy; None where there is only one."""
        return TensorSpec((), torch.float32, device) if self.scaling is Scaling.BLOCK_1X16 else None

    def dequantize(self, parts: QuantizedParts) -> Tensor:
        """The values that `parts` stand for, `parts.dtype` [`parts.shape`]."""
        shape = tuple(parts.shape)
        if parts.data is not None:
            return self.decode_matrix(parts, ROWWISE).to(parts.dtype).flatten().view(shape)
        values = self.decode_matrix(parts, COLUMNWISE).to(parts.dtype)
        # Not `contiguous`, which leaves the strides of sizes of 1 as they are.
        return values.t().clone(memory_format=torch.contiguous_format).view(shape)

    def decode_matrix(self, parts: QuantizedParts, orientation: Orientation) -> Tensor:
        """One copy that is there, decoded: float32 [rows, contraction]."""
        if self.scaling is Scaling.CUSTOM:
            raise self._must_define("decode_matrix(...)")
        values = reference.decode_operand(self.operand(parts, orientation))
        if parts.sizes is not None:  # the last byte of a row may be half filled
            *leading, columns = parts.shape
            values = values[:, : columns if orientation is ROWWISE else math.prod(leading)]
        return values.contiguous()

    def _must_define(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} must define {method}")

    def operand(
        self, parts: QuantizedParts, orientation: Orientation, layout: Layout = PLAIN
    ) -> Operand:
        """One copy as a GEMM reads it, in a layout.

        A copy that is missing is the transpose of the other one where all elements share a scale. Elsewhere it is cast
        from the decoded values.
        """
        payload = parts.payload(orientation)
        if payload is None and self.scaling is Scaling.TENSOR:
            other = parts.payload(COLUMNWISE if orientation is ROWWISE else ROWWISE)
            assert other is not None
            payload = other.t().contiguous()
        if payload is None:
            values = self.dequantize(parts)
            matrix = values.view(math.prod(values.shape[:-1]), values.shape[-1])
            return self.operand(self.quantize(matrix, orientation, layout), orientation, layout)
        scaling = self.scaling
        if scaling is Scaling.CUSTOM:
            return Operand(self.decode_matrix(parts, orientation), None, self.format, scaling)
        scale_inv, tensor_scale_inv = parts.scales(orientation)
        assert scale_inv is not None
        if not (parts.swizzled and scaling in _BYTE_SCALES):
            contraction = payload.shape[1] * self.format.codes_per_byte
            scale_inv = scale_inv.view(scale_shape(scaling, payload.shape[0], contraction))
            if layout.swizzles(scaling):
                scale_inv = reference.swizzle(scale_inv)
        payload = reference.pad_columns(
            payload, -(-layout.pad(scaling) // self.format.codes_per_byte)
        )
        return Operand(payload, scale_inv, self.format, scaling, tensor_scale_inv)


_BYTE_SCALES = (Scaling.BLOCK_1X32, Scaling.BLOCK_1X16)


def scale_shape(scaling: Scaling, rows: Any, contraction: Any) -> tuple[Any, ...]:
    """The shape of the decode scales of an operand [rows, contraction]: the table of `Scaling` in code."""
    blocks = -(-contraction // scaling.block)
    if scaling is Scaling.TENSOR:
        return ()
    if scaling is Scaling.ROW:
        return (rows,)
    if scaling is Scaling.BLOCK_1X128:
        return blocks, rows
    if scaling is Scaling.BLOCK_128X128:
        return -(-rows // scaling.block), round_up(blocks, 4)
    return rows, blocks


@dataclasses.dataclass
class QuantizedParts:
    """A quantized tensor inside an op, or its spec.

    Scales have the form that `Scaling` says; those of blocks are flat. A number of blocks may be 1, for which torch
    would make a graph of its own, and one graph is to serve every batch size. So may the bytes of a packed columnwise
    row.

    Args:
        data: codes of the rowwise copy, uint8 [..., K], or None. Two E2M1 codes share a byte.
        columnwise_data: codes of the columnwise copy, uint8 [K, ...]: a physical transpose, last dimension first. E2M1:
            flat, [K * M / 2], whatever the rank.
        scale_inv: decode scales of the rowwise copy; one scale for the whole tensor serves both copies.
        columnwise_scale_inv: decode scales of the columnwise copy.
        tensor_scale_inv: second level of scales of the rowwise copy, float32 [] or [M].
        columnwise_tensor_scale_inv: that of the columnwise copy, float32 [].
        sizes: uint8 [0, ..., K], no memory: the logical shape, where codes share bytes and it cannot be read off them.
        quantizer: what made it, and can read it.
        dtype: the logical, high-precision dtype.
        swizzled: whether scales of 1x32 and 1x16 blocks are.
    """

    data: Tensor | None = None
    columnwise_data: Tensor | None = None
    scale_inv: Tensor | None = None
    columnwise_scale_inv: Tensor | None = None
    tensor_scale_inv: Tensor | None = None
    columnwise_tensor_scale_inv: Tensor | None = None
    sizes: Tensor | None = None
    quantizer: Quantizer = dataclasses.field(kw_only=True)
    dtype: torch.dtype = dataclasses.field(kw_only=True)
    swizzled: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def shape(self) -> Any:
        """Logical shape [..., K]."""
        if self.sizes is not None:
            return self.sizes.shape[1:]
        if self.data is not None:
            return self.data.shape
        assert self.columnwise_data is not None
        return (*self.columnwise_data.shape[1:], self.columnwise_data.shape[0])

    @property
    def device(self) -> torch.device:
        """Where the codes live."""
        return device_of(self)

    @property
    def orientation(self) -> Orientation:
        """Which copies there are."""
        if self.columnwise_data is None:
            return ROWWISE
        return COLUMNWISE if self.data is None else BOTH

    def only(self, orientation: Orientation) -> QuantizedParts:
        """The same tensor with only one of its copies, ROWWISE or COLUMNWISE."""
        quantizer = self.quantizer.for_copy(orientation)
        assert quantizer is not None
        kept: dict[str, bool] = dict.fromkeys(("data", "tensor_scale_inv"), orientation.rowwise)
        kept |= dict.fromkeys(
            ("columnwise_data", "columnwise_scale_inv", "columnwise_tensor_scale_inv"),
            orientation.columnwise,
        )
        kept["scale_inv"] = orientation.rowwise or self.columnwise_scale_inv is None
        kept["sizes"] = quantizer.scaling is Scaling.CUSTOM or _packs(quantizer)
        return dataclasses.replace(
            self,
            **dict.fromkeys([name for name, keep in kept.items() if not keep]),
            swizzled=self.swizzled and quantizer.scaling in _BYTE_SCALES,
        )

    def payload(self, orientation: Orientation) -> Tensor | None:
        """The codes of one copy as a matrix uint8 [rows, contraction]; None if there is no such copy."""
        data, dim = (self.data, -1) if orientation is ROWWISE else (self.columnwise_data, 1)
        if data is None:
            return None
        if orientation is COLUMNWISE and _packs(self.quantizer.for_copy(COLUMNWISE)):
            columns = self.shape[-1]
            return data.view(columns, data.numel() // max(columns, 1))
        return data.reshape(math.prod(data.shape[:dim]), math.prod(data.shape[dim:]))

    def scales(self, orientation: Orientation) -> tuple[Tensor | None, Tensor | None]:
        """The decode scales of one copy: those of blocks, and the second level."""
        if orientation is ROWWISE:
            return self.scale_inv, self.tensor_scale_inv
        own = self.columnwise_scale_inv
        return self.scale_inv if own is None else own, self.columnwise_tensor_scale_inv

    def decode(self) -> Tensor:
        """The values as a plain tensor."""
        return self.quantizer.dequantize(self)

    def encode_(self, value: Tensor) -> None:
        """Quantize `value` anew into the same memory."""
        new = self.quantizer.quantize(value.to(self.dtype), self.orientation)
        for ours, theirs in zip(flatten(self), flatten(new), strict=True):
            ours.copy_(theirs)


def round_up(size: Any, multiple: int) -> Any:
    """The next multiple, without branching on the size (it may be symbolic)."""
    return size if multiple == 1 else (size + multiple - 1) // multiple * multiple


class _Codes(Tensor):
    """A tensor like any other. `torch.export.save` takes a weight for plain if the type of its `.data` is."""

    __torch_function__ = compat.NO_TORCH_FUNCTION

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self.as_subclass(Tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class QuantizedTensor(StructuredTensor, parts=QuantizedParts):
    """A low-precision tensor that looks like a high-precision one.

    x ~ data * scale_inv, for NVFP4 data * scale_inv * tensor_scale_inv

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
    part_sizes: Tensor | None

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
        """Codes of the rowwise copy, `quantizer.format.dtype` [..., K]; a copy that refuses to be written.

        Not padded. E2M1: uint8 [..., K / 2], the even element in the low nibble. Code that writes `parameter.data`
        means the values, not the bytes; it gets torch's error about inference tensors.

        Inside a compiled function Dynamo takes `.data` of any tensor for torch's own attribute, so there it is the
        logical tensor; read payloads outside of compiled code.

        Raises:
            ConfigError: it holds no rowwise copy.
        """
        return self._payload(self.part_data, ROWWISE).as_subclass(_Codes)

    @data.setter
    def data(self, value: Tensor) -> None:
        raise ConfigError(
            "QuantizedTensor: .data cannot be assigned",
            why="a tensor cannot stop being quantized in place",
            do="write values with copy_(...), or replace the parameter in its module",
        )

    @property
    def columnwise_data(self) -> Tensor:
        """Codes of the columnwise copy, `quantizer.format.dtype` [K, ...]; a copy like `data`, not padded.

        Raises:
            ConfigError: it holds no columnwise copy.
        """
        packed = _packs(self.part_quantizer.for_copy(COLUMNWISE))
        data = self.parts.payload(COLUMNWISE) if packed else self.part_columnwise_data
        return self._payload(data, COLUMNWISE)

    @property
    def scale_inv(self) -> Tensor:
        """Decode scales of the rowwise copy; not swizzled, not padded.

        float32 [] per tensor, [...] per row, [..., ceil(K/128)] in blocks of 1x128, [ceil(M/128), ceil(K/128)] of
        128x128; float8_e8m0fnu [..., ceil(K/32)] for MX, float8_e4m3fn [..., ceil(K/16)] for NVFP4; M is the product
        of the leading sizes.

        Raises:
            ConfigError: it holds no rowwise copy (one scale for the whole tensor serves both).
        """
        return self._scales(ROWWISE)

    @property
    def columnwise_scale_inv(self) -> Tensor:
        """Decode scales of the columnwise copy, as `scale_inv` of the transpose [K, M].

        Raises:
            ConfigError: it holds no columnwise copy (one scale for the whole tensor serves both).
        """
        return self._scales(COLUMNWISE)

    @property
    def tensor_scale_inv(self) -> Tensor | None:
        """Second level of the rowwise copy's scales (NVFP4), float32 [], or [M] if row-scaled; else None."""
        return self.parts.tensor_scale_inv

    @property
    def columnwise_tensor_scale_inv(self) -> Tensor | None:
        """Second level of the columnwise copy's scales (NVFP4), float32 []; else None."""
        return self.parts.columnwise_tensor_scale_inv

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
            raise self._no_copy(orientation)
        quantizer = self.part_quantizer.for_copy(orientation)
        assert quantizer is not None
        with torch.inference_mode():
            return payload.view(quantizer.format.dtype).clone()

    def _scales(self, orientation: Orientation) -> Tensor:
        parts = self.parts
        quantizer = parts.quantizer.for_copy(orientation)
        shared = quantizer is parts.quantizer and quantizer.scaling is Scaling.TENSOR
        stored = parts.scales(orientation)[0]
        if stored is None or not (shared or parts.payload(orientation) is not None):
            raise self._no_copy(orientation)
        assert quantizer is not None
        *leading, contraction = self.shape
        if orientation is COLUMNWISE:
            leading, contraction = [contraction], math.prod(leading)
        return _shown(stored, quantizer.scaling, leading, contraction)

    def _no_copy(self, orientation: Orientation) -> ConfigError:
        return ConfigError(
            f"QuantizedTensor: it holds no {orientation.value} copy, only {self.orientation.value}",
            why="a copy exists only if it was asked for when quantizing",
            do=f"fg.quantize(x, quantizer, orientation=fg.{orientation.name} or fg.BOTH)",
        )


def _shown(stored: Tensor, scaling: Scaling, leading: list[int], contraction: int) -> Tensor:
    """Stored decode scales as the user sees them, [..., blocks]."""
    if scaling is Scaling.CUSTOM:
        return stored
    stored = stored.view(scale_shape(scaling, math.prod(leading), contraction))
    blocks = -(-contraction // scaling.block)
    if scaling is Scaling.ROW:
        return stored.view(leading)
    if scaling is Scaling.BLOCK_1X128:
        return stored.t().reshape(*leading, blocks)
    if scaling is Scaling.BLOCK_128X128:
        return stored[:, :blocks]
    if scaling in (Scaling.BLOCK_1X32, Scaling.BLOCK_1X16):
        dtype = (Format.E8M0 if scaling is Scaling.BLOCK_1X32 else Format.E4M3).dtype
        return stored.view(dtype).view(*leading, blocks)
    return stored


@QuantizedTensor.implements(aten.view.default, aten._unsafe_view.default)
def _view(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Keep the bytes where only leading dimensions change; decode otherwise."""
    tensor, shape = args
    shape = list(torch.empty(tensor.shape, device="meta").view(shape).shape)
    if tensor.dim() == 0 or not shape or shape[-1] != tensor.shape[-1]:
        return func(tensor.parts.decode(), *args[1:], **kwargs)
    parts = map_parts(lambda t: t, tensor.parts)
    if parts.data is not None:
        parts.data = parts.data.view(*shape[:-1], parts.data.shape[-1])
    if parts.sizes is not None:
        parts.sizes = parts.sizes.view(0, *shape)
    if parts.columnwise_data is not None and not _packs(parts.quantizer.for_copy(COLUMNWISE)):
        parts.columnwise_data = parts.columnwise_data.view(shape[-1], *shape[:-1])
    return QuantizedTensor(parts)


def _packs(quantizer: Quantizer | None) -> bool:
    """Whether codes share bytes; the columnwise copy is then a matrix, whatever the rank."""
    return quantizer is not None and quantizer.format.codes_per_byte > 1


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
