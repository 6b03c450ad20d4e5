"""Wrong declarations fail when they are made, and say what to do; right ones of every kind pass."""

from dataclasses import dataclass, field, make_dataclass
from typing import Any, Literal, Optional, Union

import pytest
import torch
from torch import Tensor

import customop_ops as ops
from fullgraph.customop import (
    STRAIGHT_THROUGH,
    Carry,
    CustomOp,
    Dyn,
    Mut,
    Pass,
    Plan,
    Planned,
    define,
)
from fullgraph.customop.fields import FieldKind, read_fields
from fullgraph.errors import CompileError, ConfigError


def arguments(name="Arguments", **fields):
    return make_dataclass(name, fields.items())


def unused(*args):
    raise AssertionError("a definition runs nothing")


def forward(**fields):
    return Pass(arguments("Forward", **fields), unused, unused)


def backward(**fields):
    return Pass(arguments("Backward", **fields), unused, unused)


# Annotations.


@pytest.mark.parametrize(
    ("annotation", "kind", "optional"),
    [
        (Tensor, FieldKind.TENSOR, False),
        (Tensor | None, FieldKind.TENSOR, True),
        (Optional[ops.Int8Tensor], FieldKind.TENSOR, True),  # noqa: UP045 (both spellings)
        (Union[Tensor, ops.Int8Tensor], FieldKind.TENSOR, False),  # noqa: UP007
        (torch.nn.Parameter, FieldKind.TENSOR, False),
        (Mut[Tensor], FieldKind.MUT, False),
        (Mut[Tensor | None], FieldKind.MUT, True),
        (Carry[Tensor], FieldKind.CARRY, False),
        (Dyn[int], FieldKind.DYN, False),
        (Planned[tuple[int, ...]], FieldKind.PLANNED, False),
        (int, FieldKind.VALUE, False),
        (float | str | None, FieldKind.VALUE, True),
        (tuple[int, ...], FieldKind.VALUE, False),
        (tuple, FieldKind.VALUE, False),
        (dict[str, tuple[float, ops.Mode]], FieldKind.VALUE, False),
        (Literal["a", "b"], FieldKind.VALUE, False),
        (torch.dtype, FieldKind.VALUE, False),
        (torch.device | None, FieldKind.VALUE, True),
        (ops.Mode, FieldKind.VALUE, False),
        (ops.Numerics, FieldKind.VALUE, False),
        (torch.distributed.ProcessGroup | None, FieldKind.VALUE, True),
    ],
    ids=str,
)
def test_every_kind_of_field_is_read(annotation, kind, optional):
    (read,) = read_fields(arguments(x=annotation)).fields
    assert (read.kind, read.optional) == (kind, optional)


@dataclass
class Thawed:
    x: int


@pytest.mark.parametrize(
    ("annotation", "remedy"),
    [
        (list[int], "Tensor, Mut/Carry/Dyn, or a value"),
        (list[Tensor], "Tensor, Mut/Carry/Dyn, or a value"),
        (set, "Tensor, Mut/Carry/Dyn, or a value"),
        (object, "Tensor, Mut/Carry/Dyn, or a value"),
        (Any, "Tensor, Mut/Carry/Dyn, or a value"),
        (complex, "Tensor, Mut/Carry/Dyn, or a value"),
        (Thawed, "a frozen dataclass"),
        (tuple[list, ...], "Tensor, Mut/Carry/Dyn, or a value"),
        (tuple[Tensor, ...], "Tensor, Mut/Carry/Dyn, or a value"),
        (dict[int, int], "string keys"),
        (Tensor | int, "not a union of both"),
        (Mut[int], r"Mut\[Tensor\]: tensors only"),
        (Carry[str], r"Carry\[Tensor\]: tensors only"),
        (Mut[Carry[Tensor]], "one of Mut, Carry and Dyn, not two"),
        (Dyn[float], r"Dyn\[int\]: symbolic integers only"),
        (Dyn[int | None], r"Dyn\[int\]: symbolic integers only"),
        (Planned[list], "Tensor, Mut/Carry/Dyn, or a value"),
    ],
    ids=str,
)
def test_unsupported_annotations_are_refused(annotation, remedy):
    with pytest.raises(
        ConfigError,
        match=f"(?s)define: Arguments.field has the unsupported annotation.*Do: .*{remedy}",
    ):
        read_fields(arguments(x=Tensor, field=annotation))


