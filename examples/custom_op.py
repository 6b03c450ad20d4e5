"""An op and a tensor class of one's own: tanh in 8 bits, which are all that its backward pass keeps."""

from dataclasses import dataclass

import torch

from fullgraph import testing
from fullgraph.customop import Pass, Plan, StructuredTensor, define


@dataclass
class Int8Parts:  # what the tensor is inside an op
    data: torch.Tensor
    dtype = torch.float32
    shape = property(lambda self: self.data.shape)

    def decode(self):
        return self.data / 127


class Int8(StructuredTensor, parts=Int8Parts): ...  # and what it is outside: a torch.Tensor


@dataclass
class Forward:
    x: torch.Tensor


@dataclass
class Backward:
    grad_y: torch.Tensor
    y: torch.Tensor


def plan(a):  # decides from specs; the fake kernel is made of this
    return Plan({"y": Int8Parts(a.x.with_dtype(torch.int8))}, saved_outputs={"y": "y"})


def execute(plan, a):  # does it
    return {"y": Int8Parts((a.x.tanh() * 127).round().to(torch.int8))}


tanh = define(
    "examples::tanh",
    forward=Pass(Forward, plan, execute),
    backward=Pass(
        Backward,
        lambda a: Plan({"x": a.grad_y}),
        lambda plan, a: {"x": a.grad_y * (1 - a.y.decode() ** 2)},
    ),
    gradients=("x",),
    outputs=("y",),
)

x = torch.linspace(-3, 3, 1000, requires_grad=True)
graphs = testing.assert_one_graph(lambda x: tanh(Forward(x)), x)
eager, compiled = tanh(Forward(x)), torch.compile(lambda x: tanh(Forward(x)), fullgraph=True)(x)
testing.assert_bitwise(*[[y, torch.autograd.grad(y.sum(), x)] for y in (compiled, eager)])
print(f"{len(graphs.forward)} node forward, {len(graphs.backward)} backward; compiled equals eager")
