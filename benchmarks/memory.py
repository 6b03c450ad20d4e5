"""Peak memory and time of two Llama-3-8B blocks, forward + backward, on a GPU, for each choice of what is saved.

    python -m benchmarks memory [--recipes fp8-current ...] [--tokens 8192] [--json FILE]

The model is the one of the block benchmarks: width 4096, MLP 14336, 32 heads, 8 of keys and values, batches of 4096
tokens, bf16 weights. `peak` is `torch.cuda.max_memory_allocated` over one step, weights, gradients and input included;
every variant runs in a process of its own. The correctness of each is checked against the first, compiled bf16.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fullgraph as fg
from benchmarks.timing import environment, interleaved_ms

WIDTH, HIDDEN, HEADS, KV_HEADS, SEQUENCE = 4096, 14336, 32, 8, 4096
NATIVE = ("fp8-delayed", "fp8-current", "fp8-per-row", "fp8-block")
CHOICES: dict[str, dict[str, fg.Save]] = {
    "quantized": {},
    "original input": {"save_input": fg.Save.ORIGINAL},
    "original weight": {"save_weight": fg.Save.ORIGINAL},
    "originals": {"save_input": fg.Save.ORIGINAL, "save_weight": fg.Save.ORIGINAL},
}
CHECKPOINTED = "recomputed"
"""Activation checkpointing of each block."""


class Block(nn.Module):
    """A decoder block as Llama 3 has it, of plain `nn.Linear` layers."""

    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * KV_HEADS * head, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, WIDTH] -> the same."""
        head = WIDTH // HEADS
        sizes = (WIDTH, KV_HEADS * head, KV_HEADS * head)
        parts = self.qkv(self.attention_norm(x)).split(sizes, -1)
        query, key, value = (part.unflatten(-1, (-1, head)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Blocks(nn.Module):
    """Blocks one after the other, perhaps recomputed in the backward pass."""

    def __init__(self, count: int, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(count)])
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, WIDTH] -> the same."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def build(recipe: str, choice: str) -> Blocks:
    """The model of one variant, the same weights in each."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Blocks(2, recompute=choice == CHECKPOINTED).to(torch.bfloat16)
    if recipe != "bf16":
        fg.convert(model, recipe)
        options: dict[str, Any] = {**CHOICES.get(choice, {})}
        for layer in model.modules():
            if isinstance(layer, fg.Linear):
                layer.configure(recipe, **options)
    return model


def measure(recipe: str, choice: str, tokens: int) -> dict[str, Any]:
    """Peak bytes, bytes that wait for the backward pass, time and results of one variant, compiled."""
    model = build(recipe, choice)
    function = torch.compile(model, fullgraph=True, dynamic=False)
    torch.manual_seed(1)
    shape = (tokens // SEQUENCE, SEQUENCE, WIDTH)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad_output = torch.randn_like(x)
    parameters = list(model.parameters())

    def forward() -> Tensor:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        return function(x)

    def step() -> Tensor:
        output = forward()
        output.backward(grad_output)
        return output

    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first_call = time.perf_counter() - start
    if recipe == "fp8-delayed":
        fg.update_scales(model)
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    output = forward()
    torch.cuda.synchronize()
    waiting = torch.cuda.memory_allocated()
    output.backward(grad_output)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    results = {"output": output.detach(), "grad_input": x.grad, "grad_weight": parameters[1].grad}
    kept = {name: t.float().cpu() for name, t in results.items()}
    del output, results
    ms = interleaved_ms({"step": step}, rounds=20)["step"]
    return {
        "recipe": recipe,
        "saved": choice,
        "peak_gib": peak / 2**30,
        "after_forward_gib": waiting / 2**30,
        "first_call_s": first_call,
        "ms": ms,
        "results": kept,
    }


def _in_a_process(recipe: str, choice: str, tokens: int, folder: pathlib.Path) -> dict[str, Any]:
    file = folder / "one.pt"
    variant = ["--one", recipe, choice, str(file), "--tokens", str(tokens)]
    subprocess.run([sys.executable, "-m", "benchmarks", "memory", *variant], check=True)
    return torch.load(file)


def variants(recipes: list[str]) -> list[tuple[str, str]]:
    """Pairs of recipe and choice; bf16 first."""
    pairs = [("bf16", "as torch does"), ("bf16", CHECKPOINTED)]
    return pairs + [(recipe, choice) for recipe in recipes for choice in (*CHOICES, CHECKPOINTED)]


def main(arguments: list[str] | None = None) -> None:
    """Run every variant and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks memory", description=__doc__)
    parser.add_argument("--recipes", nargs="*", default=list(NATIVE))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        recipe, choice, file = options.one
        torch.save(measure(recipe, choice, options.tokens), file)
        return
    rows: list[dict[str, Any]] = []
    baseline: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        for recipe, choice in variants(options.recipes):
            row = _in_a_process(recipe, choice, options.tokens, pathlib.Path(folder))
            results = row.pop("results")
            baseline = baseline or results
            row["errors"] = {
                name: ((t - baseline[name]).norm() / baseline[name].norm()).item()
                for name, t in results.items()
            }
            rows.append(row)
            print(line(row, rows[0]), flush=True)
    if options.json:
        head = {"date": datetime.date.today().isoformat(), **environment()}
        text = json.dumps({**head, "tokens": options.tokens, "rows": rows}, indent=1)
        options.json.write_text(text + "\n")


def line(row: dict[str, Any], first: dict[str, Any]) -> str:
    """One variant as a line of the Markdown table of the documentation."""
    errors = " / ".join([f"{100 * e:.1f} %" for e in row["errors"].values()])
    ratio = first["ms"]["median"] / row["ms"]["median"]
    return (
        f"| {row['recipe']} | {row['saved']} | {row['peak_gib']:.2f} | {row['after_forward_gib']:.2f} | "
        f"{row['ms']['median']:.2f} | {ratio:.2f}x | {row['first_call_s']:.1f} | {errors} |"
    )