def test_arguments_are_a_dataclass():
    with pytest.raises(ConfigError, match="arguments must be a dataclass, got <class 'int'>"):
        read_fields(int)
    with pytest.raises(ConfigError, match="arguments must be a dataclass, got Thawed"):
        read_fields(Thawed(1))  # type: ignore[arg-type]


def test_slots_are_refused():
    @dataclass(slots=True)
    class Slotted:
        x: Tensor

    with pytest.raises(
        ConfigError, match=r"(?s)Slotted must not use __slots__.*without slots=True"
    ):
        read_fields(Slotted)


def test_annotations_must_resolve():
    with pytest.raises(
        ConfigError, match="an annotation of Arguments cannot be resolved: name 'Nowhere'"
    ):
        read_fields(arguments(x="Nowhere"))


@pytest.mark.parametrize(
    "default", [{"default": ops.Level()}, {"default_factory": ops.Level}], ids=str
)
def test_defaults_that_dynamo_cannot_make_are_refused(default):
    cls = make_dataclass("Arguments", [("x", Tensor), ("level", ops.Level, field(**default))])
    with pytest.raises(
        ConfigError, match=r"the default of Arguments.level is a dataclass(?s:.)*Do: let it be None"
    ):
        read_fields(cls)


@pytest.mark.parametrize("name", ["salt", "token", "dyn"])
def test_some_names_are_taken(name):
    with pytest.raises(ConfigError, match=f"Arguments must not have a field called '{name}'"):
        read_fields(arguments(x=Tensor, **{name: Tensor}))


def test_needs_is_filled_in_by_the_framework():
    with pytest.raises(
        ConfigError,
        match=r"(?s)Arguments.needs has the unsupported.*tuple\[str, ...\]: the framework",
    ):
        read_fields(arguments(x=Tensor, needs=bool))


# Definitions.

PLAIN = {"x": Tensor, "size": int}
GRADIENT = {"grad_output": Tensor}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "bare"}, r"a name is 'namespace::name', got 'bare'"),
        ({"name": "a.b::c"}, r"a name is 'namespace::name', got 'a.b::c'"),
        ({"outputs": ()}, r"outputs must be one or more different names, got \(\)"),
        ({"outputs": ("a", "a")}, r"outputs must be one or more different names, got \('a', 'a'\)"),
        ({"forward": forward(size=int)}, "Forward has no tensor field"),
        ({"forward": forward(x=Carry[Tensor])}, "Forward has no tensor field"),
        ({"forward": forward(x=Tensor, y=Planned[int])}, "Forward.y is Planned"),
        ({"gradients": ("x",)}, r"gradients=\('x',\) with backward=None"),
        ({"backward": backward(**GRADIENT)}, r"gradients=\(\) with backward=Pass"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_definitions_are_refused(options, message):
    options = {"name": "tests::wrong", "forward": forward(**PLAIN), **options}
    with pytest.raises(ConfigError, match=f"(?s)define.*{message}.*Why: .*Do: "):
        define(**options)


@pytest.mark.parametrize(
    ("fields", "gradients", "message"),
    [
        ({}, ("y",), "gradients names 'y', which is no field of Forward"),
        ({}, ("size",), "gradients names 'size', which is a value field of Forward"),
        ({"m": Mut[Tensor]}, ("m",), "gradients names 'm', which is a mut field of Forward"),
        ({}, ("x", "x"), "gradients has a name twice"),
    ],
    ids=str,
)
def test_gradients_are_those_of_tensors(fields, gradients, message):
    with pytest.raises(ConfigError, match=f"(?s)define tests::wrong: {message}.*Why: .*Do: "):
        define(
            "tests::wrong",
            forward=forward(**PLAIN, **fields),
            backward=backward(**GRADIENT),
            gradients=gradients,
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "Backward has no field grad_output.*declare grad_output: Tensor"),
        ({**GRADIENT, "c": Carry[Tensor]}, "Backward.c is a Carry"),
        (
            {**GRADIENT, "other": int},
            "Backward.other has no value field of the same name in Forward",
        ),
        ({**GRADIENT, "x": int}, "Backward.x has no value field of the same name in Forward"),
        (
            {**GRADIENT, "size": Dyn[int]},
            "Backward.size has no dyn field of the same name in Forward",
        ),
        (
            {**GRADIENT, "x": Mut[Tensor]},
            r"Backward.x is Mut, but Forward has no Carry or Mut.*x: Carry\[Tensor\]",
        ),
    ],
    ids=str,
)
def test_backward_arguments_fit_the_forward_ones(fields, message):
    with pytest.raises(ConfigError, match=f"(?s)define tests::wrong: {message}"):
        define(
            "tests::wrong", forward=forward(**PLAIN), backward=backward(**fields), gradients=("x",)
        )


