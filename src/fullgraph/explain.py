"""`fg.explain`: what a model compiles to, read off the graphs that run.

The function is compiled apart from everything else, run once forward and backward, and described node by node: what
each operand is cast to, which routine multiplies, what is padded. How nodes are found is `customop/graphs.py`.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fullgraph.customop import compat
from fullgraph.customop.graphs import (
    GraphRecorder,
    OpNode,
    isolated,
    recompile_reason,
    run_both_ways,
)
from fullgraph.customop.plan import TensorSpec
from fullgraph.errors import ConfigError, describe
from fullgraph.gemm import GemmBackend
from fullgraph.nn import Linear
from fullgraph.nn.scaling import preserved
from fullgraph.ops.linear import Decisions
from fullgraph.quantizers import HybridQuantizer
from fullgraph.recipes import LinearNumerics
from fullgraph.statistics import TensorStatistics, collected_apart, linear_layers, linears_of
from fullgraph.tables import table
from fullgraph.tensor import QuantizedParts, Quantizer

ROUTES = {
    GemmBackend.NATIVE: "native",
    GemmBackend.REFERENCE: "emulated",
    None: "high precision",
}
"""How the route of a GEMM is called in a report: on the low-precision units, with the same operands in high
precision, or without low-precision operands."""

_CONTRACTION = {"fprop": "K", "dgrad": "N", "wgrad": "M"}


@dataclasses.dataclass(frozen=True)
class NodeReport:
    """One node of one of our ops in the graphs that run. Made by `explain`.

    Args:
        layer: path of the module, "" for the model itself or a bare function.
        op: name of the op.
        direction: "forward", "backward", or "recomputed" for a forward op in the backward graph.
        tensors: operand -> dtype and shape.
        casts: operand -> its quantizer and the copies made of it here; absent if nothing is cast.
        gemms: GEMM -> its route: "native", "emulated" or "high precision".
        padding: GEMM -> the dimension that it contracts and how that grows; absent if it does not.
    """

    layer: str
    op: str
    direction: str
    tensors: dict[str, str]
    casts: dict[str, str]
    gemms: dict[str, str]
    padding: dict[str, str]

    def rows(self) -> list[tuple[str, ...]]:
        """This node as rows of the report's table: an operand in each, and beside them the GEMMs."""
        operands = [(name, text, self.casts.get(name, "")) for name, text in self.tensors.items()]
        gemms = [
            (f"{name} {route}", self.padding.get(name, "")) for name, route in self.gemms.items()
        ]
        titles = [(self.layer or "-", self.direction)]
        rows = []
        for title, operand, gemm in itertools.zip_longest(titles, operands, gemms):
            rows.append((*(title or ("", "")), *(operand or ("", "", "")), *(gemm or ("", ""))))
        return rows


