"""`define`: one op forward, one op backward, from two argument dataclasses.

Three ops come out of a definition:

- the *front* `ns::name`, composite and trace-time only. Its kernel is one `autograd.Function`, it accepts structured
  tensors, and it is the single node that Dynamo and export see;
- the lean `ns::name_forward` and `ns::name_backward` (`lean.py`), the single nodes that AOTAutograd records when it
  runs the front's kernel, and the only ones that exist at run time.

Eager mode runs the same `autograd.Function`, so both modes execute the same lean ops in the same order.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fullgraph._version import __version__
from fullgraph.customop import compat, transforms, verify
from fullgraph.customop.deferred import DeferredCall, DeferredGradient
from fullgraph.customop.definition import Definition
from fullgraph.customop.fields import NEEDS, FieldKind, read_fields
from fullgraph.customop.lean import TAGS, LeanCall, LeanOp, layout
from fullgraph.customop.plan import Pass, TensorSpec
from fullgraph.customop.structured import (
    FRONTS,
    StructuredTensor,
    code_of,
    flatten,
    is_parts,
    map_parts,
    to_spec,
    unflatten_like,
    wrap,
)
from fullgraph.customop.tangent import plain_gradient
from fullgraph.customop.token import CACHES, encode, parse, remember, source_digest
from fullgraph.errors import CompileError, ConfigError

_LIBRARIES: dict[str, torch.library.Library] = {}
_DEFINED: dict[str, CustomOp] = {}


FROM_TOKEN: Any = None
"""Default of a value field that always comes from a token, never from the arguments."""


class StraightThrough:
    """Backward of an op whose gradient is its output's gradient: a cast, a change of container."""


STRAIGHT_THROUGH = StraightThrough()
"""Pass as `define(backward=...)`: the one output's gradient is the one input's gradient."""


@dataclasses.dataclass(frozen=True)
class BackwardCall:
    """The backward of one kind of call: what depends on neither sizes nor data.

    Args:
        lean: the backward op; its pool is what the forward call kept, then the gradients of the outputs.
        places: for each tensor field of the forward arguments, which result is its gradient, if any.
        deferred: for each tensor field whose gradient is a call: its position, the call's token, and name, positions
            and form of the call's tensors, in the pool followed there by the results.
    """

    lean: LeanCall
    places: tuple[int | None, ...]
    deferred: tuple[tuple[int, str, tuple[tuple[str, tuple[int, ...], Any], ...]], ...] = ()


@dataclasses.dataclass(frozen=True)
class Call:
    """One kind of call (token, layout, device, who needs a gradient): what depends on neither sizes nor data.

    Args:
        lean: the forward op; its pool is the plain tensors of the arguments.
        is_flat: whether no argument is a structured tensor.
        needs: the fields that need a gradient.
        values: value fields and planned values, by name.
        outputs: for each output, its first result and its form; None for one that the plan leaves out.
        without_gradient: positions of outputs that cannot have a gradient.
        saved: what is saved for the backward pass: positions in the pool, followed there by the results.
        state: likewise, what a later op may change: kept by reference, outside of version checks.
        kept: backward field and form of everything in `saved` and `state`, in that order.
        changing: positions in the pool of the tensors that this or a later op changes.
        written: positions in the state of what this op writes and its backward op only reads.
        backwards: filled in as backward passes happen.
    """

    lean: LeanCall
    is_flat: bool
    needs: tuple[str, ...]
    values: Mapping[str, Any]
    outputs: tuple[tuple[int, Any] | None, ...]
    without_gradient: tuple[int, ...]
    saved: tuple[int, ...]
    state: tuple[int, ...]
    kept: tuple[tuple[str, Any], ...]
    changing: tuple[int, ...]
    written: tuple[int, ...]
    backwards: dict[Any, BackwardCall] = dataclasses.field(default_factory=dict)


