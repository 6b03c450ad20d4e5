"""Processes and threads, copies of compiled modules, defaults of torch, interruptions, reloading, `python -O`."""

import copy
import importlib
import io
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fullgraph as fg
import process_work
from fullgraph.ops import linear as linear_module
from linear_cases import RECIPES, assert_same_results, same_random_numbers
from process_work import K, N, digest, everything, new_model, train

# Dynamo looks for the gradient of what a compiled layer hands to the next one; hidden from users, an error here.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

ROOT = Path(__file__).parents[2]
SOME = ["fp8-delayed", "nvfp4", "mxfp8"]
recipes = pytest.mark.parametrize("recipe", RECIPES)
some = pytest.mark.parametrize("recipe", SOME)


def python(*arguments):
    """Run Python in a process of its own, with this package and the tests on its path."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    out = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    return out.stdout


# Processes.


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_train_as_their_parent(method):
    python("-c", f"import process_work; process_work.check_children({method!r})")


def test_a_forked_child():
    """The one of three ways that takes over what the parent has in memory."""
    python(
        "-c",
        "import process_work as w; expected = w.train_all(); assert w.in_child('fork', w.send_all) == expected",
    )


@pytest.mark.slow  # of all that is imported, bytecode without assertions has to be made
def test_flags_of_python():
    """Without assertions and docstrings."""
    script = "import process_work as w; print(w.train_new('fp8-delayed'), w.train_new('mxfp8', 'aot_eager'))"
    expected = [digest(train(new_model(recipe))) for recipe in ("fp8-delayed", "mxfp8")]
    assert python("-OO", "-c", script).split() == expected


def test_a_token_is_the_same_in_every_process():
    """Compile caches compare it: nothing of this process may be in it."""
    script = "import fullgraph as fg; print(fg.Linear(2, 2, recipe='nvfp4').recipe.numerics_text)"
    assert python("-R", "-c", script).strip() == fg.recipes.get("nvfp4").numerics_text


# Threads.


def test_threads_train_at_once():
    process_work.check_threads(compiled_too=False)


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch below 2.13 crashes when threads compile at once"
)
def test_threads_compile_at_once():
    """In a process of its own: what goes wrong here may end it."""
    python("-c", "import process_work; process_work.check_threads(compiled_too=True)")


# Copies.


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": through_pickle, "file": through_file}


def optimized(model):
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def in_place(model):
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def layer_by_layer(model):
    for layer in (model[0], model[2]):
        layer.compile(backend="aot_eager", fullgraph=True)
    return model


@some
@pytest.mark.parametrize("compile_it", [optimized, in_place, layer_by_layer])
def test_copies_of_compiled_modules_train_on(compile_it, recipe):
    model = compile_it(new_model(recipe))
    expected = train(new_model(recipe))
    assert_same_results(train(getattr(model, "_orig_mod", model), model), expected)
    for how in COPIES.values():
        if how is through_file and compile_it is optimized:
            continue  # as slow as the others, and the same as `pickle`
        other, twin = how(model), copy.deepcopy(getattr(model, "_orig_mod", model))
        inner = getattr(other, "_orig_mod", other)
        assert {p.data_ptr() for p in inner.parameters()}.isdisjoint(
            p.data_ptr() for p in model.parameters()
        )
        assert_same_results(train(inner, other), train(twin))


# Defaults of torch.


@recipes
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_default_device(device, recipe):
    """Whatever an op makes is where its tensors are."""
    expected = train(new_model(recipe))
    model = new_model(recipe)
    x = torch.ones(8, K, dtype=torch.bfloat16)
    with torch.device(device):
        made = fg.Linear(K, N, recipe=recipe)
        output = model(x)
        output.backward(torch.ones_like(output))
        q = fg.quantize(x, fg.PerTensorQuantizer(fg.Format.E4M3))
    assert made.weight.device.type == made.scaling_state.device.type == device
    assert q.device.type == output.device.type == "cpu"
    model = new_model(recipe)
    assert_same_results(train(model), expected)
    made.to_empty(device="cpu")
    made.reset_parameters()
    assert made(torch.ones(3, K)).device.type == made.scaling_state.device.type == "cpu"


@some
def test_a_default_device_inside_a_graph(recipe):
    model = new_model(recipe)
    x = torch.ones(8, K, dtype=torch.bfloat16)
    expected = model(x)
    try:
        torch.set_default_device("cpu")
        assert torch.equal(optimized(model)(x), expected)
    finally:
        torch.set_default_device(None)


@recipes
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_default_dtype(dtype, recipe):
    expected = train(new_model(recipe))
    model = new_model(recipe)
    torch.set_default_dtype(dtype)
    try:
        state = fg.Linear(K, N, recipe="fp8-delayed", dtype=torch.bfloat16).scaling_state
        assert state.forward_scale.dtype == state.history().dtype == torch.float32
        output = model(torch.ones(8, K, dtype=torch.bfloat16))
        output.backward(torch.ones_like(output) / 64)
        found = everything(model)
    finally:
        torch.set_default_dtype(torch.float32)
    model = new_model(recipe)
    output = model(torch.ones(8, K, dtype=torch.bfloat16))
    if process_work.is_random(model):
        return  # the numbers of a run are its own
    output.backward(torch.ones_like(output) / 64)
    assert_same_results(found, everything(model))
    assert_same_results(train(new_model(recipe)), expected)


# Interruptions.


class Interrupt(TorchDispatchMode):
    """Ctrl-C at the n-th operation, those inside of our ops included."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt("here")
        return func(*args, **(kwargs or {}))


