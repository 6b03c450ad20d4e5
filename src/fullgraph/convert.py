"""`fg.convert`: give an existing model low-precision layers, in place.

A `torch.nn.Linear` becomes an `fg.Linear` by changing its class. Nothing is copied or replaced, so parameters, hooks,
tied weights, flags, extra attributes and every reference to the module stay what they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fullgraph.errors import ConfigError
from fullgraph.nn import Linear, Save, Wgrad
from fullgraph.ops.linear import DEFAULT_OPTIONS, LinearOptions
from fullgraph.recipes import Recipe, resolve
from fullgraph.tables import table
from fullgraph.tensor import HIGH_PRECISION, QuantizedTensor

Filter = Callable[[str, nn.Linear], Any]

_OWN_ATTRIBUTES = (
    "recipe",
    "return_bias",
    "layer_name",
    "scaling_state",
    "wgrad",
    "save_input",
    "save_weight",
    "options_text",
    "weight_caches",
    "deferred_wgrad",
    "statistics",
)
"""What `fg.Linear.configure` sets."""


@dataclasses.dataclass(frozen=True)
class LayerConversion:
    """What `convert` did with one linear layer. Made by `convert`.

    Args:
        name: path in the model, "" for the model itself.
        kind: class of the layer before.
        in_features, out_features: K and N.
        dtype: of the weight, written without its `torch.`.
        converted: whether the layer now follows the recipe.
        reason: why not, or what else there is to know.
    """

    name: str
    kind: str
    in_features: int
    out_features: int
    dtype: str
    converted: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What `convert` did with every linear layer of a model, and why it left some alone. Made by `convert`.

    `print(report)` shows a table.

    Args:
        recipe: what the converted layers follow; None is the enclosing `fg.autocast`.
        layers: one entry for each linear layer, in the order of `named_modules`.
    """

    recipe: Recipe | None
    layers: tuple[LayerConversion, ...]

    @property
    def converted(self) -> tuple[LayerConversion, ...]:
        """The layers that follow the recipe now."""
        return tuple([layer for layer in self.layers if layer.converted])

    @property
    def skipped(self) -> tuple[LayerConversion, ...]:
        """The layers that were left alone, each with the reason."""
        return tuple([layer for layer in self.layers if not layer.converted])

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "recipe": None if self.recipe is None else repr(self.recipe),
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
        }

    def __str__(self) -> str:
        recipe = "the enclosing autocast" if self.recipe is None else type(self.recipe).__name__
        count = f"{len(self.converted)} of {len(self.layers)} linear layers follow {recipe}"
        if not self.layers:
            return count
        rows = [
            (
                layer.name or "(the model)",
                layer.kind,
                f"{layer.in_features} -> {layer.out_features}",
                layer.dtype,
                "yes" if layer.converted else "no",
                layer.reason,
            )
            for layer in self.layers
        ]
        head = ("layer", "was", "features", "dtype", "converted", "reason")
        return f"{table(head, rows)}\n\n{count}"


