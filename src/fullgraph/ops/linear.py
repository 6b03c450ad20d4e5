"""The linear op: output = input @ weight^T + bias, forward and backward one node each.

    fprop   output[M, N]      = input[M, K]            @ weight[N, K]^T
    dgrad   grad_input[M, K]  = grad_output[M, N]      @ weight[N, K]
    wgrad   grad_weight[N, K] = grad_output[M, N]^T    @ input[M, K]

Low-precision GEMMs read both operands along the contraction, so dgrad takes the columnwise copy of the weight, and
wgrad those of grad_output and input. The plan asks for exactly the copies that the GEMMs which will run need: a
frozen weight costs no columnwise input, a frozen input no columnwise weight.

With delayed scaling the op reads scales and raises amaxes; whose they are, and how the one becomes the other, is not
its business (`nn/scaling.py`, `ops/scaling.py`). Likewise it writes and reads quantized weights that are kept over
microbatches, adds to a `main_grad`, and leaves wgrad to `weight_gradient_op`, where its caller asks for it
(`nn/linear.py`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fullgraph import customop, gemm
from fullgraph._version import __version__
from fullgraph.customop import FROM_TOKEN, Carry, Mut, Pass, Plan, Planned, TensorSpec, compat
from fullgraph.customop.structured import flatten
from fullgraph.customop.token import Encoded, encode
from fullgraph.errors import ConfigError, ShapeError, check_flags, describe
from fullgraph.formats import BOTH, COLUMNWISE, ROWWISE, Orientation, Scaling
from fullgraph.gemm import GemmBackend
from fullgraph.ops import kept
from fullgraph.ops.scaling import count_use
from fullgraph.ops.statistics import record
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


class Save(enum.Enum):
    """What is kept for the backward pass of a tensor that is quantized in the forward pass. Same bits either way."""

    QUANTIZED = "quantized"
    """The copy that the backward GEMM reads: one byte an element."""
    ORIGINAL = "original"
    """The tensor as it came; the backward pass quantizes it again. No memory of its own, where someone else keeps the
    tensor anyway: a parameter does, and often an activation."""


@dataclasses.dataclass(frozen=True)
class Wgrad:
    """What becomes of the gradient of a weight.

    Args:
        into_main_grad: add it to `weight.main_grad`, float32 or bfloat16 [out_features, in_features], which the caller
            makes and clears; `weight.grad` stays None.
        deferred: leave its computation to `layer.backward_dw()`, once for each backward pass, oldest first.
        placeholder_grad: with `into_main_grad`, give the weight a gradient of zeros as well, when it has been added,
            so that hooks run which wait for a gradient.

    Raises:
        ConfigError: an option that is no bool, or `placeholder_grad` without `into_main_grad`.
    """

    into_main_grad: bool = False
    deferred: bool = False
    placeholder_grad: bool = False

    def __post_init__(self) -> None:
        check_flags(self)
        if self.placeholder_grad and not self.into_main_grad:
            raise ConfigError(
                "Wgrad: placeholder_grad=True without into_main_grad=True",
                why="without main_grad the weight gets its real gradient",
                do="set into_main_grad=True, or leave placeholder_grad out",
            )


@dataclasses.dataclass(frozen=True)
class LinearOptions:
    """What a layer asks of its op besides numerics; the same in every recipe.

    Args:
        wgrad: what becomes of the gradient of the weight.
        save_input: what is kept of the input.
        save_weight: what is kept of the weight.

    Raises:
        ConfigError: another type.
    """

    wgrad: Wgrad
    save_input: Save
    save_weight: Save

    def __post_init__(self) -> None:
        for field, kind in (("wgrad", Wgrad), ("save_input", Save), ("save_weight", Save)):
            if not isinstance(getattr(self, field), kind):
                raise ConfigError(
                    f"Linear: {field} must be a fullgraph.{kind.__name__}, got {getattr(self, field)!r}",
                    do=f"pass {field}=fullgraph.{'Wgrad(...)' if kind is Wgrad else 'Save.ORIGINAL'}",
                )


DEFAULT_OPTIONS = LinearOptions(Wgrad(), Save.QUANTIZED, Save.QUANTIZED)
DEFAULT_OPTIONS_TEXT = encode(DEFAULT_OPTIONS, "Linear options")


@dataclasses.dataclass
class LinearArguments:
    """Arguments of the forward op.

    Args:
        input: [..., K], plain or quantized.
        weight: [N, K], plain or quantized.
        bias: [N], or None.
        cached_weight: quantized copies of the weight, read in its place.
        weight_cache: where the quantized copies of the weight are written, and read from; not with `cached_weight`.
        main_grad: what wgrad is added to, float32 or bfloat16 [N, K].
        deferred: the leaf that collects deferred weight gradients (`customop/deferred.py`).
        forward_scale: scales of input, weight and output, float32 [3]; None without delayed scaling.
        forward_amax: their amaxes, float32 [3], raised; None if they are not to be recorded.
        backward_scale: scale of grad_output, float32 [1].
        backward_amax: its amax, float32 [1], raised by the backward op.
        draw_order: `random.order_of` the device, where the backward pass rounds stochastically.
        seed: int64 [], random numbers of stochastic rounding in the forward pass, if there is any.
        forward_statistics: what is recorded of input, weight and output, float32 [3, columns]; None records nothing.
        backward_statistics: the same of grad_output, float32 [1, columns].
        numerics: quantizers and accumulation, resolved from a recipe.
        output_dtype: dtype of the output, and of GEMMs in high precision.
        quantized_output: whether the output comes back quantized.
        scaling_rule: `Recipe.scaling_rule_text`.
        options: of the layer.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    cached_weight: Tensor | None = None
    weight_cache: Mut[Tensor | None] = None
    main_grad: Carry[Tensor | None] = None
    deferred: Carry[Tensor | None] = None
    forward_scale: Tensor | None = None
    forward_amax: Mut[Tensor | None] = None
    backward_scale: Carry[Tensor | None] = None
    backward_amax: Carry[Tensor | None] = None
    draw_order: Carry[Tensor | None] = None
    seed: Tensor | None = None
    forward_statistics: Mut[Tensor | None] = None
    backward_statistics: Carry[Tensor | None] = None
    numerics: LinearNumerics = FROM_TOKEN
    output_dtype: torch.dtype = FROM_TOKEN
    quantized_output: bool = FROM_TOKEN
    scaling_rule: str = FROM_TOKEN
    options: LinearOptions = FROM_TOKEN
    needs: tuple[str, ...] = ()


