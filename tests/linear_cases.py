"""The cases of the linear layer, how a test runs one, and what a result is measured against.

Shared by the unit, compile and GPU tests, so that all of them mean the same by "a case" and "the budget".
"""

import dataclasses
import itertools

import numpy as np
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import fullgraph as fg
import oracles
from fullgraph.ops.linear import linear_op
from oracles import assert_same_bits, relative_error

K, N = 48, 32
E4M3 = fg.PerTensorQuantizer(fg.Format.E4M3)
E5M2 = fg.PerTensorQuantizer(fg.Format.E5M2)


@dataclasses.dataclass(frozen=True)
class Case:
    """One way of using a linear layer."""

    recipe: str
    bias: bool = True
    quantized_weight: bool = False
    quantized_input: bool = False
    quantized_output: bool = False

    def __str__(self):
        flags = [f.name for f in dataclasses.fields(self)[1:] if getattr(self, f.name)]
        return "-".join([self.recipe, *flags])

    def layer(self, in_features=K, out_features=N, **options):
        """A bf16 layer, unless `options` say otherwise."""
        return fg.Linear(
            in_features,
            out_features,
            bias=self.bias,
            recipe=self.recipe,
            quantized_weight=self.quantized_weight,
            **{"dtype": torch.bfloat16, **options},
        )

    def function(self, layer):
        """What is compiled: the layer with the output of this case."""
        return lambda input: layer(input, quantized_output=self.quantized_output)

    def input(self, leaf):
        """The input of this case, made outside of what is compiled; gradients flow to `leaf`."""
        return fg.quantize(leaf, E4M3, fg.BOTH) if self.quantized_input else leaf


MATRIX = [
    Case(recipe, *flags)
    for recipe in ("bf16", "fp8-current")
    for flags in itertools.product((True, False), repeat=4)
]
"""{bf16, fp8-current} x bias x {plain, quantized} weight x input x output."""

PAIRWISE = [
    Case("fp8-current", True, False, False, False),
    Case("fp8-current", False, True, True, True),
    Case("fp8-current", True, True, False, True),
    Case("fp8-current", False, False, True, False),
    Case("bf16", True, True, True, False),
    Case("bf16", False, False, False, True),
]
"""A few cases in which any two values of any two axes meet, almost."""


def tensors(*sizes, dtype=torch.bfloat16, device="cpu"):
    """Random normal tensors, one for each size."""
    made = [torch.randn(size, dtype=torch.float32).to(dtype).to(device) for size in sizes]
    return made[0] if len(made) == 1 else made


def batch(tokens, in_features=K, out_features=N, **options):
    """Input and gradient of the output, at the scales of training."""
    x, grad_output = tensors((tokens, in_features), (tokens, out_features), **options)
    return x, grad_output * 1e-3


def plain(output):
    """An output as a plain tensor, differentiable."""
    return output.dequantize() if isinstance(output, fg.QuantizedTensor) else output


def bytes_of(tensor, name):
    """A result as plain tensors by name: bytes and scales of a quantized one."""
    if not isinstance(tensor, fg.QuantizedTensor):
        return {name: tensor.detach().clone()}
    copies = {"rowwise": tensor.part_data, "columnwise": tensor.part_columnwise_data}
    found = {f"{name}.{k}": t.clone() for k, t in copies.items() if t is not None}
    return {**found, f"{name}.scale_inv": tensor.scale_inv.clone()}


def gradients(layer, leaves=()):
    """Gradients of the parameters, then of other leaves, by name."""
    named = [*layer.named_parameters(), *((f"leaf{i}", leaf) for i, leaf in enumerate(leaves))]
    return {f"grad_{n}": t.grad.detach().clone() for n, t in named if t.grad is not None}


def run(case, function, layer, *batches, backward_order=None):
    """Forward all batches, then backward all: every output and every gradient, by name.

    Args:
        case: says how the input is made.
        function: `case.function(layer)`, perhaps compiled.
        layer: whose gradients are cleared first and returned.
        batches: pairs of input and gradient of the output; more than one are microbatches in flight.
        backward_order: which output goes backward when; as they came by default.
    """
    layer.zero_grad()
    leaves = [x.detach().clone().requires_grad_() for x, _ in batches]
    outputs = [function(case.input(leaf)) for leaf in leaves]
    results = {}
    for i, output in enumerate(outputs):
        results.update(bytes_of(output, f"output{i}"))
    for i in backward_order or range(len(batches)):
        plain(outputs[i]).backward(batches[i][1])
    return {**results, **gradients(layer, leaves)}


