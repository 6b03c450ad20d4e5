"""A small byte-level GPT whose every linear layer is an `fg.Linear`."""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn
from torch.nn import functional as F

from fullgraph.nn import Linear
from fullgraph.recipes import Recipe

NUM_BYTES = 256


@dataclasses.dataclass(frozen=True)
class GPTSize:
    """Sizes of a model.

    Args:
        num_layers: transformer blocks.
        num_heads: attention heads; divides `features`.
        features: width of the residual stream.
        context: longest sequence in bytes.
        learning_rate: the highest of the schedule.
    """

    num_layers: int = 4
    num_heads: int = 4
    features: int = 128
    context: int = 128
    learning_rate: float = 2e-3


SIZES = {
    "small": GPTSize(),
    "100m": GPTSize(num_layers=14, num_heads=12, features=768, context=1024, learning_rate=6e-4),
}
"""Sizes by the name that the command line knows; the larger one has about 100 million parameters."""


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, size: GPTSize, recipe: Recipe) -> None:
        super().__init__()
        features = size.features
        self.num_heads = size.num_heads
        self.attention_norm = nn.RMSNorm(features)
        self.qkv = Linear(features, 3 * features, bias=False, recipe=recipe)
        self.proj = Linear(features, features, bias=False, recipe=recipe)
        self.mlp_norm = nn.RMSNorm(features)
        self.up = Linear(features, 4 * features, bias=False, recipe=recipe)
        self.down = Linear(4 * features, features, bias=False, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        """float32 [batch, time, features] -> the same."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = qkv.transpose(1, 3).unbind(
            2
        )  # each [batch, heads, time, features of a head]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Predicts the next byte.

    Args:
        size: of the model.
        recipe: of every linear layer, the last one included.
    """

    def __init__(self, size: GPTSize, recipe: Recipe) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, size.features)
        self.position = nn.Embedding(size.context, size.features)
        self.blocks = nn.ModuleList([Block(size, recipe) for _ in range(size.num_layers)])
        self.norm = nn.RMSNorm(size.features)
        self.head = Linear(size.features, NUM_BYTES, bias=False, recipe=recipe)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor, target: Tensor) -> Tensor:
        """Mean cross entropy in nats.

        Args:
            text: int64 [batch, time], bytes.
            target: the same, one byte later.

        Returns:
            float32 [].
        """
        x = self.embedding(text) + self.position.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())
