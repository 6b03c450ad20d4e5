"""`torch.autocast` does not reach into an op, so eager and compiled code compute in the same dtypes."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fullgraph.customop import Pass, Plan, TensorSpec, define


@dataclass
class Forward:
    x: Tensor
    w: Tensor


@dataclass
class Backward:
    grad_output: Tensor
    x: Tensor
    w: Tensor


def plan_forward(a):
    output = TensorSpec((a.x.shape[0], a.w.shape[1]), a.x.dtype, a.x.device)
    return Plan({"output": output}, saved_inputs={"x": "x", "w": "w"})


def plan_backward(a):
    return Plan({"x": a.x, "w": a.w})


matmul = define(
    "autocast_tests::matmul",
    forward=Pass(Forward, plan_forward, lambda plan, a: {"output": a.x @ a.w}),
    backward=Pass(
        Backward,
        plan_backward,
        lambda plan, a: {"x": a.grad_output @ a.w.t(), "w": a.x.t() @ a.grad_output},
    ),
    gradients=("x", "w"),
)


def step(function, inside):
    """Output and gradients; the autocast around or inside of what runs."""
    torch.manual_seed(0)
    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        output = function(x, w)
        output.sum().backward()
    return output.detach(), x.grad, w.grad


def outside(x, w):
    return matmul(Forward(x, w))


def within(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return matmul(Forward(x, w))


@pytest.mark.parametrize("function", [outside, within])
def test_compiled_equals_eager_under_autocast(function):
    inside = function is within
    plain = step(lambda x, w: x @ w, inside=True)  # in float32
    eager = step(function, inside)
    compiled = step(torch.compile(function, backend="aot_eager", fullgraph=True), inside)
    for want, a, b in zip(plain, eager, compiled, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, want)
