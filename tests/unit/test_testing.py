"""`fullgraph.testing`: that each assertion holds where it should, and that it can fail."""

import math

import pytest
import torch
from torch import nn

from fullgraph import testing
from fullgraph.errors import CompileError
from fullgraph.formats import BOTH, ROWWISE, Format
from fullgraph.nn import Linear
from fullgraph.quantizers import PerTensorQuantizer, quantize


def quantized(x, orientation=BOTH, format=Format.E4M3):
    return quantize(x, PerTensorQuantizer(format), orientation)


SAME = {
    "nan": torch.tensor([1.0, math.nan]),
    "0-d": torch.tensor(3.0, dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
    "strided": torch.randn(4, 6).t(),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
    "float8": torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn),
    "quantized": quantized(torch.ones(2, 16)),
    "structure": {"a": [torch.ones(2), (None, 3, "x")]},
}


@pytest.mark.parametrize("value", SAME.values(), ids=SAME)
def test_bitwise_holds(value):
    copy = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, value)
    testing.assert_bitwise(copy, value)


ones = torch.ones(2, 16)
DIFFERENT = {
    "value": (
        torch.tensor([[1.0, 2.0]]),
        torch.tensor([[1.0, 3.0]]),
        r"1 of 2 elements of float32\[1, 2\] differ, the first at \[0, 1\]: 2.0 is not 3.0",
    ),
    "one bit": (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), "1 of 1 elements"),
    "0-d": (torch.tensor(1.0), torch.tensor(2.0), r"first at \[\]: 1.0 is not 2.0"),
    "sign of zero": (torch.tensor([0.0]), torch.tensor([-0.0]), "0.0 is not -0.0"),
    "nan and number": (torch.tensor([math.nan]), torch.tensor([1.0]), "nan is not 1.0"),
    "complex": (torch.tensor([1j]), torch.tensor([2j]), "1.0 is not 2.0"),
    "dtype": (ones, ones.double(), r"float32\[2, 16\] on cpu is not float64"),
    "shape": (ones, ones[:1], r"is not float32\[1, 16\]"),
    "broadcast": (torch.ones(1), torch.ones(1, 1), r"float32\[1\] on cpu is not float32\[1, 1\]"),
    "place": ({"a": [0, ones]}, {"a": [0, ones * 2]}, r"\['a'\]\[1\]: 32 of 32"),
    "length": ([1], [1, 2], r"value: list\(\[0\]\) is not list\(\[0\], \[1\]\)"),
    "keys": ({"a": 1}, {"b": 1}, r"dict\(\['a'\]\) is not dict\(\['b'\]\)"),
    "kind of container": ([1], (1,), "list.* is not tuple"),
    "kind of leaf": (1, 1.0, "1 is not 1.0"),
    "none": (None, ones, r"None is not Tensor float32\[2, 16\]"),
    "bytes": (quantized(ones), quantized(ones * 2), "scale_inv: 1 of 1 elements"),
    "quantizer": (
        quantized(ones),
        quantized(ones, format=Format.E5M2),
        r"data: 32 of 32|quantizer\.format",
    ),
    "copies": (quantized(ones), quantized(ones, ROWWISE), "columnwise_data: .* is not None"),
    "quantized and plain": (quantized(ones), ones, "QuantizedTensor .* is not Tensor"),
}


