"""`fg.Linear` in eager mode: values against float64 and a second oracle, shapes, dtypes, what is computed at all."""

import dataclasses
import itertools
from collections import Counter

import pytest
import torch
from torch import nn

import fullgraph as fg
from fullgraph import gemm, reference
from fullgraph.errors import ConfigError, ShapeError
from fullgraph.recipes import (
    BackwardOverride,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8PerRowScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    Role,
)
from linear_cases import (
    BUDGETS,
    E4M3,
    E5M2,
    LOW_PRECISION,
    RECIPES,
    ROUNDING,
    Case,
    K,
    N,
    assert_linear_in_budget,
    assert_same_results,
    batch,
    decoded_linear,
    gradients,
    oracle_linear,
    same_random_numbers,
    step,
    tensors,
)
from oracles import assert_same_bits, relative_error

FP8 = Case("fp8-current")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclasses.dataclass(frozen=True)
class PerRole(Recipe):
    """A recipe with any quantizer for any role."""

    input: object = None
    weight: object = None
    grad_output: object = None

    def quantizer(self, role):
        return {
            Role.INPUT: self.input,
            Role.WEIGHT: self.weight,
            Role.OUTPUT: self.input,
            Role.GRAD_OUTPUT: self.grad_output,
        }[role]


# Values.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "quantizers",
    [
        (E4M3, E4M3, E5M2),
        (E4M3, E4M3, E4M3),
        (E5M2, E4M3, E5M2),
        (dataclasses.replace(E4M3, power_of_two=True), E5M2, E5M2),
        (None, E4M3, E5M2),
        (E4M3, None, E5M2),
        (E4M3, E4M3, None),
        (E4M3, None, None),
        (None, None, E5M2),
        (None, None, None),
    ],
    ids=lambda qs: "-".join(q.format.name if q else "none" for q in qs),
)
def test_each_gemm_reads_what_the_recipe_says(quantizers, dtype):
    quantizers = dict(zip(("input", "weight", "grad_output"), quantizers, strict=True))
    layer = fg.Linear(40, 24, dtype=dtype, recipe=PerRole(**quantizers))
    x, grad_output = batch(19, 40, 24, dtype=dtype)
    got = step(layer, x, grad_output)
    expected = oracle_linear(x, layer.weight, layer.bias, grad_output, quantizers)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == dtype
        assert relative_error(got[name], value) < ROUNDING[dtype], name


