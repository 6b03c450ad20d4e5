"""The linear op: output = input @ weight^T + bias, forward and backward one node each.

    fprop   output[M, N]      = input[M, K]            @ weight[N, K]^T
    dgrad   grad_input[M, K]  = grad_output[M, N]      @ weight[N, K]
    wgrad   grad_weight[N, K] = grad_output[M, N]^T    @ input[M, K]

8-bit GEMMs read both operands along the contraction, so dgrad takes the columnwise copy of the weight, and wgrad those
of grad_output and input. The plan asks for exactly the copies that the GEMMs which will run need: a frozen weight
costs no columnwise input, a frozen input no columnwise weight.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fullgraph import customop, gemm
from fullgraph._version import __version__
from fullgraph.customop import FROM_TOKEN, Pass, Plan, Planned, TensorSpec
from fullgraph.customop.token import Encoded
from fullgraph.errors import ConfigError, ShapeError, describe
from fullgraph.formats import BOTH, COLUMNWISE, ROWWISE, Orientation
from fullgraph.gemm import GemmBackend
from fullgraph.recipes import LinearNumerics
from fullgraph.tensor import HIGH_PRECISION, QuantizedParts, Quantizer


@dataclasses.dataclass
class LinearArguments:
    """Arguments of the forward op.

    Args:
        input: [..., K], plain or quantized.
        weight: [N, K], plain or quantized.
        bias: [N], or None.
        numerics: quantizers and accumulation, resolved from a recipe.
        output_dtype: dtype of the output, and of GEMMs in high precision.
        quantized_output: whether the output comes back quantized.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    numerics: LinearNumerics = FROM_TOKEN
    output_dtype: torch.dtype = FROM_TOKEN
    quantized_output: bool = FROM_TOKEN
    needs: tuple[str, ...] = ()


@dataclasses.dataclass
class LinearBackwardArguments:
    """Arguments of the backward op.

    Args:
        grad_output: [..., N].
        input: what wgrad reads: the columnwise copy, or the input as it was; None if no one needs wgrad.
        weight: what dgrad reads, likewise.
        numerics, output_dtype: as forward.
        input_dtype, weight_dtype, bias_dtype: dtypes of the gradients.
    """

    grad_output: Tensor
    input: Tensor | None
    weight: Tensor | None
    numerics: LinearNumerics
    output_dtype: torch.dtype
    input_dtype: Planned[torch.dtype]
    weight_dtype: Planned[torch.dtype]
    bias_dtype: Planned[torch.dtype | None]
    needs: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Decisions:
    """What the plan of a pass decided; `fullgraph explain` shows it.

    Args:
        gemms: name of each GEMM that runs -> its backend, or None for high precision.
        copies: operand -> the copies that are made of it by quantizing here; absent ones are not quantized.
        pad: what the contraction of every copy is padded to a multiple of.
    """

    gemms: dict[str, GemmBackend | None]
    copies: dict[str, Orientation]
    pad: int


def plan_forward(a: Any) -> Plan:
    """Decide the forward pass from `LinearArguments` of specs: copies to make, tensors to save, the output's form."""
    _check(a)
    numerics = a.numerics
    dgrad, wgrad = "input" in a.needs, "weight" in a.needs
    device = a.input.device
    fprop = numerics.low_precision_fprop
    copies = _copies(
        input=(a.input, fprop, wgrad and numerics.low_precision_wgrad),
        weight=(a.weight, fprop, dgrad and numerics.low_precision_dgrad),
    )
    backend = (
        _backend(device, (a.input, numerics.input), (a.weight, numerics.weight)) if fprop else None
    )
    saved: dict[str, Any] = {}
    saved_inputs: dict[str, str] = {}
    if wgrad:
        if _is_saved_quantized(a.input, numerics.low_precision_wgrad):
            saved["input"] = _saved_spec(a.input, numerics.input)
        else:
            saved_inputs["input"] = "input"
    if dgrad:
        if _is_saved_quantized(a.weight, numerics.low_precision_dgrad):
            saved["weight"] = _saved_spec(a.weight, numerics.weight)
        else:
            saved_inputs["weight"] = "weight"
    shape = (*a.input.shape[:-1], a.weight.shape[0])
    if a.quantized_output:
        output: Any = numerics.output.spec(shape, a.output_dtype, device, ROWWISE)
    else:
        output = TensorSpec(shape, a.output_dtype, device)
    return Plan(
        {"output": output},
        saved,
        saved_inputs,
        values={
            "input_dtype": a.input.dtype,
            "weight_dtype": a.weight.dtype,
            "bias_dtype": None if a.bias is None else a.bias.dtype,
        },
        decisions=Decisions({"fprop": backend}, copies, gemm.alignment(device)),
    )


