"""`fg.Linear` and `fg.linear`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fullgraph.errors import ConfigError
from fullgraph.formats import BOTH
from fullgraph.nn.autocast import current_recipe, recipe_of
from fullgraph.ops.linear import LinearArguments, linear_op, linear_token
from fullgraph.quantizers import quantize
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
        ConfigError: another dtype, no tensor, or an unknown recipe.

    Numerics: each gradient has the dtype of its tensor. Sizes need not be multiples of anything: the op pads inside.
    """
    if not isinstance(input, Tensor) or not isinstance(weight, Tensor):
        raise ConfigError(
            f"linear: input and weight must be tensors, got {type(input).__name__} and {type(weight).__name__}",
            why="their dtype, device and shape decide how the op runs",
            do="convert them with torch.as_tensor",
        )
    recipe = current_recipe() if recipe is None else resolve(recipe)
    device = input.device.type
    dtype = input.dtype
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    token = linear_token(recipe.numerics_text, dtype, quantized_output)
    return linear_op(LinearArguments(input, weight, bias), token=token)


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
        quantized_weight: the weight Parameter itself is a `QuantizedTensor`; optimizers update it in place.
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

    def configure(self, recipe: Recipe | str | None, *, return_bias: bool = False) -> None:
        """Set what `torch.nn.Linear` does not have. Parameters stay as they are."""
        self.recipe = None if recipe is None else resolve(recipe)
        self.return_bias = return_bias

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
        output = linear(
            input,
            self.weight,
            bias,
            recipe=recipe_of(self, self.recipe),
            quantized_output=quantized_output,
        )
        return (output, self.bias) if self.return_bias else output

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        quantized = ", quantized_weight=True" if isinstance(self.weight, QuantizedTensor) else ""
        return f"{super().extra_repr()}, recipe={self.recipe}{quantized}"