@dataclasses.dataclass
class LinearBackwardArguments:
    """Arguments of the backward op.

    Args:
        grad_output: [..., N].
        input: what wgrad reads: the columnwise copy, or the input as it was; None if no one needs wgrad.
        weight: what dgrad reads, likewise; None if that is in `weight_cache`.
        weight_cache: as forward.
        main_grad: as forward; changed.
        forward_scale: a copy of the scales that the forward pass used, if casts of it are repeated here.
        seed: as forward, likewise.
        backward_scale: as forward.
        backward_amax: as forward.
        draw_order: as forward.
        backward_statistics: as forward.
        numerics: as forward.
        output_dtype: as forward.
        options: as forward.
        input_dtype, weight_dtype, bias_dtype: dtypes of the gradients.
    """

    grad_output: Tensor
    input: Tensor | None
    weight: Tensor | None
    weight_cache: Tensor | None
    main_grad: Mut[Tensor | None]
    forward_scale: Tensor | None
    seed: Tensor | None
    backward_scale: Tensor | None
    backward_amax: Mut[Tensor | None]
    draw_order: Mut[Tensor | None]
    backward_statistics: Mut[Tensor | None]
    numerics: LinearNumerics
    output_dtype: torch.dtype
    options: LinearOptions
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
    numerics, device = a.numerics, a.input.device
    layout = cast_layout(numerics, device)
    fprop = numerics.low_precision_fprop
    wanted = {"input": "weight" in a.needs or "deferred" in a.needs, "weight": "input" in a.needs}
    saved: dict[str, Any] = {}
    saved_inputs: dict[str, str] = {}
    for name, save in (("input", a.options.save_input), ("weight", a.options.save_weight)):
        tensor = getattr(a, name)
        copy = _saved_copy(numerics, name, tensor) if wanted[name] else None
        is_cached = name == "weight" and _cached(a) is not None
        if copy is not None and is_cached:  # `weight_cache` reaches the backward pass by itself
            saved_inputs |= {"weight": "cached_weight"} if a.weight_cache is None else {}
        elif copy is not None and save is Save.QUANTIZED:
            saved[name] = _saved_spec(numerics, name, tensor, copy, layout)
        elif wanted[name]:
            saved_inputs[name] = name
            if copy is not None and a.forward_scale is not None:
                saved["forward_scale"] = a.forward_scale
            if copy is not None and a.seed is not None:
                saved_inputs["seed"] = "seed"
    columnwise = {n: n in saved and saved[n].orientation.columnwise for n in wanted}
    copies = _copies(
        input=(a.input, fprop, columnwise["input"]),
        weight=(a.weight, fprop, columnwise["weight"]),
    )
    if a.weight_cache is not None:
        copies["weight"] = a.weight_cache.orientation
    elif a.cached_weight is not None:
        copies.pop("weight")
    gemms: dict[str, GemmBackend | None] = {"fprop": None}
    pads: dict[str, int] = {}
    if fprop:
        gemms["fprop"], pads["fprop"] = _choose(a, ("input", ROWWISE), ("weight", ROWWISE))
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
    layout = cast_layout(numerics, a.input.device)
    input = _quantized("input", a, decisions, layout, _forward_state(a, 0), a.forward_statistics)
    weight = _weight(a, decisions, layout)
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
        made = numerics.output.quantize(output, ROWWISE, state=_forward_state(a, 2))
        if a.forward_statistics is not None:
            record(a.forward_statistics[2], as_matrix(output), made)
        output = made
    results: dict[str, Any] = {"output": output}
    for name, operand in (("input", input), ("weight", weight)):
        if name in plan.saved:
            results[name] = operand.only(plan.saved[name].orientation)
    if "forward_scale" in plan.saved:
        results["forward_scale"] = a.forward_scale.clone()
    return results


