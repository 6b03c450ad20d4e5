"""Lean ops: the forward and the backward of a custom op as they stand in a compiled graph.

A lean op takes plain tensors and one string and has no autograd registration:

    ns::name_forward(Tensor[] tensors, str meta) -> Tensor[]
    ns::name_forward.mut2(Tensor[] tensors, Tensor(a!)[] mutated, str meta) -> (Tensor, Tensor)

(`SymInt[] dyn` stands before `meta` where the op has `Dyn` fields.) `meta` is the token followed by the layout: for
every tensor field None, a slot, or a structured tensor with slots in it. Mutating ops have one overload for each
number of results, because functionalization refuses `Tensor[]` results of an op that mutates.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fullgraph.customop import compat, verify
from fullgraph.customop.fields import NEEDS, FieldKind, FieldTable
from fullgraph.customop.plan import Pass, Plan, TensorSpec
from fullgraph.customop.structured import code_of, flatten, is_parts
from fullgraph.customop.token import CACHES, Construct, Slot, TensorSlot, encode, parse
from fullgraph.customop.transforms import check_tangents, refuse_batches
from fullgraph.errors import CompileError, ConfigError

MAX_RESULTS = 16
"""Most plain tensors that a mutating op can return."""
MAX_PLANS = 4096
"""Plans kept for one op before its cache starts anew: one for each token, layout, device and combination of sizes."""

Prepared = tuple[Plan, Callable[..., Any], Callable[[Mapping[str, Any]], Sequence[Any]]]
"""What the hot path needs: a plan, how to make its argument object, how to order its results."""

KERNELS: dict[Any, Callable[..., Any]] = {}
"""Overload -> its kernel, for whoever wants to look inside an op (`check.py`)."""

_shape_of = operator.attrgetter("shape")

AUTOCAST_DEVICES = ("cpu", "cuda")
"""Where `torch.autocast` must not reach into an op."""

TAGS = (torch.Tag.pt2_compliant_tag,)


def bind(table: FieldTable, meta: str) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    """How the flat arguments of a lean op become an argument object, for one `meta` string.

    Args:
        table: the argument dataclass.
        meta: token and layout.

    Returns:
        A function of the flat tensors (or specs) and the `Dyn` integers: an argument object with everything else
        from the token.
    """
    values = parse(meta)
    known = {f.name for f in table.fields if f.kind is not FieldKind.CARRY} - {NEEDS}
    given = values.keys() - {"salt", NEEDS}
    if known != given:
        raise CompileError(
            f"{table.cls.__name__} has the fields {sorted(known)}, a compiled graph calls it with {sorted(given)}",
            why="the graph comes from a compile cache and belongs to another version of the op",
            do="change define(version=...), or clear the cache",
        )
    constants: dict[str, Any] = dict.fromkeys(table.names(FieldKind.CARRY))
    constants |= {name: values[name] for name in table.names(FieldKind.VALUE, FieldKind.PLANNED)}
    plain: list[tuple[str, int]] = []
    structured: list[tuple[str, type, dict[str, Any], list[tuple[str, int]]]] = []
    place = itertools.count()
    # Read tensors come first in the flat list, mutated ones behind them.
    for name in (*table.names(FieldKind.TENSOR), *table.names(FieldKind.MUT)):
        form = values[name]
        if isinstance(form, TensorSlot):
            plain.append((name, next(place)))
        elif isinstance(form, Construct):
            statics = {n: v for n, v in form.fields.items() if not isinstance(v, TensorSlot)}
            places = [(n, next(place)) for n in form.fields if n not in statics]
            structured.append((name, form.cls, statics, places))
        else:
            constants[name] = None
    dyn_names = table.names(FieldKind.DYN)
    cls, new = table.cls, object.__new__

    def arguments(flat: Sequence[Any], dyn: Sequence[Any]) -> Any:
        made = new(cls)
        fields = made.__dict__
        fields.update(constants)
        for name, index in plain:
            fields[name] = flat[index]
        for name, parts, statics, places in structured:
            fields[name] = parts(**statics, **{n: flat[i] for n, i in places})
        if dyn:
            fields.update(zip(dyn_names, dyn, strict=True))
        return made

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


@dataclasses.dataclass(frozen=True)
class LeanCall:
    """A lean op with everything bound that depends on neither sizes nor data.

    Calling it picks the op's arguments out of a pool of plain tensors and runs it through the dispatcher.

    Args:
        overload: the op.
        meta: token and layout.
        read: positions in the pool of the tensors that are read, in field order.
        mutated: positions of those that are changed; the overload has no such argument if there are none.
        dyn: positions of the op's `Dyn` integers, or None if it has no such argument.
    """

    overload: Any
    meta: str
    read: tuple[int, ...]
    mutated: tuple[int, ...]
    dyn: tuple[int, ...] | None

    def __call__(self, pool: Sequence[Any], dyn: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Run the op; every result as one sequence."""
        arguments: list[Any] = [[pool[i] for i in self.read]]
        if self.mutated:
            arguments.append([pool[i] for i in self.mutated])
        if self.dyn is not None:
            arguments.append([dyn[i] for i in self.dyn])
        results = self.overload(*arguments, self.meta)
        return (results,) if isinstance(results, torch.Tensor) else results or ()


