"""What became of custom ops under `torch.compile`: the nodes in the graphs that run.

`GraphRecorder` is a `torch.compile` backend that reads AOTAutograd's graphs on their way to the compiler. A node is
reported as what it means: the argument object with specs in place of tensors, and the plan made from it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from fullgraph.customop import compat
from fullgraph.customop.guards import Names, in_words
from fullgraph.customop.lean import LeanOp
from fullgraph.customop.op import defined_ops
from fullgraph.customop.plan import Plan
from fullgraph.errors import ConfigError

COMPILERS = ("aot_eager", "inductor")
"""What a `GraphRecorder` can compile with: the graphs as they are, or Inductor's kernels."""


_counter = itertools.count()


@dataclasses.dataclass(frozen=True)
class OpNode:
    """One node of a custom op in a graph that runs.

    Args:
        op: name given to `define`.
        module: path of the nn.Module it belongs to, below the outermost one; "" if it is that one or unknown.
        is_backward: whether it is the op's backward.
        arguments: the argument dataclass of that direction, filled with specs.
        plan: what was planned for them.
    """

    op: str
    module: str
    is_backward: bool
    arguments: Any
    plan: Plan


@dataclasses.dataclass
class CompiledGraph:
    """One graph of Dynamo, as compiled.

    Args:
        graph_break: (torch's reason, file:line) if it ends at a graph break.
        forward: nodes of forward ops in its forward graph.
        backward: nodes of backward ops in its backward graph, which is compiled when backward first runs.
        recomputed: nodes of forward ops in its backward graph: activation checkpointing.
    """

    graph_break: tuple[str, str] | None
    forward: list[OpNode] = dataclasses.field(default_factory=list)
    backward: list[OpNode] = dataclasses.field(default_factory=list)
    recomputed: list[OpNode] = dataclasses.field(default_factory=list)

    def read(self, graph: torch.fx.GraphModule, is_backward: bool) -> None:
        """Note the nodes of one of AOTAutograd's graphs."""
        for node in op_nodes(graph):
            if node.is_backward:
                self.backward.append(node)
            else:
                (self.recomputed if is_backward else self.forward).append(node)