HIGH, DECODED = BackwardOverride.HIGH_PRECISION, BackwardOverride.DEQUANTIZED
VARIANTS = {
    **{name: fg.recipes.get(name) for name in LOW_PRECISION},
    "fp8-delayed E4M3": DelayedScaling(backward_format=fg.Format.E4M3),
    "fp8-current power of two": Float8CurrentScaling(power_of_two=True, amax_epsilon=1e-3),
    "fp8-current, high-precision backward": Float8CurrentScaling(backward_override=HIGH),
    "fp8-current, dequantized backward": Float8CurrentScaling(backward_override=DECODED),
    "fp8-per-row hybrid": Float8PerRowScaling(backward_format=fg.Format.E5M2, power_of_two=False),
    "fp8-per-row, high-precision wgrad": Float8PerRowScaling(high_precision_wgrad=True),
    "fp8-block float32 scales": Float8BlockScaling(power_of_two=False),
    "fp8-block 1x128 weights": Float8BlockScaling(weight_two_dimensional=False),
    "fp8-block hybrid": Float8BlockScaling(backward_format=fg.Format.E5M2),
    "fp8-block, dequantized backward": Float8BlockScaling(backward_override=DECODED),
    "mxfp8 floor": MXFP8BlockScaling(scale_mode=fg.MXScaleMode.FLOOR),
    "mxfp8 even, square weights": MXFP8BlockScaling(
        scale_mode=fg.MXScaleMode.EVEN, weight_two_dimensional=True
    ),
    "mxfp8 hybrid ceil": MXFP8BlockScaling(
        backward_format=fg.Format.E5M2, scale_mode=fg.MXScaleMode.CEIL
    ),
    "mxfp8, dequantized backward": MXFP8BlockScaling(backward_override=DECODED),
    "nvfp4 plain": NVFP4BlockScaling(
        hadamard=False, stochastic_rounding=False, weight_two_dimensional=False
    ),
    "nvfp4 without hadamard": NVFP4BlockScaling(hadamard=False),
    "nvfp4 to the nearest": NVFP4BlockScaling(stochastic_rounding=False),
    "nvfp4 1x16 weights": NVFP4BlockScaling(weight_two_dimensional=False),
    "nvfp4 four over six": NVFP4BlockScaling(hadamard=False, four_over_six=fg.FourOverSix.MSE),
    "nvfp4 row-scaled": NVFP4BlockScaling(row_scaled_input=True),
    "nvfp4, dequantized backward": NVFP4BlockScaling(backward_override=DECODED),
    "nvfp4, high-precision backward": NVFP4BlockScaling(backward_override=HIGH),
    "mixed": PerRole(
        fg.NVFP4Quantizer(),
        fg.HybridQuantizer(fg.BlockQuantizer(two_dimensional=True), fg.PerRowQuantizer()),
        fg.HybridQuantizer(fg.MXQuantizer(fg.Format.E5M2), E5M2),
    ),
}
"""Every recipe, and every option of one."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(64, 160, 96), (19, 71, 33), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gemms_are_exact_on_what_they_read(variant, shape, dtype):
    tokens, in_features, out_features = shape
    recipe = VARIANTS[variant]
    layer = fg.Linear(in_features, out_features, dtype=dtype, recipe=recipe)
    x, grad_output = batch(tokens, in_features, out_features, dtype=dtype)
    got = step(layer, x, grad_output)
    numerics = recipe.linear_numerics()
    expected = decoded_linear(numerics, x, layer.weight, layer.bias, grad_output)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == dtype
        assert relative_error(got[name], value) < ROUNDING[dtype], name


@pytest.mark.parametrize("leading", [(96,), (2, 3, 16)], ids=str)
@pytest.mark.parametrize("recipe", LOW_PRECISION)
def test_error_budget(recipe, leading):
    layer = fg.Linear(256, 160, dtype=torch.bfloat16, recipe=recipe)
    torch.nn.init.normal_(layer.weight, std=0.02)
    x, grad_output = tensors((*leading, 256), (*leading, 160))
    results = step(layer, x, grad_output * 1e-3)
    assert_linear_in_budget(results, layer, x, grad_output * 1e-3, recipe)


ROWS = [(1,), (13,), (24,), (50,), ()]
FEATURES = [*itertools.product((712, 767, 2), repeat=2), (256, 256)]


@pytest.mark.parametrize("quantized_weight", [False, True], ids=["plain", "quantized-weight"])
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), FEATURES)
def test_error_budget_of_odd_shapes(rows, in_features, out_features, quantized_weight):
    original = nn.Linear(in_features, out_features, dtype=torch.bfloat16)
    layer = Case("fp8-current", quantized_weight=quantized_weight).layer(in_features, out_features)
    layer.load_state_dict(original.state_dict())
    x, grad_output = tensors((*rows, in_features), (*rows, out_features))
    results = step(layer, x, grad_output * 1e-3)
    assert_linear_in_budget(results, original, x, grad_output * 1e-3)


def test_the_budget_can_be_missed():
    layer = FP8.layer()
    x, grad_output = batch(24)
    good = step(layer, x, grad_output)
    layer.recipe = fg.recipes.get("bf16")
    unquantized = step(layer, x, grad_output)
    assert_linear_in_budget(good, layer, x, grad_output)
    wrong = [{**good, name: value * 1.1} for name, value in good.items()]
    wrong += [{**good, name: unquantized[name]} for name in good.keys() - {"grad_bias"}]
    for results in wrong:
        with pytest.raises(AssertionError, match=r"error 0\.\d+"):
            assert_linear_in_budget(results, layer, x, grad_output)


@pytest.mark.parametrize("case", [Case(recipe) for recipe in RECIPES], ids=str)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_tokens(case, shape, dtype):
    layer = case.layer(dtype=dtype)
    x, grad_output = tensors((*shape, K), (*shape, N), dtype=dtype)
    results = step(layer, x, grad_output)
    assert results["output"].shape == (*shape, N)
    assert results["grad_input"].shape == x.shape
    assert_same_bits(results["grad_weight"], torch.zeros(N, K, dtype=dtype))
    assert_same_bits(results["grad_bias"], torch.zeros(N, dtype=dtype))
    assert {r.dtype for r in results.values()} == {dtype}


# Shapes and strides.


def test_leading_dimensions_are_rows():
    layer = FP8.layer()
    x, grad_output = batch(24)
    expected = step(layer, x, grad_output)
    for leading in [(24,), (24, 1), (4, 6), (2, 3, 4)]:
        got = step(layer, x.view(*leading, K), grad_output.view(*leading, N))
        assert got["output"].shape == (*leading, N)
        assert got["grad_input"].shape == (*leading, K)
        for name, value in expected.items():
            assert_same_bits(got[name].view(value.shape), value)


def test_a_vector_is_one_row():
    layer = FP8.layer()
    x, grad_output = batch(1)
    expected = step(layer, x, grad_output)
    got = step(layer, x[0], grad_output[0])
    assert got["output"].shape == (N,)
    assert got["grad_input"].shape == (K,)
    for name, value in expected.items():
        assert_same_bits(got[name].view(value.shape), value)


def misaligned(*sizes):
    return tensors((torch.Size(sizes).numel() + 1,))[1:].view(sizes)


VIEWS = {
    "transposed": lambda k: tensors((k, 24)).t(),
    "every-second-column": lambda k: tensors((24, 2 * k))[:, ::2],
    "every-second-row": lambda k: tensors((48, k))[::2],
    "expanded-rows": lambda k: tensors((1, k)).expand(24, k),
    "expanded-columns": lambda k: tensors((24, 1)).expand(24, k),
    "expanded-scalar": lambda k: tensors((1,)).expand(24, k),
    "expanded-middle": lambda k: tensors((4, 1, k)).expand(4, 6, k),
    "misaligned": lambda k: misaligned(24, k),
    "permuted": lambda k: tensors((4, k, 6)).permute(2, 0, 1),
    "narrowed": lambda k: tensors((3, 24, k + 7))[1, :, 3:-4],
    "overlapping": lambda k: tensors((24 + k,)).as_strided((24, k), (1, 1)),
}


@pytest.mark.parametrize("quantized_output", [False, True], ids=["plain", "quantized-output"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("grad_view", ["misaligned", "transposed", "expanded-scalar"])
@pytest.mark.parametrize("view", VIEWS)
def test_strides_do_not_matter(view, grad_view, recipe, quantized_output):
    case = Case(recipe, quantized_output=quantized_output)
    layer = case.layer()
    function = case.function(layer)
    x, grad_output = VIEWS[view](K), VIEWS[grad_view](N)
    if x.dim() == 3:
        grad_output = (
            grad_output.view(*x.shape[:-1], N)
            if grad_view == "misaligned"
            else (grad_output[:1, :1].expand(*x.shape[:-1], N))
        )
    got = step(layer, x, grad_output, function)
    expected = step(layer, x.contiguous().clone(), grad_output.contiguous().clone(), function)
    for name, value in expected.items():
        assert_same_bits(got[name], value)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "fp8-delayed"])
def test_strides_of_weight_and_bias_do_not_matter(recipe):
    x, weight, bias, grad_output = tensors((24, K), (K, N), (2 * N,), (24, N))
    results = []
    for w, b in ((weight.t(), bias[::2]), (weight.t().contiguous(), bias[::2].contiguous())):
        leaves = [t.detach().requires_grad_() for t in (x, w, b)]
        with same_random_numbers():
            output = fg.linear(*leaves, recipe=recipe)
            results.append([output, *torch.autograd.grad(output, leaves, grad_output)])
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got.contiguous(), expected)


# Dtypes.


def reference_layer(layer):
    """The torch layer with the same parameters."""
    result = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
    result.to(layer.weight.dtype).load_state_dict(dict(layer.named_parameters()))
    return result


@pytest.mark.parametrize("autocast_dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_dtypes_are_those_of_nn_linear(recipe, dtype, autocast_dtype):
    layer = Case(recipe).layer(dtype=dtype)
    original = reference_layer(layer)
    x, grad_output = batch(24, dtype=dtype)
    grad_output = grad_output.to(autocast_dtype or dtype)
    results = []
    for module in (layer, original):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", autocast_dtype, enabled=autocast_dtype is not None):
            output = module(leaf)
        output.backward(grad_output)
        results.append({"output": output.detach(), "grad_input": leaf.grad, **gradients(module)})
    got, expected = results
    assert {k: v.dtype for k, v in got.items()} == {k: v.dtype for k, v in expected.items()}
    assert got["output"].dtype == (autocast_dtype or dtype)
    if recipe == "bf16":
        assert_same_bits(got["output"], expected["output"])
        for name, value in expected.items():
            limit = max(ROUNDING[dtype], ROUNDING[autocast_dtype or dtype])
            assert relative_error(got[name], value) < limit, name
    else:
        for name, budget in zip(
            ("output", "grad_input", "grad_weight"), BUDGETS[recipe], strict=True
        ):
            assert 0.5 * budget < relative_error(got[name], expected[name]) < 1.3 * budget, name


def test_torch_autocast_switched_off_inside():
    layer = FP8.layer(dtype=torch.float32)
    x = torch.randn(3, K)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            assert layer(x).dtype == torch.float32
        assert layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("input_dtype", "weight_dtype"), [(a, b) for a in DTYPES for b in DTYPES if a is not b], ids=str
)
def test_mixed_dtypes(recipe, input_dtype, weight_dtype):
    layer = Case(recipe).layer(dtype=weight_dtype)
    x, grad_output = batch(24, dtype=input_dtype)
    results = step(layer, x, grad_output)
    dtypes = {name: result.dtype for name, result in results.items()}
    assert dtypes == {
        "output": input_dtype,
        "grad_input": input_dtype,
        "grad_weight": weight_dtype,
        "grad_bias": weight_dtype,
    }
    numerics = fg.recipes.get(recipe).linear_numerics()
    expected = decoded_linear(numerics, x, layer.weight, layer.bias, grad_output)
    for name, value in expected.items():
        assert relative_error(results[name], value) < 5e-3, name  # two roundings to bfloat16


# What "bf16" computes.


@pytest.mark.parametrize("shape", [(24,), (2, 3, 4), ()], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_high_precision_is_nn_linear(dtype, bias, shape):
    """Bit for bit, output and gradients."""
    layer = Case("bf16", bias=bias).layer(dtype=dtype)
    original = reference_layer(layer)
    x, grad_output = tensors((*shape, K), (*shape, N), dtype=dtype)
    assert_same_results(step(layer, x, grad_output), step(original, x, grad_output))


def test_without_a_recipe_it_is_high_precision():
    layer = fg.Linear(K, N)
    x = torch.randn(3, K)
    assert_same_bits(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


# What is computed at all.


@dataclasses.dataclass
class Work:
    """Quantizations (which copies) and GEMMs of each kind, in the order in which they ran."""

    copies: list = dataclasses.field(default_factory=list)
    low_precision: int = 0

    def take(self):
        """What was counted, and start anew."""
        counted = [c.name for c in self.copies], self.low_precision
        self.copies, self.low_precision = [], 0
        return counted


@pytest.fixture
def work(monkeypatch):
    """Count casts and low-precision GEMMs."""
    counter = Work()
    cast, multiply = reference.cast_per_tensor, gemm.gemm

    def counting_cast(*args, orientation=fg.ROWWISE, **kwargs):
        counter.copies.append(orientation)
        return cast(*args, orientation=orientation, **kwargs)

    def counting_gemm(*args, **kwargs):
        counter.low_precision += 1
        return multiply(*args, **kwargs)

    monkeypatch.setattr(reference, "cast_per_tensor", counting_cast)
    monkeypatch.setattr(gemm, "gemm", counting_gemm)
    return counter


def matrix_products(function):
    """Every matrix product that runs in a function, low precision or not."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        function()
    names = Counter(event.name for event in profile.events())
    return names["aten::mm"] + names["aten::addmm"]


