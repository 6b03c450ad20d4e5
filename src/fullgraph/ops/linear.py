"""The linear op: output = input @ weight^T + bias, forward and backward one node each.

    fprop   output[M, N]      = input[M, K]            @ weight[N, K]^T
    dgrad   grad_input[M, K]  = grad_output[M, N]      @ weight[N, K]
    wgrad   grad_weight[N, K] = grad_output[M, N]^T    @ input[M, K]

Low-precision GEMMs read both operands along the contraction, so dgrad takes the columnwise copy of the weight, and
wgrad those of grad_output and input. The plan asks for exactly the copies that the GEMMs which will run need: a
frozen weight costs no columnwise input, a frozen input no columnwise weight.

With delayed scaling the op reads scales and raises amaxes; whose they are, and how the one becomes the other, is not
its business (`nn/scaling.py`, `ops/scaling.py`).
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
from fullgraph.customop import FROM_TOKEN, Carry, Mut, Pass, Plan, Planned, TensorSpec
from fullgraph.customop.token import Encoded
from fullgraph.errors import ConfigError, ShapeError, describe
from fullgraph.formats import BOTH, COLUMNWISE, ROWWISE, Orientation, Scaling
from fullgraph.gemm import GemmBackend
from fullgraph.ops.scaling import count_use
from fullgraph.quantizers import as_matrix
from fullgraph.random import new_seed, of_rank
from fullgraph.recipes import BackwardOverride, LinearNumerics
from fullgraph.tensor import (
    HIGH_PRECISION,
    NO_STATE,
    PLAIN,
    CastState,
    Layout,
    QuantizedParts,
    Quantizer,
)


@dataclasses.dataclass
class LinearArguments:
    """Arguments of the forward op.

    Args:
        input: [..., K], plain or quantized.
        weight: [N, K], plain or quantized.
        bias: [N], or None.
        forward_scale: scales of input, weight and output, float32 [3]; None without delayed scaling.
        forward_amax: their amaxes, float32 [3], raised; None if they are not to be recorded.
        backward_scale: scale of grad_output, float32 [1].
        backward_amax: its amax, float32 [1], raised by the backward op.
        draw_order: `random.order_of` the device, where the backward pass rounds stochastically.
        seed: int64 [], random numbers of stochastic rounding in the forward pass, if there is any.
        numerics: quantizers and accumulation, resolved from a recipe.
        output_dtype: dtype of the output, and of GEMMs in high precision.
        quantized_output: whether the output comes back quantized.
        scaling_rule: `Recipe.scaling_rule_text`.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    forward_scale: Tensor | None = None
    forward_amax: Mut[Tensor | None] = None
    backward_scale: Carry[Tensor | None] = None
    backward_amax: Carry[Tensor | None] = None
    draw_order: Carry[Tensor | None] = None
    seed: Tensor | None = None
    numerics: LinearNumerics = FROM_TOKEN
    output_dtype: torch.dtype = FROM_TOKEN
    quantized_output: bool = FROM_TOKEN
    scaling_rule: str = FROM_TOKEN
    needs: tuple[str, ...] = ()


@dataclasses.dataclass
class LinearBackwardArguments:
    """Arguments of the backward op.

    Args:
        grad_output: [..., N].
        input: what wgrad reads: the columnwise copy, or the input as it was; None if no one needs wgrad.
        weight: what dgrad reads, likewise.
        backward_scale: as forward.
        backward_amax: as forward.
        draw_order: as forward.
        numerics: as forward.
        output_dtype: as forward.
        input_dtype, weight_dtype, bias_dtype: dtypes of the gradients.
    """

    grad_output: Tensor
    input: Tensor | None
    weight: Tensor | None
    backward_scale: Tensor | None
    backward_amax: Mut[Tensor | None]
    draw_order: Mut[Tensor | None]
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
        pads: name of each low-precision GEMM -> what its contraction is rounded up to a multiple of.
        copies: operand -> the copies that are made of it by quantizing here; absent ones are not quantized.
        layout: how the device wants the copies.
    """

    gemms: dict[str, GemmBackend | None]
    pads: dict[str, int]
    copies: dict[str, Orientation]
    layout: Layout


def plan_forward(a: Any) -> Plan:
    """Decide the forward pass from `LinearArguments` of specs: copies to make, tensors to save, the output's form."""
    _check(a)
    numerics, layout = a.numerics, _cast_layout(a)
    dgrad, wgrad = "input" in a.needs, "weight" in a.needs
    device = a.input.device
    fprop = numerics.low_precision_fprop
    copies = _copies(
        input=(a.input, fprop, wgrad and numerics.low_precision_wgrad),
        weight=(a.weight, fprop, dgrad and numerics.low_precision_dgrad),
    )
    gemms: dict[str, GemmBackend | None] = {"fprop": None}
    pads: dict[str, int] = {}
    if fprop:
        gemms["fprop"], pads["fprop"] = _choose(a, ("input", ROWWISE), ("weight", ROWWISE))
    saved: dict[str, Any] = {}
    saved_inputs: dict[str, str] = {}
    for name, wanted, low_precision in (
        ("input", wgrad, numerics.low_precision_wgrad),
        ("weight", dgrad, numerics.low_precision_dgrad),
    ):
        tensor = getattr(a, name)
        copy = _saved_copy(numerics, tensor, low_precision)
        if wanted and copy is not None:
            rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
            quantizer = getattr(numerics, name)
            saved[name] = quantizer.spec((rows, columns), tensor.dtype, device, copy, layout)
        elif wanted:
            saved_inputs[name] = name
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
        decisions=Decisions(gemms, pads, copies, gemm.layout(device)),
    )


