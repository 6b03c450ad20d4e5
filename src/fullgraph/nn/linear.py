"""`fg.Linear` and `fg.linear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fullgraph.customop import compat
from fullgraph.customop.deferred import DeferredGradient, count, no_calls, take
from fullgraph.customop.structured import flatten
from fullgraph.customop.token import encode, parse
from fullgraph.errors import CompileError, ConfigError
from fullgraph.formats import BOTH
from fullgraph.nn.autocast import check_repetition, current_recipe, recipe_of
from fullgraph.nn.scaling import ScalingState, saved_state
from fullgraph.nn.weights import WeightCache, check_main_grad, watch
from fullgraph.ops import flops
from fullgraph.ops.linear import (
    DEFAULT_OPTIONS,
    DEFAULT_OPTIONS_TEXT,
    LinearArguments,
    LinearOptions,
    Save,
    WeightGradientArguments,
    Wgrad,
    linear_op,
    linear_token,
    weight_copies,
    weight_gradient_op,
)
from fullgraph.ops.statistics import StatisticsBuffers
from fullgraph.quantizers import quantize
from fullgraph.random import draw_seed, order_of, prepare
from fullgraph.recipes import Recipe, Role, resolve
from fullgraph.tensor import QuantizedTensor


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe | str | None = None,
    quantized_output: bool = False,
) -> Any:
    """output = input @ weight^T + bias, in low precision; one node forward, one backward.

    Args:
        input: float32, bfloat16 or float16 [..., K], 1-D to any rank, any strides; or quantized.
        weight: the same dtypes, [N, K]; or quantized.
        bias: [N], or None.
        recipe: a recipe or its name; None takes the one of the enclosing `fg.autocast`.
        quantized_output: return a `QuantizedTensor`, differentiable.

    Returns:
        [..., N] in the dtype of the input, or of `torch.autocast` where it is enabled. M = 0 rows give an empty output.

    Raises:
        ShapeError: shapes that do not fit.
        ConfigError: another dtype, no tensor, an unknown recipe, or one with delayed scaling.

    Numerics: each gradient has the dtype of its tensor. Sizes need not be multiples of anything: the op pads inside.
    """
    recipe = current_recipe() if recipe is None else resolve(recipe)
    if recipe.scaling_rule_text:
        raise ConfigError(
            f"linear: {type(recipe).__name__} needs a layer",
            why="delayed scaling keeps scales and amaxes from step to step",
            do="use fullgraph.Linear, or another recipe",
        )
    return _linear(
        input, weight, bias, recipe=recipe, layer_name="", quantized_output=quantized_output
    )


def _linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    recipe: Recipe,
    layer_name: str,
    quantized_output: bool,
    options_text: str = DEFAULT_OPTIONS_TEXT,
    **state: Any,
) -> Any:
    """`linear`, with what a layer keeps as `LinearArguments` names it."""
    if not isinstance(input, Tensor) or not isinstance(weight, Tensor):
        raise ConfigError(
            f"linear: input and weight must be tensors, got {type(input).__name__} and {type(weight).__name__}",
            why="their dtype, device and shape decide how the op runs",
            do="convert them with torch.as_tensor",
        )
    device = input.device.type
    dtype = input.dtype
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    numerics_text, rule = recipe.numerics_text_of(layer_name), recipe.scaling_rule_text
    token = linear_token(numerics_text, dtype, quantized_output, rule, options_text)
    seed = draw_seed(input) if recipe.draws_forward else None
    order = None
    if recipe.draws_backward and torch.is_grad_enabled():
        if not torch.compiler.is_compiling():
            prepare(input.device)
        order = order_of(input.device)
    arguments = LinearArguments(input, weight, bias, seed=seed, draw_order=order, **state)
    cache = arguments.weight_cache
    if cache is not None and not torch.compiler.is_compiling() and compat.is_in_backward():
        with compat.unchanged(flatten(cache)):  # repeated, the op leaves kept copies as they are
            return linear_op(arguments, token=token)
    return linear_op(arguments, token=token)


class Linear(nn.Linear):
    """`torch.nn.Linear` in low precision: the same parameters, state_dict and initialisation.

    output = input @ weight^T + bias

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is a bias [N].
        device: of the parameters.
        dtype: of the parameters; float32, bfloat16 or float16.
        recipe: a recipe or its name; None takes the one of the enclosing `fg.autocast`, else plain high precision.
        quantized_weight: the weight Parameter itself is a `QuantizedTensor`; optimizers update it in place. It is
            made by the quantizer of the recipe, or by that of `fp8-current` where the recipe has none.
        wgrad: what becomes of the gradient of the weight; None puts it into `weight.grad`.
        save_input: what is kept of the input for the backward pass, where the forward pass quantizes it.
        save_weight: what is kept of the weight, likewise.
        return_bias: return (output, bias) and leave the addition to the caller.

    Raises:
        ConfigError: an unknown recipe or option, or a dtype that cannot be quantized.

    Example:
        >>> layer = fullgraph.Linear(32, 8, recipe="fp8-current")
        >>> layer(torch.zeros(3, 32)).shape
        torch.Size([3, 8])
    """

    recipe: Recipe | None
    return_bias: bool
    layer_name: str
    scaling_state: ScalingState
    wgrad: Wgrad
    save_input: Save
    save_weight: Save
    options_text: str
    weight_caches: dict[str, WeightCache]
    deferred_wgrad: DeferredGradient | None
    statistics: StatisticsBuffers | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str | None = None,
        quantized_weight: bool = False,
        wgrad: Wgrad | None = None,
        save_input: Save = Save.QUANTIZED,
        save_weight: Save = Save.QUANTIZED,
        return_bias: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.configure(
            recipe,
            wgrad=wgrad,
            save_input=save_input,
            save_weight=save_weight,
            return_bias=return_bias,
        )
        if quantized_weight:
            quantizer = (self.recipe or current_recipe()).stored_quantizer(Role.WEIGHT)
            self.weight = nn.Parameter(quantize(self.weight.detach(), quantizer, BOTH))

    def configure(
        self,
        recipe: Recipe | str | None,
        *,
        wgrad: Wgrad | None = None,
        save_input: Save = Save.QUANTIZED,
        save_weight: Save = Save.QUANTIZED,
        return_bias: bool = False,
        name: str = "",
    ) -> None:
        """Set what `torch.nn.Linear` does not have. Parameters, scales and amaxes stay as they are.

        Args:
            recipe: see the class.
            wgrad: see the class.
            save_input: see the class.
            save_weight: see the class.
            return_bias: see the class.
            name: what a `CustomRecipe` calls this layer.

        Raises:
            ConfigError: an unknown recipe or option, or deferred weight gradients would be lost.
        """
        recipe = None if recipe is None else resolve(recipe)
        options = LinearOptions(Wgrad() if wgrad is None else wgrad, save_input, save_weight)
        if not options.wgrad.deferred:
            self._refuse_to_lose_gradients("configure")
        self.recipe = recipe
        self.return_bias = return_bias
        self.layer_name = name
        self.wgrad, self.save_input, self.save_weight = options.wgrad, save_input, save_weight
        self.options_text = encode(options, "Linear options")
        flops.register()
        self.weight_caches = {}
        self.statistics = self.__dict__.get("statistics")
        if not self.wgrad.deferred:
            self.deferred_wgrad = None
        elif self.__dict__.get("deferred_wgrad") is None:
            self.deferred_wgrad = no_calls(self.weight.device)
            watch(self)
        if "scaling_state" not in self.__dict__:
            self.scaling_state = ScalingState(self.weight.device)
        prepare(self.weight.device)
        self.scaling_state.set_rule("" if self.recipe is None else self.recipe.scaling_rule_text)

    @property
    def fp8_scale(self) -> Tensor:
        """Scales of delayed scaling, float32 [4]: input, weight, output, grad_output; 1 at first. A copy."""
        return self.scaling_state.scales()

    @property
    def fp8_amax_history(self) -> Tensor:
        """Amaxes of delayed scaling, float32 [history_length, 4]: since the last update, then oldest first. A copy."""
        return self.scaling_state.history()

    def reset_parameters(self) -> None:
        """Initialise the parameters as `torch.nn.Linear` does, and forget scales and amaxes."""
        super().reset_parameters()
        if "scaling_state" in self.__dict__:  # not yet, when torch.nn.Linear constructs itself
            self.scaling_state.reset()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.__dict__.get("deferred_wgrad") is not None:
            watch(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._refuse_to_lose_gradients("a change of device or dtype")
        super()._apply(fn, recurse)
        self.scaling_state.follow(self.weight.device)
        if self.weight.device.type == "cpu" and self.weight.is_shared():
            self.scaling_state.share_memory()
        self.weight_caches = {}
        if self.deferred_wgrad is not None and self.deferred_wgrad.device != self.weight.device:
            self.deferred_wgrad = no_calls(self.weight.device)
        prepare(self.weight.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key, value in saved_state(self).items():
            destination[prefix + key] = value

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        state = self.scaling_state
        state.follow(self.weight.device)
        state.load_from(state_dict, prefix, missing_keys, unexpected_keys, error_msgs)

    def forward(
        self,
        input: Tensor,
        *,
        is_first_microbatch: bool | None = None,
        quantized_output: bool = False,
    ) -> Any:
        """Apply the layer.

        Args:
            input: float32, bfloat16 or float16 [..., in_features], 1-D to any rank, any strides; or quantized.
            is_first_microbatch: True quantizes the weight and keeps its copies, in buffers of this layer; False uses
                what True kept, for the other microbatches of a step; None neither. The result is the same, as long as
                neither the weight nor its scale of delayed scaling changes in between.
            quantized_output: return a `QuantizedTensor`, differentiable.

        Returns:
            [..., out_features] in the dtype of the input, or of `torch.autocast` where it is enabled; with
            `return_bias` a tuple of it, without the bias, and the bias.

        Raises:
            ShapeError: the last dimension is not in_features.
            ConfigError: `is_first_microbatch=False` before any True, or after a change of the weight; or
                `into_main_grad` without a fitting `weight.main_grad`.
        """
        bias = None if self.return_bias else self.bias
        recipe = recipe_of(self, self.recipe)
        if self.recipe is None and torch.compiler.is_compiling() and not compat.is_exporting():
            self._check_repetition(recipe.numerics_text)
        gradient = self._weight_gradient()
        output = _linear(
            input,
            # Or hooks of the weight would run in the backward pass, without a gradient.
            self.weight.detach() if "deferred" in gradient else self.weight,
            bias,
            recipe=recipe,
            layer_name=self.layer_name,
            quantized_output=quantized_output,
            options_text=self.options_text,
            **self._scaling(recipe.scaling_rule_text),
            **self._weight_copies(is_first_microbatch, recipe.numerics_text_of(self.layer_name)),
            **gradient,
            **self._statistics(),
        )
        return (output, self.bias) if self.return_bias else output

    @compat.runs_while_traced
    def _check_repetition(self, numerics_text: str) -> None:
        """Refuse to compile a repeated forward pass with another recipe; Dynamo calls this while it traces."""
        check_repetition(self, numerics_text)

    def backward_dw(self) -> None:
        """Compute the weight gradient that the oldest backward pass left, with `wgrad=Wgrad(deferred=True)`.

        It is added to `weight.grad`, or to `weight.main_grad`, and hooks of the weight run.

        Raises:
            ConfigError: the layer defers nothing, no backward pass has left anything, an operand was changed in place
                since, the weight is frozen, or its `main_grad` does not fit. Nothing is lost.
        """
        if self.deferred_wgrad is None:
            raise ConfigError(
                "Linear: backward_dw() of a layer that does not defer its weight gradient",
                why="its backward pass has computed it already",
                do="construct the layer with wgrad=fullgraph.Wgrad(deferred=True), or do not call this",
            )
        if count(self.deferred_wgrad) == 0:
            raise ConfigError(
                "Linear: backward_dw() has nothing to compute",
                why="each backward pass leaves one weight gradient, and it has been taken already",
                do="call backward_dw() once for each backward pass, after it",
            )
        if self.wgrad.into_main_grad:
            self._check_main_grad()
        if not self.weight.requires_grad:
            raise ConfigError(
                "Linear: backward_dw() of a frozen weight",
                why="it was trained when the backward pass left its gradient, and takes none now",
                do="call requires_grad_(True) before, or discard_dw()",
            )
        call = take(self.deferred_wgrad)
        assert call is not None
        weight: Any = self.weight
        main_grad = weight.main_grad if self.wgrad.into_main_grad else None
        operands: dict[str, Any] = {**call.tensors, "main_grad": main_grad}
        arguments = WeightGradientArguments(**operands)
        grad = weight_gradient_op(arguments, token=call.token)
        if main_grad is None or self.wgrad.placeholder_grad:
            torch.autograd.backward(self.weight, grad)

    def discard_dw(self) -> int:
        """Forget the weight gradients that backward passes have left, as after a step that failed.

        Returns:
            How many there were.
        """
        if self.deferred_wgrad is None:
            return 0
        waiting = count(self.deferred_wgrad)
        self.deferred_wgrad.queue.clear()
        return waiting

    def _refuse_to_lose_gradients(self, action: str) -> None:
        leaf = self.__dict__.get("deferred_wgrad")
        if leaf is not None and count(leaf):
            raise ConfigError(
                f"Linear: {action} while {count(leaf)} weight gradients are still to be computed",
                why="what they are computed from belongs to the layer as it is",
                do="call backward_dw() for each, or discard_dw(), before",
            )

    def _weight_gradient(self) -> dict[str, Any]:
        """Where the op puts the gradient of the weight, if not into `weight.grad`."""
        wanted = torch.is_grad_enabled() and self.weight.requires_grad
        if not wanted or compat.is_exporting():
            return {}
        if self.wgrad.into_main_grad:
            self._check_main_grad()
        if self.wgrad.deferred:
            return {"deferred": self.deferred_wgrad}
        weight: Any = self.weight
        return {"main_grad": weight.main_grad} if self.wgrad.into_main_grad else {}

    @compat.runs_while_traced
    def _check_main_grad(self) -> None:
        """Refuse a main_grad that does not fit. Dynamo, which cannot raise our errors, calls this while it traces."""
        check_main_grad(self.weight)

    def _weight_copies(self, is_first: bool | None, numerics_text: str) -> dict[str, Any]:
        """The kept copies of the weight: to be written, or to be read."""
        if is_first is None or isinstance(self.weight, QuantizedTensor) or compat.is_exporting():
            return {}
        if not self._has_weight_cache(is_first, numerics_text):
            return {}
        quantized = self.weight_caches[numerics_text].quantized
        return {"weight_cache" if is_first else "cached_weight": quantized}

    @compat.runs_while_traced
    def _has_weight_cache(self, is_first: bool, numerics_text: str) -> bool:
        """Whether a recipe quantizes the weight; the first microbatch makes the buffers.

        Dynamo calls this while it traces, so that the buffers exist before the graph that uses them: they are inputs
        of it, with stable addresses, and no warm-up call is needed.
        """
        cache = self.weight_caches.get(numerics_text)
        if cache is not None and cache.fits(self.weight):
            return True
        if weight_copies(parse(f"numerics={numerics_text}")["numerics"]) is None:
            return False
        if not is_first:
            raise ConfigError(
                "Linear: is_first_microbatch=False, but there has been no first microbatch",
                why="it uses the quantized weight that the first microbatch kept",
                do="pass is_first_microbatch=True to the first microbatch of each step",
            )
        self.weight_caches[numerics_text] = WeightCache(self.weight.detach(), numerics_text)
        watch(self)
        return True

    def _statistics(self) -> dict[str, Any]:
        """The rows that the op records into, while somebody collects them."""
        rows = self.statistics
        if rows is None or compat.is_exporting():
            return {}
        backward = rows.backward if torch.is_grad_enabled() else None
        return {"forward_statistics": rows.forward, "backward_statistics": backward}

    def _scaling(self, rule: str) -> dict[str, Any]:
        """What the op gets of the state: nothing without delayed scaling, and only scales where nothing is trained."""
        if not rule:
            return {}
        state = self.scaling_state
        trains = torch.is_grad_enabled() and not compat.is_exporting()
        if not torch.compiler.is_compiling():
            state.follow(self.weight.device)  # FSDP moves parameters without telling their module
            if trains and state.rule != rule:
                state.set_rule(rule)
        return {
            "forward_scale": state.forward_scale,
            "forward_amax": state.forward_amax if trains else None,
            "backward_scale": state.backward_scale,
            "backward_amax": state.backward_amax if trains else None,
        }

    def __prepare_scriptable__(self) -> Any:
        raise CompileError(
            "Linear: torch.jit.script is not supported",
            why="recipes, tokens and tensor classes are Python, and TorchScript has none",
            do="use torch.export.export",
        )

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        shown = [super().extra_repr(), f"recipe={self.recipe}"]
        if isinstance(self.weight, QuantizedTensor):
            shown.append("quantized_weight=True")
        for option, default in DEFAULT_OPTIONS.__dict__.items():
            if getattr(self, option) != default:
                shown.append(f"{option}={getattr(self, option)}")
        return ", ".join(shown)


def make_weight_caches(model: nn.Module) -> int:
    """Make the buffers of `is_first_microbatch` for every layer of a model at once.

    The first microbatch makes those of its layer, so this is needed only where layers share one compiled graph
    (regional compilation): a layer without buffers would be compiled anew for them.

    Args:
        model: any module; its `fg.Linear` layers use their own recipe, or that of the enclosing `fg.autocast`.

    Returns:
        How many layers have them now; those that do not quantize their weight have none.

    Raises:
        ConfigError: `model` is no module.

    Example:
        >>> model = torch.nn.Sequential(fullgraph.Linear(32, 8, recipe="mxfp8"), torch.nn.ReLU())
        >>> fullgraph.make_weight_caches(model)
        1
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"make_weight_caches: a torch.nn.Module is needed, got {type(model).__name__}",
            why="the buffers belong to its layers",
            do="pass the model",
        )
    count = 0
    for layer in model.modules():
        if isinstance(layer, Linear) and not isinstance(layer.weight, QuantizedTensor):
            recipe = current_recipe() if layer.recipe is None else layer.recipe
            count += layer._has_weight_cache(True, recipe.numerics_text_of(layer.layer_name))
    return count