def _weight(a: Any, decisions: Decisions, layout: Layout) -> Any:
    """The weight as fprop and dgrad get it, perhaps kept from an earlier microbatch or for later ones."""
    if a.cached_weight is not None:
        kept.check(a.weight, a.numerics.weight)
        return a.cached_weight
    cache = a.weight_cache
    # What checkpointing repeats has to leave copies alone that other microbatches have saved.
    is_repeated = cache is not None and compat.is_in_backward()
    if is_repeated and kept.holds(a.weight, a.numerics.weight, a.forward_scale):
        return cache
    weight = _quantized("weight", a, decisions, layout, _forward_state(a, 1), a.forward_statistics)
    if cache is None:
        return weight
    for target, made in zip(flatten(cache), flatten(weight), strict=True):
        target.copy_(made)
    kept.note(a.weight, a.numerics.weight, a.forward_scale)
    return cache


def plan_backward(a: Any) -> Plan:
    """Decide the backward pass from `LinearBackwardArguments` of specs: which GEMMs run, which copies they read."""
    grad_output, device, numerics = a.grad_output, a.grad_output.device, a.numerics
    layout = cast_layout(numerics, device)
    outputs: dict[str, TensorSpec] = {}
    saved: dict[str, Any] = {}
    deferred: dict[str, tuple[str, dict[str, str]]] = {}
    gemms: dict[str, GemmBackend | None] = {}
    pads: dict[str, int] = {}
    copies: dict[str, Orientation] = {}
    if "input" in a.needs:
        gemms["dgrad"] = None
        weight = _dgrad_weight(a)
        copies |= _repeated(numerics, "weight", weight)
        if numerics.low_precision_dgrad:
            operands = ("grad_output", ROWWISE), ("weight", COLUMNWISE)
            gemms["dgrad"], pads["dgrad"] = _choose(a, *operands)
        shape = (*grad_output.shape[:-1], weight.shape[-1])
        outputs["input"] = TensorSpec(shape, a.input_dtype, device)
    if "weight" in a.needs or "deferred" in a.needs:
        gemms["wgrad"] = None
        copies |= _repeated(numerics, "input", a.input)
        if numerics.low_precision_wgrad:
            operands = ("grad_output", COLUMNWISE), ("input", COLUMNWISE)
            gemms["wgrad"], pads["wgrad"] = _choose(a, *operands)
        shape = (grad_output.shape[-1], a.input.shape[-1])
        if "deferred" in a.needs:
            sources = {}
            for name in ("grad_output", "input"):
                low_precision = name == "grad_output" and numerics.low_precision_wgrad
                copy = COLUMNWISE if low_precision else copies.get(name)
                sources[name] = name
                if copy is not None:
                    sources[name] = f"deferred_{name}"
                    spec = _saved_spec(numerics, name, getattr(a, name), copy, layout)
                    saved[sources[name]] = spec
            token = weight_gradient_op.encode(
                numerics=numerics,
                output_dtype=a.output_dtype,
                weight_dtype=a.weight_dtype,
                options=a.options,
            )
            deferred["deferred"] = token, sources
        elif a.main_grad is None or a.options.wgrad.placeholder_grad:
            outputs["weight"] = TensorSpec(shape, a.weight_dtype, device)
    if "bias" in a.needs:
        outputs["bias"] = TensorSpec((grad_output.shape[-1],), a.bias_dtype, device)
    copies |= _copies(
        grad_output=(
            grad_output,
            gemms.get("dgrad") is not None,
            gemms.get("wgrad") is not None,
        )
    )
    decisions = Decisions(gemms, pads, copies, gemm.layout(device))
    return Plan(outputs, saved, deferred=deferred, decisions=decisions)