class CustomOp:
    """A forward/backward pair that traces as one node each way. Made by `define`.

    Calling it runs it: `op(arguments)`, or `op(arguments, token=token)` with a token that `encode` made outside of the
    compiled region; value fields of `arguments` are then not read.
    """

    def __init__(
        self,
        name: str,
        forward: Pass,
        backward: Pass | StraightThrough | None,
        gradients: tuple[str, ...],
        outputs: tuple[str, ...],
        version: str,
    ) -> None:
        self.name = name
        self._forward, self._backward = forward, backward
        self._gradients, self._outputs = gradients, outputs
        passes = [p for p in (forward, backward) if isinstance(p, Pass)]
        ours = (define, LeanOp, encode, flatten)  # what the shape of the graphs depends on
        digest = source_digest(*ours, *[x for p in passes for x in (p.arguments, p.plan)])
        self._salt = f"salt={f'{__version__}/{version}/{digest}'!r}"
        self._table = read_fields(forward.arguments)
        self._backward_table = (
            read_fields(backward.arguments) if isinstance(backward, Pass) else None
        )
        self._definition = Definition(name, self._table, self._backward_table, gradients, outputs)
        self._definition.check()

        kinds = (FieldKind.TENSOR, FieldKind.MUT, FieldKind.CARRY)
        self._tensor_names = self._table.names(*kinds)
        self._gradient_fields = [(i, n) for i, n in enumerate(self._tensor_names) if n in gradients]
        required = [i for i, f in enumerate(self._table.of(*kinds)) if not f.optional]
        self._lead = required[0] if required else 0
        self._dyn_names = self._table.names(FieldKind.DYN)
        self._value_names = tuple(n for n in self._table.names(FieldKind.VALUE) if n != NEEDS)
        self._has_needs = self._table.get(NEEDS) is not None
        self._calls: dict[Any, Call] = {}
        CACHES.append(self._calls)
        self._register()

    def _register(self) -> None:
        namespace, _, name = self.name.partition("::")
        library = _LIBRARIES.get(namespace)
        if library is None:
            library = _LIBRARIES[namespace] = torch.library.Library(namespace, "FRAGMENT")
        self._lean_forward = LeanOp(
            library, namespace, f"{name}_forward", self._forward, self._table
        )
        self._lean_backward: LeanOp | None = None
        if isinstance(self._backward, Pass):
            assert self._backward_table is not None
            self._lean_backward = LeanOp(
                library, namespace, f"{name}_backward", self._backward, self._backward_table
            )
        self._function = _make_function(self)
        library.define(name + self._front_schema(), tags=TAGS)
        library.impl(name, self._front_kernel, "CompositeImplicitAutograd")
        transforms.refuse_batches(library, name, self.name)
        self.front_op = getattr(getattr(torch.ops, namespace), name).default
        FRONTS[self.front_op] = self._front_kernel

    def _front_schema(self) -> str:
        letters = iter(string.ascii_lowercase)
        tensors = "".join(
            f", Tensor({next(letters)}!)? {f.name}"
            if f.kind is FieldKind.MUT
            else f", Tensor? {f.name}"
            for f in self._table.fields
            if f.name in self._tensor_names
        )
        many = len(self._outputs) > 1
        returns = f"({', '.join(['Tensor?'] * len(self._outputs))})" if many else "Tensor"
        return f"(str token, SymInt[] dyn{tensors}) -> {returns}"

    def _front_kernel(self, token: str, dyn: Sequence[Any], *tensors: torch.Tensor | None) -> Any:
        return self.apply(token, dyn, tensors)

    @property
    def fwd_op(self) -> Any:
        """The forward op as it stands in a graph: for selective-checkpoint policies and graph passes.

        An op with `Mut` fields stands there as one of several overloads: compare with `in op.fwd_ops`.
        """
        return self._lean_forward.pure

    @property
    def fwd_ops(self) -> tuple[Any, ...]:
        """Every overload of the forward op."""
        return self._lean_forward.overloads

    @property
    def bwd_op(self) -> Any:
        """The backward op as it stands in a graph, or None if there is none."""
        return self._lean_backward and self._lean_backward.pure

    @property
    def bwd_ops(self) -> tuple[Any, ...]:
        """Every overload of the backward op."""
        return self._lean_backward.overloads if self._lean_backward else ()

    def encode(self, **values: Any) -> str:
        """Write the value fields as a token. Do it where configuration changes, not in each forward.

        Args:
            **values: every value field of the forward arguments, `needs` excepted.

        Returns:
            The token: a string, equal for equal values, with the version in it.

        Raises:
            ConfigError: a value that cannot be a constant of the graph, or names that are not the value fields.
        """
        if tuple(sorted(values)) != tuple(sorted(self._value_names)):
            raise ConfigError(
                f"{self.name}: a token holds {sorted(self._value_names)}, got {sorted(values)}",
                why="every value field of the arguments is part of the token",
                do="pass each of them by name",
            )
        return self._encode([values[name] for name in self._value_names])

    def _encode(self, values: list[Any]) -> str:
        token = self._salt
        for name, value in zip(self._value_names, values):  # noqa: B905 (Dynamo of torch 2.11)
            token = f"{token},{name}={encode(value, f'{self.name}.{name}')}"
            if not torch.compiler.is_compiling():
                remember(value)
        return token

    def __call__(self, arguments: Any, *, token: str | None = None) -> Any:
        """Run the op.

        Args:
            arguments: an instance of the forward argument dataclass.
            token: what `encode` returned for these values; None encodes them now.

        Returns:
            The output, or a tuple of them if the op was defined with several; None for one the plan leaves out.
        """
        if token is None:
            token = self._encode([getattr(arguments, name) for name in self._value_names])
        tensors = [getattr(arguments, name) for name in self._tensor_names]
        dyn = [getattr(arguments, name) for name in self._dyn_names]
        if torch.compiler.is_compiling():
            return self.front_op(token, dyn, *tensors)
        if verify.state.on:
            self._check_token(arguments, token)
        return self.apply(token, dyn, tensors)

    def __deepcopy__(self, memo: Any) -> CustomOp:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _op_of, (self.name,)

    def check(self, arguments: Any) -> None:
        """Check the op on an example: opcheck's five tests, plan against results, the CUDA-graph lint.

        Args:
            arguments: an instance of the forward argument dataclass with real tensors.

        Raises:
            CompileError: naming the check that failed.
        """
        from fullgraph.customop.check import check

        check(self, arguments)

    def apply(self, token: str, dyn: Sequence[Any], tensors: Sequence[torch.Tensor | None]) -> Any:
        """Run the op on a token, `Dyn` integers and the tensors in field order."""
        if not compat.is_plain_call():
            transforms.check_call(self.name, tensors)
        needs: tuple[str, ...] = ()
        if torch.is_grad_enabled():
            needs = tuple(
                [
                    n
                    for i, n in self._gradient_fields
                    if (t := tensors[i]) is not None and t.requires_grad
                ]
            )
        device = None if (lead := tensors[self._lead]) is None else lead.device
        key = (token, needs, device, *map(code_of, tensors))
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = self._prepare(token, needs, tensors, dyn)
        if needs:
            return self._function.apply(call, dyn, *tensors)
        if torch.is_grad_enabled():  # `execute` is no place for autograd to look into
            with torch.no_grad():
                outputs, _ = self.run_forward(call, dyn, tensors)
        else:
            outputs, _ = self.run_forward(call, dyn, tensors)
        return outputs[0] if len(outputs) == 1 else outputs

    def run_forward(
        self, call: Call, dyn: Sequence[Any], tensors: Sequence[torch.Tensor | None]
    ) -> tuple[tuple[Any, ...], list[Any]]:
        """Run the lean forward op; the outputs in order, and the pool of all plain tensors."""
        pool: list[Any] = list(tensors) if call.is_flat else _flat(tensors)
        if call.needs and call.changing:
            compat.mark_no_version_check(pool[i] for i in call.changing)
        results = call.lean(pool, dyn)
        outputs = tuple([None if o is None else _take(results, *o) for o in call.outputs])
        pool += results
        return outputs, pool

    def _prepare(
        self,
        token: str,
        needs: tuple[str, ...],
        tensors: Sequence[torch.Tensor | None],
        dyn: Sequence[Any],
    ) -> Call:
        fields = self._table.of(*_TENSORS)
        for field, tensor in zip(fields, tensors, strict=True):
            if tensor is None and not field.optional:
                raise ConfigError(
                    f"{self.name}: {field.name} is required, got None",
                    why=f"{self._table.cls.__name__}.{field.name} is not declared `| None`",
                    do="pass a tensor, or declare the field optional",
                )
        if all(
            t is None for f, t in zip(fields, tensors, strict=True) if f.kind is not FieldKind.CARRY
        ):
            raise ConfigError(
                f"{self.name}: got no tensor at all",
                why="the op takes device and shapes from its tensors",
                do=f"pass at least one of {list(self._table.names(FieldKind.TENSOR, FieldKind.MUT))}",
            )
        values = parse(token)
        arguments = object.__new__(self._table.cls)
        arguments.__dict__.update({n: values[n] for n in self._value_names})
        arguments.__dict__.update(zip(self._dyn_names, dyn, strict=True))
        meta = token + layout(
            self._table,
            (
                code_of(t)
                for f, t in zip(fields, tensors, strict=True)
                if f.kind is not FieldKind.CARRY
            ),
        )
        if self._has_needs:
            arguments.__dict__[NEEDS] = needs
            meta += f",{NEEDS}={encode(needs)}"
        slots = _Slots()
        for field, tensor in zip(fields, tensors, strict=True):
            spec = to_spec(tensor)
            slots.add(field.name, spec)
            arguments.__dict__[field.name] = None if field.kind is FieldKind.CARRY else spec
        num_inputs = slots.count
        plan = self._forward.plan(arguments)
        self._definition.check_plan(plan)
        results = _Slots(num_inputs)
        for name, spec in plan.results.items():
            results.add(name, spec)

        saved: dict[str, tuple[tuple[int, ...], Any]] = {}
        state: dict[str, tuple[tuple[int, ...], Any]] = {}
        if needs and self._backward_table is not None:
            saved.update({n: results[n] for n in plan.saved})
            saved.update({n: slots[source] for n, source in plan.saved_inputs.items()})
            saved.update({n: results[source] for n, source in plan.saved_outputs.items()})
            state.update({n: slots[n] for n in self._definition.handed_on})
            self._definition.check_kept(
                plan, {n for n, (_, form) in {**saved, **state}.items() if form is not None}
            )
        outputs = [plan.outputs.get(name) for name in self._outputs]
        return Call(
            lean=self._lean_forward.call(
                meta,
                results.count - num_inputs,
                slots.all(*self._table.names(FieldKind.TENSOR)),
                slots.all(*self._table.names(FieldKind.MUT)),
                range(len(self._dyn_names)),
                is_inference=not needs,
            ),
            is_flat=not any(isinstance(t, StructuredTensor) for t in tensors),
            needs=needs,
            values={**values, **plan.values},
            outputs=tuple(
                [
                    None if spec is None else (results[name][0][0] - num_inputs, results[name][1])
                    for name, spec in zip(self._outputs, outputs, strict=True)
                ]
            ),
            without_gradient=tuple(
                [
                    i
                    for i, o in enumerate(outputs)
                    if o is not None and not (o.dtype.is_floating_point or o.dtype.is_complex)
                ]
            ),
            saved=_places(saved),
            state=_places(state),
            kept=tuple(
                [(n, form) for n, (_, form) in (*saved.items(), *state.items()) if form is not None]
            ),
            changing=slots.all(*self._table.names(FieldKind.MUT), *self._definition.handed_on),
            written=self._written(state),
        )

    def _written(self, state: Mapping[str, tuple[tuple[int, ...], Any]]) -> tuple[int, ...]:
        table = self._backward_table
        if table is None:
            return ()
        mut, read = self._table.names(FieldKind.MUT), table.names(FieldKind.TENSOR)
        places = _places(state)
        wanted = _places({n: place for n, place in state.items() if n in mut and n in read})
        return tuple([places.index(place) for place in wanted])

    def versions(self, call: Call, state: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Versions of the state that this op wrote and its backward pass reads; none while it is traced."""
        if not call.written or compat.is_tracing():
            return ()
        return tuple([0 if (t := state[i]).is_inference() else t._version for i in call.written])

    def changed(self) -> RuntimeError:
        """What torch says of a saved tensor that was changed, of state that this op wrote."""
        names = [n for n in self._definition.handed_on if n in self._table.names(FieldKind.MUT)]
        return RuntimeError(
            f"{self.name}: one of the tensors needed for gradient computation has been modified by an inplace "
            f"operation: of {', '.join(names)}, which the forward pass wrote and the backward pass reads"
        )

    def _check_token(self, arguments: Any, token: str) -> None:
        """With a token the value fields of the arguments are not read; where set, they must agree."""
        values = parse(token)
        for name in self._value_names:
            given = getattr(arguments, name)
            if given is not None and encode(given) != encode(values[name]):
                raise CompileError(
                    f"{self.name}: argument {name}={given!r} differs from the token, which says {values[name]!r}",
                    why="with token=... the op reads its values from the token",
                    do="encode again after a change of configuration",
                )

    def run_backward(
        self,
        call: Call,
        dyn: Sequence[Any],
        kept: Sequence[Any],
        gradients: Sequence[torch.Tensor | None],
        wanted: tuple[bool, ...],
    ) -> list[torch.Tensor | None]:
        """Run the lean backward op.

        Args:
            call: the forward call.
            dyn: the `Dyn` integers of the forward call.
            kept: the plain tensors that the forward call kept, as `call.kept` describes them.
            gradients: those of the outputs.
            wanted: for each tensor field, whether autograd asks for its gradient.

        Returns:
            For each tensor field its gradient, or None.
        """
        key = (wanted, *map(code_of, gradients))
        backward = call.backwards.get(key)
        if backward is None:
            needs = tuple(
                [
                    n
                    for n, w in zip(self._tensor_names, wanted, strict=True)
                    if w and n in call.needs
                ]
            )
            backward = self._prepare_backward(call, dyn, kept, gradients, needs)
            call.backwards[key] = backward
        pool = [*kept, *gradients]
        results = backward.lean(pool, dyn)
        found: list[Any] = [None if place is None else results[place] for place in backward.places]
        if backward.deferred:
            pool += results
        for position, token, tensors in backward.deferred:
            made = {
                name: wrap(unflatten_like(form, iter([pool[i] for i in places])))
                for name, places, form in tensors
            }
            anchor = pool[tensors[0][1][0]].new_empty(0, dtype=torch.float32)
            found[position] = DeferredGradient((DeferredCall(token, made),), anchor)
        return found

    def _prepare_backward(
        self,
        call: Call,
        dyn: Sequence[Any],
        kept: Sequence[Any],
        gradients: Sequence[torch.Tensor | None],
        needs: tuple[str, ...],
    ) -> BackwardCall:
        table, lean = self._backward_table, self._lean_backward
        assert table is not None and lean is not None and isinstance(self._backward, Pass)
        arguments = object.__new__(table.cls)
        fields = arguments.__dict__
        meta = self._salt
        for name in table.names(FieldKind.VALUE, FieldKind.PLANNED):
            fields[name] = needs if name == NEEDS else call.values[name]
            meta = f"{meta},{name}={encode(fields[name], f'{self.name}.{name}')}"
        dyn_names = table.names(FieldKind.DYN)
        dyn_places = [self._dyn_names.index(name) for name in dyn_names]
        fields.update({name: dyn[i] for name, i in zip(dyn_names, dyn_places, strict=True)})
        slots = _Slots()
        flat = iter(kept)
        specs = {name: to_spec(unflatten_like(form, flat)) for name, form in call.kept}
        specs |= {f"grad_{n}": to_spec(g) for n, g in zip(self._outputs, gradients, strict=True)}
        for name, spec in specs.items():
            slots.add(name, spec)
        tensor_fields = table.names(FieldKind.TENSOR, FieldKind.MUT)
        fields.update({name: specs.get(name) for name in tensor_fields})
        plan = self._backward.plan(arguments)
        made = [n for n, s in plan.outputs.items() if s is not None]
        wrong = [n for n in made if n not in needs or is_parts(plan.outputs[n])]
        wrong += [n for n in plan.deferred if n not in needs or n in made]
        if not plan.deferred:
            wrong += list(plan.saved)
        if wrong:
            raise CompileError(
                f"{self.name}: the backward plan has the results {wrong}, needed are {list(needs)}",
                why="each result of the backward op is the plain gradient of a forward field that needs one",
                do="look at `needs` in the plan and leave out what is not in it",
            )
        results = _Slots(slots.count)
        for name, spec in plan.results.items():
            results.add(name, spec)
        first = slots.count
        return BackwardCall(
            lean.call(
                meta + layout(table, (code_of(specs.get(name)) for name in tensor_fields)),
                results.count - first,
                slots.all(*table.names(FieldKind.TENSOR)),
                slots.all(*table.names(FieldKind.MUT)),
                dyn_places,
                is_inference=False,
            ),
            tuple([results[n][0][0] - first if n in made else None for n in self._tensor_names]),
            tuple(
                [
                    (
                        self._tensor_names.index(name),
                        token,
                        tuple(
                            [
                                (field, *(results if source in plan.saved else slots)[source])
                                for field, source in sources.items()
                            ]
                        ),
                    )
                    for name, (token, sources) in plan.deferred.items()
                ]
            ),
        )


_TENSORS = (FieldKind.TENSOR, FieldKind.MUT, FieldKind.CARRY)


class _Slots:
    """Where named tensors stand in a flat list: positions of their plain tensors, and their form."""

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self._places: dict[str, tuple[tuple[int, ...], Any]] = {}

    def add(self, name: str, spec: Any) -> None:
        """Place the plain tensors of `spec` behind those before; None takes one place too."""
        size = len(flatten(spec)) if is_parts(spec) else 1
        self._places[name] = tuple(range(self.count, self.count + size)), _form(spec)
        self.count += size

    def __getitem__(self, name: str) -> tuple[tuple[int, ...], Any]:
        return self._places[name]

    def all(self, *names: str) -> tuple[int, ...]:
        """Positions of all plain tensors under these names, without those that are absent."""
        present = [self._places[n] for n in names if n in self._places]
        return tuple([i for places, form in present if form is not None for i in places])


def _places(kept: Mapping[str, tuple[tuple[int, ...], Any]]) -> tuple[int, ...]:
    return tuple([i for places, form in kept.values() if form is not None for i in places])


def _form(spec: Any) -> Any:
    """A spec without its sizes: the form of a result, safe to keep after tracing."""
    if spec is None:
        return None
    if is_parts(spec):
        return map_parts(_form, spec)
    return TensorSpec((), spec.dtype, torch.device("meta"))


def _flat(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The plain tensors of all; None stays, so that places do not depend on it."""
    return [
        plain
        for t in tensors
        for plain in (flatten(t) if isinstance(t, StructuredTensor) else (t,))
    ]


def _take(results: Sequence[torch.Tensor], start: int, form: Any) -> torch.Tensor:
    """One output out of the results of the forward op."""
    if isinstance(form, TensorSpec):
        return results[start]
    return wrap(unflatten_like(form, iter(results[start:])))


def _plain_gradient(gradient: Any) -> torch.Tensor | None:
    """The gradient of an output as the backward op takes it: always a plain tensor."""
    if isinstance(gradient, StructuredTensor):
        return gradient.parts.decode()
    return plain_gradient(gradient)


def _make_function(op: CustomOp) -> type[torch.autograd.Function]:
    """The `autograd.Function` of an op: what the front's kernel and eager mode run."""

    def forward(ctx: Any, call: Call, dyn: Sequence[Any], *tensors: torch.Tensor | None) -> Any:
        outputs, pool = op.run_forward(call, dyn, tensors)
        ctx.call, ctx.dyn = call, dyn
        ctx.state = [pool[i] for i in call.state]
        ctx.versions = op.versions(call, ctx.state)
        ctx.save_for_backward(*[pool[i] for i in call.saved])
        if call.without_gradient:
            ctx.mark_non_differentiable(*[outputs[i] for i in call.without_gradient])
        return outputs[0] if len(outputs) == 1 else outputs

    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        plain = [_plain_gradient(g) for g in gradients]
        if isinstance(op._backward, StraightThrough):
            return None, None, *[plain[0] if n in op._gradients else None for n in op._tensor_names]
        transforms.check_backward(op.name)
        kept = [*ctx.saved_tensors, *ctx.state]
        if ctx.versions != op.versions(ctx.call, ctx.state):
            raise op.changed()
        wanted = ctx.needs_input_grad[2:]
        return None, None, *op.run_backward(ctx.call, ctx.dyn, kept, plain, wanted)

    # Made by name, so that profiles and error messages show the op's.
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(op.name.partition("::")[2], (torch.autograd.Function,), methods)


def define(
    name: str,
    *,
    forward: Pass,
    backward: Pass | StraightThrough | None = None,
    gradients: Sequence[str] = (),
    outputs: Sequence[str] = ("output",),
    version: str = "0",
) -> CustomOp:
    """Make a forward/backward pair into one graph node each way.

    Args:
        name: "namespace::name", unused so far.
        forward: arguments, plan and execute of the forward pass.
        backward: the same for the backward pass; its arguments receive `grad_<output>` for each output, the tensors
            that the forward plan saves, `Carry` and `Mut` fields of the same name, and values of the same name.
            `STRAIGHT_THROUGH` if the gradient passes unchanged; None if nothing is differentiable.
        gradients: the forward fields that can have a gradient.
        outputs: names of the outputs.
        version: part of every token, like the version of this package and the source of the modules of both plans.
            Change it whenever a plan changes by other means, so that no older graph is taken from a compile cache.

    Returns:
        The op.

    Raises:
        ConfigError: a declaration that cannot work, naming class, field and remedy.

    Example:
        See examples/custom_op.py.
    """
    namespace, separator, base = name.partition("::")
    if not (separator and namespace.isidentifier() and base.isidentifier()):
        raise ConfigError(
            f"define: a name is 'namespace::name', got {name!r}",
            why="torch.library files ops by namespace",
            do="take the name of your package as namespace",
        )
    if name in _DEFINED:
        raise ConfigError(
            f"define {name}: this op is already defined",
            why="one process can hold one op of a name",
            do="choose another name",
        )
    gradients, outputs = tuple(gradients), tuple(outputs)
    if bool(gradients) != (backward is not None):
        raise ConfigError(
            f"define {name}: gradients={gradients} with backward={backward!r}",
            why="a backward pass computes the gradients of the fields named in gradients",
            do="give both or neither",
        )
    if isinstance(backward, StraightThrough) and not len(gradients) == len(outputs) == 1:
        raise ConfigError(
            f"define {name}: STRAIGHT_THROUGH needs one gradient and one output, got {gradients} and {outputs}",
            why="it hands the one to the other",
            do="give a backward Pass",
        )
    op = CustomOp(name, forward, backward, gradients, outputs, version)
    _DEFINED[name] = op
    return op


def _op_of(name: str) -> CustomOp:
    return _DEFINED[name]


def defined_ops() -> tuple[CustomOp, ...]:
    """Every op that `define` has made in this process, in order."""
    return tuple(_DEFINED.values())
