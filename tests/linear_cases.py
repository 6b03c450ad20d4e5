"""The cases of the linear layer, how a test runs one, and what a result is measured against.

Shared by the unit, compile and GPU tests, so that all of them mean the same by "a case" and "the budget".
"""

import contextlib
import dataclasses
import itertools

import numpy as np
import torch

import fullgraph as fg
import oracles
from fullgraph import reference
from fullgraph.customop.structured import parts_table
from fullgraph.random import new_seed
from fullgraph.recipes import BackwardOverride, Role
from fullgraph.tensor import CastState
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
        if not self.quantized_input:
            return leaf
        own = fg.recipes.get(self.recipe).quantizer(Role.INPUT)
        return fg.quantize(leaf, E4M3 if own is None or own.is_delayed else own, fg.BOTH)


RECIPES = list(fg.recipes.BY_NAME)
LOW_PRECISION = [name for name in RECIPES if name != "bf16"]

MATRIX = [
    Case(recipe, *flags)
    for recipe in RECIPES
    for flags in itertools.product((True, False), repeat=4)
]
"""Every recipe x bias x {plain, quantized} weight x input x output."""

PAIRWISE = [
    *[
        Case(recipe, *flags)
        for recipe in LOW_PRECISION
        for flags in (
            (True, False, False, False),
            (False, True, True, True),
            (True, True, False, True),
            (False, False, True, False),
        )
    ],
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
    components = parts_table(tensor.parts).tensors(tensor.parts)
    return {f"{name}.{component}": t.clone() for component, t in components.items()}


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
    with same_random_numbers():
        leaves = [x.detach().clone().requires_grad_() for x, _ in batches]
        outputs = [function(case.input(leaf)) for leaf in leaves]
        results = {}
        for i, output in enumerate(outputs):
            results.update(bytes_of(output, f"output{i}"))
        for i in backward_order or range(len(batches)):
            plain(outputs[i]).backward(batches[i][1])
    return {**results, **gradients(layer, leaves), **state_of(layer)}


@contextlib.contextmanager
def same_random_numbers(seed=7):
    """Stochastic rounding draws the same inside, each time; outside, nothing changes."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def state_of(layer):
    """Scales and amaxes of delayed scaling, by name; empty before the layer used them."""
    state = getattr(layer, "scaling_state", None)
    if state is None or not state.rule:
        return {}
    names = ("forward_scale", "forward_amax", "backward_scale", "backward_amax")
    return {name: getattr(state, name).clone() for name in names}


def assert_same_results(actual, expected):
    """The same names, and under each of them the same bits."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        try:
            assert_same_bits(actual[name], value)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


# The error budget: relative Frobenius errors of fprop, dgrad and wgrad with normal values. The errors of the operands
# (E4M3 2.65 %, E5M2 5.27 %, NVFP4 9.5 %) add in quadrature, whatever the contraction. Below 0.7 times the value
# something was not quantized.
BUDGETS = {
    "fp8-delayed": (0.0372, 0.0590, 0.0591),
    "fp8-current": (0.0372, 0.0590, 0.0591),
    "fp8-per-row": (0.0376, 0.0377, 0.0378),
    "fp8-block": (0.0376, 0.0377, 0.0378),
    "mxfp8": (0.0376, 0.0377, 0.0378),
    "nvfp4": (0.146, 0.176, 0.166),
}
LOWEST, HIGHEST = 0.7, 1.25
# A handful of values can have any error, up to half a unit in the last place of both operands and of the result:
# (1 + 2^-4)(1 + 2^-4) - 1 and (1 + 2^-3)(1 + 2^-4) - 1, and 2^-8. Small codes of NVFP4 may lose everything.
LARGE_SAMPLE = 30


def worst_error(expected_error):
    """What a handful of values may have."""
    return 0.133 if expected_error < 0.05 else 0.2 if expected_error < 0.1 else 1.0


def assert_gemm_in_budget(actual, a, b, expected_error, exact=None):
    """The error of a GEMM is what quantization costs: no more, and not much less.

    The error is relative to the norm that a sum of independent terms has, sqrt(sum a^2 b^2). That is the norm of the
    result, but does not vanish where one of few results happens to cancel.

    Args:
        actual: the result, any leading dimensions.
        a, b: the operands before quantization, float64 [M, K] and [K, N].
        expected_error: of `BUDGETS`.
        exact: what `actual` should be, if not a @ b.
    """
    exact = a @ b if exact is None else exact
    norm = (a.square() @ b.square()).sum().sqrt()
    error = ((actual.detach().cpu().double().reshape(exact.shape) - exact).norm() / norm).item()
    if min(a.numel(), b.numel(), exact.numel()) < LARGE_SAMPLE:
        assert error <= worst_error(expected_error), f"error {error:.4f}"
    else:
        low, high = LOWEST * expected_error, HIGHEST * expected_error
        assert low <= error <= high, f"error {error:.4f}"


def assert_linear_in_budget(results, layer, x, grad_output, recipe="fp8-current"):
    """Output and all gradients of one step against the float64 layer: shapes, dtypes and errors.

    Args:
        results: "output", "grad_input", "grad_weight" and, if there is a bias, "grad_bias".
        layer: a layer with the same unquantized parameters; its class does not matter.
        x: the input, in the dtype of the parameters.
        grad_output: the gradient of the output.
        recipe: by name.
    """
    weight, bias = layer.weight.detach().cpu().double(), layer.bias
    fprop, dgrad, wgrad = BUDGETS[recipe]
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
    assert_gemm_in_budget(results["output"], a, weight.t(), fprop, output)
    assert_gemm_in_budget(results["grad_input"], g, weight, dgrad)
    assert_gemm_in_budget(results["grad_weight"], g.t(), a, wgrad)
    if bias is not None:
        error = relative_error(results["grad_bias"], g.sum(0))
        assert error <= ROUNDING[x.dtype], f"error {error:.4f} of grad_bias"


# The rounding of a result and nothing else: half a unit in the last place, and room for the sums.
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}