def backward(plan: Plan, a: Any) -> dict[str, Any]:
    """Execute a backward plan on `LinearBackwardArguments` of tensors and parts."""
    numerics, decisions = a.numerics, plan.decisions
    if "grad_output" in decisions.copies and a.grad_output.dtype != torch.bfloat16:
        # An FP8 cast makes infinity finite, which would hide an overflow from a gradient scaler. NaN stays.
        a.grad_output = a.grad_output.nan_to_num(math.nan, math.nan, math.nan)
    grad_output = as_matrix(a.grad_output)
    state = NO_STATE
    if "grad_output" in decisions.copies:
        state = CastState(
            None if a.backward_scale is None else a.backward_scale[0],
            None if a.backward_amax is None else a.backward_amax[0],
            new_seed(grad_output.device) if numerics.grad_output.is_stochastic else None,
        )
    quantized = _quantized(
        "grad_output", a, decisions, decisions.layout, state, a.backward_statistics
    )
    layout = cast_layout(numerics, grad_output.device)
    results: dict[str, Any] = {}
    if "input" in plan.outputs:
        weight = _quantized("weight", a, decisions, layout, _forward_state(a, 1))
        if isinstance(a.weight, QuantizedParts) or a.weight is None:
            weight = _dgrad_weight(a)
        if decisions.gemms["dgrad"] is not None:
            grad = _gemm(
                "dgrad",
                a,
                decisions,
                ("grad_output", quantized, ROWWISE),
                ("weight", weight, COLUMNWISE),
                out_dtype=a.input_dtype,
                split_accumulator=numerics.dgrad_split_accumulator,
            )
        else:
            grad = grad_output.to(a.output_dtype) @ _plain(weight, a.output_dtype)
        results["input"] = grad.to(a.input_dtype).view(plan.outputs["input"].shape)
        del weight, grad
        if decisions.gemms.get("wgrad") is not None:  # the rest is memory that wgrad can have
            quantized = quantized.only(COLUMNWISE)
    if "wgrad" in decisions.gemms:
        input = _quantized("input", a, decisions, layout, _forward_state(a, 0))
        made = {"grad_output": quantized, "input": input}
        if plan.deferred:
            for name, spec in plan.saved.items():
                results[name] = made[name.removeprefix("deferred_")].only(spec.orientation)
        else:
            grad = _weight_gradient(a, decisions, **made)
            if "weight" in plan.outputs:
                weight_spec = plan.outputs["weight"]
                results["weight"] = weight_spec.empty().zero_() if grad is None else grad
    if "bias" in plan.outputs:
        results["bias"] = grad_output.sum(0, dtype=torch.float32).to(a.bias_dtype)
    return results