class GraphRecorder:
    """A `torch.compile` backend that notes graphs, graph breaks and custom-op nodes, then compiles.

    Use one for one `torch.compile`; reading costs compile time only.

    Args:
        compiler: one of `COMPILERS`.

    Attributes:
        graphs: what was compiled, in order; each after the first is a graph break or a recompilation.

    Raises:
        ConfigError: another compiler.
    """

    def __init__(self, compiler: str = "aot_eager") -> None:
        if compiler not in COMPILERS:
            raise ConfigError(
                f"GraphRecorder: unknown compiler {compiler!r}",
                why=f"the compilers are {', '.join(COMPILERS)}",
                do="use one of them",
            )
        self.compiler = compiler
        self.graphs: list[CompiledGraph] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What `torch.compile` calls."""
        graph = CompiledGraph(compat.graph_break(module))
        compiled = compat.compile_graph(self.compiler, module, inputs, graph.read)
        self.graphs.append(graph)  # not before: Dynamo may give up within and start anew
        return compiled

    @property
    def breaks(self) -> list[tuple[str, str]]:
        """(torch's reason, file:line) of each graph break that ended a graph."""
        return [graph.graph_break for graph in self.graphs if graph.graph_break is not None]

    @property
    def forward(self) -> list[OpNode]:
        """Nodes of forward ops in forward graphs."""
        return [node for graph in self.graphs for node in graph.forward]

    @property
    def backward(self) -> list[OpNode]:
        """Nodes of backward ops in backward graphs."""
        return [node for graph in self.graphs for node in graph.backward]

    @property
    def recomputed(self) -> list[OpNode]:
        """Nodes of forward ops in backward graphs."""
        return [node for graph in self.graphs for node in graph.recomputed]


def op_nodes(graph: torch.fx.GraphModule) -> Iterator[OpNode]:
    """The custom-op nodes of one of AOTAutograd's graphs, in order."""
    lean: dict[Any, tuple[str, bool, LeanOp]] = {}
    for op in defined_ops():
        lean |= dict.fromkeys(op.fwd_ops, (op.name, False, op._lean_forward))
        if op._lean_backward is not None:
            lean |= dict.fromkeys(op.bwd_ops, (op.name, True, op._lean_backward))
    for node in graph.graph.nodes:
        overload, values = _call_of(node)
        if overload in lean:
            name, is_backward, lean_op = lean[overload]
            flat = [t.meta["val"] for t in (*values["tensors"], *values.get("mutated", ()))]
            dyn = tuple([_value(size) for size in values.get("dyn", ())])
            arguments, plan = lean_op.describe(flat, values["meta"], dyn)
            yield OpNode(name, _module_path(node), is_backward, arguments, plan)


def _call_of(node: torch.fx.Node) -> tuple[Any, dict[str, Any]]:
    """The overload that a node calls and its arguments by name, through functionalization's wrapper too."""
    target: Any = node.target
    values: dict[str, Any] = dict(node.kwargs)
    if isinstance(target, torch._ops.OpOverload):
        names = [argument.name for argument in target._schema.arguments]
        return target, values | dict(zip(names, node.args, strict=False))
    if not isinstance(target, torch._ops.HigherOrderOperator) or not node.args:
        return None, values
    if "_mutated_length" in values:
        bases, count = values["_all_bases"], values["_mutated_length"]
        values["mutated"] = [bases[values[f"_mutated_{i}_base_index"]] for i in range(count)]
    return node.args[0], values


def _value(size: Any) -> Any:
    return size.meta["val"] if isinstance(size, torch.fx.Node) else size


def _module_path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    paths = [path for path, _ in stack.values()]
    return paths[-1].removeprefix(paths[0]).removeprefix(".")


def isolated(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, to compile apart.

    `torch.compile` shares compiled code between all uses of one code object, and what it has learned about sizes
    between all of one name and place.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_name=f"run_{next(_counter)}")
    return run


def recompile_reason(
    function: Callable[..., Any],
    compiled: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str | None:
    """Run a compiled function both ways; if it would recompile, do not, and say which guards failed.

    Args:
        function: what was compiled, through `isolated`.
        compiled: the result.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Returns:
        What changed, in the names of the function's parameters; None if it did not recompile.
    """
    message = compat.recompile_error(lambda: run_both_ways(compiled, args, kwargs))
    if message is None:
        return None
    # "- 0/0: <guard>   # <source line>", one for each compiled version, then perhaps a stack trace
    guards = re.findall(r"^ *- [!\d/]+: (.*?)(?:  +#.*)?$", message, re.MULTILINE)
    names = Names(function, args, kwargs)
    return "; ".join(dict.fromkeys([in_words(guard, names) for guard in guards])) or message


def run_both_ways(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Run forward, and backward from every differentiable result, and leave no gradient anywhere."""

    def as_leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)

    args, kwargs = tree_map_only(torch.Tensor, as_leaf, (args, kwargs))
    results = tree_leaves(function(*args, **kwargs))
    results = [r for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None]
    leaves = _leaves_of(results)
    if leaves:
        ones = [torch.ones(r.shape, dtype=r.dtype, device=r.device) for r in results]
        torch.autograd.grad(results, leaves, ones, allow_unused=True)


def _leaves_of(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """The leaf tensors that these depend on."""
    leaves: list[torch.Tensor] = []
    seen: set[Any] = set()
    to_visit = [result.grad_fn for result in results]
    while to_visit:
        function = to_visit.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        variable = getattr(function, "variable", None)
        if variable is not None:
            leaves.append(variable)
        to_visit += [upstream for upstream, _ in function.next_functions]
    return leaves
