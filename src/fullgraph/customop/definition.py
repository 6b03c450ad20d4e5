"""What fits together in an op: the declarations among themselves, and a forward plan with them.

Everything that cannot work is refused here, by `define` or by the first call that shows it; every message names class,
field and remedy. What a single annotation may be is the business of `fields.py`.
"""

from __future__ import annotations

import dataclasses
import functools

from fullgraph.customop.fields import NEEDS, FieldKind, FieldTable
from fullgraph.customop.plan import Plan
from fullgraph.customop.token import encode
from fullgraph.errors import CompileError, ConfigError


@dataclasses.dataclass(frozen=True)
class Definition:
    """The declarations of one op.

    Args:
        name: "namespace::name".
        forward: fields of the forward arguments.
        backward: fields of the backward arguments; None if there is no backward op.
        gradients: the forward fields that can have a gradient.
        outputs: names of the outputs.
    """

    name: str
    forward: FieldTable
    backward: FieldTable | None
    gradients: tuple[str, ...]
    outputs: tuple[str, ...]

    @functools.cached_property
    def handed_on(self) -> tuple[str, ...]:
        """Tensors that the caller hands to the backward op: `Carry` and `Mut` fields which both sides have."""
        if self.backward is None:
            return ()
        names = self.forward.names(FieldKind.CARRY, FieldKind.MUT)
        return tuple([name for name in names if self.backward.get(name)])

    def check(self) -> None:
        """Refuse declarations that could only fail later.

        Raises:
            ConfigError: naming class, field and remedy.
        """
        cls = self.forward.cls.__name__
        if len(set(self.outputs)) != len(self.outputs) or not self.outputs:
            raise ConfigError(
                f"define {self.name}: outputs must be one or more different names, got {self.outputs}",
                why="plan, execute and backward arguments name each output",
                do="name each output once",
            )
        for field in self.forward.of(FieldKind.PLANNED):
            raise ConfigError(
                f"define {self.name}: {cls}.{field.name} is Planned",
                why="the forward plan decides Planned values, so they are arguments of the backward pass only",
                do="declare it there, and give it its value in Plan(values=...)",
            )
        if not self.forward.of(FieldKind.TENSOR, FieldKind.MUT):
            raise ConfigError(
                f"define {self.name}: {cls} has no tensor field",
                why="the op takes device and shapes from its tensors",
                do="declare at least one field as Tensor or Mut[Tensor]",
            )
        if len(set(self.gradients)) != len(self.gradients):
            raise ConfigError(
                f"define {self.name}: gradients has a name twice: {self.gradients}",
                why="each names a field of the forward arguments",
                do="name each field once",
            )
        for name in self.gradients:
            field = self.forward.get(name)
            collects = field is not None and field.kind is FieldKind.CARRY
            if collects and name not in self.handed_on:
                continue  # a leaf that collects deferred calls
            if field is None or field.kind is not FieldKind.TENSOR:
                kind = "no field" if field is None else f"a {field.kind.value} field"
                raise ConfigError(
                    f"define {self.name}: gradients names {name!r}, which is {kind} of {cls}",
                    why="only tensors that the op reads can have a gradient",
                    do=f"choose from {list(self.forward.names(FieldKind.TENSOR))}",
                )
        if self.backward is not None:
            self._check_backward(self.backward)

    def _check_backward(self, backward: FieldTable) -> None:
        cls, forward_cls = backward.cls.__name__, self.forward.cls.__name__
        for field in backward.fields:
            source = self.forward.get(field.name)
            kind = None if source is None else source.kind
            where = f"define {self.name}: {cls}.{field.name}"
            if field.kind is FieldKind.CARRY:
                raise ConfigError(
                    f"{where} is a Carry",
                    why="Carry hands a tensor from the forward to the backward arguments",
                    do="declare it Carry in the forward arguments and Mut or Tensor here",
                )
            is_value = field.kind in (FieldKind.VALUE, FieldKind.DYN) and field.name != NEEDS
            if is_value and kind is not field.kind:
                raise ConfigError(
                    f"{where} has no {field.kind.value} field of the same name in {forward_cls}",
                    why="values of the backward op are those of the forward op",
                    do="declare it in both, or declare it Planned here and decide it in the forward plan",
                )
            if field.kind is FieldKind.MUT and kind not in (FieldKind.CARRY, FieldKind.MUT):
                raise ConfigError(
                    f"{where} is Mut, but {forward_cls} has no Carry or Mut field of that name",
                    why="what the backward op changes must be handed to it by the caller",
                    do=f"declare {field.name}: Carry[Tensor] in {forward_cls}",
                )
        missing = [f"grad_{o}" for o in self.outputs if backward.get(f"grad_{o}") is None]
        if missing:
            raise ConfigError(
                f"define {self.name}: {cls} has no field {missing[0]}",
                why="the gradient of each output arrives in the field grad_<output>",
                do=f"declare {missing[0]}: Tensor",
            )

    def check_plan(self, plan: Plan) -> None:
        """Refuse a forward plan whose names do not fit the declarations.

        Args:
            plan: what the forward pass planned.

        Raises:
            CompileError: naming the op, the name and the remedy.
            ConfigError: a planned value that cannot be a constant.
        """
        unknown = [n for n in plan.outputs if n not in self.outputs]
        if unknown or (len(self.outputs) == 1 and plan.outputs.get(self.outputs[0]) is None):
            raise CompileError(
                f"{self.name}: the plan has the outputs {list(plan.outputs)}, defined are {list(self.outputs)}",
                why="the number of outputs is part of the op",
                do="name them in define(outputs=...); only one of several may be left out",
            )
        for name in plan.saved:
            if name in plan.outputs:
                raise CompileError(
                    f"{self.name}: the plan has {name!r} both as an output and as saved",
                    why="results go by name",
                    do="save an output with saved_outputs, or rename one of them",
                )
        if self.backward is None:
            return
        planned = self.backward.names(FieldKind.PLANNED)
        if set(planned) != set(plan.values):
            raise CompileError(
                f"{self.name}: the plan has the values {sorted(plan.values)}, "
                f"{self.backward.cls.__name__} declares {sorted(planned)}",
                why="a Planned field of the backward arguments takes the plan's value of its name",
                do="give the plan exactly these values",
            )
        for name, value in plan.values.items():
            encode(value, f"{self.name}.{name}")  # raises for what could not be a constant
        for name, source in plan.saved_inputs.items():
            field = self.forward.get(source)
            if field is None or field.kind is not FieldKind.TENSOR:
                raise CompileError(
                    f"{self.name}: the plan saves the input {source!r} as {name!r}, which is no Tensor field of "
                    f"{self.forward.cls.__name__}",
                    why="only a tensor that the op reads can be saved as it is",
                    do=f"choose from {list(self.forward.names(FieldKind.TENSOR))}; a Mut or Carry field reaches "
                    "the backward field of its own name anyway",
                )
        for name, source in plan.saved_outputs.items():
            if plan.outputs.get(source) is None:
                raise CompileError(
                    f"{self.name}: the plan saves the output {source!r} as {name!r}, but makes no such output",
                    why="only an output that the plan makes can be saved",
                    do=f"choose from {list(plan.outputs)}",
                )

    def check_kept(self, plan: Plan, kept: set[str]) -> None:
        """Refuse a forward plan that gives a backward field no tensor, or two.

        Args:
            plan: what the forward pass planned.
            kept: backward fields that have a tensor from the forward call.

        Raises:
            CompileError: naming class, field and remedy.
        """
        table = self.backward
        assert table is not None
        saved = [*plan.saved, *plan.saved_inputs, *plan.saved_outputs]
        for name in saved:
            field = table.get(name)
            if field is None or field.kind not in (FieldKind.TENSOR, FieldKind.MUT):
                raise CompileError(
                    f"{self.name}: the plan saves {name!r}, which is no tensor field of {table.cls.__name__}",
                    why="every saved tensor is for the backward field of the same name",
                    do="declare the field, or do not save it",
                )
            if saved.count(name) + (name in self.handed_on) > 1:
                raise CompileError(
                    f"{self.name}: {table.cls.__name__}.{name} would get two tensors",
                    why="a field is filled once: from saved, saved_inputs, saved_outputs, or a Carry or Mut field",
                    do="rename one of them",
                )
        arriving = kept | {f"grad_{n}" for n, spec in plan.outputs.items() if spec is not None}
        for field in table.of(FieldKind.TENSOR, FieldKind.MUT):
            if not field.optional and field.name not in arriving:
                raise CompileError(
                    f"{self.name}: backward field {field.name} has no tensor",
                    why="the forward plan does not save it, and no Carry or Mut field of its name has one",
                    do=f"save {field.name!r} in the plan, or declare the field `| None`",
                )