def assert_same_results(actual, expected):
    """The same names, and under each of them the same bits."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        try:
            assert_same_bits(actual[name], value)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


class GraphRecorder:
    """A backend that runs the graphs of AOTAutograd as they are, and keeps them."""

    def __init__(self):
        self.graphs = []
        self.backend = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)

    def _keep(self, graph, example_inputs):
        self.graphs.append(graph)
        return make_boxed_func(graph.forward)

    @property
    def linear_nodes(self):
        """Forward and backward nodes of the linear op, over all graphs."""
        targets = [node.target for graph in self.graphs for node in graph.graph.nodes]
        return tuple(
            sum(t in ops for t in targets) for ops in (linear_op.fwd_ops, linear_op.bwd_ops)
        )


# The error budget, measured with normal values: a GEMM of two E4M3 operands has 3.72 %, one of E5M2 by E4M3 5.90 %,
# whatever the sizes: the errors of the operands (2.65 %, 5.27 %) add in quadrature. The limits are 5 % and 7.5 %; below
# 0.7 times the value something was not quantized.
FPROP_ERROR, BACKWARD_ERROR = 0.0372, 0.0590
LIMIT = {FPROP_ERROR: 0.05, BACKWARD_ERROR: 0.075}
# A handful of values can have any error, up to half a unit in the last place of both operands and of the result:
# (1 + 2^-4)(1 + 2^-4) - 1 and (1 + 2^-3)(1 + 2^-4) - 1, and 2^-8.
WORST = {FPROP_ERROR: 0.133, BACKWARD_ERROR: 0.2}
LARGE_SAMPLE = 30


def assert_gemm_in_budget(actual, a, b, expected_error, exact=None):
    """The error of a GEMM is what quantization costs: no more, and not much less.

    The error is relative to the norm that a sum of independent terms has, sqrt(sum a^2 b^2). That is the norm of the
    result, but does not vanish where one of few results happens to cancel.

    Args:
        actual: the result, any leading dimensions.
        a, b: the operands before quantization, float64 [M, K] and [K, N].
        expected_error: `FPROP_ERROR` or `BACKWARD_ERROR`.
        exact: what `actual` should be, if not a @ b.
    """
    exact = a @ b if exact is None else exact
    norm = (a.square() @ b.square()).sum().sqrt()
    error = ((actual.detach().cpu().double().reshape(exact.shape) - exact).norm() / norm).item()
    if min(a.numel(), b.numel(), exact.numel()) < LARGE_SAMPLE:
        assert error <= WORST[expected_error], f"error {error:.4f}"
    else:
        assert 0.7 * expected_error <= error <= LIMIT[expected_error], f"error {error:.4f}"


def assert_linear_in_budget(results, layer, x, grad_output):
    """Output and all gradients of one step against the float64 layer: shapes, dtypes and errors.

    Args:
        results: "output", "grad_input", "grad_weight" and, if there is a bias, "grad_bias".
        layer: a layer with the same unquantized parameters; its class does not matter.
        x: the input, in the dtype of the parameters.
        grad_output: the gradient of the output.
    """
    weight, bias = layer.weight.detach().cpu().double(), layer.bias
    a = x.detach().cpu().double().reshape(-1, weight.shape[1])
    g = grad_output.detach().cpu().double().reshape(-1, weight.shape[0])
    shapes = {
        "output": grad_output.shape,
        "grad_input": x.shape,
        "grad_weight": weight.shape,
        "grad_bias": weight.shape[:1],
    }
    assert results.keys() == shapes.keys() - (set() if bias is not None else {"grad_bias"})
    for name, result in results.items():
        assert result.shape == shapes[name], name
        assert result.dtype == x.dtype, name
    output = a @ weight.t() + (0 if bias is None else bias.detach().cpu().double())
    assert_gemm_in_budget(results["output"], a, weight.t(), FPROP_ERROR, output)
    assert_gemm_in_budget(results["grad_input"], g, weight, BACKWARD_ERROR)
    assert_gemm_in_budget(results["grad_weight"], g.t(), a, BACKWARD_ERROR)
    if bias is not None:
        error = relative_error(results["grad_bias"], g.sum(0))
        assert error <= ROUNDING[x.dtype], f"error {error:.4f} of grad_bias"


# The rounding of a result and nothing else: half a unit in the last place, and room for the sums.
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}


def step(layer, x, grad_output, function=None):
    """One forward and backward: the output, the gradient of the input and those of the parameters."""
    layer.zero_grad()
    leaf = x.detach().requires_grad_()
    output = plain((layer if function is None else function)(leaf))
    output.backward(grad_output)
    return {"output": output.detach(), "grad_input": leaf.grad, **gradients(layer)}


def oracle_cast(x, quantizer):
    """The values that a tensor has after quantization, float64 of the same shape, by the NumPy oracle."""
    name = quantizer.format.name
    x = x.detach().cpu()
    codes, scale_inv = oracles.cast_per_tensor(
        x,
        x.abs().max().float().item() if x.numel() else 0.0,
        name,
        power_of_two=quantizer.power_of_two,
    )
    table = [
        oracles.decode_code(name, code & 0x7F) * (-1 if code & 0x80 else 1) for code in range(256)
    ]
    return torch.from_numpy(np.array(table)[codes]) * float(scale_inv)


def oracle_linear(x, weight, bias, grad_output, quantizers):
    """The linear layer in float64 on operands quantized by the NumPy oracle.

    Args:
        x, weight, bias, grad_output: plain tensors, x and grad_output matrices.
        quantizers: for "input", "weight" and "grad_output" a quantizer or None. A GEMM reads the quantized operands if
            it has both of them, and the original ones otherwise.
    """
    original = {"input": x, "weight": weight, "grad_output": grad_output}
    exact = {k: t.detach().cpu().double() for k, t in original.items()}
    cast = {k: oracle_cast(t, quantizers[k]) for k, t in original.items() if quantizers[k]}

    def operands(*names):
        return [(cast if all(n in cast for n in names) else exact)[n] for n in names]

    a, b = operands("input", "weight")
    results = {"output": a @ b.t() + (0 if bias is None else bias.detach().cpu().double())}
    a, b = operands("grad_output", "weight")
    results["grad_input"] = a @ b
    a, b = operands("grad_output", "input")
    results["grad_weight"] = a.t() @ b
    if bias is not None:
        results["grad_bias"] = exact["grad_output"].sum(0)
    return results
