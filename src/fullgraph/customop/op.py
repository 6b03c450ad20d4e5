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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fullgraph._version import __version__
from fullgraph.customop import compat, verify
from fullgraph.customop.fields import NEEDS, FieldKind, FieldTable, read_fields
from fullgraph.customop.lean import TAGS, LeanOp, layout
from fullgraph.customop.plan import Pass, Plan, TensorSpec
from fullgraph.customop.structured import (
    FRONTS,
    code_of,
    flatten,
    is_parts,
    map_parts,
    to_spec,
    unflatten_like,
    wrap,
)
from fullgraph.customop.tangent import plain_gradient
from fullgraph.customop.token import encode, parse, remember, symbolic_value
from fullgraph.errors import CompileError, ConfigError

_LIBRARIES: dict[str, torch.library.Library] = {}
_DEFINED: set[str] = set()


class StraightThrough:
    """Backward of an op whose gradient is its output's gradient: a cast, a change of container."""


STRAIGHT_THROUGH = StraightThrough()
"""Pass as `define(backward=...)`: the one output's gradient is the one input's gradient."""


@dataclasses.dataclass(frozen=True)
class BackwardCall:
    """The backward of one kind of call: everything that does not depend on sizes."""

    meta: str
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """One kind of call (token, layout, who needs a gradient): everything that does not depend on sizes."""

    meta: str
    needs: tuple[str, ...]
    values: Mapping[str, Any]
    outputs: Mapping[str, Any]
    saved: Mapping[str, Any]
    saved_inputs: Mapping[str, str]
    saved_outputs: Mapping[str, str]
    results: int
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
        self._salt = f"salt={f'{__version__}/{version}'!r}"
        self._table = read_fields(forward.arguments)
        self._backward_table = read_fields(backward.arguments) if isinstance(backward, Pass) else None
        _check_definition(name, self._table, self._backward_table, gradients, outputs)

        kinds = (FieldKind.TENSOR, FieldKind.MUT, FieldKind.CARRY)
        self._tensor_names = self._table.names(*kinds)
        self._dyn_names = self._table.names(FieldKind.DYN)
        self._value_names = tuple(n for n in self._table.names(FieldKind.VALUE) if n != NEEDS)
        self._has_needs = self._table.get(NEEDS) is not None
        self._calls: dict[Any, Call] = {}
        self._register()

    # -- registration -------------------------------------------------------------------------------------------

    def _register(self) -> None:
        namespace, _, name = self.name.partition("::")
        library = _LIBRARIES.get(namespace)
        if library is None:
            library = _LIBRARIES[namespace] = torch.library.Library(namespace, "FRAGMENT")
        self._lean_forward = LeanOp(library, namespace, f"{name}_forward", self._forward, self._table)
        self._lean_backward: LeanOp | None = None
        if isinstance(self._backward, Pass):
            assert self._backward_table is not None
            self._lean_backward = LeanOp(
                library, namespace, f"{name}_backward", self._backward, self._backward_table
            )
        self._function = _make_function(self)
        library.define(name + self._front_schema(), tags=TAGS)
        library.impl(name, self._front_kernel, "CompositeImplicitAutograd")
        self.front_op = getattr(getattr(torch.ops, namespace), name).default
        FRONTS[self.front_op] = self._front_kernel

    def _front_schema(self) -> str:
        letters = iter(string.ascii_lowercase)
        tensors = "".join(
            f", Tensor({next(letters)}!)? {f.name}" if f.kind is FieldKind.MUT else f", Tensor? {f.name}"
            for f in self._table.fields
            if f.name in self._tensor_names
        )
        returns = ", ".join(["Tensor?"] * len(self._outputs)) if len(self._outputs) > 1 else "Tensor"
        returns = f"({returns})" if len(self._outputs) > 1 else returns
        return f"(str token, SymInt[] dyn, SymInt[] constants{tensors}) -> {returns}"

    def _front_kernel(
        self, token: str, dyn: Sequence[Any], constants: Sequence[Any], *tensors: torch.Tensor | None
    ) -> Any:
        if any(isinstance(c, torch.SymInt) for c in constants):
            names = self._integer_values(token)
            raise symbolic_value(f"{self.name}.{' or '.join(names)}")
        return self.apply(token, tuple(dyn), tensors)

    def _integer_values(self, token: str) -> list[str]:
        values = parse(token)
        return [n for n in self._value_names if type(values.get(n)) is int]

    # -- public -------------------------------------------------------------------------------------------------

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
        token = self._encode([values[name] for name in self._value_names])
        if not torch.compiler.is_compiling():
            for value in values.values():
                remember(value)
        return token

    def _encode(self, values: list[Any]) -> str:
        token = self._salt
        for name, value in zip(self._value_names, values):  # noqa: B905 (Dynamo of torch 2.11)
            token = f"{token},{name}={encode(value, f'{self.name}.{name}')}"
        return token

    def __call__(self, arguments: Any, *, token: str | None = None) -> Any:
        """Run the op.

        Args:
            arguments: an instance of the forward argument dataclass.
            token: what `encode` returned for these values; None encodes them now.

        Returns:
            The output, or a tuple of them if the op was defined with several; None for one the plan leaves out.
        """
        constants: list[Any] = []
        if token is None:
            values = [getattr(arguments, name) for name in self._value_names]
            constants = [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
            token = self._encode(values)
        tensors = [getattr(arguments, name) for name in self._tensor_names]
        dyn = [getattr(arguments, name) for name in self._dyn_names]
        if torch.compiler.is_compiling():
            return self.front_op(token, dyn, constants, *tensors)
        if verify.enabled():
            self._check_token(arguments, token)
        return self.apply(token, tuple(dyn), tensors)

    def check(self, arguments: Any) -> None:
        """Check the op on an example: opcheck's five tests, plan against results, the CUDA-graph lint.

        Args:
            arguments: an instance of the forward argument dataclass with real tensors.

        Raises:
            CompileError: naming the check that failed.
        """
        from fullgraph.customop.check import check

        check(self, arguments)

    # -- the eager path, and the front's kernel while tracing ------------------------------------------------------

    def apply(self, token: str, dyn: tuple[Any, ...], tensors: Sequence[torch.Tensor | None]) -> Any:
        """Run the op on a token, `Dyn` integers and the tensors in field order."""
        grad = torch.is_grad_enabled()
        codes = tuple([code_of(t) for t in tensors])
        needs = ()
        if grad:
            needs = tuple(
                [
                    name
                    for name, t in zip(self._tensor_names, tensors, strict=True)
                    if t is not None and t.requires_grad and name in self._gradients
                ]
            )
        key = (token, needs, codes)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = self._prepare(token, needs, codes, tensors, dyn)
        if needs:
            outputs = self._function.apply(call, dyn, *tensors)
            return outputs
        outputs, _ = self.run_forward(call, dyn, tensors)
        return outputs[0] if len(outputs) == 1 else outputs

    def run_forward(
        self, call: Call, dyn: tuple[Any, ...], tensors: Sequence[torch.Tensor | None]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run the lean forward op; the outputs in order, and the saved results by name."""
        read: list[Any] = []
        mutated: list[Any] = []
        for field, tensor in zip(self._table.of(*_TENSORS), tensors, strict=True):
            if tensor is not None and field.kind is not FieldKind.CARRY:
                (read if field.kind is FieldKind.TENSOR else mutated).extend(flatten(tensor))
        flat = iter(self._lean_forward.call(read, mutated, dyn, call.meta, call.results))
        outputs = {n: wrap(unflatten_like(form, flat)) for n, form in call.outputs.items()}
        saved = {name: unflatten_like(form, flat) for name, form in call.saved.items()}
        return tuple([outputs.get(name) for name in self._outputs]), saved

    def _prepare(
        self,
        token: str,
        needs: tuple[str, ...],
        codes: tuple[Any, ...],
        tensors: Sequence[torch.Tensor | None],
        dyn: tuple[Any, ...],
    ) -> Call:
        fields = self._table.of(*_TENSORS)
        visible = [c for f, c in zip(fields, codes, strict=True) if f.kind is not FieldKind.CARRY]
        for field, tensor in zip(fields, tensors, strict=True):
            if tensor is None and not field.optional:
                raise ConfigError(
                    f"{self.name}: {field.name} is required, got None",
                    why=f"{self._table.cls.__name__}.{field.name} is not declared `| None`",
                    do="pass a tensor, or declare the field optional",
                )
        values = parse(token)
        arguments = object.__new__(self._table.cls)
        arguments.__dict__.update({n: values[n] for n in self._value_names})
        arguments.__dict__.update(zip(self._dyn_names, dyn, strict=True))
        arguments.__dict__.update(
            {
                f.name: None if f.kind is FieldKind.CARRY else to_spec(t)
                for f, t in zip(fields, tensors, strict=True)
            }
        )
        meta = token + layout(self._table, iter(visible))
        if self._has_needs:
            arguments.__dict__[NEEDS] = needs
            meta += f",{NEEDS}={encode(needs)}"
        plan = self._forward.plan(arguments)
        self._check_plan(plan)
        return Call(
            meta,
            needs,
            {**values, **plan.values},
            outputs={n: _form(plan.outputs[n]) for n in plan.outputs},
            saved={n: _form(spec) for n, spec in plan.saved.items()},
            saved_inputs=dict(plan.saved_inputs),
            saved_outputs=dict(plan.saved_outputs),
            results=sum(len(flatten(spec)) for spec in plan.results.values()),
        )

    def _check_plan(self, plan: Plan) -> None:
        """The names of a forward plan must fit the definition."""
        unknown = [n for n in plan.outputs if n not in self._outputs]
        if unknown or (len(self._outputs) == 1 and not plan.outputs):
            raise CompileError(
                f"{self.name}: the plan has the outputs {list(plan.outputs)}, defined are {list(self._outputs)}",
                why="the number of outputs is part of the op",
                do="name them in define(outputs=...); only one of several may be left out",
            )
        if self._backward_table is None:
            return
        planned = self._backward_table.names(FieldKind.PLANNED)
        if set(planned) != set(plan.values):
            raise CompileError(
                f"{self.name}: the plan has the values {sorted(plan.values)}, "
                f"{self._backward_table.cls.__name__} declares {sorted(planned)}",
                why="a Planned field of the backward arguments takes the plan's value of its name",
                do="give the plan exactly these values",
            )
        for name in (*plan.saved, *plan.saved_inputs, *plan.saved_outputs):
            field = self._backward_table.get(name)
            if field is None or field.kind not in (FieldKind.TENSOR, FieldKind.MUT):
                raise CompileError(
                    f"{self.name}: the plan saves {name!r}, which is no tensor field of "
                    f"{self._backward_table.cls.__name__}",
                    why="every saved tensor is for the backward field of the same name",
                    do="declare the field, or do not save it",
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

    # -- backward -------------------------------------------------------------------------------------------------

    def run_backward(
        self,
        call: Call,
        dyn: tuple[Any, ...],
        tensors: Mapping[str, Any],
        needs: tuple[str, ...],
    ) -> dict[str, torch.Tensor]:
        """Run the lean backward op: gradients by forward field name.

        Args:
            call: the forward call.
            dyn: the `Dyn` integers of the forward call.
            tensors: saved tensors, carried tensors and output gradients by backward field name.
            needs: the forward fields whose gradient is wanted.
        """
        table, lean = self._backward_table, self._lean_backward
        assert table is not None and lean is not None
        fields = table.of(FieldKind.TENSOR, FieldKind.MUT)
        ordered = [tensors.get(f.name) for f in fields]
        codes = tuple([code_of(t) for t in ordered])
        dyn = tuple([dyn[self._dyn_names.index(n)] for n in table.names(FieldKind.DYN)])
        backward = call.backwards.get((needs, codes))
        if backward is None:
            backward = self._prepare_backward(call, needs, codes, dict(tensors), dyn)
            call.backwards[(needs, codes)] = backward
        read: list[Any] = []
        mutated: list[Any] = []
        for field, tensor in zip(fields, ordered, strict=True):
            (read if field.kind is FieldKind.TENSOR else mutated).extend(flatten(tensor))
        flat = lean.call(read, mutated, dyn, backward.meta, len(backward.names))
        return dict(zip(backward.names, flat, strict=True))

    def _prepare_backward(
        self,
        call: Call,
        needs: tuple[str, ...],
        codes: tuple[Any, ...],
        tensors: dict[str, Any],
        dyn: tuple[Any, ...],
    ) -> BackwardCall:
        table = self._backward_table
        assert table is not None and isinstance(self._backward, Pass)
        arguments = object.__new__(table.cls)
        text = self._salt
        for name in table.names(FieldKind.VALUE, FieldKind.PLANNED):
            value = needs if name == NEEDS else call.values[name]
            arguments.__dict__[name] = value
            text = f"{text},{name}={encode(value)}"
        for field in table.of(FieldKind.TENSOR, FieldKind.MUT):
            tensor = tensors.get(field.name)
            if tensor is None and not field.optional:
                raise CompileError(
                    f"{self.name}: backward field {field.name} has no tensor",
                    why="the forward plan does not save it and no Carry or Mut field has its name",
                    do=f"save {field.name!r} in the plan, or declare the field `| None`",
                )
            arguments.__dict__[field.name] = to_spec(tensor)
        arguments.__dict__.update(zip(table.names(FieldKind.DYN), dyn, strict=True))
        plan = self._backward.plan(arguments)
        wrong = [n for n, s in plan.outputs.items() if n not in needs or is_parts(s)] + list(plan.saved)
        if wrong:
            raise CompileError(
                f"{self.name}: the backward plan has the results {wrong}, needed are {list(needs)}",
                why="each result of the backward op is the plain gradient of a forward field that needs one",
                do="look at `needs` in the plan and leave out what is not in it",
            )
        return BackwardCall(text + layout(table, iter(codes)), tuple(plan.outputs))


_TENSORS = (FieldKind.TENSOR, FieldKind.MUT, FieldKind.CARRY)


def _form(spec: Any) -> Any:
    """A spec without its sizes: the form of a result, safe to keep after tracing."""
    if is_parts(spec):
        return map_parts(_form, spec)
    return TensorSpec((), spec.dtype, torch.device("meta"))


def _make_function(op: CustomOp) -> type[torch.autograd.Function]:
    """The `autograd.Function` of an op: what the front's kernel and eager mode run."""
    names = op._tensor_names
    fields = op._table.of(*_TENSORS)
    state = [i for i, f in enumerate(fields) if f.kind is not FieldKind.TENSOR]
    backward_table = op._backward_table

    def is_state(name: str) -> bool:
        """Tensors that a later op may change: kept by reference, outside of version checks."""
        forward = op._table.get(name)
        backward = backward_table.get(name) if backward_table else None
        return (forward is not None and forward.kind in (FieldKind.CARRY, FieldKind.MUT)) or (
            backward is not None and backward.kind is FieldKind.MUT
        )

    kept = [
        (i, f.name)
        for i, f in enumerate(fields)
        if f.kind is not FieldKind.TENSOR and backward_table and backward_table.get(f.name)
    ]

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: Call, dyn: tuple[Any, ...], *tensors: torch.Tensor | None) -> Any:
            if state:
                changing = [t for i in state for t in flatten(tensors[i])]
                compat.mark_no_version_check(changing)
            outputs, saved = op.run_forward(call, dyn, tensors)
            for name, source in call.saved_inputs.items():
                saved[name] = tensors[names.index(source)]
            for name, source in call.saved_outputs.items():
                saved[name] = outputs[op._outputs.index(source)]
            ctx.call, ctx.dyn = call, dyn
            ctx.state = {name: tensors[i] for i, name in kept}
            ctx.state.update({n: t for n, t in saved.items() if is_state(n)} if state else {})
            to_save = [(n, t) for n, t in saved.items() if n not in ctx.state]
            ctx.forms = [(n, _form(to_spec(t))) for n, t in to_save]
            ctx.save_for_backward(*[plain for _, t in to_save for plain in flatten(t)])
            ctx.mark_non_differentiable(
                *[o for o in outputs if o is not None and not o.is_floating_point()]
            )
            return outputs[0] if len(outputs) == 1 else outputs

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *gradients: Any) -> Any:
            call = ctx.call
            wanted = ctx.needs_input_grad[2:]
            needs = tuple([n for n, w in zip(names, wanted, strict=True) if w and n in call.needs])
            plain = [plain_gradient(g) for g in gradients]
            if isinstance(op._backward, StraightThrough):
                results = {op._gradients[0]: plain[0]}
            else:
                flat = iter(ctx.saved_tensors)
                tensors = {name: unflatten_like(form, flat) for name, form in ctx.forms}
                tensors.update(ctx.state)
                tensors.update({f"grad_{n}": g for n, g in zip(op._outputs, plain, strict=True)})
                results = op.run_backward(call, ctx.dyn, tensors, needs)
            return (None, None, *[results.get(n) for n in names])

    Function.__name__ = Function.__qualname__ = op.name.partition("::")[2]
    return Function