class LeanOp:
    """One direction of a custom op as a `torch.library` op over plain tensors.

    Args:
        library: where the op is defined.
        namespace, name: its qualified name, "ns::name".
        direction: arguments, plan and execute.
        table: the fields of the arguments.
    """

    def __init__(
        self,
        library: torch.library.Library,
        namespace: str,
        name: str,
        direction: Pass,
        table: FieldTable,
    ) -> None:
        self.name = f"{namespace}::{name}"
        self._table = table
        self._plan, self._execute = direction.plan, direction.execute
        self._bindings: dict[str, Callable[[Sequence[Any], Sequence[Any]], Any]] = {}
        self._prepared: dict[Any, Prepared] = {}
        self._structures: dict[Any, Any] = {}
        CACHES.extend((self._bindings, self._prepared, self._structures))
        self._has_dyn = bool(table.of(FieldKind.DYN))
        self.pure = self._define(library, "", "Tensor[]")
        self._single = self._define(library, "single", "Tensor", arity=1)
        self._mutating: list[Any] = []
        if table.of(FieldKind.MUT):
            for arity in range(MAX_RESULTS + 1):
                returns = "Tensor" if arity == 1 else f"({', '.join(['Tensor'] * arity)})"
                self._mutating.append(
                    self._define(library, f"mut{arity}", returns, arity=arity, mutates=True)
                )

    @property
    def overloads(self) -> tuple[Any, ...]:
        """Every overload under which this op can stand in a graph."""
        return (self.pure, self._single, *self._mutating)

    def call(
        self,
        meta: str,
        results: int,
        read: Sequence[int],
        mutated: Sequence[int],
        dyn: Sequence[int],
        *,
        is_inference: bool,
    ) -> LeanCall:
        """Choose the overload and bind what every call of one kind has in common.

        Args:
            meta: token and layout.
            results: how many plain tensors come back.
            read: see `LeanCall`.
            mutated: see `LeanCall`.
            dyn: positions of the op's `Dyn` integers.
            is_inference: no gradient will be asked for.

        Raises:
            ConfigError: more results than a mutating op can have.
        """
        overload = self._single if is_inference and results == 1 else self.pure
        if mutated:
            if results > MAX_RESULTS:
                raise ConfigError(
                    f"{self.name} returns {results} tensors, more than a mutating op may ({MAX_RESULTS})",
                    why="mutating ops are registered with a fixed number of results",
                    do="save fewer tensors, or pack several into one",
                )
            overload = self._mutating[results]
        return LeanCall(
            overload, meta, tuple(read), tuple(mutated), tuple(dyn) if self._has_dyn else None
        )

    def _define(
        self,
        library: torch.library.Library,
        overload: str,
        returns: str,
        *,
        arity: int | None = None,
        mutates: bool = False,
    ) -> Any:
        def kernel(run: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., Any]:
            """`run` with the arguments and results of the schema."""
            fix = _FIXED.get(arity, tuple)
            if mutates and self._has_dyn:
                return lambda tensors, mutated, dyn, meta: fix(
                    run(tensors, meta, tuple(dyn), mutated)
                )
            if mutates:
                return lambda tensors, mutated, meta: fix(run(tensors, meta, (), mutated))
            if self._has_dyn:
                return lambda tensors, dyn, meta: fix(run(tensors, meta, tuple(dyn)))
            return run if arity is None else lambda tensors, meta: run(tensors, meta)[0]

        namespace, _, base = self.name.partition("::")
        name = f"{base}.{overload}" if overload else base
        arguments = (
            "Tensor[] tensors"
            + ", Tensor(a!)[] mutated" * mutates
            + ", SymInt[] dyn" * self._has_dyn
        )
        library.define(f"{name}({arguments}, str meta) -> {returns}", tags=TAGS)
        real = kernel(self._real if mutates or self._has_dyn else self._make_pure())
        library.impl(name, real, "CompositeExplicitAutograd")
        # Always called where autograd does not record: spare it torch's fallback, which would look into that.
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        refuse_batches(library, name, self.name)
        torch.library.register_fake(f"{namespace}::{name}", kernel(self._fake), lib=library)
        packet = getattr(getattr(torch.ops, namespace), base)
        for device in AUTOCAST_DEVICES:
            without = _without_autocast(packet, overload or "default", device)
            library.impl(name, without, f"Autocast{device.upper()}")
        made = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        KERNELS[made] = real
        return made

    def _real(
        self,
        tensors: Sequence[torch.Tensor],
        meta: str,
        dyn: tuple[int, ...] = (),
        mutated: Sequence[torch.Tensor] = (),
    ) -> Sequence[torch.Tensor]:
        flat = [*tensors, *mutated]
        if compat.is_in_dual_level():
            check_tangents(self.name, flat)
        key = (meta, flat[0].get_device(), *map(_shape_of, flat), *dyn)
        plan, arguments, collect = self._prepared.get(key) or self._prepare(key, flat, meta, dyn)
        results = self._execute(plan, arguments(flat, dyn))
        if verify.state.on:
            verify.results_match(self.name, plan, results, flat)
        for tensor in mutated:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        return collect(results)

    def _make_pure(self) -> Callable[[Sequence[torch.Tensor], str], Sequence[torch.Tensor]]:
        """`_real` for the op that most are, without `Mut` and `Dyn`: the same, written for speed."""
        prepared, prepare, execute, state = (
            self._prepared,
            self._prepare,
            self._execute,
            verify.state,
        )
        is_in_dual_level = compat.is_in_dual_level

        def pure(tensors: Sequence[torch.Tensor], meta: str) -> Sequence[torch.Tensor]:
            if is_in_dual_level():
                check_tangents(self.name, tensors)
            key = (meta, tensors[0].get_device(), *map(_shape_of, tensors))
            plan, arguments, collect = prepared.get(key) or prepare(key, tensors, meta, ())
            results = execute(plan, arguments(tensors, ()))
            if state.on:
                verify.results_match(self.name, plan, results, tensors)
            return collect(results)

        return pure

    def _prepare(
        self, key: Any, flat: Sequence[torch.Tensor], meta: str, dyn: tuple[int, ...]
    ) -> Prepared:
        arguments = self._bind(meta)
        _, plan = self.describe(flat, meta, dyn)
        if len(self._prepared) >= MAX_PLANS:
            self._prepared.clear()
        prepared = self._prepared[key] = plan, arguments, _flattener(plan)
        return prepared

    def _fake(
        self,
        tensors: Sequence[torch.Tensor],
        meta: str,
        dyn: tuple[Any, ...] = (),
        mutated: Sequence[torch.Tensor] = (),
    ) -> Sequence[torch.Tensor]:
        _, plan = self.describe([*tensors, *mutated], meta, dyn)
        return [spec.empty() for spec in _flattener(plan)(plan.results)]

    def describe(
        self, flat: Sequence[torch.Tensor], meta: str, dyn: tuple[Any, ...]
    ) -> tuple[Any, Plan]:
        """What a call means: its arguments with specs in place of tensors, and its plan.

        Args:
            flat: tensors that are read, then those that are mutated; fake ones will do.
            meta: token and layout.
            dyn: the `Dyn` fields.
        """
        arguments = self._bind(meta)([TensorSpec.of(t) for t in flat], dyn)
        plan = self._plan(arguments)
        self._check_structure(plan, meta, flat[0].device)
        return arguments, plan

    def _check_structure(self, plan: Plan, meta: str, device: torch.device) -> None:
        """All but the sizes of a plan is fixed by the token, the layout and the device."""
        structure = (
            [(name, code_of(spec)) for name, spec in plan.results.items()],
            dict(plan.saved_inputs),
            dict(plan.saved_outputs),
            {
                name: encode(value, f"{self.name}: the value {name}")
                for name, value in plan.values.items()
            },
        )
        before = self._structures.setdefault((meta, device.type), structure)
        if structure != before:
            raise CompileError(
                f"{self.name}: the plan depends on sizes: it has {structure}, for other sizes it had {before}",
                why="which results there are is compiled in, and one graph serves every size",
                do="decide by values and dtypes; what may depend on sizes are the specs and `decisions`",
            )

    def _bind(self, meta: str) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
        arguments = self._bindings.get(meta)
        if arguments is None:
            arguments = self._bindings[meta] = bind(self._table, meta)
        return arguments


def _without_autocast(packet: Any, overload: str, device: str) -> Callable[..., Any]:
    """A kernel that runs the op as a compiled graph would: `torch.autocast` does not reach inside.

    In eager mode it would, and cast the operands of operations inside of `execute`; in a compiled graph it is off.
    """

    def run(*arguments: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return getattr(packet, overload)(*arguments)

    return run


_FIXED: dict[int | None, Callable[[Sequence[torch.Tensor]], Any]] = {
    0: lambda results: None,
    1: operator.itemgetter(0),
}
"""How the results of a kernel become those of an overload with none and one; a tuple otherwise."""


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
            fields.append(
                f",{field.name}={f'T[{code}]' if isinstance(code, torch.dtype) else code}"
            )
        elif field.kind is FieldKind.DYN:
            fields.append(f",{field.name}={Slot.DYN.value}")
    return "".join(fields)