def step(layer, x, grad_output, function=None):
    """One forward and backward: the output, the gradient of the input and those of the parameters."""
    layer.zero_grad()
    leaf = x.detach().requires_grad_()
    with same_random_numbers():
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


def decoded(tensor, quantizer, copy, state):
    """What a GEMM reads in one copy of a matrix, float64 [rows, contraction], rotated if the copy is."""
    parts = quantizer.quantize(tensor.detach(), copy, state=state)
    return reference.decode_operand(parts.quantizer.operand(parts, copy)).double().cpu()


def product(a, b):
    """a @ b^T over the contraction; the zeros that fill it up may differ in number."""
    contraction = min(a.shape[1], b.shape[1])
    return a[:, :contraction] @ b[:, :contraction].t()


def decoded_linear(numerics, x, weight, bias, grad_output, scales=(1.0, 1.0, 1.0)):
    """The linear layer in float64 on the values that its low-precision GEMMs read, and on the originals elsewhere.

    Args:
        numerics: of the recipe.
        x, weight, bias, grad_output: plain tensors, x and grad_output matrices.
        scales: of delayed scaling, for input, weight and grad_output.
    """
    tensors = {"input": x, "weight": weight, "grad_output": grad_output}
    exact = {k: t.detach().cpu().double() for k, t in tensors.items()}

    def read(name, copy):
        quantizer = getattr(numerics, name)
        scale = x.new_tensor(scales[list(tensors).index(name)], dtype=torch.float32)
        with same_random_numbers():
            state = CastState(encode_scale=scale, seed=new_seed(x.device))
        return decoded(tensors[name], quantizer, copy, state)

    ROW, COLUMN = fg.ROWWISE, fg.COLUMNWISE
    fallback = dict(exact)
    if numerics.backward_override is BackwardOverride.DEQUANTIZED:
        fallback |= {k: read(k, ROW)[:, : x.shape[1]] for k in ("input", "weight")}

    def operands(low_precision, left, right):
        if low_precision:
            return read(*left), read(*right)
        return [
            fallback[name] if copy is ROW else fallback[name].t() for name, copy in (left, right)
        ]

    fprop = [
        read(n, ROW) if numerics.low_precision_fprop else exact[n] for n in ("input", "weight")
    ]
    results = {"output": product(*fprop)}
    if bias is not None:
        results["output"] = results["output"] + bias.detach().cpu().double()
    dgrad = operands(numerics.low_precision_dgrad, ("grad_output", ROW), ("weight", COLUMN))
    wgrad = operands(numerics.low_precision_wgrad, ("grad_output", COLUMN), ("input", COLUMN))
    results |= {"grad_input": product(*dgrad), "grad_weight": product(*wgrad)}
    if bias is not None:
        results["grad_bias"] = exact["grad_output"].sum(0)
    return results