def _check_definition(
    name: str,
    forward: FieldTable,
    backward: FieldTable | None,
    gradients: tuple[str, ...],
    outputs: tuple[str, ...],
) -> None:
    """Refuse a definition that could only fail later; every message names class, field and remedy."""
    cls = forward.cls.__name__
    if len(set(outputs)) != len(outputs) or not outputs:
        raise ConfigError(f"define {name}: outputs must be one or more different names, got {outputs}")
    if not forward.of(*_TENSORS[:2]):
        raise ConfigError(
            f"define {name}: {cls} has no tensor field",
            why="the op takes device and shapes from its tensors",
            do="declare at least one field as Tensor or Mut[Tensor]",
        )
    if len(set(gradients)) != len(gradients):
        raise ConfigError(f"define {name}: gradients has a name twice: {gradients}", do="name each field once")
    for field_name in gradients:
        field = forward.get(field_name)
        if field is None or field.kind is not FieldKind.TENSOR:
            kind = "no field" if field is None else f"a {field.kind.value} field"
            raise ConfigError(
                f"define {name}: gradients names {field_name!r}, which is {kind} of {cls}",
                why="only tensors that the op reads can have a gradient",
                do=f"choose from {list(forward.names(FieldKind.TENSOR))}",
            )
    if backward is not None:
        _check_backward(name, forward, backward, outputs)


