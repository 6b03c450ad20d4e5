"""One timer for every benchmark of kernels: interleaved, L2 flushed, CUDA events, medians with spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

L2_FLUSH_BYTES = 256 << 20


def interleaved_ms(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 40,
    warmup: int = 5,
    device: str = "cuda",
) -> dict[str, dict[str, float]]:
    """Time functions in turn, so that clocks and temperature drift over all of them alike.

    Args:
        functions: what to time, by name.
        rounds: timed calls of each.
        warmup: untimed calls of each before.
        device: a CUDA device; or "cpu", where a clock on the wall does it.

    Returns:
        For each name: median, p10 and p90 in milliseconds.
    """
    for function in functions.values():
        for _ in range(warmup):
            function()
    if torch.device(device).type == "cpu":
        return _wall_ms(functions, rounds)
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device=device)
    events: dict[str, list[tuple[Any, Any]]] = {n: [] for n in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            stop.record()
            events[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: _summary([a.elapsed_time(b) for a, b in pairs]) for name, pairs in events.items()}


def _wall_ms(
    functions: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: _summary(taken) for name, taken in times.items()}


def _summary(times: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(times, n=10)
    return {"median": statistics.median(times), "p10": tenths[0], "p90": tenths[-1]}


def environment() -> dict[str, str]:
    """Versions and device: every stored result carries them."""
    import fullgraph

    found = {"torch": torch.__version__, "fullgraph": fullgraph.__version__}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found