def test_straight_through_is_one_to_one():
    with pytest.raises(ConfigError, match="STRAIGHT_THROUGH needs one gradient and one output"):
        define(
            "tests::wrong",
            forward=forward(x=Tensor, y=Tensor),
            backward=STRAIGHT_THROUGH,
            gradients=("x", "y"),
        )


def test_a_name_is_given_once():
    with pytest.raises(ConfigError, match="define tests::linear: this op is already defined"):
        define("tests::linear", forward=forward(**PLAIN))


def test_a_refused_definition_leaves_no_trace():
    with pytest.raises(ConfigError, match="Forward has no tensor field"):
        define("tests::second_try", forward=forward(size=int))
    op = define("tests::second_try", forward=forward(**PLAIN))
    assert isinstance(op, CustomOp)


@pytest.mark.parametrize(
    "name", ["self", "out", "input", "dtype", "device", "_private", "meta", "tensors", "T", "D"]
)
def test_names_of_torch_are_no_problem(name):
    op = define(
        f"tests::named_{name}",
        forward=Pass(
            arguments("Named", **{name: Tensor, f"{name}_size": int}),
            lambda a: Plan({"output": getattr(a, name)}),
            lambda plan, a: {"output": getattr(a, name) * getattr(a, f"{name}_size")},
        ),
    )
    assert op(op._table.cls(torch.ones(2), 3)).tolist() == [3, 3]


# Calls that do not fit the definition.


def double(name, cls, plan, execute=None, **options):
    execute = execute or (lambda plan, a: {"output": a.x * 2})
    return define(f"tests::{name}", forward=Pass(cls, plan, execute), **options)


@dataclass
class Double:
    x: Tensor
    state: Mut[Tensor | None] = None
    later: Carry[Tensor | None] = None
    needs: tuple[str, ...] = ()


@dataclass
class DoubleBackward:
    grad_output: Tensor
    kept: Tensor | None = None
    later: Mut[Tensor | None] = None
    shape: Planned[int | None] = None
    needs: tuple[str, ...] = ()


@dataclass
class DoubleBackwardStrict(DoubleBackward):
    must: Tensor = field(kw_only=True)


VALUES = {"shape": 1}
PLANS = {
    "unknown_output": (
        {"outputs": {"other": "x"}},
        "has the outputs ['other'], defined are ['output']",
    ),
    "no_output": ({"outputs": {}}, "has the outputs [], defined are ['output']"),
    "none_output": (
        {"outputs": {"output": None}},
        "has the outputs ['output'], defined are ['output']",
    ),
    "values": ({"values": {}}, "has the values [], DoubleBackward declares ['shape']"),
    "unknown_saved": (
        {"saved": {"nothing": "x"}},
        "saves 'nothing', which is no tensor field of DoubleBackward",
    ),
    "saved_value": (
        {"saved": {"needs": "x"}},
        "saves 'needs', which is no tensor field of DoubleBackward",
    ),
    "saved_and_output": ({"saved": {"output": "x"}}, "has 'output' both as an output and as saved"),
    "twice": (
        {"saved": {"kept": "x"}, "saved_inputs": {"kept": "x"}},
        "DoubleBackward.kept would get two tensors",
    ),
    "carried": ({"saved": {"later": "x"}}, "DoubleBackward.later would get two tensors"),
    "input_of_no_name": (
        {"saved_inputs": {"kept": "y"}},
        "saves the input 'y' as 'kept', which is no Tensor field",
    ),
    "mutated_input": (
        {"saved_inputs": {"kept": "state"}},
        "saves the input 'state' as 'kept', which is no Tensor",
    ),
    "output_of_no_name": (
        {"saved_outputs": {"kept": "y"}},
        "saves the output 'y' as 'kept', but makes no such output",
    ),
}


@pytest.mark.parametrize("case", PLANS)
def test_plans_fit_the_definition(case):
    changed, message = PLANS[case]

    def plan(a):
        named = {
            kind: {
                n: a.x if source == "x" and kind in ("outputs", "saved") else source
                for n, source in names.items()
            }
            for kind, names in changed.items()
        }
        return Plan(**{"outputs": {"output": a.x}, "values": VALUES, **named})

    op = double(
        f"plan_{case}",
        Double,
        plan,
        backward=Pass(DoubleBackward, unused, unused),
        gradients=("x",),
    )
    with pytest.raises(CompileError, match=rf"(?s)^tests::plan_{case}: .*Why: .*Do: ") as caught:
        op(Double(torch.ones(2, requires_grad=True), state=torch.zeros(2), later=torch.zeros(2)))
    assert message in str(caught.value)


