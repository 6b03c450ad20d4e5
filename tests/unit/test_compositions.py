"""Optimizers, averages, gradient scaling and clipping, pruning and the like around the layer, in eager mode."""

import copy
import functools
import inspect
import math
import warnings

import pytest
import torch
import torch.nn.utils.prune as prune
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fullgraph as fg
from fullgraph.errors import ConfigError
from linear_cases import (
    E4M3,
    LOW_PRECISION,
    RECIPES,
    Case,
    K,
    N,
    assert_same_results,
    batch,
    gradients,
    step,
)
from oracles import assert_same_bits, relative_error

FEW = ["bf16", "fp8-current", "fp8-delayed"]
by_recipe = pytest.mark.parametrize("recipe", RECIPES)
by_few = pytest.mark.parametrize("recipe", FEW)
weights = pytest.mark.parametrize(
    "quantized_weight", [False, True], ids=["plain", "quantized-weight"]
)


# Optimizers.


class Lion(torch.optim.Optimizer):
    """A rule of one's own, as people write them: sign of a mean, decay and step in one."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.add_(mean.mul(0.9).add(p.grad, alpha=0.1).sign(), alpha=-group["lr"])
                mean.mul_(0.99).add_(p.grad, alpha=0.01)


OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": functools.partial(torch.optim.Adam, lr=0.05),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.0),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.05),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.05, momentum=0.9),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=0.05, weight_decay=0.0),
    "RAdam": functools.partial(torch.optim.RAdam, lr=0.05),
    "Adamax": functools.partial(torch.optim.Adamax, lr=0.05),
    "Adadelta": functools.partial(torch.optim.Adadelta, lr=0.5),
    "Rprop": functools.partial(torch.optim.Rprop, lr=0.05),
    "Lion": functools.partial(Lion, lr=0.05),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = functools.partial(torch.optim.Muon, lr=0.05, weight_decay=0.0)


def variants(make):
    """The optimizer with each of the options that choose how it is carried out."""
    known = inspect.signature(getattr(make, "func", make)).parameters
    options = [
        {},
        {"foreach": True},
        {"foreach": False},
        {"fused": True},
        {"differentiable": False},
    ]
    return [functools.partial(make, **o) for o in options if all(name in known for name in o)]


def weight_of(quantizer=E4M3):
    return nn.Parameter(fg.quantize(torch.randn(N, K), quantizer, fg.BOTH))


def values(parameter):
    return parameter.detach().dequantize()


def requantized(value, quantizer=E4M3):
    return fg.quantize(value, quantizer, fg.BOTH).dequantize()


QUANTIZERS = [E4M3, fg.MXQuantizer(), fg.NVFP4Quantizer(two_dimensional=True)]


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: type(q).__name__)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_decodes_steps_and_quantizes(name, quantizer):
    """What it does to a plain tensor of the decoded values, quantized again after each step; in place."""
    for make in variants(OPTIMIZERS[name]):
        weight = weight_of(quantizer)
        plain = nn.Parameter(values(weight).clone())
        start, pointer = plain.detach().clone(), weight.part_data.data_ptr()
        optimizers = make([weight]), make([plain])
        for _ in range(3):
            weight.grad = torch.randn(N, K)
            plain.grad = weight.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
            with torch.no_grad():
                plain.copy_(requantized(plain, quantizer))
            assert_same_bits(values(weight), plain.detach())
        assert not torch.equal(values(weight), start)
        assert weight.part_data.data_ptr() == pointer
        assert all(type(t) is torch.Tensor for t in _state(optimizers[0]))


def _state(optimizer):
    return [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name", ["NAdam", "ASGD", "AdamW"])
def test_an_optimizer_that_writes_twice_quantizes_twice(name):
    """Weight decay and the like are writes of their own: a code may be the next one, and no more."""
    options = {"weight_decay": 0.1} if name == "AdamW" else {}
    weight = weight_of()
    plain = nn.Parameter(values(weight).clone())
    start = plain.detach().clone()
    optimizers = [getattr(torch.optim, name)([p], lr=0.05, **options) for p in (weight, plain)]
    weight.grad = torch.randn(N, K)
    plain.grad = weight.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    assert relative_error(values(weight), plain.detach()) < 0.04
    assert relative_error(values(weight), start) > 0.005


def test_a_step_below_half_a_code_is_lost():
    """Without a copy in high precision a quantized weight cannot collect what is too small for its codes."""
    ratios = []
    for quantizer in (E4M3, fg.MXQuantizer()):
        weight = weight_of(quantizer)
        before = values(weight).norm()
        with torch.no_grad():
            for _ in range(100):
                weight.mul_(1 - 1e-3)  # weight decay
        ratios.append((values(weight).norm() / before).item())
    assert ratios[0] == pytest.approx((1 - 1e-3) ** 100, rel=0.01)  # an exact scale, which shrinks
    assert ratios[1] == 1  # a power of two, which does not


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_learning_rate_may_be_a_tensor(name):
    results = []
    for rate in (0.0625, torch.tensor(0.0625)):
        torch.manual_seed(3)
        weight = weight_of()
        optimizer = OPTIMIZERS[name]([weight], lr=rate)
        weight.grad = torch.randn(N, K)
        optimizer.step()
        results.append(values(weight))
    assert relative_error(results[0], results[1]) < 0.01


@weights
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resume_an_optimizer(name, quantized_weight):
    case = Case("fp8-current", bias=False, quantized_weight=quantized_weight)
    layer = case.layer()
    optimizer = OPTIMIZERS[name](layer.parameters())

    def train(layer, optimizer, steps):
        for number in steps:
            torch.manual_seed(number)
            step(layer, *batch(24))
            optimizer.step()

    train(layer, optimizer, range(3))
    saved = copy.deepcopy((layer.state_dict(), optimizer.state_dict()))
    train(layer, optimizer, range(3, 6))
    other = case.layer()
    other.load_state_dict(saved[0])
    optimizer = OPTIMIZERS[name](other.parameters())
    optimizer.load_state_dict(saved[1])
    train(other, optimizer, range(3, 6))
    weight, expected = other.weight.detach(), layer.weight.detach()
    assert_same_bits(*[w.dequantize() if quantized_weight else w for w in (weight, expected)])


@weights
@by_few
def test_an_optimizer_in_the_backward_pass(recipe, quantized_weight):
    """One for each parameter, run as soon as its gradient is there."""
    case = Case(recipe, quantized_weight=quantized_weight)
    torch.manual_seed(1)
    model = nn.Sequential(case.layer(K, N), nn.ReLU(), case.layer(N, K))
    other = copy.deepcopy(model)
    own = {p: torch.optim.SGD([p], lr=0.5) for p in model.parameters()}

    def update(parameter):
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    for _ in range(3):
        x, grad_output = batch(24, K, K)
        model(x).backward(grad_output)
        assert all(parameter.grad is None for parameter in model.parameters())
        other(x).backward(grad_output)
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert_same_bits(decoded(ours), decoded(theirs))


def decoded(tensor):
    tensor = tensor.detach()
    return tensor.dequantize() if isinstance(tensor, fg.QuantizedTensor) else tensor


# Averages.


@weights
def test_an_average_of_the_weights(quantized_weight):
    """The average is kept in the form of the weight: quantized after each update, if that is quantized."""
    model = nn.Sequential(Case("fp8-current", quantized_weight=quantized_weight).layer())
    options = {"multi_avg_fn": get_ema_multi_avg_fn(0.75)} if not quantized_weight else {}
    average = AveragedModel(model, **options)
    expected = None
    for number in range(1, 4):
        average.update_parameters(model)
        new = decoded(model[0].weight).float()
        if expected is None:
            expected = new
        elif quantized_weight:
            expected = expected + (new - expected) / number
        else:
            expected = torch.lerp(expected, new, 0.25)
        with torch.no_grad():
            model[0].weight.add_(torch.randn(N, K).bfloat16())
    assert type(average.module[0].weight) is type(model[0].weight)
    assert relative_error(decoded(average.module[0].weight), expected) < (
        0.06 if quantized_weight else 0.01
    )
    x, grad_output = batch(24)
    assert step(average, x, grad_output)["output"].shape == (24, N)


# Gradients: clipping, scaling.


@pytest.mark.parametrize("foreach", [None, True, False], ids=str)
@weights
@by_few
def test_clipping(recipe, quantized_weight, foreach):
    case = Case(recipe, quantized_weight=quantized_weight)
    model = nn.Sequential(case.layer(K, N), case.layer(N, K))
    step(model, *batch(24, K, K))
    raw = {name: grad.clone() for name, grad in gradients(model).items()}
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=foreach)
    exact = math.sqrt(sum(grad.double().square().sum().item() for grad in raw.values()))
    assert abs(norm.item() / exact - 1) < 0.01
    for name, grad in gradients(model).items():
        assert relative_error(grad, raw[name].double() * 1e-3 / exact) < 0.01
    nn.utils.clip_grad_value_(model.parameters(), 1e-6, foreach=foreach)
    assert all(grad.abs().max() <= 1.01e-6 for grad in gradients(model).values())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
@weights
@by_recipe
def test_an_overflow_is_seen_behind_the_layer(recipe, quantized_weight, value):
    """Under a gradient scaler, which works in float16."""
    layer = Case(recipe, bias=False, quantized_weight=quantized_weight).layer(dtype=torch.float16)
    x, grad_output = batch(24, dtype=torch.float16)
    grad_output[3, 5] = value
    found = step(layer, x, grad_output)
    for name in ("grad_input", "grad_weight"):
        assert not found[name].isfinite().all()
    rows = found["grad_input"].isfinite().all(1)
    if recipe != "nvfp4":  # one scale for the whole tensor
        assert rows.sum() == 23


@pytest.mark.parametrize(
    "recipe", [name for name in LOW_PRECISION if "fp8" in name and name != "mxfp8"]
)
def test_elsewhere_an_infinite_gradient_becomes_finite(recipe):
    layer = Case(recipe, bias=False).layer()
    x, grad_output = batch(24)
    grad_output[3, 5] = math.inf
    assert step(layer, x, grad_output)["grad_input"].isfinite().all()


@by_recipe
def test_gradient_scaler(recipe):
    """Steps with an overflow are skipped and the scale is halved until nothing overflows; then training goes on."""
    options = {"recipe": recipe, "bias": False}
    model = nn.Sequential(fg.Linear(K, N, **options), nn.ReLU(), fg.Linear(N, 16, **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if recipe == "fp8-delayed":
        fg.attach(optimizer, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**32, growth_interval=1000)
    steps = 0
    for _ in range(30):
        optimizer.zero_grad()
        before, scale = model[0].weight.detach().clone(), scaler.get_scale()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(24, K)).float().square().mean()
        scaler.scale(loss).backward()
        finite = all(p.grad.isfinite().all() for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (scale if finite else scale / 2)
        assert torch.equal(before, model[0].weight) != finite
        assert all(p.isfinite().all() for p in model.parameters())
        steps += finite
    assert 0 < steps < 30
    if recipe == "fp8-delayed":
        for layer in (model[0], model[2]):
            state = layer.scaling_state
            assert state.history().isfinite().all()
            scales, amaxes = state.scales(), state.history()[1:].amax(0)
            largest = torch.tensor([448.0, 448.0, 448.0, 57344.0])
            cast = torch.tensor([True, True, False, True])
            assert torch.equal(scales[cast], (largest / amaxes)[cast])


# Around the layer.


@weights
def test_parametrizations(quantized_weight):
    """The recipe applies to the weight that they make; `convert` comes before them."""
    for wrap in (parametrizations.weight_norm, parametrizations.orthogonal):
        layer = Case("fp8-current", quantized_weight=quantized_weight).layer(dtype=torch.float32)
        plain = nn.Linear(K, N)
        plain.load_state_dict({n: decoded(t) for n, t in layer.named_parameters()})
        for each in (layer, plain):
            torch.manual_seed(1)
            wrap(each)
        assert isinstance(layer, fg.Linear)
        x, grad_output = batch(24, dtype=torch.float32)
        found = step(layer, x, grad_output)
        expected = fg.linear(x, decoded(layer.weight), layer.bias, recipe="fp8-current")
        assert_same_bits(found["output"], expected.detach())
        theirs = step(plain, x, grad_output)
        assert found.keys() == theirs.keys()
        for name, value in theirs.items():
            assert relative_error(found[name], value) < 0.1


def test_spectral_norm_and_the_older_weight_norm():
    x, grad_output = batch(24, dtype=torch.float32)
    layer = Case("fp8-current").layer(dtype=torch.float32)
    parametrizations.spectral_norm(layer)
    step(layer, x, grad_output)
    layer.eval()
    expected = fg.linear(x, layer.weight, layer.bias, recipe="fp8-current")
    assert_same_bits(layer(x), expected)
    layer = Case("fp8-current").layer(dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layer)
    assert {"grad_weight_g", "grad_weight_v"} <= step(layer, x, grad_output).keys()


@weights
@by_few
def test_pruning(recipe, quantized_weight):
    layer = Case(recipe, quantized_weight=quantized_weight).layer()
    prune.l1_unstructured(layer, "weight", 0.5)
    x, grad_output = batch(24)
    found = step(layer, x, grad_output)
    assert (found["grad_weight_orig"] == 0).float().mean() == 0.5
    other = Case(recipe).layer()
    with torch.no_grad():
        other.weight.copy_(decoded(layer.weight))
        other.bias.copy_(layer.bias)
    assert_same_bits(found["output"], step(other, x, grad_output)["output"])
    if quantized_weight:
        with pytest.raises(ConfigError, match="data cannot be assigned"):
            prune.remove(layer, "weight")
    else:
        prune.remove(layer, "weight")
        assert_same_bits(step(layer, x, grad_output)["output"], found["output"])


def test_skipping_initialisation():
    layer = nn.utils.skip_init(fg.Linear, K, N, recipe="fp8-delayed", dtype=torch.bfloat16)
    assert layer.weight.device.type == layer.scaling_state.device.type == "cpu"
    nn.init.normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    x, grad_output = batch(24)
    step(layer, x, grad_output)
    assert layer.scaling_state.forward_amax[0] == x.abs().max()


def test_a_lazy_layer_is_refused_until_it_has_a_weight():
    model = nn.Sequential(nn.LazyLinear(N))
    assert "run the model once, then convert" in fg.convert(model, "fp8-current").skipped[0].reason
    model(torch.zeros(1, K))
    assert len(fg.convert(model, "fp8-current").converted) == 1


@by_few
def test_data_parallel_without_gpus_is_the_module(recipe):
    layer = Case(recipe).layer()
    x, grad_output = batch(24)
    expected = step(layer, x, grad_output)
    wrapped = nn.DataParallel(layer)
    assert_same_bits(step(wrapped, x, grad_output)["output"], expected["output"])


def hooked(model):
    """Every kind of hook that changes what passes, and a log of those that do not."""
    log = []
    first, last = model[0], model[-1]
    first.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    first.register_forward_hook(lambda module, inputs, output: output + 1)
    first.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 4,))
    last.register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] * 2,))
    first.weight.register_hook(lambda grad: grad * 2)
    last.weight.register_post_accumulate_grad_hook(lambda parameter: log.append(parameter))
    return log


@weights
@by_few
def test_hooks(recipe, quantized_weight):
    case = Case(recipe, quantized_weight=quantized_weight)
    torch.manual_seed(1)
    model = nn.Sequential(case.layer(K, N), nn.ReLU(), case.layer(N, K))
    twin = copy.deepcopy(model)
    log = hooked(model)
    x, grad_output = batch(24, K, K)
    found = step(model, x, grad_output)

    def by_hand(x):
        hidden = twin[0](x * 2) + 1
        return twin[2](hidden.relu())

    expected = step(twin, x, grad_output * 2, by_hand)
    assert log == [model[2].weight]
    expected["grad_input"] = expected["grad_input"] * 4
    expected["grad_0.weight"] = expected["grad_0.weight"] * 2
    assert_same_results(found, expected)


def test_a_copy_has_the_hooks_that_torch_copies():
    """Those of modules; torch leaves hooks of tensors behind."""
    for kind in (nn.Linear, fg.Linear):
        model = nn.Sequential(kind(K, N), nn.ReLU(), kind(N, K))
        hooked(model)
        twin = copy.deepcopy(model)
        assert len(twin[0]._forward_hooks) == len(twin[0]._forward_pre_hooks) == 1
        x, grad_output = batch(24, K, K, dtype=torch.float32)
        ours, theirs = (step(m, x, grad_output) for m in (twin, model))
        assert_same_bits(ours["grad_input"], theirs["grad_input"])
        assert_same_bits(ours["grad_0.weight"] * 2, theirs["grad_0.weight"])


# Torch's encoder layers.


def encoder(num_layers=2):
    layer = nn.TransformerEncoderLayer(K, 4, 2 * K, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers).eval()


@by_few
def test_a_converted_encoder_does_not_use_the_fast_path(recipe):
    """It would read the weights of the layers itself, in high precision."""
    model = encoder()
    original = copy.deepcopy(model)
    report = fg.convert(model, recipe)
    assert [layer.name for layer in report.converted] == [
        f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)
    ]
    x, padded = torch.randn(2, 5, K), torch.zeros(2, 5, dtype=torch.bool)
    padded[0, 3:] = True
    calls = []
    model.layers[1].linear2.forward = lambda x: (
        calls.append(1) or fg.Linear.forward(model.layers[1].linear2, x)
    )  # a hook would switch the fast path off by itself
    with torch.no_grad():
        ours = model(x), model(x, src_key_padding_mask=padded)
    assert len(calls) == 2
    with torch.no_grad():
        error = relative_error(ours[0], original(x))
    assert error < 1e-5 if recipe == "bf16" else 1e-4 < error < 0.1
    trained = model(x)
    assert relative_error(ours[0], trained.detach()) < 0.02
    if recipe == "bf16":
        assert relative_error(ours[1][1], ours[0][1]) < 1e-5


def test_an_encoder_that_is_left_alone_keeps_the_fast_path():
    model = encoder()
    fg.convert(model, "fp8-current", filter=lambda name, layer: False)
    assert model.use_nested_tensor
    assert model.layers[0].activation_relu_or_gelu