def forward(plan: Plan, a: Any) -> dict[str, Any]:
    """Execute a forward plan on `LinearArguments` of tensors and parts."""
    numerics, decisions = a.numerics, plan.decisions
    input = _quantized("input", a.input, numerics.input, decisions)
    weight = _quantized("weight", a.weight, numerics.weight, decisions)
    if decisions.gemms["fprop"] is not None:
        output = _gemm(
            "fprop",
            decisions,
            (input, ROWWISE),
            (weight, ROWWISE),
            bias=a.bias,
            out_dtype=a.output_dtype,
            split_accumulator=numerics.fprop_split_accumulator,
        )
    else:
        bias = None if a.bias is None else a.bias.to(a.output_dtype)
        output = F.linear(_matrix(a.input, a.output_dtype), _plain(a.weight, a.output_dtype), bias)
    output = output.view(*a.input.shape[:-1], a.weight.shape[0])
    results: dict[str, Any] = {
        "output": numerics.output.quantize(output, ROWWISE) if a.quantized_output else output
    }
    for name, operand in (("input", input), ("weight", weight)):
        if name in plan.saved:
            results[name] = operand.only(COLUMNWISE)
    return results


def plan_backward(a: Any) -> Plan:
    """Decide the backward pass from `LinearBackwardArguments` of specs: which GEMMs run, which copies they read."""
    grad_output, device, numerics = a.grad_output, a.grad_output.device, a.numerics
    outputs: dict[str, TensorSpec] = {}
    gemms: dict[str, GemmBackend | None] = {}
    if "input" in a.needs:
        gemms["dgrad"] = (
            _backend(device, (grad_output, numerics.grad_output), (a.weight, numerics.weight))
            if numerics.low_precision_dgrad
            else None
        )
        shape = (*grad_output.shape[:-1], a.weight.shape[-1])
        outputs["input"] = TensorSpec(shape, a.input_dtype, device)
    if "weight" in a.needs:
        gemms["wgrad"] = (
            _backend(device, (grad_output, numerics.grad_output), (a.input, numerics.input))
            if numerics.low_precision_wgrad
            else None
        )
        shape = (grad_output.shape[-1], a.input.shape[-1])
        outputs["weight"] = TensorSpec(shape, a.weight_dtype, device)
    if "bias" in a.needs:
        outputs["bias"] = TensorSpec((grad_output.shape[-1],), a.bias_dtype, device)
    copies = _copies(
        grad_output=(
            grad_output,
            gemms.get("dgrad") is not None,
            gemms.get("wgrad") is not None,
        )
    )
    return Plan(outputs, decisions=Decisions(gemms, copies, gemm.alignment(device)))


def backward(plan: Plan, a: Any) -> dict[str, Tensor]:
    """Execute a backward plan on `LinearBackwardArguments` of tensors and parts."""
    numerics, decisions = a.numerics, plan.decisions
    rows = math.prod(a.grad_output.shape[:-1])
    grad_output = a.grad_output.reshape(rows, a.grad_output.shape[-1])
    quantized = _quantized("grad_output", grad_output, numerics.grad_output, decisions)
    grads = {}
    if "input" in plan.outputs:
        if decisions.gemms["dgrad"] is not None:
            grad = _gemm(
                "dgrad",
                decisions,
                (quantized, ROWWISE),
                (a.weight, COLUMNWISE),
                out_dtype=a.input_dtype,
                split_accumulator=numerics.dgrad_split_accumulator,
            )
        else:
            grad = grad_output.to(a.output_dtype) @ _plain(a.weight, a.output_dtype)
        grads["input"] = grad.to(a.input_dtype).view(plan.outputs["input"].shape)
    if "weight" in plan.outputs:
        if decisions.gemms["wgrad"] is not None:
            grad = _gemm(
                "wgrad",
                decisions,
                (quantized, COLUMNWISE),
                (a.input, COLUMNWISE),
                out_dtype=a.weight_dtype,
                split_accumulator=numerics.wgrad_split_accumulator,
            )
        else:
            grad = grad_output.to(a.output_dtype).t() @ _matrix(a.input, a.output_dtype)
        grads["weight"] = grad.to(a.weight_dtype)
    if "bias" in plan.outputs:
        grads["bias"] = grad_output.sum(0, dtype=torch.float32).to(a.bias_dtype)
    return grads


def _copies(**operands: tuple[Any, bool, bool]) -> dict[str, Orientation]:
    """Operand -> the copies to make, given (tensor, rowwise read?, columnwise read?); quantized ones need none."""
    copies = {}
    for name, (tensor, rowwise, columnwise) in operands.items():
        if (rowwise or columnwise) and not isinstance(tensor, QuantizedParts):
            copies[name] = BOTH if rowwise and columnwise else ROWWISE if rowwise else COLUMNWISE
    return copies