def test_a_backward_field_that_nothing_fills_is_named():
    op = double(
        "nothing_fills",
        Double,
        lambda a: Plan({"output": a.x}, values=VALUES),
        backward=Pass(DoubleBackwardStrict, unused, unused),
        gradients=("x",),
    )
    assert op(Double(torch.ones(2))).tolist() == [2, 2]  # no gradient, no complaint
    with pytest.raises(
        CompileError, match=r"(?s)backward field must has no tensor.*save 'must' in the plan"
    ):
        op(Double(torch.ones(2, requires_grad=True)))


def test_a_backward_plan_makes_needed_gradients_only():
    op = double(
        "unneeded",
        Double,
        lambda a: Plan({"output": a.x}, values=VALUES),
        backward=Pass(DoubleBackward, lambda a: Plan({"state": a.grad_output}), unused),
        gradients=("x",),
    )
    output = op(Double(torch.ones(2, requires_grad=True)))
    with pytest.raises(
        CompileError, match=r"the backward plan has the results \['state'\], needed are \['x'\]"
    ):
        output.sum().backward()


def test_a_mutating_op_has_a_limit_of_results():
    op = double(
        "many",
        Double,
        lambda a: Plan({f"o{i}": a.x for i in range(17)}),
        outputs=[f"o{i}" for i in range(17)],
    )
    with pytest.raises(
        ConfigError, match=r"many_forward returns 17 tensors, more than a mutating op may \(16\)"
    ):
        op(Double(torch.ones(2), state=torch.zeros(2)))


def test_required_tensors_are_required():
    with pytest.raises(
        ConfigError,
        match=r"(?s)tests::linear: weight is required, got None.*declare the field optional",
    ):
        ops.linear(ops.LinearForward(torch.ones(2, 3), None, numerics=ops.Numerics()))  # type: ignore[arg-type]


def test_one_tensor_at_least():
    op = double("all_optional", arguments("AllOptional", x=Tensor | None, y=Tensor | None), unused)
    with pytest.raises(
        ConfigError, match=r"got no tensor at all(?s:.)*at least one of \['x', 'y'\]"
    ):
        op(op._table.cls(None, None))


def test_a_token_has_exactly_the_value_fields():
    with pytest.raises(
        ConfigError,
        match=r"tests::linear: a token holds \['numerics'\], got \['mode', 'numerics'\]",
    ):
        ops.linear.encode(numerics=ops.Numerics(), mode=ops.Mode.FAST)
    with pytest.raises(ConfigError, match=r"tests::linear: a token holds \['numerics'\], got \[\]"):
        ops.linear.encode()


def test_a_value_that_cannot_be_a_constant_is_named():
    with pytest.raises(
        ConfigError, match="tests::linear.numerics: a value of type list cannot be a constant"
    ):
        ops.linear.encode(numerics=[1])


def test_values_beside_a_token_must_agree():
    token = ops.linear.encode(numerics=ops.Numerics())
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    ops.linear(ops.LinearForward(x, weight, numerics=ops.Numerics()), token=token)
    with pytest.raises(
        CompileError, match=r"(?s)argument numerics=.*EXACT.* differs from the token, which says"
    ):
        ops.linear(ops.LinearForward(x, weight, numerics=ops.Numerics(ops.Mode.EXACT)), token=token)


def test_planned_values_are_constants():
    op = double(
        "planned_list",
        Double,
        lambda a: Plan({"output": a.x}, values={"shape": [1]}),
        backward=Pass(DoubleBackward, unused, unused),
        gradients=("x",),
    )
    with pytest.raises(
        ConfigError, match=r"tests::planned_list.shape: a value of type list cannot be a constant"
    ):
        op(Double(torch.ones(2, requires_grad=True)))


def test_planned_values_reach_the_backward_pass():
    seen = []

    def plan(a):
        return Plan({"output": a.x}, values={"shape": len(a.x.shape)})

    def plan_backward(a):
        seen.append(a.shape)
        return Plan({"x": a.grad_output})

    op = double(
        "planned",
        Double,
        plan,
        backward=Pass(
            DoubleBackward, plan_backward, lambda plan, a: {"x": a.grad_output * a.shape}
        ),
        gradients=("x",),
    )
    x = torch.ones(2, 3, requires_grad=True)
    op(Double(x)).sum().backward()
    assert set(seen) == {2}
    assert x.grad.unique().tolist() == [2]