# who needs a gradient (input, weight, bias): copies and GEMMs forward, copies and GEMMs backward
WORK = {
    (1, 1, 1): (["BOTH", "BOTH"], 1, ["BOTH"], 2),
    (1, 1, 0): (["BOTH", "BOTH"], 1, ["BOTH"], 2),
    (1, 0, 1): (["ROWWISE", "BOTH"], 1, ["ROWWISE"], 1),
    (1, 0, 0): (["ROWWISE", "BOTH"], 1, ["ROWWISE"], 1),
    (0, 1, 1): (["BOTH", "ROWWISE"], 1, ["COLUMNWISE"], 1),
    (0, 1, 0): (["BOTH", "ROWWISE"], 1, ["COLUMNWISE"], 1),
    (0, 0, 1): (["ROWWISE", "ROWWISE"], 1, [], 0),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("needs", WORK, ids=str)
def test_no_work_for_what_is_frozen(needs, compiled, work):
    forward_copies, forward_gemms, backward_copies, backward_gemms = WORK[needs]
    layer = FP8.layer()
    function = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x, grad_output = batch(24)
    for tensor, needed in zip((x, layer.weight, layer.bias), needs, strict=True):
        tensor.requires_grad_(bool(needed))
    if compiled:  # compiling runs nothing real, but counting must not depend on it
        function(x).backward(grad_output)
        work.take()
    output = function(x)
    assert work.take() == (forward_copies, forward_gemms)
    output.backward(grad_output)
    assert work.take() == (backward_copies, backward_gemms)
    assert [t.grad is not None for t in (x, layer.weight, layer.bias)] == list(map(bool, needs))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_no_work_for_gradients_nobody_can_ask_for(context, work):
    layer = FP8.layer()
    with context():
        layer(torch.zeros(3, K, dtype=torch.bfloat16, requires_grad=True))
    assert work.take() == (["ROWWISE", "ROWWISE"], 1)


@pytest.mark.parametrize("wanted", [["input"], ["weight"], ["bias"], ["weight", "input"]], ids=str)
def test_a_single_gradient_can_be_asked_for(wanted):
    layer = FP8.layer()
    x, grad_output = batch(24)
    everything = step(layer, x, grad_output)
    layer.zero_grad()
    leaves = {"input": x.requires_grad_(), "weight": layer.weight, "bias": layer.bias}
    got = torch.autograd.grad(layer(x), [leaves[name] for name in wanted], grad_output)
    for name, gradient in zip(wanted, got, strict=True):
        assert_same_bits(gradient, everything[f"grad_{name}"])
    assert gradients(layer) == {}


@pytest.mark.parametrize("orientation", [fg.ROWWISE, fg.COLUMNWISE, fg.BOTH], ids=lambda o: o.name)
def test_what_is_quantized_is_not_quantized_again(orientation, work):
    layer = FP8.layer()
    x, grad_output = batch(24)
    expected = step(layer, x, grad_output)
    layer.weight = nn.Parameter(fg.quantize(layer.weight.detach(), E4M3, orientation))
    layer.zero_grad()
    leaf = x.requires_grad_()
    input = fg.quantize(leaf, E4M3, orientation)
    work.take()
    output = layer(input)
    assert work.take() == ([], 1)
    output.backward(grad_output)
    assert work.take() == (["BOTH"], 2)
    got = {"output": output.detach(), "grad_input": leaf.grad, **gradients(layer)}
    for name, value in expected.items():
        assert_same_bits(got[name], value)


def test_a_quantized_output_is_one_more_cast(work):
    FP8.layer()(batch(3)[0], quantized_output=True)
    assert work.take() == (["BOTH", "ROWWISE", "ROWWISE"], 1)


@pytest.mark.parametrize("needs", WORK, ids=str)
def test_high_precision_runs_the_same_gemms(needs, work):
    layer = Case("bf16").layer()
    x, grad_output = batch(24)
    for tensor, needed in zip((x, layer.weight, layer.bias), needs, strict=True):
        tensor.requires_grad_(bool(needed))
    outputs = []
    assert matrix_products(lambda: outputs.append(layer(x))) == WORK[needs][1]
    assert matrix_products(lambda: outputs[0].backward(grad_output)) == WORK[needs][3]
    assert work.take() == ([], 0)


def test_the_profiler_sees_low_precision_gemms_too():
    layer = FP8.layer()
    x, grad_output = batch(24)
    assert matrix_products(lambda: step(layer, x, grad_output)) == 3


# The module.


def test_parameters_and_their_initialisation_are_those_of_nn_linear():
    torch.manual_seed(3)
    layer = fg.Linear(K, N, recipe="fp8-current")
    torch.manual_seed(3)
    original = nn.Linear(K, N)
    assert list(layer.state_dict()) == list(original.state_dict()) == ["weight", "bias"]
    for name, value in original.state_dict().items():
        assert_same_bits(layer.state_dict()[name], value)
    assert list(fg.Linear(K, N, bias=False).state_dict()) == ["weight"]


def test_return_bias():
    layer = FP8.layer(return_bias=True)
    x, grad_output = batch(24)
    output, bias = layer(x)
    assert bias is layer.bias
    assert_same_bits(output, fg.linear(x, layer.weight, recipe="fp8-current"))
    (output + bias).backward(grad_output)
    assert_same_bits(bias.grad, grad_output.sum(0))
    output, bias = Case("fp8-current", bias=False).layer(return_bias=True)(x)
    assert bias is None


def test_functional_form():
    layer = FP8.layer()
    x, _ = batch(24)
    assert_same_bits(fg.linear(x, layer.weight, layer.bias, recipe="fp8-current"), layer(x))
    assert_same_bits(fg.linear(x, layer.weight), nn.functional.linear(x, layer.weight))
    recipe = fg.recipes.Float8CurrentScaling()
    assert_same_bits(fg.linear(x, layer.weight, layer.bias, recipe=recipe), layer(x))
    quantized = fg.linear(x, layer.weight, layer.bias, recipe=recipe, quantized_output=True)
    assert_same_bits(quantized.data, fg.quantize(layer(x), E4M3).data)


def test_the_recipe_can_be_changed():
    layer = FP8.layer()
    x, _ = batch(24)
    before = layer(x)
    layer.configure("bf16")
    assert_same_bits(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    layer.configure("fp8-current", return_bias=True)
    output, bias = layer(x)
    assert 0 < relative_error(output + bias, before) < 0.01


def test_meta_device():
    layer = FP8.layer(device="meta")
    assert layer(torch.empty(3, K, dtype=torch.bfloat16, device="meta")).shape == (3, N)


def test_weight_tying():
    first, second = FP8.layer(K, K), FP8.layer(K, K)
    second.weight = first.weight
    x, grad_output = batch(24, K, K)
    second(first(x)).backward(grad_output)
    got = first.weight.grad.clone()
    untied = FP8.layer(K, K)
    untied.weight, untied.bias = nn.Parameter(first.weight.detach().clone()), second.bias
    first.weight.grad = None
    untied(first(x)).backward(grad_output)
    assert_same_bits(got, first.weight.grad + untied.weight.grad)


def test_weight_tied_with_an_embedding():
    embedding = nn.Embedding(N, K, dtype=torch.bfloat16)
    head = Case("fp8-current", bias=False).layer()
    head.weight = embedding.weight
    head(embedding(torch.tensor([1, 5, 7]))).backward(batch(3)[1])
    assert head.weight is embedding.weight
    assert embedding.weight.grad is not None
    assert set(nn.Sequential(embedding, head).state_dict()) == {"0.weight", "1.weight"}


def test_stale_parameters_are_noticed():
    """As in nn.Linear: a weight that is changed before backward has read it is an error, quantized or not."""
    for case in (
        Case("bf16"),
        Case("bf16", quantized_weight=True),
        Case("fp8-current", quantized_weight=True),
    ):
        layer = case.layer()
        output = layer(batch(3)[0].requires_grad_())
        with torch.no_grad():
            layer.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_a_weight_cast_in_forward_may_change_before_backward():
    layer = FP8.layer()
    x, grad_output = batch(24)
    expected = step(layer, x, grad_output)
    leaf = x.requires_grad_()
    output = layer(leaf)
    with torch.no_grad():
        layer.weight.zero_()
    output.backward(grad_output)
    assert_same_bits(leaf.grad, expected["grad_input"])


# Errors.


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 47), r"must be in_features = 48, got \(input: bfloat16\[3, 47\]\)"),
        ((), r"must be in_features = 48, got \(input: bfloat16\[\]\)"),
        ((48, 3), "must be in_features = 48"),
    ],
)
def test_wrong_input_shapes(shape, message):
    with pytest.raises(ShapeError, match=message):
        FP8.layer()(torch.zeros(shape, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        ((2, 8, 48), None, r"must be a matrix .*, got bfloat16\[2, 8, 48\]"),
        ((48,), None, "must be a matrix"),
        ((8, 48), (7,), r"the bias must be \[8\], got \(bias: bfloat16\[7\]\)"),
        ((8, 48), (8, 1), r"the bias must be \[8\]"),
    ],
)
def test_wrong_parameter_shapes(weight, bias, message):
    x, weight = tensors((3, 48), weight)
    with pytest.raises(ShapeError, match=message):
        fg.linear(x, weight, None if bias is None else tensors(bias), recipe="fp8-current")