def _backend(device: torch.device, a: tuple[Any, Any], b: tuple[Any, Any]) -> GemmBackend:
    """The routine of a low-precision GEMM of two (tensor, quantizer) operands."""
    formats = [
        (tensor.quantizer if isinstance(tensor, QuantizedParts) else quantizer).format
        for tensor, quantizer in (a, b)
    ]
    return gemm.select(device, *formats)


def _is_saved_quantized(tensor: Any, low_precision: bool) -> bool:
    """Whether a columnwise copy made here is saved, rather than the tensor as it came."""
    return low_precision and not isinstance(tensor, QuantizedParts)


def _saved_spec(tensor: TensorSpec, quantizer: Quantizer) -> QuantizedParts:
    matrix = (math.prod(tensor.shape[:-1]), tensor.shape[-1])
    pad = gemm.alignment(tensor.device)
    return quantizer.spec(matrix, tensor.dtype, tensor.device, COLUMNWISE, pad=pad)


def _quantized(name: str, tensor: Any, quantizer: Any, decisions: Decisions) -> Any:
    """An operand as a quantized matrix with the copies that were decided; as it is if there are none to make."""
    copies = decisions.copies.get(name)
    if copies is None:
        return tensor
    matrix = tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    return quantizer.quantize(matrix, copies, pad=decisions.pad)


def _gemm(
    name: str,
    decisions: Decisions,
    a: tuple[QuantizedParts, Orientation],
    b: tuple[QuantizedParts, Orientation],
    **options: Any,
) -> Tensor:
    """a @ b^T over the copies that have the contraction last."""
    operands = [
        gemm.Operand(
            *parts.quantizer.matrix(parts, orientation, pad=decisions.pad), parts.quantizer.format
        )
        for parts, orientation in (a, b)
    ]
    backend = decisions.gemms[name]
    assert backend is not None
    return gemm.gemm(backend, *operands, **options)


def _plain(tensor: Any, dtype: torch.dtype) -> Tensor:
    """An operand of a high-precision GEMM."""
    return (tensor.decode() if isinstance(tensor, QuantizedParts) else tensor).to(dtype)


def _matrix(tensor: Any, dtype: torch.dtype) -> Tensor:
    """The same, as a matrix."""
    plain = _plain(tensor, dtype)
    return plain.reshape(math.prod(plain.shape[:-1]), plain.shape[-1])


def _check(a: Any) -> None:
    """Refuse what nn.Linear would refuse, and dtypes without a quantized meaning."""
    features = a.weight.shape[-1] if len(a.weight.shape) == 2 else None
    if features is None:
        raise ShapeError(
            f"Linear: the weight must be a matrix [out_features, in_features], got {describe(a.weight)}"
        )
    if len(a.input.shape) == 0 or a.input.shape[-1] != features:
        raise ShapeError(
            f"Linear: the last dimension of the input must be in_features = {features}, "
            f"got (input: {describe(a.input)})",
            why="output = input @ weight^T contracts the last dimension of both",
            do="check the layer before this one, or in_features",
        )
    if a.bias is not None and tuple(a.bias.shape) != (a.weight.shape[0],):
        raise ShapeError(
            f"Linear: the bias must be [{a.weight.shape[0]}], got (bias: {describe(a.bias)})",
            do="check out_features",
        )
    for name in ("input", "weight", "bias"):
        tensor = getattr(a, name)
        if tensor is not None and tensor.dtype not in HIGH_PRECISION:
            raise ConfigError(
                f"Linear: the {name} must be float32, bfloat16 or float16, got {describe(tensor)}",
                why="these are the dtypes of training in mixed or low precision",
                do=f"convert the {name}, or use torch.nn.Linear",
            )
        if tensor is not None and tensor.device != a.input.device:
            raise ConfigError(
                f"Linear: all tensors must be on one device, got input on {a.input.device}, "
                f"{name} on {tensor.device}",
                do=f"move the {name} or the input",
            )


linear_op = customop.define(
    "fullgraph::linear",
    forward=Pass(LinearArguments, plan_forward, forward),
    backward=Pass(LinearBackwardArguments, plan_backward, backward),
    gradients=("input", "weight", "bias"),
    version=__version__,
)


def linear_token(numerics_text: str, output_dtype: torch.dtype, quantized_output: bool) -> str:
    """The token of the linear op; `numerics_text` is `Recipe.numerics_text`."""
    if torch.compiler.is_compiling():
        return _encode(numerics_text, output_dtype, quantized_output)
    return _cached_encode(numerics_text, output_dtype, quantized_output)


def _encode(numerics_text: str, output_dtype: torch.dtype, quantized_output: bool) -> str:
    return linear_op.encode(
        numerics=Encoded(numerics_text),
        output_dtype=output_dtype,
        quantized_output=quantized_output,
    )


_cached_encode = functools.lru_cache(maxsize=4096)(_encode)