def _check_backward(
    name: str, forward: FieldTable, backward: FieldTable, outputs: tuple[str, ...]
) -> None:
    cls = backward.cls.__name__
    for field in backward.fields:
        source = forward.get(field.name)
        where = f"define {name}: {cls}.{field.name}"
        if field.kind is FieldKind.CARRY:
            raise ConfigError(
                f"{where} is a Carry",
                why="Carry hands a tensor from the forward to the backward arguments",
                do="declare it Carry in the forward arguments and Mut or Tensor here",
            )
        if field.kind in (FieldKind.VALUE, FieldKind.DYN) and field.name != NEEDS:
            if source is None or source.kind is not field.kind:
                raise ConfigError(
                    f"{where} has no {field.kind.value} field of the same name in {forward.cls.__name__}",
                    why="values of the backward op are those of the forward op",
                    do="declare it in both, or declare it Planned here and decide it in the forward plan",
                )
        if field.kind is FieldKind.MUT and (
            source is None or source.kind not in (FieldKind.CARRY, FieldKind.MUT)
        ):
            raise ConfigError(
                f"{where} is Mut, but {forward.cls.__name__} has no Carry or Mut field of that name",
                why="what the backward op changes must be handed to it by the caller",
                do=f"declare {field.name}: Carry[Tensor] in {forward.cls.__name__}",
            )
    missing = [f"grad_{o}" for o in outputs if backward.get(f"grad_{o}") is None]
    if missing:
        raise ConfigError(
            f"define {name}: {cls} has no field {missing[0]}",
            why="the gradient of each output arrives in the field grad_<output>",
            do=f"declare {missing[0]}: Tensor",
        )


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
        version: part of every token. Change it whenever plan or execute change what they return, so that compiled
            graphs of an older version are not taken from a cache.

    Returns:
        The op.

    Raises:
        ConfigError: a declaration that cannot work, naming class, field and remedy.

    Example:
        See examples/custom_op.py.
    """
    namespace, separator, base = name.partition("::")
    if not (separator and namespace.isidentifier() and base.isidentifier()):
        raise ConfigError(f"define: a name is 'namespace::name', got {name!r}")
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
        raise ConfigError(f"define {name}: STRAIGHT_THROUGH needs one gradient and one output")
    op = CustomOp(name, forward, backward, gradients, outputs, version)
    _DEFINED.add(name)
    return op
