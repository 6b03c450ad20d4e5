"""Lean ops: the forward and the backward of a custom op as they stand in a compiled graph.

A lean op takes plain tensors and one string and has no autograd registration:

    ns::name_forward(Tensor[] tensors, str meta) -> Tensor[]
    ns::name_forward.mut2(Tensor[] tensors, Tensor(a!)[] mutated, str meta) -> (Tensor, Tensor)

(`SymInt[] dyn` stands before `meta` where the op has `Dyn` fields.) `meta` is the token followed by the layout: for
every tensor field None, a slot, or a structured tensor with slots in it. Mutating ops have one overload for each
number of results, because functionalization refuses `Tensor[]` results of an op that mutates.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fullgraph.customop import verify
from fullgraph.customop.fields import FieldKind, FieldTable
from fullgraph.customop.plan import Pass, Plan, TensorSpec
from fullgraph.customop.structured import flatten, is_parts
from fullgraph.customop.token import Construct, Slot, TensorSlot, parse
from fullgraph.errors import ConfigError

MAX_RESULTS = 16
"""Most plain tensors that a mutating op can return."""
MAX_PLANS = 4096
"""Plans kept for one token and layout before the cache starts anew (one for each combination of shapes)."""

TAGS = (torch.Tag.pt2_compliant_tag,)


class Binding:
    """How the flat arguments of a lean op become an argument object, for one `meta` string.

    Args:
        table: the argument dataclass.
        meta: token and layout.
    """

    def __init__(self, table: FieldTable, meta: str) -> None:
        self._cls = table.cls
        self._constants: dict[str, Any] = {}
        self._plain: list[tuple[str, int]] = []
        self._structured: list[tuple[str, type, dict[str, Any], list[tuple[str, int]]]] = []
        self._dyn: list[tuple[str, int]] = []
        self.slots: list[torch.dtype] = []
        self.plans: dict[Any, tuple[Plan, Callable[[Mapping[str, Any]], Sequence[Any]]]] = {}
        values = parse(meta)
        mutated = table.names(FieldKind.MUT)
        # Read tensors come first in the flat list, mutated ones behind them.
        for name in (*table.names(FieldKind.TENSOR), *mutated):
            self._place(name, values[name])
        for index, name in enumerate(table.names(FieldKind.DYN)):
            self._dyn.append((name, index))
        for name in table.names(FieldKind.CARRY):
            self._constants[name] = None
        for name in table.names(FieldKind.VALUE, FieldKind.PLANNED):
            self._constants[name] = values[name]

    def _place(self, name: str, form: Any) -> None:
        if form is None:
            self._constants[name] = None
        elif isinstance(form, TensorSlot):
            self._plain.append((name, self._slot(form)))
        else:
            assert isinstance(form, Construct)
            slots = {n: v for n, v in form.fields.items() if isinstance(v, TensorSlot)}
            constants = {n: v for n, v in form.fields.items() if n not in slots}
            places = [(n, self._slot(v)) for n, v in slots.items()]
            self._structured.append((name, form.cls, constants, places))

    def _slot(self, slot: TensorSlot) -> int:
        self.slots.append(slot.dtype)
        return len(self.slots) - 1

    def arguments(self, flat: Sequence[Any], dyn: Sequence[Any]) -> Any:
        """The argument object: tensors or specs from `flat`, everything else from the token."""
        fields = self._constants.copy()
        for name, index in self._plain:
            fields[name] = flat[index]
        for name, cls, constants, places in self._structured:
            fields[name] = cls(**constants, **{n: flat[i] for n, i in places})
        for name, index in self._dyn:
            fields[name] = dyn[index]
        arguments = object.__new__(self._cls)
        object.__setattr__(arguments, "__dict__", fields)
        return arguments


def _flattener(plan: Plan) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    """How the results of `execute` (or the specs of the plan) become what the op returns."""
    results = plan.results
    names = list(results)
    if any(is_parts(spec) for spec in results.values()):
        return lambda results: [t for name in names for t in flatten(results[name])]
    if len(names) == 1:
        return lambda results: [results[names[0]]]
    return operator.itemgetter(*names) if names else lambda results: []


class LeanOp:
    """One direction of a custom op as a `torch.library` op over plain tensors.

    Args:
        library: where the op is defined.
        namespace, name: its qualified name, "ns::name".
        direction: arguments, plan and execute.
        table: the fields of the arguments.
    """

    def __init__(
        self, library: torch.library.Library, namespace: str, name: str, direction: Pass, table: FieldTable
    ) -> None:
        self.name = f"{namespace}::{name}"
        self._table = table
        self._plan, self._execute = direction.plan, direction.execute
        self._bindings: dict[str, Binding] = {}
        self._has_dyn = bool(table.of(FieldKind.DYN))
        dyn = "SymInt[] dyn, " if self._has_dyn else ""
        self._define(library, name, f"(Tensor[] tensors, {dyn}str meta) -> Tensor[]", False, list)
        packet = getattr(getattr(torch.ops, namespace), name)
        self.pure = packet.default
        self.mutating: list[Any] = []
        if table.of(FieldKind.MUT):
            for arity in range(MAX_RESULTS + 1):
                returns = "Tensor" if arity == 1 else f"({', '.join(['Tensor'] * arity)})"
                schema = f"(Tensor[] tensors, Tensor(a!)[] mutated, {dyn}str meta) -> {returns}"
                self._define(library, f"{name}.mut{arity}", schema, True, _fixed_arity(arity))
                self.mutating.append(getattr(packet, f"mut{arity}"))

    @property
    def overloads(self) -> tuple[Any, ...]:
        """Every overload under which this op can stand in a graph."""
        return (self.pure, *self.mutating)

    def _define(
        self,
        library: torch.library.Library,
        name: str,
        schema: str,
        mutates: bool,
        finish: Callable[[Sequence[torch.Tensor]], Any],
    ) -> None:
        def unpack(run: Callable[..., list[torch.Tensor]]) -> Callable[..., Any]:
            match mutates, self._has_dyn:
                case False, False:
                    return lambda tensors, meta: finish(run(tensors, (), meta))
                case False, True:
                    return lambda tensors, dyn, meta: finish(run(tensors, tuple(dyn), meta))
                case True, False:
                    return lambda tensors, mutated, meta: finish(run(tensors, (), meta, mutated))
            return lambda tensors, mutated, dyn, meta: finish(run(tensors, tuple(dyn), meta, mutated))

        library.define(name + schema, tags=TAGS)
        library.impl(name, unpack(self._real), "CompositeExplicitAutograd")
        qualified = f"{self.name.partition('::')[0]}::{name}"
        torch.library.register_fake(qualified, unpack(self._fake), lib=library)

    def call(
        self, tensors: list[Any], mutated: list[Any], dyn: Sequence[Any], meta: str, results: int
    ) -> Sequence[torch.Tensor]:
        """Run the op through the dispatcher.

        Args:
            tensors: plain tensors that are read, in field order.
            mutated: plain tensors that are changed.
            dyn: the `Dyn` fields.
            meta: token and layout.
            results: how many plain tensors come back.
        """
        tail = (list(dyn), meta) if self._has_dyn else (meta,)
        if not mutated:
            return self.pure(tensors, *tail)
        if results > MAX_RESULTS:
            raise ConfigError(
                f"{self.name} returns {results} tensors, more than a mutating op may ({MAX_RESULTS})",
                why="mutating ops are registered with a fixed number of results",
                do="save fewer tensors, or pack several into one",
            )
        result = self.mutating[results](tensors, mutated, *tail)
        if results == 1:
            return [result]
        return [] if results == 0 else list(result)

    def _real(
        self, tensors: list[torch.Tensor], dyn: tuple[int, ...], meta: str, mutated: Sequence[Any] = ()
    ) -> Sequence[torch.Tensor]:
        binding = self._bindings.get(meta) or self._bind(meta)
        flat = [*tensors, *mutated] if mutated else tensors
        key = (flat[0].device, dyn, *[t.shape for t in flat])
        plan, flatten_results = binding.plans.get(key) or self._prepare(binding, key, flat, dyn)
        results = self._execute(plan, binding.arguments(flat, dyn))
        if verify.enabled():
            verify.results_match(self.name, plan, results, flat)
        for tensor in mutated:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        return flatten_results(results)

    def _prepare(self, binding: Binding, key: Any, flat: Sequence[torch.Tensor], dyn: tuple[int, ...]) -> Any:
        plan = self._plan(binding.arguments([TensorSpec.of(t) for t in flat], dyn))
        if len(binding.plans) >= MAX_PLANS:
            binding.plans.clear()
        prepared = binding.plans[key] = plan, _flattener(plan)
        return prepared

    def _fake(
        self, tensors: list[torch.Tensor], dyn: tuple[Any, ...], meta: str, mutated: Sequence[Any] = ()
    ) -> Sequence[torch.Tensor]:
        binding = self._bindings.get(meta) or self._bind(meta)
        specs = [TensorSpec.of(t) for t in (*tensors, *mutated)]
        plan = self._plan(binding.arguments(specs, dyn))
        return [spec.empty() for spec in _flattener(plan)(plan.results)]

    def _bind(self, meta: str) -> Binding:
        binding = self._bindings[meta] = Binding(self._table, meta)
        return binding


def _fixed_arity(arity: int) -> Callable[[Sequence[torch.Tensor]], Any]:
    if arity == 0:
        return lambda results: None
    if arity == 1:
        return lambda results: results[0]
    return tuple


def layout(table: FieldTable, codes: Iterator[Any]) -> str:
    """The layout part of `meta`.

    Args:
        table: the argument dataclass.
        codes: for each tensor field in declaration order: None, a dtype, or the text of a structured tensor.
    """
    fields = []
    for field in table.fields:
        if field.kind in (FieldKind.TENSOR, FieldKind.MUT):
            code = next(codes)
            fields.append(f",{field.name}={f'T[{code}]' if isinstance(code, torch.dtype) else code}")
        elif field.kind is FieldKind.DYN:
            fields.append(f",{field.name}={Slot.DYN.value}")
    return "".join(fields)