def forward(plan: Plan, a: Any) -> dict[str, Any]:
    """Execute a forward plan on `LinearArguments` of tensors and parts."""
    numerics, decisions = a.numerics, plan.decisions
    if a.forward_amax is not None:
        count_use(a.forward_scale, a.scaling_rule)  # no compiler copies what is only read
    layout = _cast_layout(a)
    input = _quantized("input", a, decisions, layout, _forward_state(a, 0))
    weight = _quantized("weight", a, decisions, layout, _forward_state(a, 1))
    if decisions.gemms["fprop"] is not None:
        output = _gemm(
            "fprop",
            a,
            decisions,
            ("input", input, ROWWISE),
            ("weight", weight, ROWWISE),
            bias=a.bias,
            out_dtype=a.output_dtype,
            split_accumulator=numerics.fprop_split_accumulator,
        )
    else:
        bias = None if a.bias is None else a.bias.to(a.output_dtype)
        output = F.linear(_matrix(a.input, a.output_dtype), _plain(a.weight, a.output_dtype), bias)
    output = output.view(*a.input.shape[:-1], a.weight.shape[0])
    if a.quantized_output:
        output = numerics.output.quantize(output, ROWWISE, state=_forward_state(a, 2))
    results: dict[str, Any] = {"output": output}
    for name, operand in (("input", input), ("weight", weight)):
        if name in plan.saved:
            results[name] = operand.only(plan.saved[name].orientation)
    return results


def plan_backward(a: Any) -> Plan:
    """Decide the backward pass from `LinearBackwardArguments` of specs: which GEMMs run, which copies they read."""
    grad_output, device, numerics = a.grad_output, a.grad_output.device, a.numerics
    outputs: dict[str, TensorSpec] = {}
    gemms: dict[str, GemmBackend | None] = {}
    pads: dict[str, int] = {}
    if "input" in a.needs:
        gemms["dgrad"] = None
        if numerics.low_precision_dgrad:
            operands = ("grad_output", ROWWISE), ("weight", COLUMNWISE)
            gemms["dgrad"], pads["dgrad"] = _choose(a, *operands)
        shape = (*grad_output.shape[:-1], a.weight.shape[-1])
        outputs["input"] = TensorSpec(shape, a.input_dtype, device)
    if "weight" in a.needs:
        gemms["wgrad"] = None
        if numerics.low_precision_wgrad:
            operands = ("grad_output", COLUMNWISE), ("input", COLUMNWISE)
            gemms["wgrad"], pads["wgrad"] = _choose(a, *operands)
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
    return Plan(outputs, decisions=Decisions(gemms, pads, copies, gemm.layout(device)))