def pass_through(model):
    """Forward and backward under an autocast that nothing but this uses."""
    with same_random_numbers(), fg.autocast("mxfp8"):
        output = model(torch.ones(4, K, dtype=torch.bfloat16))
        output.backward(torch.ones_like(output) / 64)
    return {"output": output.detach(), **everything(model)}


@recipes
def test_an_interruption_leaves_nothing_behind(recipe):
    model = new_model(recipe)
    expected = pass_through(copy.deepcopy(model))
    state = model[0].scaling_state
    interrupted = 0
    for after in range(200):
        model.zero_grad()
        for layer in (model[0], model[2]):
            layer.scaling_state.reset()
        for op in fg.customop.op.defined_ops():
            op._calls.clear()  # as if for the first time
        try:
            with Interrupt(after):
                pass_through(model)
        except KeyboardInterrupt:
            interrupted += 1
        else:
            break
        assert fg.nn.current_recipe() == fg.recipes.get("bf16")
        model.zero_grad()
        for layer in (model[0], model[2]):
            layer.scaling_state.reset()
        assert_same_results(pass_through(model), expected)
    assert interrupted >= 4
    assert model[0].scaling_state is state


def test_an_interruption_of_a_trace(monkeypatch):
    """Ctrl-C while a plan is made for a graph; the next call compiles as if nothing had been."""
    model = new_model("fp8-delayed")
    function = optimized(model)
    choose = linear_module._choose
    for after in range(4):
        left = [after]

        def interrupted(*args, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt("here")
            return choose(*args)

        for op in fg.customop.op.defined_ops():
            op._calls.clear()
        monkeypatch.setattr(linear_module, "_choose", interrupted)
        with pytest.raises(KeyboardInterrupt, match="here"):
            function(torch.ones(4, K, dtype=torch.bfloat16))
        monkeypatch.undo()
    assert_same_results(train(model, function), train(new_model("fp8-delayed")))


# Reloading.


def test_reloading_the_package_is_harmless():
    before = new_model("fp8-delayed")
    expected = train(copy.deepcopy(before))
    again = importlib.reload(fg)
    assert again.Linear is type(before[0])
    assert_same_results(train(before), expected)
    assert_same_results(train(new_model("fp8-delayed")), expected)


def test_reloading_an_op_is_refused():
    """In a process of its own: half of the module has been made anew by then."""
    script = """
        import importlib
        import fullgraph
        from fullgraph.ops import linear
        try:
            importlib.reload(linear)
        except fullgraph.errors.ConfigError as error:
            print(error)
    """
    assert "define fullgraph::linear: this op is already defined" in python(
        "-c", textwrap.dedent(script)
    )
