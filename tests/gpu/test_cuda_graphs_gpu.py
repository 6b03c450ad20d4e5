"""CUDA graphs: of `mode="reduce-overhead"`, captured by hand around a whole step, and of `make_graphed_callables`.

Whatever replays does to the bit what eager mode does.
"""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fullgraph as fg
from fullgraph.nn.scaling import preserved
from linear_cases import RECIPES, assert_same_results, state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::fullgraph.errors.EmulationWarning"),
    # A warm-up on a side stream, as torch's documentation has it.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]
GPU = torch.device("cuda", 0)
WIDTH, HIDDEN, TOKENS = 256, 384, 128
recipes = pytest.mark.parametrize("recipe", RECIPES)


def new_model(recipe, second=None):
    """Two layers with something between them; every call makes the same one."""
    torch.manual_seed(1)
    options = {"dtype": torch.bfloat16, "device": GPU}
    return nn.Sequential(
        fg.Linear(WIDTH, HIDDEN, recipe=recipe, **options),
        nn.ReLU(),  # which rounds nothing: Inductor rounds GELU otherwise than eager mode
        fg.Linear(HIDDEN, WIDTH, recipe=second or recipe, **options),
    )


def has_scales(model):
    return any(isinstance(m, fg.Linear) and m.scaling_state.rule for m in model.modules())


def update(model):
    if has_scales(model):
        fg.update_scales(model)


def data_of(number, tokens=TOKENS):
    """Input and gradient of the output of a step; they grow and shrink, so that scales matter."""
    generator = torch.Generator(GPU).manual_seed(number)
    made = torch.randn(2, tokens, WIDTH, device=GPU, generator=generator).bfloat16()
    factor = 2.0 ** (number % 5)
    return made[0] * factor, made[1] * (1e-3 / factor)


def everything(model, **more):
    """Parameters, gradients and states by name."""
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    found |= {f"grad of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}  # fmt: skip
    for name, layer in model.named_modules():
        if isinstance(layer, fg.Linear):
            found |= {f"{name}.{key}": t for key, t in state_of(layer).items()}
    return found | {name: t.detach().clone() for name, t in more.items()}


def assert_one_of_each(graphs):
    assert counters["stats"]["unique_graphs"] == graphs
    assert counters["inductor"]["cudagraph_skips"] == 0


# reduce-overhead.


def train_step(model, function, optimizer, number, microbatches=1, set_to_none=True):
    """One step: its outputs, then everything before and after the optimizer."""
    optimizer.zero_grad(set_to_none=set_to_none)
    torch.compiler.cudagraph_mark_step_begin()
    found = {}
    for i in range(microbatches):
        x, grad_output = data_of(number * microbatches + i)
        output = function(x)
        found[f"output{i}"] = output.detach().clone()
        output.backward(grad_output)
    before = everything(model, **found)
    optimizer.step()
    update(model)
    return {**before, **{f"{name} after": t for name, t in everything(model).items()}}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


MIXED = [("fp8-delayed", "nvfp4"), ("fp8-block", "fp8-current")]


@pytest.mark.parametrize(("first", "second"), MIXED, ids=["-".join(pair) for pair in MIXED])
def test_train_eval_train(first, second):
    models = new_model(first, second), new_model(first, second)
    function = torch.compile(models[0], fullgraph=True, mode="reduce-overhead")
    optimizers = [sgd(model) for model in models]
    for number in range(12):
        if number % 4 == 3:
            for model in models:
                model.eval()
            x, _ = data_of(number)
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                assert torch.equal(function(x), models[1](x))
            continue
        results = []
        for model, run, optimizer in zip(models, (function, models[1]), optimizers, strict=True):
            model.train()
            torch.manual_seed(number)  # of stochastic rounding
            results.append(train_step(model, run, optimizer, number))
        assert_same_results(*results)
    assert_one_of_each(2)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "fp8-per-row"])
def test_gradients_accumulate_over_microbatches(recipe):
    """One microbatch after the other, into gradients that are there: replays add to them."""
    models = new_model(recipe), new_model(recipe)
    function = torch.compile(models[0], fullgraph=True, mode="reduce-overhead")
    for model in models:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    optimizers = [sgd(model) for model in models]
    for number in range(6):
        results = [
            train_step(model, run, optimizer, number, microbatches=3, set_to_none=False)
            for model, run, optimizer in zip(models, (function, models[1]), optimizers, strict=True)
        ]
        assert_same_results(*results)
    assert_one_of_each(1)