def convert(
    model: nn.Module,
    recipe: Recipe | str | None,
    *,
    filter: Filter | None = None,
    wgrad: Wgrad | None = None,
    save_input: Save | None = None,
    save_weight: Save | None = None,
) -> ConversionReport:
    """Turn the `torch.nn.Linear` layers of a model into `fg.Linear`, in place.

    A layer whose class is `torch.nn.Linear` itself becomes an `fg.Linear`; an `fg.Linear` gets the recipe. Everything
    else is left alone, and the report says why. Nothing is changed if anything raises.

    Args:
        model: any module, itself a linear layer or not.
        recipe: a recipe or its name; None lets the layers follow the enclosing `fg.autocast`.
        filter: (name, layer) -> whether to convert it; for all layers if None.
        wgrad: see `fg.Linear`; None leaves an `fg.Linear` as it is.
        save_input: likewise.
        save_weight: likewise.

    Returns:
        What became of every linear layer.

    Raises:
        ConfigError: `model` is no module, `filter` is not callable, or a recipe or option is unknown.

    Example:
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
        ... )
        >>> report = fullgraph.convert(
        ...     model, "fp8-current", filter=lambda name, layer: layer.out_features >= 16
        ... )
        >>> [layer.name for layer in report.converted]
        ['0']
        >>> print(report.skipped[0].reason)
        left out by the filter
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"convert: a torch.nn.Module is needed, got {type(model).__name__}",
            why="layers are converted inside of the model that holds them",
            do="pass the model",
        )
    if filter is not None and not callable(filter):
        raise ConfigError(
            f"convert: filter must be callable, got {filter!r}",
            why="it is asked for each layer: filter(name, layer) -> bool",
            do='pass a function, such as filter=lambda name, layer: not name.endswith("head")',
        )
    resolved = None if recipe is None else resolve(recipe)
    found = list(_linears(model))
    reasons = [_reason_against(name, layer, filter) for name, layer in found]
    report = ConversionReport(
        resolved,
        tuple([_describe(*entry, reason) for entry, reason in zip(found, reasons, strict=True)]),
    )
    chosen = [entry for entry, reason in zip(found, reasons, strict=True) if reason is None]
    if resolved is not None:
        for name, _ in chosen:
            resolved.numerics_text_of(name)  # may raise: before anything is changed
    options = {"wgrad": wgrad, "save_input": save_input, "save_weight": save_weight}
    given = {option: value for option, value in options.items() if value is not None}
    LinearOptions(**{**DEFAULT_OPTIONS.__dict__, **given})  # may raise, likewise
    for name, layer in chosen:
        _apply(layer, name, resolved, given)
    _leave_fast_paths(model)
    return report


def _leave_fast_paths(model: nn.Module) -> None:
    """Have transformer encoders call their linear layers.

    In inference `nn.TransformerEncoderLayer` hands the weights of its linear layers to one fused op of torch's, in high
    precision. The attribute that says which activation that op is to use says that there is none.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            if isinstance(module.linear1, Linear) or isinstance(module.linear2, Linear):
                module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and any(
            isinstance(layer, Linear) for layer in module.modules()
        ):
            module.use_nested_tensor = False  # only the fused op takes them


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module


def _reason_against(name: str, layer: nn.Linear, filter: Filter | None) -> str | None:
    """Why a layer is left alone; None if it is not."""
    if isinstance(layer, LazyModuleMixin):
        return "a lazy layer without parameters yet: run the model once, then convert"
    if is_parametrized(layer):
        return "parametrized: its class was made for its parametrizations; convert first, then parametrize"
    if type(layer) is not nn.Linear and not isinstance(layer, Linear):
        return f"{type(layer).__name__} is a subclass of torch.nn.Linear that may compute something else"
    if "forward" in vars(layer):
        return "its forward was replaced on the instance, so a new class would have no effect"
    taken = [n for n in _OWN_ATTRIBUTES if n in vars(layer) and not isinstance(layer, Linear)]
    if taken:
        return f"it has an attribute {taken[0]} of its own, which fg.Linear would replace"
    if layer.weight.dtype not in HIGH_PRECISION:
        return f"{_dtype(layer)} cannot be quantized, only float32, bfloat16 and float16"
    weight = layer.weight
    if is_traceable_wrapper_subclass(weight) and not isinstance(weight, QuantizedTensor):
        return f"its weight is a {type(weight).__name__}, a kind of tensor that fg.Linear does not know"
    if filter is not None and not filter(name, layer):
        return "left out by the filter"
    return None


def _describe(name: str, layer: nn.Linear, reason: str | None) -> LayerConversion:
    return LayerConversion(
        name,
        "fg.Linear" if type(layer) is Linear else type(layer).__name__,
        layer.in_features,
        layer.out_features,
        _dtype(layer),
        converted=reason is None,
        reason=reason or ("only its recipe was set" if isinstance(layer, Linear) else ""),
    )


def _dtype(layer: nn.Linear) -> str:
    return str(layer.weight.dtype).removeprefix("torch.")


def _apply(layer: nn.Linear, name: str, recipe: Recipe | None, options: dict[str, Any]) -> None:
    if isinstance(layer, Linear):
        kept = {option: getattr(layer, option) for option in DEFAULT_OPTIONS.__dict__}
        layer.configure(recipe, return_bias=layer.return_bias, name=name, **{**kept, **options})
        return
    layer.__class__ = Linear
    layer.configure(recipe, name=name, **options)  # type: ignore[attr-defined]