@pytest.mark.parametrize(("actual", "expected", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_bitwise_fails(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        testing.assert_bitwise(actual, expected)


def test_relative_error_and_sqnr():
    x = torch.randn(64, 64)
    assert testing.relative_error(x, x) == 0
    assert testing.relative_error(torch.zeros(3), torch.zeros(3)) == 0
    assert testing.relative_error(torch.ones(3), torch.zeros(3)) == math.inf
    assert testing.relative_error(1.25 * x, x) == pytest.approx(0.25, rel=1e-6)
    assert testing.sqnr_db(x, x) == math.inf
    assert testing.sqnr_db(1.1 * x, x) == pytest.approx(20, abs=1e-4)
    # E4M3 of normal values: 2.65 % error
    assert 31 < testing.sqnr_db(quantized(x), x) < 32


def test_within_error_holds_and_fails():
    x = torch.randn(64, 64)
    testing.assert_within_error(quantized(x), x, 0.03)
    with pytest.raises(
        AssertionError, match=r"error 0\.02\d+ of float32\[64, 64\] is over the limit 0\.02"
    ):
        testing.assert_within_error(quantized(x), x, 0.02)
    with pytest.raises(AssertionError, match="error nan"):
        testing.assert_within_error(x * math.nan, x, 1e9)
    with pytest.raises(AssertionError, match=r"shapes differ: float32\[64, 64\] and float32\[64\]"):
        testing.assert_within_error(x, x[0], 1)


def test_one_graph_holds_and_counts():
    model = nn.Sequential(Linear(32, 48, recipe="fp8-current"), nn.ReLU(), Linear(48, 8))
    graphs = testing.assert_one_graph(model, torch.randn(3, 32))
    assert (len(graphs.forward), len(graphs.backward)) == (2, 2)
    assert model[0].weight.grad is None
    with torch.no_grad():
        graphs = testing.assert_one_graph(model, torch.randn(3, 32))
    assert (len(graphs.forward), len(graphs.backward)) == (2, 0)


def branches(x):
    return x + 1 if x.sum() > 0 else x


def test_one_graph_fails():
    with pytest.raises(AssertionError, match=r"branches is not one graph: Data-dependent"):
        testing.assert_one_graph(branches, torch.ones(3))
    with pytest.raises(AssertionError, match="<lambda> is 0 graphs, not one"):
        testing.assert_one_graph(lambda x: 3, torch.ones(3))


def scaled(x, factor=2, *more, offset=0.0):
    return x * factor + sum(more) + offset


def test_compiles_once_holds():
    layer = Linear(32, 8, recipe="fp8-current")
    sets = [(torch.randn(size, 32),) for size in (4, 9, 33)]
    testing.assert_compiles_once(layer, *sets, dynamic=True)
    testing.assert_compiles_once(layer, sets[0], (torch.randn(4, 32),))
    marked = torch.randn(5, 32)
    torch._dynamo.mark_dynamic(marked, 0)
    testing.assert_compiles_once(layer, (marked,), *sets)


x = torch.ones(4, 3)
RECOMPILING = {
    "size": (
        (x,),
        (x[:3],),
        r"scaled: call 2 recompiles because x.shape\[0\] was 4, is 3 \(guard: tensor 'x' size mismatch at index 0",
    ),
    "dtype": (
        (x,),
        (x.double(),),
        r"because x.dtype was float32, is float64 \(guard: tensor 'x' dt",
    ),
    "requires_grad": (
        (x,),
        (x.clone().requires_grad_(),),
        r"because x.requires_grad was False, is True",
    ),
    "value": ((x, True), (x, False), r"because factor was True, is False"),
    "variadic": (
        (x, 1, x + 1),
        (x, 1, x.double()),
        r"because more\[0\].dtype was float32, is float64",
    ),
    "number of arguments": ((x,), (x, 1), r"because len\(args\) was 1, is 2"),
}


@pytest.mark.parametrize(("first", "second", "message"), RECOMPILING.values(), ids=RECOMPILING)
def test_compiles_once_fails_and_names_the_argument(first, second, message):
    with pytest.raises(AssertionError, match=message):
        testing.assert_compiles_once(scaled, first, second)


def test_compiles_once_names_arguments_of_modules():
    sets = [(torch.randn(size, 8),) for size in (4, 4, 5)]
    message = r"Linear: call 3 recompiles because input.shape\[0\] was 4, is 5"
    with pytest.raises(AssertionError, match=message):
        testing.assert_compiles_once(Linear(8, 8), *sets)


def test_compiles_once_sees_the_state_of_the_model():
    layer = Linear(8, 8)

    def switching(x):
        layer.train(x.shape[0] == 4)
        return layer(x)

    with pytest.raises(AssertionError, match="call 2 recompiles"):
        testing.assert_compiles_once(switching, (torch.randn(4, 8),), (torch.randn(5, 8),))
    with pytest.raises(AssertionError, match="two calls or more are needed, got 1"):
        testing.assert_compiles_once(layer, (torch.randn(4, 8),))


def test_cuda_graph_lint_is_here_too():
    testing.cuda_graph_lint(torch.add, torch.ones(2), torch.ones(2))
    with pytest.raises(CompileError, match="not capturable"):
        testing.cuda_graph_lint(torch.Tensor.item, torch.ones(1))
