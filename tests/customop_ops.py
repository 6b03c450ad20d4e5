"""Custom ops of every kind for the tests of `fullgraph.customop`; none of them knows of low precision.

`linear` has all that an op can have but `Dyn` fields and groups; the others show one thing each.
"""

import dataclasses
import enum
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fullgraph.customop import Carry, Dyn, Mut, Pass, Plan, StructuredTensor, TensorSpec, define

# A structured tensor: 8 bits and one decode factor.


@dataclass
class Int8Parts:
    data: Tensor
    scale_inv: Tensor
    dtype: torch.dtype

    @property
    def shape(self):
        return self.data.shape

    def decode(self):
        return ((self.data.float() - 128) * self.scale_inv).to(self.dtype)

    def encode_(self, value):
        new = to_int8(value)
        self.data.copy_(new.data)
        self.scale_inv.copy_(new.scale_inv)


class Int8Tensor(StructuredTensor, parts=Int8Parts):
    """The tensor class of `Int8Parts`."""


torch.serialization.add_safe_globals([Int8Tensor])


def to_int8(x):
    """Plain tensor to parts."""
    amax = x.float().abs().amax() if x.numel() else torch.zeros((), device=x.device)
    scale_inv = torch.where(amax > 0, amax / 127, torch.ones_like(amax))
    return Int8Parts((torch.round(x.float() / scale_inv) + 128).to(torch.uint8), scale_inv, x.dtype)


def int8_spec(spec):
    """What `to_int8` makes of a tensor of this spec."""
    return Int8Parts(
        TensorSpec(tuple(spec.shape), torch.uint8, spec.device),
        TensorSpec((), torch.float32, spec.device),
        spec.dtype,
    )


def int8(x, requires_grad=False):
    """Plain tensor to structured tensor, outside of any op."""
    return Int8Tensor(to_int8(x), requires_grad=requires_grad)


# linear: structured or plain input, weight and output; state of both passes; a value.


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


@dataclass(frozen=True)
class Numerics:
    mode: Mode = Mode.FAST
    structured_output: bool = False


@dataclass
class LinearForward:
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    amax: Mut[Tensor | None] = None
    grad_amax: Carry[Tensor | None] = None
    main_grad: Carry[Tensor | None] = None
    numerics: Numerics | None = None
    needs: tuple[str, ...] = ()


@dataclass
class LinearBackward:
    grad_output: Tensor
    x: Tensor | None
    weight: Tensor | None
    grad_amax: Mut[Tensor | None]
    main_grad: Mut[Tensor | None]
    numerics: Numerics
    needs: tuple[str, ...] = ()


def _int8_or_given(x):
    return x if isinstance(x, Int8Parts) else to_int8(x)


def _device(x):
    return x.data.device if isinstance(x, Int8Parts) else x.device


def plan_linear(a):
    output = TensorSpec((*a.x.shape[:-1], a.weight.shape[0]), a.x.dtype, _device(a.x))
    saved, saved_inputs = {}, {}
    for name, needed_for in (("x", "weight"), ("weight", "x")):
        if needed_for in a.needs:
            tensor = getattr(a, name)
            if isinstance(tensor, Int8Parts):
                saved_inputs[name] = name
            else:
                saved[name] = int8_spec(tensor)
    return Plan(
        {"output": int8_spec(output) if a.numerics.structured_output else output},
        saved,
        saved_inputs,
    )


def execute_linear(plan, a):
    x, weight = _int8_or_given(a.x), _int8_or_given(a.weight)
    if a.amax is not None and x.data.numel():
        a.amax.copy_(torch.maximum(a.amax, x.decode().abs().amax().float()))
    output = x.decode() @ weight.decode().t()
    if a.numerics.mode is Mode.EXACT:
        output = output * 2
    if a.bias is not None:
        output = output + a.bias
    results = {"output": to_int8(output) if a.numerics.structured_output else output}
    return results | {n: t for n, t in {"x": x, "weight": weight}.items() if n in plan.saved}


def plan_linear_backward(a):
    grad, outputs = a.grad_output, {}
    if "x" in a.needs:
        outputs["x"] = grad.with_shape(*grad.shape[:-1], a.weight.shape[1])
    if "weight" in a.needs and a.main_grad is None:
        outputs["weight"] = grad.with_shape(grad.shape[-1], a.x.shape[-1])
    if "bias" in a.needs:
        outputs["bias"] = grad.with_shape(grad.shape[-1])
    return Plan(outputs)


