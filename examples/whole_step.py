"""A whole training step in one graph: forward and backward of two microbatches, clipping, AdamW, the scales."""

import inspect

import torch
from torch import nn

import fullgraph as fg
from fullgraph.customop.graphs import GraphRecorder

torch.manual_seed(0)
layers = [fg.Linear(64, 64, dtype=torch.bfloat16, recipe="fp8-delayed") for _ in range(2)]
model = nn.Sequential(layers[0], nn.GELU(), layers[1])
parameters = list(model.parameters())
# A tensor: a new learning rate is then no new graph.
optimizer = torch.optim.AdamW(parameters, lr=torch.tensor(3e-3), foreach=False)
# What is below the hooks and the graph break of optimizer.step().
update = inspect.unwrap(torch.optim.AdamW.step)
# Gradients that are there before the step and stay where they are; also of a quantized weight they are plain.
for parameter in parameters:
    parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    torch._dynamo.mark_static_address(parameter.grad)


def train_step(inputs, targets):
    total = 0.0
    for x, y in zip(inputs, targets, strict=True):
        loss = (model(x).float() - y).square().mean() / len(inputs)
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad.add_(gradient)
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    with torch.no_grad():
        update(optimizer)
    fg.update_scales(model)
    for parameter in parameters:
        parameter.grad.zero_()
    return total


recorder = GraphRecorder("aot_eager")  # counts; backend="inductor" is what makes a step fast
compiled = torch.compile(train_step, fullgraph=True, backend=recorder)
inputs = torch.randn(2, 32, 64, dtype=torch.bfloat16)
targets = inputs.float().roll(1, -1)
losses = []
with torch._dynamo.config.patch(trace_autograd_ops=True):
    for number in range(10):
        optimizer.param_groups[0]["lr"].fill_(3e-3 * min(1.0, (number + 1) / 4))
        losses.append(compiled(inputs, targets).item())
print(
    f"{len(recorder.graphs)} graph, {len(recorder.forward)} nodes forward, {len(recorder.backward)} backward"
)
print("the loss fell" if losses[-1] < losses[0] else "the loss did not fall")
