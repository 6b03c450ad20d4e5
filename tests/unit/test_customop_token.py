"""Static arguments as text: what can be written, that it comes back equal, and what is refused."""

import dataclasses
import enum
import functools
import importlib
import linecache
import math
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import customop_ops as ops
from fullgraph.customop.token import (
    Encoded,
    Group,
    encode,
    find_type,
    parse,
    remember,
    source_digest,
)
from fullgraph.errors import CompileError, ConfigError


class Color(enum.Enum):
    RED = "red"
    CRIMSON = "red"
    GREEN = ("a", 1)


class Number(enum.IntEnum):
    ONE = 1


class Permission(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass(frozen=True)
class Inner:
    factor: float
    name: str = "x"


@dataclass(frozen=True)
class Outer:
    inner: Inner
    options: dict[str, Any]
    derived: int = dataclasses.field(init=False, default=7)

    class Kind(enum.Enum):
        A = 1


@dataclass
class Thawed:
    value: int = 0


def round_trip(value):
    return parse(f"value={encode(value)}")["value"]


def equal(left, right):
    """Equality that tells -0.0 from 0.0, 1 from True, and nan from nothing."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return repr(left) == repr(right)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)
    if dataclasses.is_dataclass(left):
        return equal(dataclasses.asdict(left), dataclasses.asdict(right))
    return left == right


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
DEVICES = [torch.device("cpu"), torch.device("cuda"), torch.device("cuda:3"), torch.device("meta")]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.sampled_from([*DTYPES, *DEVICES, *Color, *Number, *ops.Mode, *Outer.Kind]),
)
inners = st.builds(Inner, st.floats(), st.text())
values = st.recursive(
    st.one_of(scalars, inners),
    lambda children: st.one_of(
        st.lists(children).map(tuple),
        st.dictionaries(st.text(), children),
        st.builds(Outer, inners, st.dictionaries(st.text(), children)),
    ),
    max_leaves=8,
)


@given(values)
@settings(deadline=None)
def test_values_come_back_equal(value):
    assert equal(round_trip(value), value)


@given(values)
@settings(deadline=None)
def test_text_is_canonical(value):
    assert encode(round_trip(value)) == encode(value)


@pytest.mark.parametrize(
    "value",
    [
        math.inf,
        -math.inf,
        math.nan,
        -0.0,
        0.0,
        5e-324,
        -(2**70),
        'it\'s "quoted"\n\t\\ \0 é \ud800',
        "salt='x',needs=()",
        (),
        ((),),
        (1,),
        ((1, (2.0, "a")), None),
        {},
        {"": {}},
        {"b": 1, "a": (True, {"c": torch.float32})},
        torch.device("cuda:1"),
        Color.CRIMSON,
        Number.ONE,
        Outer.Kind.A,
        Outer(Inner(-0.0, "'"), {"nested": Inner(math.inf)}),
    ],
    ids=repr,
)
def test_awkward_values_come_back_equal(value):
    assert equal(round_trip(value), value)


def test_dict_order_does_not_matter():
    assert encode({"a": 1, "b": 2}) == encode({"b": 2, "a": 1})


def test_values_of_unequal_types_differ():
    texts = [encode(value) for value in (0, 0.0, -0.0, False, "0", None, (0,), Number.ONE, 1)]
    assert len(set(texts)) == len(texts)


def test_enums_come_back_identical():
    assert round_trip(Color.CRIMSON) is Color.RED
    assert round_trip(Number.ONE) is Number.ONE


def test_numbers_of_other_libraries_become_plain():
    np = pytest.importorskip("numpy")
    assert encode(np.float64(0.5)) == "0.5"
    assert type(round_trip(np.float64(0.5))) is float


def test_a_group_is_held_by_name():
    assert round_trip(Group("tensor's")) == Group("tensor's")


def test_encoded_text_stands_for_itself():
    assert encode((Encoded(encode(Inner(0.5))), 1)) == encode((Inner(0.5), 1))


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ([1], "type list"),
        ({1}, "type set"),
        (1j, "type complex"),
        (Thawed(), "type Thawed"),
        (torch.zeros(2), "type Tensor"),
        (Inner, "type type"),
        ({1: 2}, "a dict with a key other than a string"),
        (Inner(factor=torch.zeros(())), "type Tensor"),  # type: ignore[arg-type]
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_a_constant_is_refused(value, what):
    with pytest.raises(
        ConfigError, match=f"(?s)op.field: a value of {what}|op.field: {what}.*Do: use None, bool"
    ):
        encode(value, "op.field")


def test_a_missing_type_is_named():
    with pytest.raises(
        CompileError, match="the type customop_ops.Missing of a static argument was not found"
    ):
        parse("value=new('customop_ops.Missing')")
    with pytest.raises(CompileError, match="the type no_such_module.Missing of a static argument"):
        parse("value=new('no_such_module.Missing')")


@pytest.mark.parametrize(
    "text", ["value=print('x')", "value=[1]", "value=__import__('os').name", "value=1+1"]
)
def test_only_tokens_are_parsed(text):
    with pytest.raises(CompileError, match="not a token"):
        parse(text)


def test_a_combination_of_flags_is_no_constant():
    with pytest.raises(ConfigError, match="op.field: a combination of flags cannot be a constant"):
        encode(Permission.READ | Permission.WRITE, "op.field")
    assert round_trip(Permission.READ) is Permission.READ


def local_type(default):
    @dataclass(frozen=True)
    class Local:
        value: int = default

    return Local


def test_types_defined_in_a_function_are_remembered():
    local = local_type(1)
    remember((local(3),))
    assert round_trip(local(3)) == local(3)
    with pytest.raises(ConfigError, match=r"two types are called .*local_type\.<locals>\.Local"):
        remember(local_type(2)(3))


def test_a_type_defined_anew_replaces_the_old_one(monkeypatch):
    def define_it(result):
        """A cell of a notebook that defines `notebook.Level`."""

        @dataclass(frozen=True)
        class Level(ops.Level):
            __qualname__, __module__ = "Level", "notebook"
            factor: float = dataclasses.field(init=False, default=result)

        module.Level = Level
        return Level()

    module = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", module)
    first = define_it(10.0)
    assert ops.tagged(ops.TaggedForward(torch.ones(1), first, size=0)).item() == 30
    second = define_it(100.0)
    assert ops.tagged(ops.TaggedForward(torch.ones(1), second, size=0)).item() == 300
    with pytest.raises(
        ConfigError, match="two types are called notebook.Level.*(?s:.)*make its values anew"
    ):
        ops.tagged(ops.TaggedForward(torch.ones(1), first, size=0))


def test_the_digest_changes_with_the_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    digests = []
    for text in ("def plan(): return 1", "def plan(): return 2", "def plan(): return 2"):
        (tmp_path / "edited.py").write_text(text)
        monkeypatch.delitem(sys.modules, "edited", raising=False)
        linecache.clearcache()
        digests.append(source_digest(importlib.import_module("edited").plan))
    assert digests[0] != digests[1] == digests[2]


def test_the_digest_does_without_source():
    namespace = {"__name__": "nowhere"}
    exec("def plan(): return 1", namespace)
    assert len(source_digest(namespace["plan"], functools.partial(print))) == 8


def test_names_lead_to_nested_types():
    assert find_type(f"{__name__}.Outer.Kind") is Outer.Kind
