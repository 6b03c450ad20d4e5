"""`fg.Linear` and `fg.linear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fullgraph.customop import compat
from fullgraph.errors import ConfigError
from fullgraph.formats import BOTH
from fullgraph.nn.autocast import current_recipe, recipe_of
from fullgraph.nn.scaling import HISTORY_KEY, SCALE_KEY, ScalingState
from fullgraph.ops.linear import LinearArguments, linear_op, linear_token
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
    **state: Any,
) -> Any:
    """`linear`, with the state of delayed scaling as `LinearArguments` names it."""
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
    token = linear_token(numerics_text, dtype, quantized_output, rule)
    seed = draw_seed(input) if recipe.draws_forward else None
    order = None
    if recipe.draws_backward:
        if not torch.compiler.is_compiling():
            prepare(input.device)
        order = order_of(input.device)
    arguments = LinearArguments(input, weight, bias, seed=seed, draw_order=order, **state)
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
        return_bias: return (output, bias) and leave the addition to the caller.

    Raises:
        ConfigError: an unknown recipe, or a dtype that cannot be quantized.

    Example:
        >>> layer = fullgraph.Linear(32, 8, recipe="fp8-current")
        >>> layer(torch.zeros(3, 32)).shape
        torch.Size([3, 8])
    """

    recipe: Recipe | None
    return_bias: bool
    layer_name: str
    scaling_state: ScalingState

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
        return_bias: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.configure(recipe, return_bias=return_bias)
        if quantized_weight:
            quantizer = (self.recipe or current_recipe()).stored_quantizer(Role.WEIGHT)
            self.weight = nn.Parameter(quantize(self.weight.detach(), quantizer, BOTH))

    def configure(
        self, recipe: Recipe | str | None, *, return_bias: bool = False, name: str = ""
    ) -> None:
        """Set what `torch.nn.Linear` does not have. Parameters, scales and amaxes stay as they are.

        Args:
            recipe: see the class.
            return_bias: see the class.
            name: what a `CustomRecipe` calls this layer.
        """
        self.recipe = None if recipe is None else resolve(recipe)
        self.return_bias = return_bias
        self.layer_name = name
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.scaling_state.follow(self.weight.device)
        prepare(self.weight.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.scaling_state.is_fresh:
            for key in (SCALE_KEY, HISTORY_KEY):
                destination[prefix + key] = getattr(self, key)

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

    def forward(self, input: Tensor, *, quantized_output: bool = False) -> Any:
        """Apply the layer.

        Args:
            input: float32, bfloat16 or float16 [..., in_features], 1-D to any rank, any strides; or quantized.
            quantized_output: return a `QuantizedTensor`, differentiable.

        Returns:
            [..., out_features] in the dtype of the input, or of `torch.autocast` where it is enabled; with
            `return_bias` a tuple of it, without the bias, and the bias.

        Raises:
            ShapeError: the last dimension is not in_features.
        """
        bias = None if self.return_bias else self.bias
        recipe = recipe_of(self, self.recipe)
        output = _linear(
            input,
            self.weight,
            bias,
            recipe=recipe,
            layer_name=self.layer_name,
            quantized_output=quantized_output,
            **self._scaling(recipe.scaling_rule_text),
        )
        return (output, self.bias) if self.return_bias else output

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

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        quantized = ", quantized_weight=True" if isinstance(self.weight, QuantizedTensor) else ""
        return f"{super().extra_repr()}, recipe={self.recipe}{quantized}"