def _weight_gradient(a: Any, decisions: Decisions, grad_output: Any, input: Any) -> Tensor | None:
    """wgrad in the dtype of the weight; None if it was added to `a.main_grad`."""
    main_grad = a.main_grad
    if decisions.gemms["wgrad"] is not None:
        grad = _gemm(
            "wgrad",
            a,
            decisions,
            ("grad_output", grad_output, COLUMNWISE),
            ("input", input, COLUMNWISE),
            out_dtype=a.weight_dtype if main_grad is None else torch.float32,
            split_accumulator=a.numerics.wgrad_split_accumulator,
        )
        if main_grad is not None:
            main_grad.add_(grad)
            return None
        return grad.to(a.weight_dtype)
    left, right = as_matrix(a.grad_output).to(a.output_dtype).t(), _matrix(input, a.output_dtype)
    if main_grad is not None:
        gemm.add_product(main_grad, left, right)
        return None
    return (left @ right).to(a.weight_dtype)


@dataclasses.dataclass
class WeightGradientArguments:
    """Arguments of the op that computes a deferred weight gradient.

    Args:
        grad_output: the columnwise copy [N, M], or plain [..., N].
        input: the columnwise copy [K, M], or plain [..., K].
        main_grad: as forward; changed.
        numerics, output_dtype, options: as forward.
        weight_dtype: dtype of the gradient.
    """

    grad_output: Tensor
    input: Tensor
    main_grad: Mut[Tensor | None] = None
    numerics: LinearNumerics = FROM_TOKEN
    output_dtype: torch.dtype = FROM_TOKEN
    weight_dtype: torch.dtype = FROM_TOKEN
    options: LinearOptions = FROM_TOKEN


def plan_weight_gradient(a: Any) -> Plan:
    """Decide a deferred wgrad; with `main_grad` it gives only what its hooks ask for."""
    gemms: dict[str, GemmBackend | None] = {"wgrad": None}
    pads: dict[str, int] = {}
    if a.numerics.low_precision_wgrad:
        operands = ("grad_output", COLUMNWISE), ("input", COLUMNWISE)
        gemms["wgrad"], pads["wgrad"] = _choose(a, *operands)
    device = a.grad_output.device
    shape: tuple[Any, ...] = (a.grad_output.shape[-1], a.input.shape[-1])
    if a.main_grad is not None and not a.options.wgrad.placeholder_grad:
        shape = (0,)
    decisions = Decisions(gemms, pads, {}, gemm.layout(device))
    return Plan({"weight": TensorSpec(shape, a.weight_dtype, device)}, decisions=decisions)


def weight_gradient(plan: Plan, a: Any) -> dict[str, Tensor]:
    """Execute a plan of a deferred wgrad."""
    grad = _weight_gradient(a, plan.decisions, a.grad_output, a.input)
    return {"weight": plan.outputs["weight"].empty().zero_() if grad is None else grad}


def _copies(**operands: tuple[Any, bool, bool]) -> dict[str, Orientation]:
    """Operand -> the copies to make, given (tensor, rowwise read?, columnwise read?); quantized ones need none."""
    copies = {}
    for name, (tensor, rowwise, columnwise) in operands.items():
        if (rowwise or columnwise) and not isinstance(tensor, QuantizedParts):
            copies[name] = BOTH if rowwise and columnwise else ROWWISE if rowwise else COLUMNWISE
    return copies


def _dgrad_weight(a: Any) -> Any:
    """The weight as dgrad gets it: without the rowwise copy, which may be padded, so that its columns are K."""
    weight = a.weight_cache if a.weight is None else a.weight
    if a.numerics.low_precision_dgrad and isinstance(weight, QuantizedParts):
        return weight.only(COLUMNWISE) if weight.orientation.columnwise else weight
    return weight


def _repeated(numerics: LinearNumerics, name: str, tensor: Any) -> dict[str, Orientation]:
    """The copy that the backward pass makes of an operand which was saved as it came."""
    copy = _saved_copy(numerics, name, tensor)
    return {} if copy is None else {name: copy}


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
    tensor, own = _given(a, name), getattr(a.numerics, name).for_copy(copy)
    given = tensor.quantizer.for_copy(copy) if isinstance(tensor, QuantizedParts) else None
    return own if given is None or (copy is COLUMNWISE and given.rotates != own.rotates) else given


def _cached(a: Any) -> QuantizedParts | None:
    """The kept copies of the weight, written or read."""
    cache = getattr(a, "cached_weight", None)
    return getattr(a, "weight_cache", None) if cache is None else cache


