"""What a training run leaves on disk: one line of JSON for each step, and a picture of the losses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any


class Log:
    """A JSONL file, complete after every line.

    Args:
        path: the file, overwritten.

    Attributes:
        num_records: lines written.
    """

    def __init__(self, path: Path) -> None:
        self.num_records = 0
        self._stream = path.open("w", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        self._stream.write(json.dumps(record) + "\n")
        self.num_records += 1
        self._stream.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()


def smoothed(losses: Sequence[float], window: int = 20) -> list[float]:
    """The mean of each loss and those before it, up to `window` of them."""
    return [
        sum(part) / len(part)
        for part in (losses[max(0, end - window) : end] for end in range(1, len(losses) + 1))
    ]


def draw(path: Path, losses: Mapping[str, Sequence[float]]) -> None:
    """Draw loss curves into a PNG: what was measured pale, its running mean on top.

    Args:
        path: the file, overwritten.
        losses: recipe -> loss at each step.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for index, (recipe, values) in enumerate(losses.items()):
        steps = range(1, len(values) + 1)
        style = "-" if index == 0 else "--"
        axes.plot(steps, values, color=f"C{index}", alpha=0.25, linewidth=1)
        axes.plot(steps, smoothed(values), style, color=f"C{index}", label=recipe)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Byte-level GPT, compiled")
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(path)
