"""The exception tree, its messages, and how tensors are written in them."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fullgraph import errors
from fullgraph.errors import (
    CompileError,
    ConfigError,
    FullgraphError,
    HardwareError,
    ShapeError,
    describe,
)

TREE = {
    ConfigError: ValueError,
    ShapeError: ValueError,
    HardwareError: RuntimeError,
    CompileError: RuntimeError,
}


@pytest.mark.parametrize("cls", TREE)
def test_is_one_of_ours_and_a_builtin(cls):
    assert issubclass(cls, FullgraphError)
    assert issubclass(cls, TREE[cls])
    with pytest.raises(TREE[cls], match=r"^Linear: no$"):
        raise cls("Linear: no")


@pytest.mark.parametrize("cls", TREE)
def test_tree_is_printed_in_the_module_docstring(cls):
    assert f"{cls.__name__}({TREE[cls].__name__})" in errors.__doc__


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "Linear: need 16, got 7"),
        ({"why": "rule."}, "Linear: need 16, got 7\nWhy: rule."),
        ({"do": "pad."}, "Linear: need 16, got 7\nDo: pad."),
        ({"why": "rule.", "do": "pad."}, "Linear: need 16, got 7\nWhy: rule.\nDo: pad."),
    ],
)
def test_message_has_a_line_for_each_part(parts, text):
    assert str(ShapeError("Linear: need 16, got 7", **parts)) == text


def test_parts_are_keywords():
    with pytest.raises(TypeError, match="positional argument"):
        ShapeError("what", "why")


@pytest.mark.parametrize("cls", [FullgraphError, *TREE])
@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_survives_copying(cls, clone):
    error = cls("what", why="why", do="do")
    error.layer = "layers.3"
    twin = clone(error)
    assert type(twin) is cls
    assert str(twin) == str(error)
    assert (twin.what, twin.why, twin.do, twin.layer) == ("what", "why", "do", "layers.3")


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.empty(3, 7, dtype=torch.bfloat16), "bfloat16[3, 7]"),
        (torch.empty(()), "float32[]"),
        (torch.empty(0, 5, dtype=torch.uint8), "uint8[0, 5]"),
        (torch.empty(2, dtype=torch.float8_e4m3fn, device="meta"), "float8_e4m3fn[2]"),
        (np.zeros((2, 3), np.float32), "float32[2, 3]"),
    ],
)
def test_describe(tensor, text):
    assert describe(tensor) == text


def test_describe_keeps_sizes_symbolic():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.empty(24, 7, dtype=torch.float16))
    text = describe(fake)
    assert text.startswith("float16[s")
    assert "24" not in text
    assert not mode.shape_env.guards