def _given(a: Any, name: str) -> Any:
    """An operand as the op was given it."""
    tensor = getattr(a, name)
    if name == "weight" and not isinstance(tensor, QuantizedParts):
        cache = _cached(a)
        return tensor if cache is None else cache
    return tensor


def cast_layout(numerics: LinearNumerics, device: torch.device) -> Layout:
    """How copies of input and weight are made. What is decoded in the backward pass is saved as it is."""
    if numerics.backward_override is BackwardOverride.DEQUANTIZED:
        return PLAIN
    return gemm.layout(device)


def weight_copies(numerics: LinearNumerics) -> Orientation | None:
    """Which copies of a weight serve any microbatch; None if no GEMM reads any."""
    if not numerics.low_precision_fprop:
        return None
    return BOTH if numerics.low_precision_dgrad else ROWWISE


def _saved_copy(numerics: LinearNumerics, name: str, tensor: Any) -> Orientation | None:
    """Which copy of input or weight the backward pass reads; None if it is the tensor as it came."""
    if isinstance(tensor, QuantizedParts):
        return None
    by_gemm = {"input": numerics.low_precision_wgrad, "weight": numerics.low_precision_dgrad}
    if by_gemm[name]:
        return COLUMNWISE
    decoded = numerics.backward_override is BackwardOverride.DEQUANTIZED
    return ROWWISE if decoded and numerics.low_precision_fprop else None


def _saved_spec(
    numerics: LinearNumerics, name: str, tensor: Any, copy: Orientation, layout: Layout
) -> QuantizedParts:
    """The spec of one copy of an operand, which is a matrix."""
    rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    quantizer = getattr(numerics, name)
    return quantizer.spec((rows, columns), tensor.dtype, tensor.device, copy, layout)


def _forward_state(a: Any, slot: int) -> CastState:
    """What the cast of input (0), weight (1) or output (2) takes."""
    if a.forward_scale is None and a.seed is None:
        return NO_STATE
    amax = getattr(
        a, "forward_amax", None
    )  # a cast that is repeated in the backward pass was recorded
    return CastState(
        None if a.forward_scale is None else a.forward_scale[slot],
        None if amax is None else amax[slot],
        None if a.seed is None else of_rank(a.seed + slot),
    )


def _quantized(
    name: str,
    a: Any,
    decisions: Decisions,
    layout: Layout,
    state: CastState,
    statistics: Tensor | None = None,
) -> Any:
    """An operand as a quantized matrix with the copies that were decided; as it is if there are none to make."""
    tensor, copies = getattr(a, name), decisions.copies.get(name)
    if copies is None:
        return tensor
    matrix = as_matrix(tensor)
    parts = getattr(a.numerics, name).quantize(matrix, copies, layout, state)
    if statistics is not None:
        record(statistics[1 if name == "weight" else 0], matrix, parts)
    return parts


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
    came_quantized = isinstance(_given(a, name), QuantizedParts)
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
    gradients=("input", "weight", "bias", "deferred"),
    version=__version__,
)

weight_gradient_op = customop.define(
    "fullgraph::linear_weight_gradient",
    forward=Pass(WeightGradientArguments, plan_weight_gradient, weight_gradient),
    outputs=("weight",),
    version=__version__,
)


def linear_token(
    numerics_text: str,
    output_dtype: torch.dtype,
    quantized_output: bool,
    scaling_rule: str = "",
    options_text: str = DEFAULT_OPTIONS_TEXT,
) -> str:
    """The token of the linear op.

    The texts are those of a recipe (`numerics_text` and `scaling_rule_text`), and encoded `LinearOptions`.
    """
    encode = _encode if torch.compiler.is_compiling() else _cached_encode
    return encode(numerics_text, output_dtype, quantized_output, scaling_rule, options_text)


def _encode(
    numerics_text: str,
    output_dtype: torch.dtype,
    quantized_output: bool,
    scaling_rule: str,
    options_text: str,
) -> str:
    return linear_op.encode(
        numerics=Encoded(numerics_text),
        output_dtype=output_dtype,
        quantized_output=quantized_output,
        scaling_rule=scaling_rule,
        options=Encoded(options_text),
    )


_cached_encode = functools.lru_cache(maxsize=4096)(_encode)
