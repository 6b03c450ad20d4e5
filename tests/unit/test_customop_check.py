"""`verify_plans`, `check` and `cuda_graph_lint`: quiet about good ops, and each thing that can be wrong is found."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import customop_ops as ops
from fullgraph import customop
from fullgraph.customop import Mut, Pass, Plan, Planned, TensorSpec, define
from fullgraph.customop.check import SYNCHRONISING
from fullgraph.errors import CompileError

counter = iter(range(1000))


@dataclass
class Arguments:
    x: Tensor
    state: Mut[Tensor | None] = None
    needs: tuple[str, ...] = ()


@dataclass
class BackwardArguments:
    grad_output: Tensor
    needs: tuple[str, ...] = ()


def op_of(execute, plan=lambda a: Plan({"output": a.x}), **options):
    """An op of one input and one output under a new name."""
    return define(
        f"tests::checked_{next(counter)}", forward=Pass(Arguments, plan, execute), **options
    )


def pair_of(execute_backward, plan_backward=lambda a: Plan({"x": a.grad_output})):
    return op_of(
        lambda plan, a: {"output": a.x * 2},
        backward=Pass(BackwardArguments, plan_backward, execute_backward),
        gradients=("x",),
    )


def spec(*shape, dtype=torch.float32):
    return TensorSpec(shape, dtype, torch.device("cpu"))


# Plan against real results.

WRONG_RESULTS = {
    "missing": (
        lambda plan, a: {},
        r"execute returned the results \[\], the plan says \['output'\]",
    ),
    "none": (lambda plan, a: {"output": None}, r"the results \[\], the plan says \['output'\]"),
    "other name": (
        lambda plan, a: {"y": a.x * 2},
        r"the results \['y'\], the plan says \['output'\]",
    ),
    "too many": (
        lambda plan, a: {"output": a.x * 2, "y": a.x * 3},
        r"the results \['output', 'y'\], the plan",
    ),
    "shape": (
        lambda plan, a: {"output": a.x[:1] * 2},
        r"output: TensorSpec\(shape=\(1, 3\).*says .*\(2, 3\)",
    ),
    "dtype": (
        lambda plan, a: {"output": a.x.double()},
        r"output: TensorSpec\(.*torch.float64.*says .*torch.float32",
    ),
    "device": (
        lambda plan, a: {"output": a.x.to("meta")},
        r"output: TensorSpec\(.*type='meta'.*says .*type='cpu'",
    ),
    "strides": (
        lambda plan, a: {"output": (a.x * 2).t().contiguous().t()},
        r"output with strides \(1, 2\)",
    ),
    "alias of an input": (
        lambda plan, a: {"output": a.x},
        "result 'output' shares its memory with an input",
    ),
    "view of an input": (
        lambda plan, a: {"output": a.x.view(2, 3)},
        "'output' shares its memory with an input",
    ),
    "structure": (
        lambda plan, a: {"output": ops.to_int8(a.x)},
        "output: Int8Parts, the plan says TensorSpec",
    ),
}


@pytest.mark.parametrize("case", WRONG_RESULTS)
def test_results_that_differ_from_the_plan_are_found(case):
    execute, message = WRONG_RESULTS[case]
    op = op_of(execute)
    with pytest.raises(CompileError, match=f"(?s){op.name}_forward: .*{message}.*Why: .*Do: "):
        op(Arguments(torch.ones(2, 3)))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (ops.Int8Parts(spec(2, 3, dtype=torch.int8), spec(), torch.float32), "uint8.*int8"),
        (
            ops.Int8Parts(spec(2, 3, dtype=torch.uint8), spec(), torch.bfloat16),
            "dtype=torch.float32.*torch.bfloat16",
        ),
        (
            ops.Int8Parts(spec(2, 3, dtype=torch.uint8), spec(1), torch.float32),
            r"shape=\(\).*shape=\(1,\)",
        ),
        (spec(2, 3), "output: Int8Parts, the plan says TensorSpec"),
    ],
)
def test_parts_that_differ_from_the_plan_are_found(parts, message):
    op = op_of(lambda plan, a: {"output": ops.to_int8(a.x)}, lambda a: Plan({"output": parts}))
    with pytest.raises(CompileError, match=f"(?s){message}"):
        op(Arguments(torch.ones(2, 3)))


def test_results_that_share_memory_are_found():
    def execute(plan, a):
        y = a.x * 2
        return {"output": y, "again": y}

    op = define(
        f"tests::checked_{next(counter)}",
        forward=Pass(Arguments, lambda a: Plan({"output": a.x, "again": a.x}), execute),
        outputs=("output", "again"),
    )
    with pytest.raises(CompileError, match="result 'again' shares its memory with result 'output'"):
        op(Arguments(torch.ones(2, 3)))


def test_the_backward_pass_is_verified_too():
    op = pair_of(lambda plan, a: {"x": a.grad_output[:1] * 2})
    output = op(Arguments(torch.ones(2, 3, requires_grad=True)))
    with pytest.raises(
        CompileError, match=rf"{op.name}_backward: execute returned x: TensorSpec\(shape=\(1, 3\)"
    ):
        output.backward(torch.ones(2, 3))


def test_compiled_results_are_verified_too():
    op = op_of(lambda plan, a: {"output": a.x[:1] * 2})
    compiled = torch.compile(lambda x: op(Arguments(x)), fullgraph=True, backend="aot_eager")
    with pytest.raises(CompileError, match=r"execute returned output: TensorSpec\(shape=\(1, 3\)"):
        compiled(torch.ones(2, 3))


def test_verification_is_a_switch():
    op = op_of(lambda plan, a: {"output": a.x})
    x = torch.ones(2, 3)
    with customop.verify_plans(False):
        assert op(Arguments(x)) is not None
        with customop.verify_plans(), pytest.raises(CompileError, match="shares its memory"):
            op(Arguments(x))
        assert op(Arguments(x)) is not None
    with pytest.raises(CompileError, match="shares its memory"):
        op(Arguments(x))
    customop.set_verify_plans(False)
    try:
        assert op(Arguments(x)) is not None
    finally:
        customop.set_verify_plans(True)


# check: good ops.

X = torch.randn(3, 4)


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


GOOD = {
    "swiglu": lambda: (ops.swiglu, ops.SwigluForward(leaf(3, 4), leaf(3, 4))),
    "swiglu, no gradient": lambda: (ops.swiglu, ops.SwigluForward(X, X)),
    "stats": lambda: (ops.stats, ops.StatsForward(leaf(3, 4))),
    "stats, two outputs": lambda: (ops.stats, ops.StatsForward(leaf(3, 4), with_mean=False)),
    "repeat": lambda: (ops.repeat, ops.RepeatForward(leaf(3, 4), 2)),
    "track": lambda: (ops.track, ops.TrackForward(leaf(3, 4), torch.zeros(()), torch.zeros(()))),
    "tagged": lambda: (ops.tagged, ops.TaggedForward(X)),
    "all_sum": lambda: (ops.all_sum, ops.AllSumForward(leaf(3, 4))),
    "linear": lambda: (
        ops.linear,
        ops.LinearForward(leaf(3, 4), leaf(5, 4), leaf(5), numerics=ops.Numerics()),
    ),
    "linear, state": lambda: (
        ops.linear,
        ops.LinearForward(
            leaf(3, 4),
            leaf(5, 4),
            None,
            torch.zeros(()),
            torch.zeros(()),
            torch.zeros(5, 4),
            numerics=ops.Numerics(),
        ),
    ),
    "linear, structured weight": lambda: (
        ops.linear,
        ops.LinearForward(
            leaf(3, 4), ops.int8(torch.randn(5, 4), True), leaf(5), numerics=ops.Numerics()
        ),
    ),
    "linear, no rows": lambda: (
        ops.linear,
        ops.LinearForward(leaf(0, 4), leaf(5, 4), leaf(5), numerics=ops.Numerics()),
    ),
}


@pytest.mark.parametrize("case", GOOD)
def test_good_ops_pass(case):
    op, arguments = GOOD[case]()
    tensors = [t for t in vars(arguments).values() if isinstance(t, Tensor)]
    before = [t.clone() for t in tensors]
    op.check(arguments)
    assert all(
        torch.equal(ops.plain(a), ops.plain(b)) for a, b in zip(before, tensors, strict=True)
    )
    assert all(t.grad is None for t in tensors)


# check: bad ops.

_cache = {}


def _hidden_cache(plan, a):
    table = _cache.setdefault(len(a.x), torch.arange(7.0))
    return {"output": a.x * table.sum()}


def _grown_state(plan, a):
    a.state.add_(1)
    return {"output": a.x * 2}


BAD = {
    "item": (
        lambda plan, a: {"output": a.x * a.x.sum().item()},
        "not capturable, it calls aten::item",
    ),
    "bool": (
        lambda plan, a: {"output": a.x * 2 if a.x.sum() > 0 else a.x * 3},
        "not capturable, it calls aten::",
    ),
    "nonzero": (
        lambda plan, a: {"output": a.x * len(a.x.nonzero())},
        "not capturable, it calls aten::nonzero",
    ),
    "alias": (lambda plan, a: {"output": a.x}, "shares its memory with an input"),
    "hidden cache": (_hidden_cache, "keeps tensors alive after the call, made by aten::arange"),
    "hidden mutation": (
        lambda plan, a: {"output": a.x.add_(1) * 2},
        "(?s)opcheck test_schema failed.*mutated",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_ops_fail(case):
    execute, message = BAD[case]
    _cache.clear()
    op = op_of(execute)
    with pytest.raises(CompileError, match=message):
        op.check(Arguments(torch.rand(3, 4)))


def test_a_bad_backward_pass_fails():
    op = pair_of(lambda plan, a: {"x": a.grad_output * a.grad_output.sum().item()})
    with pytest.raises(
        CompileError, match=f"{op.name.replace('::', '.')}_backward.default: not capturable"
    ):
        op.check(Arguments(torch.rand(3, 4, requires_grad=True)))


def branching_op(kind):
    """An op whose plan has one more output, or another value, for more than two rows."""

    def plan(a):
        big = a.x.shape[0] > 2
        return Plan(
            {"output": a.x, "more": a.x if big and kind == "results" else None},
            values={"big": bool(big) if kind == "values" else False},
        )

    def execute(plan, a):
        return {"output": a.x * 2, "more": a.x * 3 if "more" in plan.results else None}

    @dataclass
    class Backward(BackwardArguments):
        grad_more: Tensor | None = None
        big: Planned[bool] = False

    return define(
        f"tests::checked_{next(counter)}",
        forward=Pass(Arguments, plan, execute),
        backward=Pass(
            Backward, lambda a: Plan({"x": a.grad_output}), lambda plan, a: {"x": a.grad_output * 2}
        ),
        gradients=("x",),
        outputs=("output", "more"),
    )


@pytest.mark.parametrize("kind", ["results", "values"])
def test_a_plan_whose_structure_depends_on_sizes_is_found(kind):
    op = branching_op(kind)
    op(Arguments(torch.rand(3, 4)))
    op(Arguments(torch.rand(5, 4)))
    with pytest.raises(
        CompileError, match=r"(?s)the plan depends on sizes.*Do: decide by values and dtypes"
    ):
        op(Arguments(torch.rand(2, 4)))


def test_a_plan_whose_structure_depends_on_sizes_is_found_compiled():
    op = branching_op("results")
    compiled = torch.compile(
        lambda x: op(Arguments(x))[0], fullgraph=True, backend="aot_eager", dynamic=True
    )
    compiled(torch.rand(3, 4))
    with pytest.raises(Exception, match="the plan depends on sizes"):
        compiled(torch.rand(2, 4))


def test_check_turns_verification_on():
    op = op_of(lambda plan, a: {"output": a.x.double()})
    with customop.verify_plans(False), pytest.raises(CompileError, match="float64"):
        op.check(Arguments(torch.rand(3, 4)))


# The lint on functions.


def test_lint_passes_what_can_be_captured():
    customop.cuda_graph_lint(lambda x: (x * 2, [x + 1, None]), torch.ones(3))
    customop.cuda_graph_lint(lambda x: x * 2, ops.int8(torch.ones(3)))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.view(-1), "result 0 shares memory with an input"),
        (lambda x: [y := x * 2, y[:1]], "result 1 shares memory with result 0"),
        (lambda x: x[x > 0], "aten::"),
        (lambda x: x.unique(), "aten::_unique2"),
        (lambda x: torch.equal(x, x), "aten::equal"),
    ],
)
def test_lint_finds_what_cannot_be_captured(function, message):
    with pytest.raises(CompileError, match=message):
        customop.cuda_graph_lint(function, torch.ones(3))


def test_names_of_synchronising_ops_exist():
    for name in SYNCHRONISING:
        namespace, _, op = name.partition("::")
        assert hasattr(getattr(torch.ops, namespace), op), name