def accumulated_from_none(layer, steps=4):
    """Whether gradients that begin as None accumulate right under reduce-overhead; torch's error, if it raises one."""
    torch._dynamo.reset()
    eager = copy.deepcopy(layer)
    function = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for number in range(steps):
        found = []
        for model, run in ((layer, function), (eager, eager)):
            model.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            for i in range(2):
                x, grad_output = data_of(2 * number + i)
                try:
                    run(x).backward(grad_output)
                    weight_grad = model.weight.grad.clone()
                except RuntimeError as error:
                    return f"raises {str(error)[:40]}"
            found.append(weight_grad)
        if not torch.equal(*found):
            return "wrong"
    return "right"


def test_gradients_that_begin_as_none_behave_as_those_of_torch():
    """A first gradient may lie in the memory of the graph; what torch makes of that is not ours to change."""
    options = {"bias": False, "dtype": torch.bfloat16, "device": GPU}
    outcomes = {
        accumulated_from_none(make(WIDTH, WIDTH, **options)) for make in (nn.Linear, fg.Linear)
    }
    outcomes.add(accumulated_from_none(fg.Linear(WIDTH, WIDTH, recipe="fp8-current", **options)))
    assert len(outcomes) == 1, outcomes


def test_a_step_for_each_size_is_recorded_once(monkeypatch):
    captures = []
    enter = torch.cuda.graph.__enter__
    monkeypatch.setattr(
        torch.cuda.graph, "__enter__", lambda self: (captures.append(self), enter(self))[1]
    )
    model = new_model("fp8-current")
    function = torch.compile(model, fullgraph=True, mode="reduce-overhead", dynamic=True)
    after = []
    for _ in range(5):
        for tokens in (32, 64, 48):
            x, grad_output = data_of(0, tokens)
            results = []
            for run in (function, model):
                model.zero_grad()
                torch.compiler.cudagraph_mark_step_begin()
                output = run(x)
                kept = output.detach().clone()
                output.backward(grad_output)
                results.append(everything(model, output=kept))
                del output
            assert_same_results(*results)
        after.append(len(captures))
    assert after[0] <= after[1] <= after[2] == after[3] == after[4]
    assert 6 <= after[-1] <= 12  # forward and backward, three sizes; the pool may take a few more
    assert_one_of_each(1)


# Captured by hand.