def backward(plan: Plan, a: Any) -> dict[str, Tensor]:
    """Execute a backward plan on `LinearBackwardArguments` of tensors and parts."""
    numerics, decisions = a.numerics, plan.decisions
    grad_output = as_matrix(a.grad_output)
    state = NO_STATE
    if "grad_output" in decisions.copies:
        state = CastState(
            None if a.backward_scale is None else a.backward_scale[0],
            None if a.backward_amax is None else a.backward_amax[0],
            new_seed(grad_output.device) if numerics.grad_output.is_stochastic else None,
        )
    quantized = _quantized("grad_output", a, decisions, decisions.layout, state)
    grads = {}
    if "input" in plan.outputs:
        if decisions.gemms["dgrad"] is not None:
            grad = _gemm(
                "dgrad",
                a,
                decisions,
                ("grad_output", quantized, ROWWISE),
                ("weight", a.weight, COLUMNWISE),
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
                a,
                decisions,
                ("grad_output", quantized, COLUMNWISE),
                ("input", a.input, COLUMNWISE),
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


def _choose(a: Any, *operands: tuple[str, Orientation]) -> tuple[GemmBackend, int]:
    """The routine of a low-precision GEMM of two operands, and what their contraction is padded to a multiple of."""
    kinds = []
    for name, copy in operands:
        quantizer = _quantizer_of(a, name, copy)
        format = None if quantizer.scaling is Scaling.CUSTOM else quantizer.format
        kinds.append(gemm.Kind(format, quantizer.scaling))
    device = getattr(a, operands[0][0]).device
    backend = gemm.select(device, *kinds, allow_emulation=a.numerics.allow_emulation)
    return backend, max([gemm.layout(device).pad(kind.scaling) for kind in kinds])


def _quantizer_of(a: Any, name: str, copy: Orientation) -> Quantizer:
    """Whose codes a GEMM reads: those of a tensor that came quantized, if the other operand is cast to match."""
    tensor, own = getattr(a, name), getattr(a.numerics, name).for_copy(copy)
    given = tensor.quantizer.for_copy(copy) if isinstance(tensor, QuantizedParts) else None
    return own if given is None or (copy is COLUMNWISE and given.rotates != own.rotates) else given


def _cast_layout(a: Any) -> Layout:
    """How copies are made in the forward pass. What is decoded in the backward pass is saved as it is."""
    if a.numerics.backward_override is BackwardOverride.DEQUANTIZED:
        return PLAIN
    return gemm.layout(a.input.device)


def _saved_copy(numerics: LinearNumerics, tensor: Any, low_precision: bool) -> Orientation | None:
    """Which copy made here is saved for the backward pass; None if it is the tensor as it came."""
    if isinstance(tensor, QuantizedParts):
        return None
    if low_precision:
        return COLUMNWISE
    decoded = numerics.backward_override is BackwardOverride.DEQUANTIZED
    return ROWWISE if decoded and numerics.low_precision_fprop else None


def _forward_state(a: Any, slot: int) -> CastState:
    """What the cast of input (0), weight (1) or output (2) takes."""
    if a.forward_scale is None and a.seed is None:
        return NO_STATE
    return CastState(
        None if a.forward_scale is None else a.forward_scale[slot],
        None if a.forward_amax is None else a.forward_amax[slot],
        None if a.seed is None else of_rank(a.seed + slot),
    )


def _quantized(name: str, a: Any, decisions: Decisions, layout: Layout, state: CastState) -> Any:
    """An operand as a quantized matrix with the copies that were decided; as it is if there are none to make."""
    tensor, copies = getattr(a, name), decisions.copies.get(name)
    if copies is None:
        return tensor
    return getattr(a.numerics, name).quantize(as_matrix(tensor), copies, layout, state)


def _gemm(
    name: str,
    a: Any,
    decisions: Decisions,
    left: tuple[str, QuantizedParts, Orientation],
    right: tuple[str, QuantizedParts, Orientation],
    **options: Any,
) -> Tensor:
    """left @ right^T over the copies that have the contraction last, given as (operand, tensor, copy)."""
    backend = decisions.gemms[name]
    assert backend is not None
    operands = [_operand(a, *side, decisions.layout) for side in (left, right)]
    return gemm.gemm(backend, *operands, **options)


def _operand(
    a: Any, name: str, parts: QuantizedParts, copy: Orientation, layout: Layout
) -> gemm.Operand:
    quantizer = _quantizer_of(a, name, copy)
    came_quantized = isinstance(getattr(a, name), QuantizedParts)
    if came_quantized and parts.quantizer.for_copy(copy) != quantizer:
        parts = quantizer.quantize(as_matrix(parts.decode()), copy, layout)
    return parts.quantizer.operand(parts, copy, layout)


def _plain(tensor: Any, dtype: torch.dtype) -> Tensor:
    """An operand of a high-precision GEMM."""
    return (tensor.decode() if isinstance(tensor, QuantizedParts) else tensor).to(dtype)


def _matrix(tensor: Any, dtype: torch.dtype) -> Tensor:
    """The same, as a matrix."""
    return as_matrix(_plain(tensor, dtype))


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


def linear_token(
    numerics_text: str, output_dtype: torch.dtype, quantized_output: bool, scaling_rule: str = ""
) -> str:
    """The token of the linear op; the texts are those of a recipe: `numerics_text` and `scaling_rule_text`."""
    encode = _encode if torch.compiler.is_compiling() else _cached_encode
    return encode(numerics_text, output_dtype, quantized_output, scaling_rule)


def _encode(
    numerics_text: str, output_dtype: torch.dtype, quantized_output: bool, scaling_rule: str
) -> str:
    return linear_op.encode(
        numerics=Encoded(numerics_text),
        output_dtype=output_dtype,
        quantized_output=quantized_output,
        scaling_rule=scaling_rule,
    )


_cached_encode = functools.lru_cache(maxsize=4096)(_encode)