@pytest.mark.parametrize("name", ["input", "weight", "bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn], ids=str)
def test_wrong_dtypes(name, dtype):
    arguments = {"input": torch.zeros(3, 48), "weight": torch.zeros(8, 48), "bias": torch.zeros(8)}
    arguments[name] = arguments[name].to(dtype)
    with pytest.raises(ConfigError, match=f"the {name} must be float32, bfloat16 or float16"):
        fg.linear(**arguments, recipe="fp8-current")


def test_tensors_on_different_devices():
    with pytest.raises(ConfigError, match="one device, got input on cpu, weight on meta"):
        FP8.layer(device="meta")(torch.zeros(3, K, dtype=torch.bfloat16))


def test_wrong_recipes():
    with pytest.raises(
        ConfigError, match=r"unknown recipe 'fp9'\nWhy: the recipes are bf16, fp8-delayed"
    ):
        fg.Linear(K, N, recipe="fp9")
    with pytest.raises(ConfigError, match="a recipe is needed, got 8"):
        fg.Linear(K, N, recipe=8)
    with pytest.raises(ConfigError, match="unknown recipe"):
        fg.linear(torch.zeros(3, K), torch.zeros(N, K), recipe="fp9")


def test_a_weight_that_cannot_be_quantized():
    with pytest.raises(ConfigError, match="must be float32, bfloat16 or float16, got float64"):
        fg.Linear(K, N, dtype=torch.float64, quantized_weight=True, recipe="fp8-current")


def test_repr_names_recipe_and_quantized_weight():
    text = repr(Case("fp8-current", quantized_weight=True).layer())
    assert "in_features=48, out_features=32, bias=True, recipe=Float8CurrentScaling(" in text
    assert "quantized_weight=True" in text
    assert "recipe=None" in repr(fg.Linear(K, N))
    assert "quantized_weight" not in repr(fg.Linear(K, N))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", LOW_PRECISION)
def test_a_gradient_scaler_sees_an_overflow(recipe, dtype):
    """Behind a cast that saturates an infinite gradient would be finite."""
    layer = fg.Linear(K, N, bias=False, dtype=dtype, recipe=recipe)
    x, grad_output = batch(24, dtype=dtype)
    grad_output[3, 5] = torch.inf
    layer(x.requires_grad_()).backward(grad_output)
    assert not layer.weight.grad.isfinite().all()
    assert not x.grad.isfinite().all()