@dataclasses.dataclass(frozen=True)
class Report:
    """What a model compiles to. Made by `explain`.

    `print(report)` shows everything.

    Args:
        num_linears: `fg.Linear` modules in the model; None if what was explained is no module.
        num_graphs: graphs of the first call; 1 if nothing breaks them.
        graph_breaks: how often a graph broke.
        break_reasons: torch's reasons, with file and line.
        forward_nodes: nodes of our ops in the forward graphs of the first call.
        backward_nodes: the same for the backward graphs.
        recomputed_nodes: nodes of our forward ops in backward graphs (activation checkpointing).
        recompiles: graphs that the second call added.
        recompile_reasons: the guards that failed.
        nodes: every node, in the order of the graphs.
        statistics: what the first call's casts did to each tensor of each layer; None if that was not asked for.
    """

    num_linears: int | None
    num_graphs: int
    graph_breaks: int
    break_reasons: tuple[str, ...]
    forward_nodes: int
    backward_nodes: int
    recomputed_nodes: int
    recompiles: int
    recompile_reasons: tuple[str, ...]
    nodes: tuple[NodeReport, ...]
    statistics: tuple[TensorStatistics, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        head = ("layer", "pass", "operand", "tensor", "cast", "GEMM", "padding")
        rows = [row for node in self.nodes for row in node.rows()]
        counts = {
            "linear layers": "unknown" if self.num_linears is None else self.num_linears,
            "forward nodes": self.forward_nodes,
            "backward nodes": self.backward_nodes,
            "recomputed nodes": self.recomputed_nodes,
            "graphs": self.num_graphs,
            "graph breaks": self.graph_breaks,
            "recompiles": self.recompiles,
        }
        lines = [table(head, rows), ""] if rows else []
        if self.statistics:
            lines += [table(_STATISTICS_HEAD, map(_statistics_row, self.statistics)), ""]
        lines += [f"{name:<17}{count}" for name, count in counts.items()]
        for reason in (*self.break_reasons, *self.recompile_reasons):
            lines += ["", reason]
        return "\n".join(lines)


def explain(
    function: Callable[..., Any],
    *inputs: Any,
    again: tuple[Any, ...] | None = None,
    dynamic: bool | None = None,
    stats: bool = False,
    **kwargs: Any,
) -> Report:
    """Say what a model compiles to: nodes, casts, GEMM routes, padding, graph breaks, recompiles.

    Compiles apart from other uses of the model and runs it, forward and backward, once with each set of inputs. Leaves
    no gradients behind, and random number generators, the state of delayed scaling and statistics that are being
    collected as they were; what the model changes otherwise when it runs, it changes.

    Args:
        function: a module or any function of tensors.
        *inputs: its arguments.
        again: positional arguments of a second call, such as another batch size, to see whether it recompiles.
        dynamic: as for `torch.compile`: None makes a size symbolic once it has changed, True from the start.
        stats: also say what the casts of the first call do to values: amax, underflow, saturation, SQNR. Backward
            starts from ones.
        **kwargs: keyword arguments of the function, in both calls.

    Returns:
        The report. Graph breaks are reported, not raised.

    Raises:
        ConfigError: `function` is not callable, or `again` is no tuple; with `stats` also if `function` is no module,
            has no `fg.Linear`, or has no data.

    Example:
        >>> layer = fullgraph.Linear(32, 8, recipe="fp8-current")
        >>> report = fullgraph.explain(layer, torch.randn(4, 32))
        >>> report.forward_nodes, report.backward_nodes, report.graph_breaks
        (1, 1, 0)
        >>> report.nodes[0].gemms
        {'fprop': 'emulated'}
    """
    if not callable(function):
        raise ConfigError(
            f"explain: a module or a function is needed, got {type(function).__name__}",
            why="it is compiled and run once with the inputs",
            do="pass the model and its inputs separately: fg.explain(model, x)",
        )
    if again is not None and not isinstance(again, (tuple, list)):
        raise ConfigError(
            f"explain: again must be a tuple of arguments, got {type(again).__name__}",
            why="it holds all positional arguments of a second call",
            do="pass again=(x,)",
        )
    layers = linear_layers("explain", function) if stats else linears_of(function)
    recorder = GraphRecorder()
    run = torch.compile(isolated(function), backend=recorder, dynamic=dynamic)
    breaks_before = compat.graph_break_counts()
    devices = _cuda_devices(function, inputs, kwargs)
    with (
        torch.random.fork_rng(devices=devices),
        preserved(function),
        collected_apart(layers, collect=stats) as collected,
    ):
        run_both_ways(run, inputs, kwargs)
        report = _first_call(function, recorder, breaks_before)
        if stats:
            report = dataclasses.replace(report, statistics=collected())
        if again is None:
            return report
        reason = recompile_reason(function, run, again, kwargs)
        if reason is not None:
            run_both_ways(run, again, kwargs)
    return dataclasses.replace(
        report,
        recompiles=len(recorder.graphs) - report.num_graphs,
        recompile_reasons=() if reason is None else (f"recompiled because {reason}",),
    )


def _first_call(
    function: Callable[..., Any], recorder: GraphRecorder, breaks_before: dict[str, int]
) -> Report:
    breaks = _break_reasons(recorder, breaks_before)
    passes = {
        "forward": recorder.forward,
        "backward": recorder.backward,
        "recomputed": recorder.recomputed,
    }
    return Report(
        num_linears=_num_linears(function),
        num_graphs=len(recorder.graphs),
        graph_breaks=len(breaks),
        break_reasons=breaks,
        forward_nodes=len(recorder.forward),
        backward_nodes=len(recorder.backward),
        recomputed_nodes=len(recorder.recomputed),
        recompiles=0,
        recompile_reasons=(),
        nodes=tuple([_node_report(node, name) for name, nodes in passes.items() for node in nodes]),
    )


def _num_linears(function: Callable[..., Any]) -> int | None:
    if not isinstance(function, nn.Module):
        return None
    return sum(isinstance(module, Linear) for module in function.modules())


def _cuda_devices(function: Callable[..., Any], inputs: Any, kwargs: Any) -> list[int]:
    """The GPUs whose random numbers the call may use."""
    tensors = [t for t in tree_leaves((inputs, kwargs)) if isinstance(t, torch.Tensor)]
    if isinstance(function, nn.Module):
        tensors += [*function.parameters(), *function.buffers()]
    return sorted({t.get_device() for t in tensors if t.is_cuda})


def _break_reasons(recorder: GraphRecorder, before: dict[str, int]) -> tuple[str, ...]:
    """Torch's reasons, with the place where there is one.

    A break that ends a graph comes with its place, but at times with a shorter text than torch counts it under. A
    break before the first operation, or in a loop, ends no graph and is only counted.
    """
    now = compat.graph_break_counts()
    counted = [reason for reason in now if now[reason] > before.get(reason, 0)]
    ended = [reason for reason, _ in recorder.breaks]
    unmatched = [reason for reason in counted if reason not in ended]
    reasons = []
    for reason, place in recorder.breaks:
        if reason not in counted and unmatched:
            reason = unmatched.pop(0)
        reasons.append(f"graph break at {place}: {reason}")
    return (*reasons, *[f"graph break: {reason}" for reason in unmatched])


def _node_report(node: OpNode, direction: str) -> NodeReport:
    fields = {f.name: getattr(node.arguments, f.name) for f in dataclasses.fields(node.arguments)}
    numerics, decisions = fields.get("numerics"), node.plan.decisions
    casts: dict[str, str] = {}
    gemms: dict[str, str] = {}
    padding: dict[str, str] = {}
    if isinstance(numerics, LinearNumerics) and isinstance(decisions, Decisions):
        for operand, orientation in decisions.copies.items():
            casts[operand] = f"{_quantizer(getattr(numerics, operand))} {orientation.value}"
        gemms = {name: ROUTES[backend] for name, backend in decisions.gemms.items()}
        padding = _padding(fields, decisions)
    return NodeReport(
        layer=node.module,
        op=node.op,
        direction=direction,
        tensors={
            name: text
            for name, value in fields.items()
            if (text := _tensor(value))
            and not name.endswith("_statistics")  # of ours, not the model's
        },
        casts=casts,
        gemms=gemms,
        padding=padding,
    )


_STATISTICS_HEAD = (
    *("layer", "tensor", "amax", "underflow", "saturation", "nonfinite", "SQNR (dB)"),
    *("elements", "casts"),
)


def _statistics_row(record: TensorStatistics) -> tuple[str, ...]:
    """What was recorded of a tensor, as a row of the report's second table."""
    shares = (record.underflow, record.saturation, record.nonfinite)
    return (
        record.layer or "-",
        record.tensor,
        f"{record.amax:.4g}",
        *["-" if share is None else f"{share:.3%}" for share in shares],
        "-" if record.sqnr_db is None else f"{record.sqnr_db:.1f}",
        f"{record.elements:,}",
        str(record.casts),
    )


def _tensor(value: Any) -> str:
    """A tensor operand as text; "" for anything else."""
    if isinstance(value, TensorSpec):
        return describe(value)
    if isinstance(value, QuantizedParts):
        return f"{value.quantizer.format.name} of {describe(value)}"
    return ""


def _quantizer(quantizer: Quantizer) -> str:
    """A quantizer without the options that have their default."""
    if isinstance(quantizer, HybridQuantizer):
        members = [quantizer.rowwise, quantizer.columnwise]
        return " / ".join(["high precision" if m is None else _quantizer(m) for m in members])
    options = [quantizer.format.name]
    for field in dataclasses.fields(quantizer):
        value = getattr(quantizer, field.name)
        if field.name != "format" and value != field.default:
            shown = value.name if isinstance(value, enum.Enum) else value
            options.append(field.name if value is True else f"{field.name}={shown}")
    return f"{type(quantizer).__name__}({', '.join(options)})"


def _padding(fields: dict[str, Any], decisions: Decisions) -> dict[str, str]:
    """The contractions that grow: K of fprop, N of dgrad, M of wgrad."""
    padding = {}
    for gemm, pad in decisions.pads.items():
        shape = fields["input" if gemm == "fprop" else "grad_output"].shape
        size = math.prod(shape[:-1]) if gemm == "wgrad" else shape[-1]
        if pad > 1 and not isinstance(size, int):
            padding[gemm] = f"{_CONTRACTION[gemm]} {size} -> a multiple of {pad}"
        elif size % pad:
            padding[gemm] = f"{_CONTRACTION[gemm]} {size} -> {size + -size % pad}"
    return padding
