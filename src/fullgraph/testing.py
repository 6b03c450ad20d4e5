"""Assertions about graphs and numbers, for the tests of those who use fullgraph or define ops of their own.

Each raises `AssertionError` with what was found, and needs no test framework. Functions are compiled apart, so these
neither see nor disturb what else the process compiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fullgraph.customop import cuda_graph_lint as cuda_graph_lint
from fullgraph.customop.graphs import GraphRecorder, isolated, recompile_reason, run_both_ways
from fullgraph.customop.structured import StructuredTensor
from fullgraph.errors import describe
from fullgraph.nn.scaling import preserved

__all__ = [
    "Call",
    "assert_bitwise",
    "assert_compiles_once",
    "assert_one_graph",
    "assert_within_error",
    "call",
    "cuda_graph_lint",
    "relative_error",
    "sqnr_db",
]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_one_graph(
    function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None, **kwargs: Any
) -> GraphRecorder:
    """Compile with `fullgraph=True`, run forward and backward, and raise unless all of it is one graph.

    Args:
        function: a module or any function.
        *inputs: its arguments.
        dynamic: as for `torch.compile`.
        **kwargs: its keyword arguments.

    Returns:
        What was recorded: `forward` and `backward` are lists of the custom-op nodes, to count.

    Raises:
        AssertionError: with torch's reason.

    Example:
        >>> layer = fullgraph.Linear(32, 8, recipe="fp8-current")
        >>> graphs = assert_one_graph(layer, torch.randn(4, 32))
        >>> len(graphs.forward), len(graphs.backward)
        (1, 1)
    """
    from torch._dynamo.exc import Unsupported

    recorder = GraphRecorder()
    run = torch.compile(isolated(function), backend=recorder, fullgraph=True, dynamic=dynamic)
    try:
        run_both_ways(run, inputs, kwargs)
    except Unsupported as error:
        raise AssertionError(f"{_name(function)} is not one graph: {error}") from error
    if len(recorder.graphs) != 1:
        raise AssertionError(f"{_name(function)} is {len(recorder.graphs)} graphs, not one")
    return recorder


@dataclasses.dataclass(frozen=True)
class Call:
    """One call for `assert_compiles_once`. Made by `call`.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        contexts: context managers to run it in, the outermost first.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    contexts: tuple[contextlib.AbstractContextManager[Any], ...] = ()

    def inside(self, *contexts: contextlib.AbstractContextManager[Any]) -> Call:
        """The same call within these contexts, such as `torch.no_grad()` or a recipe of `fullgraph.autocast`."""
        return dataclasses.replace(self, contexts=(*contexts, *self.contexts))


def call(*args: Any, **kwargs: Any) -> Call:
    """Arguments of one call for `assert_compiles_once`, by position and by keyword.

    Args:
        *args: positional arguments.
        **kwargs: keyword arguments.

    Returns:
        The call.

    Example:
        >>> layer, x = fullgraph.Linear(32, 8, recipe="fp8-current"), torch.randn(4, 32)
        >>> assert_compiles_once(layer, call(x), call(x).inside(torch.no_grad()))
        Traceback (most recent call last):
        ...
        AssertionError: Linear: call 2 recompiles because gradients were switched ...
    """
    return Call(args, kwargs)


def assert_compiles_once(
    function: Callable[..., Any], *calls: tuple[Any, ...] | Call, dynamic: bool | None = None
) -> None:
    """Compile for the first call and raise if any later one needs another compilation.

    Args:
        function: a module or any function.
        *calls: what each call gets, at least two: a tuple of positional arguments, or a `call`.
        dynamic: as for `torch.compile`. With None, torch takes a size for constant until it changes: mark the
            dimension with `torch._dynamo.mark_dynamic`, or pass True, to ask for one graph for all sizes.

    Raises:
        AssertionError: naming the call and what it was: an argument with its dtype, size, stride or value, an attribute
            of the module, a global setting; with what that was at first and what it is now.

    Example:
        >>> layer = fullgraph.Linear(32, 8, recipe="fp8-current")
        >>> assert_compiles_once(layer, (torch.randn(4, 32),), (torch.randn(9, 32),), dynamic=True)
        >>> assert_compiles_once(layer, (torch.randn(4, 32),), (torch.randn(9, 32),))
        Traceback (most recent call last):
        ...
        AssertionError: Linear: call 2 recompiles because input.shape[0] was 4, is 9 ...
    """
    if len(calls) < 2:
        raise AssertionError(f"two calls or more are needed, got {len(calls)}")
    backend = GraphRecorder()
    run = torch.compile(isolated(function), backend=backend, fullgraph=True, dynamic=dynamic)
    for number, given in enumerate(calls, 1):
        made = given if isinstance(given, Call) else Call(given, {})
        with contextlib.ExitStack() as stack:
            stack.enter_context(preserved(function))
            for context in made.contexts:
                stack.enter_context(context)
            reason = recompile_reason(function, run, made.args, dict(made.kwargs))
        if reason is not None:
            raise AssertionError(f"{_name(function)}: call {number} recompiles because {reason}")


