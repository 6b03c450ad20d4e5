"""`fullgraph explain`: the report of `fg.explain` on the GPT that `fullgraph train` trains."""

from __future__ import annotations

import torch

from fullgraph.cli.device import find_device
from fullgraph.cli.gpt import GPT, NUM_BYTES, GPTSize
from fullgraph.explain import Report, explain
from fullgraph.recipes import get

SIZE = GPTSize(num_layers=1)


def explain_gpt(recipe: str, device: str) -> Report:
    """Explain one block of the GPT with its head, for two batch sizes.

    Args:
        recipe: name of a recipe.
        device: name of a device.

    Raises:
        ConfigError: an unknown recipe or device.
        HardwareError: a device that is not there.
    """
    resolved = get(recipe)
    where = find_device(device)
    model = GPT(SIZE, resolved).to(where)
    batches = [
        torch.randint(NUM_BYTES, (size, SIZE.context), device=where) for size in (2, 2, 3, 3)
    ]
    with torch.autocast(where.type, dtype=torch.bfloat16):
        return explain(model, *batches[:2], again=tuple(batches[2:]), dynamic=True)