def execute_linear_backward(plan, a):
    grad = to_int8(a.grad_output).decode()
    rows = grad.reshape(-1, grad.shape[-1])
    if a.grad_amax is not None and grad.numel():
        a.grad_amax.copy_(torch.maximum(a.grad_amax, a.grad_output.abs().amax().float()))
    results = {}
    if "x" in a.needs:
        results["x"] = grad @ a.weight.decode()
    if "weight" in a.needs:
        grad_weight = rows.t() @ a.x.decode().reshape(-1, a.x.shape[-1])
        if a.main_grad is None:
            results["weight"] = grad_weight
        else:
            a.main_grad.add_(grad_weight.float())
    if "bias" in a.needs:
        results["bias"] = rows.sum(0)
    return results


linear = define(
    "tests::linear",
    forward=Pass(LinearForward, plan_linear, execute_linear),
    backward=Pass(LinearBackward, plan_linear_backward, execute_linear_backward),
    gradients=("x", "weight", "bias"),
)


class Linear(torch.nn.Module):
    """A layer around `linear`; its token is made when it is."""

    def __init__(
        self,
        in_features,
        out_features,
        numerics=Numerics(),
        *,
        bias=True,
        int8_weight=False,
        state=False,
        main_grad=False,
    ):
        super().__init__()
        weight = torch.randn(out_features, in_features, dtype=torch.bfloat16) / in_features**0.5
        self.weight = torch.nn.Parameter(int8(weight) if int8_weight else weight)
        self.bias = (
            torch.nn.Parameter(torch.zeros(out_features, dtype=torch.bfloat16)) if bias else None
        )
        self.register_buffer("amax", torch.zeros(()) if state else None)
        self.register_buffer("grad_amax", torch.zeros(()) if state else None)
        self.register_buffer(
            "main_grad", torch.zeros(out_features, in_features) if main_grad else None
        )
        self.token = linear.encode(numerics=numerics)

    def forward(self, x):
        arguments = LinearForward(
            x, self.weight, self.bias, self.amax, self.grad_amax, self.main_grad
        )
        return linear(arguments, token=self.token)


# swiglu: two plain inputs, saved as they are, one output.


@dataclass
class SwigluForward:
    gate: Tensor
    up: Tensor
    needs: tuple[str, ...] = ()


@dataclass
class SwigluBackward:
    grad_output: Tensor
    gate: Tensor
    up: Tensor
    needs: tuple[str, ...] = ()


def plan_swiglu_backward(a):
    return Plan({name: getattr(a, name) for name in a.needs})


def execute_swiglu_backward(plan, a):
    sigmoid = torch.sigmoid(a.gate)
    silu = a.gate * sigmoid
    gradients = {
        "gate": a.grad_output * a.up * (sigmoid + silu * (1 - sigmoid)),
        "up": a.grad_output * silu,
    }
    return {name: gradients[name].contiguous() for name in a.needs}


swiglu = define(
    "tests::swiglu",
    forward=Pass(
        SwigluForward,
        lambda a: Plan({"output": a.gate}, saved_inputs={"gate": "gate", "up": "up"}),
        lambda plan, a: {"output": (torch.nn.functional.silu(a.gate) * a.up).contiguous()},
    ),
    backward=Pass(SwigluBackward, plan_swiglu_backward, execute_swiglu_backward),
    gradients=("gate", "up"),
)


# stats: three outputs, one of them optional and one an integer; the output itself is saved.


@dataclass
class StatsForward:
    x: Tensor
    with_mean: bool = True
    needs: tuple[str, ...] = ()


@dataclass
class StatsBackward:
    grad_output: Tensor
    grad_mean: Tensor | None
    grad_count: Tensor
    output: Tensor
    with_mean: bool
    needs: tuple[str, ...] = ()


def plan_stats(a):
    mean = a.x.with_shape(*a.x.shape[:-1], 1) if a.with_mean else None
    count = TensorSpec((), torch.int64, a.x.device)
    return Plan({"output": a.x, "mean": mean, "count": count}, saved_outputs={"output": "output"})


def execute_stats(plan, a):
    results = {"output": torch.exp(a.x).contiguous(), "count": (a.x > 0).sum()}
    return results | ({"mean": a.x.mean(-1, keepdim=True)} if a.with_mean else {})


def execute_stats_backward(plan, a):
    grad = a.grad_output * a.output
    if a.grad_mean is not None:
        grad = grad + a.grad_mean / a.output.shape[-1]
    return {"x": grad.contiguous()}


stats = define(
    "tests::stats",
    forward=Pass(StatsForward, plan_stats, execute_stats),
    backward=Pass(StatsBackward, lambda a: Plan({"x": a.output}), execute_stats_backward),
    gradients=("x",),
    outputs=("output", "mean", "count"),
)


# both: a structured and a plain output.


@dataclass
class BothForward:
    x: Tensor
    needs: tuple[str, ...] = ()


@dataclass
class BothBackward:
    grad_int8: Tensor
    grad_plain: Tensor
    needs: tuple[str, ...] = ()