def assert_bitwise(actual: Any, expected: Any) -> None:
    """Raise unless two values are the same to the bit: structure, dtypes, shapes, devices and data.

    Args:
        actual: tensors, or mappings, sequences and dataclasses of them; structured tensors are compared part by part,
            anything else with `==`.
        expected: likewise.

    Raises:
        AssertionError: with the place in the structure, and for data the first element that differs.

    Numerics: zeros of different sign differ; a NaN equals any NaN.

    Example:
        >>> assert_bitwise(
        ...     {"a": torch.tensor([1.0, math.nan])}, {"a": torch.tensor([1.0, math.nan])}
        ... )
    """
    for place, ours, theirs in _pairs("", actual, expected):
        problem = _difference(ours, theirs)
        if problem:
            raise AssertionError(f"{place or 'value'}: {problem}")


def assert_within_error(actual: Any, reference: Any, limit: float) -> None:
    """Raise unless a tensor is near another one, as a whole.

    |actual - reference| / |reference| <= limit, in the Frobenius norm

    Args:
        actual: any floating dtype; a quantized tensor is decoded.
        reference: likewise, of the same shape.
        limit: relative error, such as 0.05.

    Raises:
        AssertionError: with the error found.
    """
    if tuple(actual.shape) != tuple(reference.shape):
        raise AssertionError(f"shapes differ: {describe(actual)} and {describe(reference)}")
    error = relative_error(actual, reference)
    if not error <= limit:  # so that NaN is refused
        raise AssertionError(
            f"relative error {error:.4g} of {describe(actual)} is over the limit {limit:.4g}"
        )


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """|actual - reference| / |reference| in the Frobenius norm.

    Args:
        actual: any floating dtype; a quantized tensor is decoded.
        reference: likewise, of the same shape.

    Returns:
        The error; 0 for equal tensors, also if both are zero or empty.

    Numerics: computed in float64.
    """
    ours, theirs = _plain(actual), _plain(reference)
    distance = torch.linalg.vector_norm(ours - theirs).item()
    if distance == 0:
        return 0.0
    size = torch.linalg.vector_norm(theirs).item()
    return math.inf if size == 0 else distance / size


def sqnr_db(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Signal to quantization noise: 20 log10(|reference| / |actual - reference|), in decibels.

    Args:
        actual: any floating dtype; a quantized tensor is decoded.
        reference: likewise, of the same shape.

    Returns:
        Decibels; infinity for equal tensors.

    Example:
        >>> round(sqnr_db(torch.tensor([1.1]), torch.tensor([1.0])))
        20
    """
    error = relative_error(actual, reference)
    return math.inf if error == 0 else -20 * math.log10(error)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.decode() if isinstance(tensor, StructuredTensor) else tensor
    return plain.detach().to(torch.float64)


def _pairs(place: str, actual: Any, expected: Any) -> Iterator[tuple[str, Any, Any]]:
    """The leaves of two equal structures side by side; where they differ, the two halves that do."""
    ours, theirs = _children(actual), _children(expected)
    if (
        ours is None
        or theirs is None
        or type(actual) is not type(expected)
        or ours.keys() != theirs.keys()
    ):
        yield place, actual, expected
        return
    for key, child in ours.items():
        yield from _pairs(f"{place}{key}", child, theirs[key])


def _children(value: Any) -> dict[str, Any] | None:
    """What a container holds, by the text that selects it; None for a leaf."""
    if isinstance(value, StructuredTensor):
        value = value.parts
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f".{f.name}": getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {f"[{key!r}]": item for key, item in value.items()}
    if isinstance(value, list | tuple):
        return {f"[{index}]": item for index, item in enumerate(value)}
    return None


def _difference(actual: Any, expected: Any) -> str:
    """How two leaves differ; "" if they do not."""
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return (
            ""
            if type(actual) is type(expected) and actual == expected
            else _unequal(actual, expected)
        )
    if isinstance(actual, StructuredTensor) or isinstance(expected, StructuredTensor):
        return _unequal(actual, expected)  # two alike would have been compared part by part
    if actual.is_complex() and expected.is_complex():
        return _difference(torch.view_as_real(actual), torch.view_as_real(expected))
    for fact in ("dtype", "shape", "device"):
        if getattr(actual, fact) != getattr(expected, fact):
            return f"{describe(actual)} on {actual.device} is not {describe(expected)} on {expected.device}"
    differs = (_bits(actual) != _bits(expected)) & ~(_is_nan(actual) & _is_nan(expected))
    count = int(differs.sum())
    if not count:
        return ""
    first = tuple(differs.nonzero()[0].tolist())
    return (
        f"{count} of {differs.numel()} elements of {describe(actual)} differ, "
        f"the first at {list(first)}: {actual[first].item()!r} is not {expected[first].item()!r}"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(_BITS[tensor.element_size()])


def _is_nan(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.dtype == torch.float4_e2m1fn_x2:
        return torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    # isnan knows no 8-bit formats
    return (tensor.to(torch.float32) if tensor.element_size() == 1 else tensor).isnan()


def _unequal(actual: Any, expected: Any) -> str:
    return f"{_short(actual)} is not {_short(expected)}"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {describe(value)}"
    children = _children(value)
    return repr(value) if children is None else f"{type(value).__name__}({', '.join(children)})"
