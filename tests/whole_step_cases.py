"""A whole training step as one function, and the same in the parts that people compile apart."""

import inspect

import torch
from torch import nn

import fullgraph as fg
from linear_cases import same_random_numbers, state_of

WIDTH, TOKENS, MICROBATCHES = 32, 24, 2

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}
"""A learning rate that is a tensor may change; with foreach torch takes one on a GPU only."""


def new_model(recipe, device="cpu", **options):
    """Two layers with an activation between them; the same numbers each time."""
    torch.manual_seed(1)
    options = {"dtype": torch.bfloat16, "recipe": recipe, **options}
    layers = [fg.Linear(WIDTH, WIDTH, **options) for _ in range(2)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1]).to(device)


def keep_gradients(model):
    """Gradients that are there before the first step and stay where they are."""
    for parameter in model.parameters():
        zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        torch._dynamo.mark_static_address(zeros)
        parameter.grad = zeros


def batches(number, device="cpu"):
    """Inputs and targets of a step, a microbatch each."""
    generator = torch.Generator().manual_seed(number)
    shape = (MICROBATCHES, TOKENS, WIDTH)
    inputs, targets = [torch.randn(shape, generator=generator).to(device) for _ in range(2)]
    return inputs.bfloat16(), targets


class Step:
    """One step of training: forward, loss, backward of each microbatch, clipping, optimizer, scales.

    Args:
        model: its gradients are kept, see `keep_gradients`.
        optimizer: of its parameters.
        compile_update: how the optimizer is compiled, if it is apart from the rest.
    """

    def __init__(self, model, optimizer, compile_update=None):
        self.model, self.parameters = model, list(model.parameters())
        keep_gradients(model)
        self.updates_scales = bool(model[0].scaling_state.rule)
        below = inspect.unwrap(type(optimizer).step)

        def update():
            with torch.no_grad():
                below(optimizer)

        self.update = compile_update(update) if compile_update else update

    def gradients(self, inputs, targets):
        """Forward and backward of all microbatches, into the gradients that are kept; the losses."""
        losses = []
        for x, target in zip(inputs, targets, strict=True):
            loss = (self.model(x).float() - target).square().mean() / MICROBATCHES
            found = torch.autograd.grad(loss, self.parameters)
            for parameter, gradient in zip(self.parameters, found, strict=True):
                parameter.grad.add_(gradient)
            losses.append(loss.detach())
        return losses

    def __call__(self, inputs, targets):
        """The step; the losses, the norm, and the gradients after clipping."""
        losses = self.gradients(inputs, targets)
        norm = nn.utils.clip_grad_norm_(self.parameters, 0.5)
        self.update()
        if self.updates_scales:
            fg.update_scales(self.model)
        gradients = [parameter.grad.clone() for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad.zero_()
        return [*losses, norm, *gradients]

    def unclipped(self, inputs, targets):
        """A step that returns the gradients, and nothing that is a sum which Inductor takes in another order."""
        self.gradients(inputs, targets)
        gradients = [parameter.grad.clone() for parameter in self.parameters]
        self.update()
        if self.updates_scales:
            fg.update_scales(self.model)
        for parameter in self.parameters:
            parameter.grad.zero_()
        return gradients


def main_grad_step(model, dtype):
    """A step whose weight gradients go to `main_grad`; an update of exact products, the buffers cleared at its end."""
    weights = [layer.weight for layer in model if isinstance(layer, fg.Linear)]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        torch._dynamo.mark_static_address(weight.main_grad)

    def step(inputs, targets):
        for x, target in zip(inputs, targets, strict=True):
            model(x).backward(target.bfloat16())
        # Not a clone: Inductor hands out the buffer itself for that, and it is cleared below.
        gradients = [weight.main_grad.double() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight.sub_(weight.main_grad.to(weight.dtype), alpha=0.125)
                weight.main_grad.zero_()
        if model[0].scaling_state.rule:
            fg.update_scales(model)
        return gradients

    return step


def result_of(model, values):
    """What a step returned and what it left behind, by name."""
    named = {f"value{i}": value.clone() for i, value in enumerate(values)}
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if isinstance(weight, fg.QuantizedTensor):
            weight = weight.dequantize()
        named[name] = weight.clone()
    for name, layer in model.named_modules():
        named |= {f"{name}.{key}": value for key, value in state_of(layer).items()}
    return named


def run(function, model, number, device="cpu"):
    """One step: what it returned and what it left behind."""
    with same_random_numbers(), torch._dynamo.config.patch(trace_autograd_ops=True):
        return result_of(model, function(*batches(number, device)))