both = define(
    "tests::both",
    forward=Pass(
        BothForward,
        lambda a: Plan({"int8": int8_spec(a.x), "plain": a.x}),
        lambda plan, a: {"int8": to_int8(a.x), "plain": (a.x * 3).contiguous()},
    ),
    backward=Pass(
        BothBackward,
        lambda a: Plan({"x": a.grad_plain}),
        lambda plan, a: {"x": (a.grad_int8 + 3 * a.grad_plain).contiguous()},
    ),
    gradients=("x",),
    outputs=("int8", "plain"),
)


# track: state that both passes mutate, and nothing else of interest.


@dataclass
class TrackForward:
    x: Tensor
    total: Mut[Tensor]
    grad_total: Carry[Tensor | None] = None
    needs: tuple[str, ...] = ()


@dataclass
class TrackBackward:
    grad_output: Tensor
    grad_total: Mut[Tensor | None]
    needs: tuple[str, ...] = ()


def execute_track(plan, a):
    a.total.add_(a.x.sum())
    return {"output": (a.x * 2).contiguous()}


def execute_track_backward(plan, a):
    if a.grad_total is not None:
        a.grad_total.add_(a.grad_output.sum())
    return {"x": (a.grad_output * 2).contiguous()}


track = define(
    "tests::track",
    forward=Pass(TrackForward, lambda a: Plan({"output": a.x}), execute_track),
    backward=Pass(TrackBackward, lambda a: Plan({"x": a.grad_output}), execute_track_backward),
    gradients=("x",),
)


# repeat: an integer that is no constant, in both passes.


@dataclass
class RepeatForward:
    x: Tensor
    times: Dyn[int]
    needs: tuple[str, ...] = ()


@dataclass
class RepeatBackward:
    grad_output: Tensor
    times: Dyn[int]
    needs: tuple[str, ...] = ()


repeat = define(
    "tests::repeat",
    forward=Pass(
        RepeatForward,
        lambda a: Plan({"output": a.x.with_shape(a.times, *a.x.shape)}),
        lambda plan, a: {"output": a.x.expand(a.times, *a.x.shape).contiguous()},
    ),
    backward=Pass(
        RepeatBackward,
        lambda a: Plan({"x": a.grad_output.with_shape(*a.grad_output.shape[1:])}),
        lambda plan, a: {"x": a.grad_output.sum(0)},
    ),
    gradients=("x",),
)


# all_sum: a process group.


@dataclass
class AllSumForward:
    x: Tensor
    group: ProcessGroup | None = None


@dataclass
class AllSumBackward:
    grad_output: Tensor
    group: ProcessGroup | None


def _all_sum(x, group):
    x = x.clone(memory_format=torch.contiguous_format)
    if group is not None:
        torch.distributed.all_reduce(x, group=group.resolve())
    return x


all_sum = define(
    "tests::all_sum",
    forward=Pass(
        AllSumForward,
        lambda a: Plan({"output": a.x}),
        lambda plan, a: {"output": _all_sum(a.x, a.group)},
    ),
    backward=Pass(
        AllSumBackward,
        lambda a: Plan({"x": a.grad_output}),
        lambda plan, a: {"x": _all_sum(a.grad_output, a.group)},
    ),
    gradients=("x",),
)


# tagged: nothing but values.


@dataclass(frozen=True)
class Level:
    name: str = "low"
    depth: int = 3
    factor: float = 0.5


@dataclass
class TaggedForward:
    x: Tensor
    level: Level | None = None
    sizes: tuple[int, ...] = ()
    options: dict[str, float] = dataclasses.field(default_factory=dict)
    mode: Mode = Mode.FAST
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    size: int = 2


def execute_tagged(plan, a):
    level = a.level or Level()
    factor = level.depth * level.factor + sum(a.sizes) + sum(a.options.values()) + a.size
    return {"output": (a.x * factor * a.mode.value).to(a.dtype)}


tagged = define(
    "tests::tagged",
    forward=Pass(
        TaggedForward,
        lambda a: Plan({"output": TensorSpec(a.x.shape, a.dtype, a.x.device)}),
        execute_tagged,
    ),
)


# What the tests do with them.


def plain(tensor):
    """A tensor as a plain one, differentiable."""
    return tensor.decode() if isinstance(tensor, Int8Tensor) else tensor


def same(left, right):
    """Whether two tensors, or nested tuples and lists of them, have the same bits."""
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if left is None or right is None:
        return left is right
    if isinstance(left, StructuredTensor):
        return (
            type(left) is type(right)
            and left.layout_text == right.layout_text
            and same(left.part_data, right.part_data)
            and same(left.part_scale_inv, right.part_scale_inv)
        )
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
