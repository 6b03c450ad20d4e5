"""torch.export, its files, AOTInductor from Python: one forward op for each layer, the bits of eager mode.

ONNX is refused with the reason; TorchScript in test_transforms.py.
"""

import copy
import io
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fullgraph as fg
from fullgraph.errors import CompileError
from fullgraph.ops.linear import linear_op
from linear_cases import RECIPES

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:The given buffer is not writable"),
]

K, HIDDEN, N = 64, 48, 32
WEIGHTS = pytest.mark.parametrize("quantized_weight", [False, True], ids=["plain", "quantized"])
STRICT = pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
SOME_RECIPES = [
    r if r in ("fp8-current", "fp8-delayed", "nvfp4") else pytest.param(r, marks=pytest.mark.slow)
    for r in RECIPES
]
SOURCES = Path(__file__).parents[2] / "src"


def new_model(recipe, quantized_weight=False, frozen=True):
    torch.manual_seed(0)
    options = {"recipe": recipe, "quantized_weight": quantized_weight, "dtype": torch.bfloat16}
    model = nn.Sequential(
        fg.Linear(K, HIDDEN, **options), nn.ReLU(), fg.Linear(HIDDEN, N, **options)
    )
    if model[0].scaling_state.rule:  # with scales that are not 1
        model(rows(8)).sum().backward()
        fg.update_scales(model)
        model.zero_grad()
    return model.eval().requires_grad_(not frozen)


def rows(count):
    return torch.randn(count, K, dtype=torch.bfloat16)


def exported(model, strict=False):
    dynamic = ({0: torch.export.Dim("rows", min=2)},)
    return torch.export.export(model, (rows(4),), strict=strict, dynamic_shapes=dynamic)


def ops_of(program):
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


def saved_and_loaded(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def file_copy(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def assert_equal_to_eager(function, model):
    for count in (2, 7, 32):
        x = rows(count)
        with torch.no_grad():
            assert torch.equal(function(x), model(x))


@pytest.mark.parametrize("recipe", SOME_RECIPES)
@WEIGHTS
@STRICT
def test_export(recipe, quantized_weight, strict):
    model = new_model(recipe, quantized_weight)
    before = [layer.scaling_state.history() for layer in (model[0], model[2])]
    program = exported(model, strict)
    relu = torch.ops.aten.relu.default
    assert ops_of(program) == [linear_op.front_op, relu, linear_op.front_op]
    assert_equal_to_eager(program.module(), model)
    lowered = program.run_decompositions()
    forward, *rest = ops_of(lowered)
    assert forward in linear_op.fwd_ops
    assert rest == [relu, forward]
    assert_equal_to_eager(lowered.module(), model)
    after = [layer.scaling_state.history() for layer in (model[0], model[2])]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("recipe", SOME_RECIPES)
@WEIGHTS
def test_files(recipe, quantized_weight):
    model = new_model(recipe, quantized_weight)
    program = exported(model)
    loaded = saved_and_loaded(program)
    assert ops_of(loaded) == ops_of(program)
    assert_equal_to_eager(loaded.module(), model)
    assert_equal_to_eager(loaded.run_decompositions().module(), model)
    assert_equal_to_eager(saved_and_loaded(program.run_decompositions()).module(), model)


@WEIGHTS
def test_weights_in_the_file_are_those_of_the_model(quantized_weight):
    model = new_model("mxfp8", quantized_weight)
    weight = saved_and_loaded(exported(model)).state_dict["0.weight"]
    assert isinstance(weight, fg.QuantizedTensor) == quantized_weight
    assert isinstance(weight, nn.Parameter)
    plain = (w.dequantize() if quantized_weight else w for w in (weight, model[0].weight))
    assert torch.equal(*plain)


def test_codes_that_a_user_looks_at_are_a_tensor_like_any_other():
    """`torch.export.save` tells tensor classes by the type of `.data`, which here is one of its own."""
    codes = new_model("fp8-current", quantized_weight=True)[0].weight.data
    assert type(codes) is not torch.Tensor
    assert repr(codes).startswith("tensor(")
    for other in (copy.deepcopy(codes), file_copy(codes), codes.clone()):
        assert type(other) is torch.Tensor
        assert torch.equal(other.view(torch.uint8), codes.view(torch.uint8))


def test_a_trainable_plain_weight_may_be_exported():
    model = new_model("fp8-current", frozen=False)
    assert_equal_to_eager(exported(model).run_decompositions().module(), model)


@STRICT
def test_a_trainable_quantized_weight_is_refused(strict):
    model = new_model("fp8-current", quantized_weight=True, frozen=False)
    with pytest.raises((CompileError, RuntimeError)) as found:
        exported(model, strict)
    for words in ("a structured tensor that requires a gradient", "model.requires_grad_(False)"):
        assert words in str(found.value)
    model.requires_grad_(False)
    assert_equal_to_eager(exported(model, strict).module(), model)


def test_another_process_needs_the_package(tmp_path):
    """A file of a program holds the names of its ops; the import defines them."""
    model = new_model("fp8-current", quantized_weight=True)
    x = rows(5)
    torch.export.save(exported(model), tmp_path / "model.pt2")
    torch.save((x, model(x)), tmp_path / "expected.pt")
    script = f"""
        import sys, torch
        sys.path.insert(0, {str(SOURCES)!r})
        import fullgraph
        x, expected = torch.load({str(tmp_path / "expected.pt")!r})
        program = torch.export.load({str(tmp_path / "model.pt2")!r})
        with torch.no_grad():
            assert torch.equal(program.module()(x), expected)
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], check=True)


EXHAUSTIVE = [
    r if r == "fp8-delayed" else pytest.param(r, marks=pytest.mark.exhaustive) for r in RECIPES
]


@pytest.mark.slow  # a C++ compiler runs
@pytest.mark.parametrize("recipe", EXHAUSTIVE)
@WEIGHTS
def test_aot_inductor(recipe, quantized_weight, tmp_path):
    model = new_model(recipe, quantized_weight)
    path = torch._inductor.aoti_compile_and_package(
        exported(model), package_path=str(tmp_path / "model.pt2")
    )
    assert_equal_to_eager(torch._inductor.aoti_load_package(path), model)


# ONNX.


def refused_by_us():
    return pytest.raises(
        CompileError, match=r"fullgraph::linear: ONNX has no such operator(.|\n)*Why: (.|\n)*Do: "
    )


@WEIGHTS
def test_onnx_of_torchscript_is_refused(quantized_weight, tmp_path):
    model = new_model("fp8-current", quantized_weight)
    with refused_by_us(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (rows(4),), tmp_path / "model.onnx", dynamo=False)


@WEIGHTS
@STRICT
def test_onnx_is_refused(quantized_weight, strict, monkeypatch):
    """What `torch.onnx.export(dynamo=True)` does first; the rest of it needs onnxscript."""
    model = new_model("fp8-current", quantized_weight)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    if strict:
        with pytest.raises(RuntimeError, match="ONNX has no such operator"):
            exported(model, strict)
    else:
        with refused_by_us():
            exported(model, strict)


def test_onnx_is_refused_where_onnxscript_is_installed(tmp_path):
    pytest.importorskip("onnxscript", reason="needs onnxscript")
    with pytest.raises(Exception, match="ONNX has no such operator"):
        torch.onnx.export(new_model("fp8-current"), (rows(4),), tmp_path / "m.onnx", dynamo=True)
