"""A debug switch: do the real results of every op match its plan?

Off by default, since it costs host time; on in the tests. What it finds is a bug of the op, so it raises at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fullgraph.customop.plan import Plan, TensorSpec
from fullgraph.customop.structured import flatten, is_parts, layout_text, to_spec
from fullgraph.errors import CompileError


class State:
    """The switch itself; an object, so that the hot path reads it without a call."""

    on = False


state = State()


def set_verify_plans(on: bool) -> None:
    """Compare the real results of every op with its plan from now on, or no longer.

    Args:
        on: which of the two.
    """
    state.on = on


@contextlib.contextmanager
def verify_plans(on: bool = True) -> Iterator[None]:
    """Compare the real results of every op with its plan inside the context.

    Args:
        on: False to compare nothing inside.

    Yields:
        None; what was set before is set again afterwards.
    """
    before = state.on
    set_verify_plans(on)
    try:
        yield
    finally:
        set_verify_plans(before)


def results_match(op: str, plan: Plan, results: Mapping[str, Any], inputs: Sequence[Any]) -> None:
    """Raise unless the results have the plan's names, specs and structure, and alias nothing.

    Raises:
        CompileError: naming the op, the result and both specs.
    """
    planned = plan.results
    returned = sorted(name for name, result in results.items() if result is not None)
    if sorted(planned) != returned:
        raise _mismatch(op, f"the results {returned}", f"{sorted(planned)}")
    seen = {t.untyped_storage()._cdata: "an input" for t in inputs if t.numel()}
    for name, spec in planned.items():
        result = results[name]
        actual = to_spec(result)
        if type(actual) is not type(spec):
            raise _mismatch(op, f"{name}: {type(result).__name__}", type(spec).__name__)
        if is_parts(spec) and layout_text(actual) != layout_text(spec):
            raise _mismatch(op, f"{name}: {layout_text(actual)}", layout_text(spec))
        for tensor, want in zip(flatten(result), flatten(spec), strict=True):
            got = TensorSpec.of(tensor)
            if got != want:
                raise _mismatch(op, f"{name}: {got}", str(want))
            if not tensor.is_contiguous():
                raise _mismatch(op, f"{name} with strides {tensor.stride()}", "a contiguous tensor")
            storage = tensor.untyped_storage()._cdata
            if tensor.numel() and storage in seen:
                raise CompileError(
                    f"{op}: result {name!r} shares its memory with {seen[storage]}",
                    why="compilers and CUDA graphs take every result of an op to be new memory",
                    do="return a copy, or name the input in saved_inputs instead of saving it again",
                )
            seen[storage] = f"result {name!r}"


def _mismatch(op: str, got: str, planned: str) -> CompileError:
    return CompileError(
        f"{op}: execute returned {got}, the plan says {planned}",
        why="the fake kernel allocates what the plan says, so compiled code relies on it",
        do="mend plan or execute so that both say the same",
    )