class Step:
    """A whole step of training on tensors that stay where they are."""

    def __init__(self, model, optimizer, function=None, set_to_none=False):
        self.model, self.optimizer, self.set_to_none = model, optimizer, set_to_none
        self.function = function or model
        self.x, self.grad_output = data_of(0)
        self.output = None

    def load(self, number):
        for mine, given in zip((self.x, self.grad_output), data_of(number), strict=True):
            mine.copy_(given)

    def __call__(self):
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        output = self.function(self.x)
        output.backward(self.grad_output)
        self.optimizer.step()
        update(self.model)
        self.output = output.detach()

    def warm_up(self, number=3):
        """As torch's documentation has it: on a side stream, before the capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(number):
                self()
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self):
        graph = torch.cuda.CUDAGraph()
        if self.set_to_none:  # so that the capture makes gradients in the memory of the graph
            self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            self()
        return graph


OPTIMIZERS = {
    "sgd": sgd,
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, capturable=True, foreach=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, capturable=True, fused=True),
}


def assert_replays_like_eager(captured, eager, steps=10):
    """Both were warmed up alike; then one replays, and the other one runs."""
    torch.cuda.synchronize()
    graph = captured.capture()
    for number in range(steps):
        for step, run in ((captured, graph.replay), (eager, eager)):
            torch.manual_seed(number)
            step.load(number)
            run()
        assert_same_results(
            everything(captured.model, output=captured.output),
            everything(eager.model, output=eager.output),
        )


def warmed_up(*steps):
    for step in steps:
        torch.manual_seed(0)
        step.warm_up()
    return steps


@recipes
@pytest.mark.parametrize("set_to_none", [False, True], ids=["zeros", "none"])
def test_a_whole_step_captured(set_to_none, recipe):
    steps = [Step(m, sgd(m), set_to_none=set_to_none) for m in (new_model(recipe) for _ in range(2))]  # fmt: skip
    assert_replays_like_eager(*warmed_up(*steps))
    if has_scales(steps[0].model):
        assert steps[0].model[0].fp8_scale[0] != 1


@pytest.mark.parametrize("optimizer", ["adamw", "fused"])
def test_a_whole_step_captured_with_adamw(optimizer):
    models = new_model("fp8-delayed", "nvfp4"), new_model("fp8-delayed", "nvfp4")
    assert_replays_like_eager(*warmed_up(*[Step(m, OPTIMIZERS[optimizer](m)) for m in models]))


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_a_compiled_step_captured(recipe):
    """`torch.compile` in its default mode, and a capture around it."""
    models = new_model(recipe), new_model(recipe)
    function = torch.compile(models[0], fullgraph=True)
    steps = Step(models[0], sgd(models[0]), function), Step(models[1], sgd(models[1]))
    assert_replays_like_eager(*warmed_up(*steps))
    assert_one_of_each(1)


def run_once(model, x, grad_output, seed=3):
    """One forward and backward pass in eager mode."""
    model.zero_grad()
    reset(model)
    torch.manual_seed(seed)
    output = model(x)
    output.backward(grad_output)
    return everything(model, output=output)


def reset(model):
    for layer in (model[0], model[2]):
        layer.scaling_state.reset()


@recipes
def test_a_size_that_was_never_run_can_be_captured(recipe):
    """All that an op keeps exists before the capture; nothing of it is made within and not yet computed."""
    model = new_model(recipe)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for tokens in (2 * TOKENS, 3 * TOKENS):
            run_once(model, *data_of(0, tokens))
    torch.cuda.current_stream().wait_stream(stream)
    x, grad_output = data_of(1)
    model.zero_grad()
    reset(model)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Relaxed: a GEMM of this size may load a kernel of cuBLAS that was not loaded before.
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        output = model(x)
        output.backward(grad_output)
    captured = {n: p.grad for n, p in model.named_parameters()}
    before = run_once(model, x, grad_output)
    reset(model)
    torch.manual_seed(3)
    graph.replay()
    replayed = {
        "output": output.detach().clone(),
        **{f"grad of {n}": g for n, g in captured.items()},
    }
    assert_same_results(replayed, {name: before[name] for name in replayed})
    del output
    assert_same_results(run_once(model, x, grad_output), before)


def test_stochastic_rounding_draws_anew_at_each_replay():
    model = new_model("nvfp4")
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.0))
    (step,) = warmed_up(step)
    graph = step.capture()

    def gradients(seed):
        torch.manual_seed(seed)
        found = []
        for _ in range(4):
            graph.replay()
            found.append(model[0].weight.grad.clone())
        return found

    first = gradients(3)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(first, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(3), strict=True))
    assert not torch.equal(first[0], gradients(4)[0])


# make_graphed_callables.


@recipes
@pytest.mark.parametrize("what", ["layer", "model"])
def test_graphed_callables(what, recipe):
    models = new_model(recipe), new_model(recipe)
    sample = data_of(0)[0].requires_grad_()
    with preserved(models[0]):  # its warm-up goes backward from memory that nobody has written
        if what == "model":
            function = torch.cuda.make_graphed_callables(models[0], (sample,))
        else:
            graphed = torch.cuda.make_graphed_callables(models[0][0], (sample,))
            function = nn.Sequential(graphed, *list(models[0])[1:])
    for number in range(4):
        results = []
        for model, run in ((models[0], function), (models[1], models[1])):
            model.zero_grad()
            torch.manual_seed(number)
            x, grad_output = data_of(number)
            leaf = x.requires_grad_()
            output = run(leaf)
            kept = output.detach().clone()
            output.backward(grad_output)
            results.append(everything(model, output=kept, leaf=leaf.grad))
            update(model)
        assert_same_results(*results)


# Memory.


def peak_of(model, function):
    """Bytes over what was there before: the peak of forward and backward, and what is left behind."""
    x = torch.randn(8192, 1024, device=GPU, dtype=torch.bfloat16)
    grad_output = torch.randn_like(x) * 1e-3
    for _ in range(2):  # the first one compiles
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function(x).backward(grad_output)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        left = torch.cuda.memory_allocated() - before
    return peak, left


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "fp8-block"])
def test_saved_tensors_are_freed_as_early_as_in_eager_mode(recipe):
    layers = [
        fg.Linear(1024, 1024, bias=False, recipe=recipe, dtype=torch.bfloat16, device=GPU)
        for _ in range(8)
    ]
    model = nn.Sequential(*layers)
    eager, left = peak_of(model, model)
    compiled, left_compiled = peak_of(model, torch.compile(model, fullgraph=True))
    assert left_compiled == left
    assert compiled <= 1.02 * eager, (compiled, eager)
