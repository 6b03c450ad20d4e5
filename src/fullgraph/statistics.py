"""What low precision costs, layer by layer and step by step, while a model trains.

`collect_statistics` hands buffers to the layers of a model for one step in every N; their ops fill them on the device
(`ops/statistics.py`), and in all other steps do nothing. Here the buffers are read, without waiting for them, and
become records, lines of a file and a picture.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from fullgraph.delayed import SLOTS
from fullgraph.errors import ConfigError
from fullgraph.nn import Linear
from fullgraph.ops.statistics import COLUMN_NAMES, COLUMNS, StatisticsBuffers


@dataclasses.dataclass(frozen=True)
class TensorStatistics:
    """What the casts of one tensor of one layer did in one step. Made by `Statistics`, `explain` and `read_statistics`.

    Shares are parts of `elements`. Numbers that are not known, or that would be infinite, are None.

    Args:
        step: in which it was, 1 for the first.
        layer: path of the module; "" for the model itself.
        tensor: "input", "weight", "output" or "grad_output".
        amax: the largest finite magnitude.
        underflow: share of values other than zero that became zero.
        saturation: share of values beyond the range of their scaling group; None for `Scaling.CUSTOM`.
        nonfinite: share of values that were infinite or NaN, before the cast or after it; they count as nothing else.
        sqnr_db: 10 log10(sum x^2 / sum (x - decoded)^2), the signal-to-quantization-noise ratio in decibels; None where
            nothing was lost, or where there is nothing but zeros.
        elements: how many values were cast, in all casts together.
        casts: how many casts there were: one for each microbatch; in eager mode one more for each recomputation.
    """

    step: int
    layer: str
    tensor: str
    amax: float
    underflow: float | None
    saturation: float | None
    nonfinite: float | None
    sqnr_db: float | None
    elements: int
    casts: int


class Statistics:
    """The statistics of a model in training. Made by `collect_statistics`.

    Call `step()` once after each optimizer step, and `close()` at the end, or use it in a `with` statement.

    Args:
        layers: path -> layer; none of them collects yet.
        every: one step in so many is sampled.
        path: a JSONL file, or None.
        first_step: number of the coming step.
    """

    def __init__(
        self,
        layers: dict[str, Linear],
        every: int,
        path: Path | None = None,
        first_step: int = 1,
    ) -> None:
        self.every = every
        self._step = first_step
        self._records: list[TensorStatistics] = []
        self._pending: collections.deque[_Reading] = collections.deque()
        self._layers = layers
        self._buffers: dict[str, StatisticsBuffers] = {}
        self._stream = None if path is None else _open(path, first_step)
        self._release = weakref.finalize(self, _let_go, list(layers.values()), self._stream)
        for layer in layers.values():
            _COLLECTING[id(layer)] = self
        self._prepare()

    @property
    def is_sampling(self) -> bool:
        """Whether the step that is in progress, or comes next, is sampled."""
        return self._release.alive and (self._step - 1) % self.every == 0

    @property
    def records(self) -> list[TensorStatistics]:
        """What there is so far, in the order of steps, layers and tensors. Waits for the device. A copy."""
        self._finish(wait=True)
        return list(self._records)

    def step(self) -> None:
        """A training step is over. Reads what it collected, if it was sampled, and decides about the next one.

        Raises:
            ConfigError: after `close()`.
        """
        if not self._release.alive:
            raise ConfigError(
                "Statistics.step: the statistics are closed",
                why="their layers do not collect any more",
                do="call close() after the last step, or begin anew with collect_statistics(model)",
            )
        if self.is_sampling:
            self._pending.append(_Reading(self._step, self._buffers))
        self._finish(wait=False)
        self._step += 1
        self._prepare()

    def close(self) -> None:
        """Finish the records and the file; the layers collect no more. Does nothing the second time.

        What a sampled step collected before its `step()` is dropped.
        """
        if not self._release.alive:
            return
        for layer in self._layers.values():
            _COLLECTING.pop(id(layer), None)
        try:
            self._finish(wait=True)
        finally:
            self._release()

    def plot(
        self, path: str | os.PathLike[str], metric: str = "sqnr_db", tensor: str | None = None
    ) -> None:
        """Draw the records; see `plot_statistics`.

        Args:
            path: the file, a PNG.
            metric: what the colour means.
            tensor: which tensor; None draws all that were cast.
        """
        plot_statistics(self.records, path, metric=metric, tensor=tensor)

    def __enter__(self) -> Statistics:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _prepare(self) -> None:
        """Hand buffers to the layers if the coming step is sampled, and take them away if it is not."""
        if not self.is_sampling:
            for layer in self._layers.values():
                layer.statistics = None
            return
        for name, layer in self._layers.items():
            buffers = self._buffers.get(name)
            if buffers is None or buffers.device != layer.weight.device:
                buffers = self._buffers[name] = StatisticsBuffers(layer.weight.device)
            layer.statistics = buffers

    def _finish(self, *, wait: bool) -> None:
        """Make records of what has arrived on the host; of all there is, if it is worth waiting for."""
        while self._pending and (wait or self._pending[0].has_arrived):
            records = self._pending.popleft().records()
            self._records += records
            if self._stream is not None:
                self._stream.writelines(_line(record) for record in records)
                self._stream.flush()


_COLLECTING: weakref.WeakValueDictionary[int, Statistics] = weakref.WeakValueDictionary()
"""id of a layer -> what collects its statistics, and keeps it alive."""


def collect_statistics(
    model: nn.Module,
    *,
    every: int = 100,
    path: str | os.PathLike[str] | None = None,
    first_step: int = 1,
) -> Statistics:
    """Collect, in one step of every N, what quantization does to each tensor of each layer.

    The first step is sampled, and then every N-th. A layer that collects is another graph than one that does not, so a
    compiled model has two graphs in all; those of the other steps hold nothing of this and cost nothing. Nothing waits
    for the device: what a step collected arrives during the next ones. Results of the model stay what they were, bit
    for bit.

    Args:
        model: any module; its `fg.Linear` layers collect. Layers that it gets later do not.
        every: N >= 1; 1 samples all steps.
        path: a file that gets a line of JSON for each record, overwritten; None for none.
        first_step: number of the coming step. If it is above 1, a training goes on: the file keeps its lines of the
            steps before.

    Returns:
        What collects; call its `step()` after each optimizer step, and keep it: when it is dropped or closed, the
        layers collect no more.

    Raises:
        ConfigError: no module, no `fg.Linear` in it, parameters without data, a layer that collects already, `every`
            or `first_step` below 1, or a file that cannot be written.

    Numerics: see `TensorStatistics`, and `fullgraph.ops.statistics.record`.

    Example:
        >>> layer = fullgraph.Linear(32, 8, recipe="fp8-current")
        >>> with fullgraph.collect_statistics(layer, every=10) as statistics:
        ...     for _ in range(20):
        ...         layer(torch.randn(4, 32)).sum().backward()
        ...         statistics.step()
        >>> [(record.step, record.tensor) for record in statistics.records][:3]
        [(1, 'input'), (1, 'weight'), (1, 'grad_output')]
        >>> sorted({record.step for record in statistics.records})
        [1, 11]
    """
    for name, number in (("every", every), ("first_step", first_step)):
        if type(number) is not int or number < 1:
            raise ConfigError(
                f"collect_statistics: {name} must be an integer >= 1, got {number!r}",
                why="steps are counted from 1, and one in so many is sampled",
                do="use every=100, or every=1 for all steps",
            )
    layers = linear_layers("collect_statistics", model)
    busy = [name for name, layer in layers.items() if id(layer) in _COLLECTING]
    if busy:
        raise ConfigError(
            f"collect_statistics: {len(busy)} layers collect statistics already, the first of them {busy[0]!r}",
            why="a layer has one set of buffers",
            do="close() the other statistics first",
        )
    return Statistics(layers, every, None if path is None else Path(path), first_step)


def linears_of(model: Any) -> dict[str, Linear]:
    """The `fg.Linear` layers of a module, by path, without what `torch.compile(model)` adds to it; else none."""
    if not isinstance(model, nn.Module):
        return {}
    return {
        ".".join([part for part in name.split(".") if part != "_orig_mod"]): module
        for name, module in model.named_modules()
        if isinstance(module, Linear)
    }


def linear_layers(caller: str, model: Any) -> dict[str, Linear]:
    """The layers that can collect, by path.

    Args:
        caller: whose error it is.
        model: what was passed to it.

    Returns:
        Path -> layer, as `linears_of`.

    Raises:
        ConfigError: not a module, none in it is an `fg.Linear`, or one has no data.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{caller}: statistics need a torch.nn.Module, got {type(model).__name__}",
            why="they are those of its fg.Linear layers",
            do="pass the model",
        )
    found = linears_of(model)
    if not found:
        raise ConfigError(
            f"{caller}: there is no fg.Linear in {type(model).__name__} to take statistics of",
            why="they tell what the casts of these layers do",
            do='convert the model first: fullgraph.convert(model, "fp8-current")',
        )
    empty = [name for name, layer in found.items() if layer.weight.device.type == "meta"]
    if empty:
        raise ConfigError(
            f"{caller}: the layer {empty[0]!r} is on the meta device",
            why="statistics are those of values, and there are none",
            do="give the model data first, with to_empty(...) and its initialisation",
        )
    return found


@contextlib.contextmanager
def collected_apart(
    layers: dict[str, Linear], *, collect: bool
) -> Iterator[Callable[[], tuple[TensorStatistics, ...]]]:
    """Run a model without disturbing what collects its statistics; for running it to look at it.

    Args:
        layers: of the model, by path.
        collect: whether they collect within, for the function that is yielded.

    Yields:
        A function that returns what was collected since the last call, or since the start.
    """
    before = {name: layer.statistics for name, layer in layers.items()}
    own: dict[str, StatisticsBuffers] = {}
    for name, layer in layers.items():
        layer.statistics = None
        if collect:
            layer.statistics = own[name] = StatisticsBuffers(layer.weight.device)
    try:
        yield lambda: tuple(_Reading(1, own).records()) if own else ()
    finally:
        for name, layer in layers.items():
            layer.statistics = before[name]


def _let_go(layers: Iterable[Linear], stream: TextIO | None) -> None:
    for layer in layers:
        layer.statistics = None
    if stream is not None:
        stream.close()


class _Reading:
    """What one step collected, on its way to the host. The buffers start anew.

    Args:
        step: its number.
        buffers: of the layers, by path.
    """

    def __init__(self, step: int, buffers: dict[str, StatisticsBuffers]) -> None:
        self.step = step
        self._parts: list[tuple[list[str], Tensor, torch.cuda.Event | None]] = []
        for device in dict.fromkeys([b.device for b in buffers.values()]):
            here = {name: b for name, b in buffers.items() if b.device == device}
            rows = [rows for b in here.values() for rows in (b.forward, b.backward)]
            with torch.no_grad():
                joined = torch.cat(rows)
                torch._foreach_zero_(rows)
            self._parts.append((list(here), *_on_the_host(joined)))

    @property
    def has_arrived(self) -> bool:
        """Whether `records` would not wait."""
        return all(event is None or event.query() for _, _, event in self._parts)

    def records(self) -> list[TensorStatistics]:
        """For each tensor that was cast, a record."""
        found = []
        for names, rows, event in self._parts:
            if event is not None:
                event.synchronize()
            by_layer = rows.view(len(names), len(SLOTS), COLUMNS).tolist()
            for name, layer_rows in zip(names, by_layer, strict=True):
                for tensor, row in zip(SLOTS, layer_rows, strict=True):
                    numbers = dict(zip(COLUMN_NAMES, row, strict=True))
                    if numbers["casts"]:
                        found.append(_record(self.step, name, tensor, numbers))
        return found


def _on_the_host(rows: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on the host, and the event after which it is complete; None if it is."""
    if not rows.is_cuda:
        return rows.cpu(), None
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    host.copy_(rows, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(rows.device))
    return host, event


def _record(step: int, layer: str, tensor: str, numbers: dict[str, float]) -> TensorStatistics:
    elements, signal, noise = (numbers[name] for name in ("elements", "signal", "noise"))

    def share(name: str) -> float | None:
        return numbers[name] / elements if elements and not math.isnan(numbers[name]) else None

    has_ratio = 0 < signal < math.inf and 0 < noise < math.inf
    return TensorStatistics(
        step=step,
        layer=layer,
        tensor=tensor,
        amax=numbers["amax"],
        underflow=share("underflow"),
        saturation=share("saturation"),
        nonfinite=share("nonfinite"),
        sqnr_db=10 * math.log10(signal / noise) if has_ratio else None,
        elements=int(elements),
        casts=int(numbers["casts"]),
    )


def _line(record: TensorStatistics) -> str:
    return json.dumps(dataclasses.asdict(record), allow_nan=False) + "\n"


_OPEN: weakref.WeakValueDictionary[Path, TextIO] = weakref.WeakValueDictionary()
"""Files that collections write."""


def _open(path: Path, first_step: int) -> TextIO:
    """The file to write to, with the lines that it keeps."""
    other = _OPEN.get(path.resolve())
    if other is not None and not other.closed:
        raise ConfigError(
            f"collect_statistics: {path} is being written by another collection",
            why="each collection writes its own file from the start",
            do="choose another place, or close() the other one first",
        )
    kept = []
    if first_step > 1 and path.exists():
        kept = [record for record in read_statistics(path) if record.step < first_step]
    try:
        stream = path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"collect_statistics: cannot write {path}: {error.strerror}", do="choose another place"
        ) from error
    stream.writelines(_line(record) for record in kept)
    stream.flush()
    _OPEN[path.resolve()] = stream
    return stream


def read_statistics(path: str | os.PathLike[str]) -> list[TensorStatistics]:
    """Read what `collect_statistics(..., path=...)` wrote, during a training or after it.

    Args:
        path: the file.

    Returns:
        The records, in the order of the file. A last line that is not complete, as an interruption may leave it, is
        left out.

    Raises:
        ConfigError: the file cannot be read, or a line of it is no record.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"read_statistics: cannot read {path}: {error.strerror}",
            do="pass the file that collect_statistics(..., path=...) wrote",
        ) from error
    records = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            records.append(TensorStatistics(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"read_statistics: line {number} of {path} is no record of statistics",
                why=f"a line is a JSON object with {', '.join(_FIELDS)}",
                do="pass the file that collect_statistics(..., path=...) wrote",
            ) from error
    return records


_FIELDS = tuple([field.name for field in dataclasses.fields(TensorStatistics)])


@dataclasses.dataclass(frozen=True)
class _Metric:
    """How a number is drawn. Bright is where most is lost, in every picture.

    Args:
        title: what it is, with its unit.
        factor: to that unit.
        low_is_bad: whether small values are the bright ones.
        logarithmic: whether colours stand for factors rather than differences.
    """

    title: str
    factor: float = 1.0
    low_is_bad: bool = False
    logarithmic: bool = False


_METRICS = {
    "sqnr_db": _Metric("signal to quantization noise (dB)", low_is_bad=True),
    "underflow": _Metric("underflow: values that became zero (%)", 100.0),
    "saturation": _Metric("saturation: values beyond the range (%)", 100.0),
    "nonfinite": _Metric("infinite or NaN (%)", 100.0),
    "amax": _Metric("largest magnitude", logarithmic=True),
}

_MOST_NAMES = 60
"""Layers whose names are all written at the axis; of more, every second, third and so on."""


def plot_statistics(
    records: Iterable[TensorStatistics],
    path: str | os.PathLike[str],
    *,
    metric: str = "sqnr_db",
    tensor: str | None = None,
) -> None:
    """Draw statistics as a map: layers from top to bottom, sampled steps from left to right. Bright is where it hurts.

    A cell without a colour has no number: the tensor was not cast in that step, or the number is None.

    Args:
        records: of a `Statistics`, or of `read_statistics`.
        path: the file, a PNG, overwritten.
        metric: what the colour means: "sqnr_db", "underflow", "saturation", "nonfinite" or "amax".
        tensor: "input", "weight", "output" or "grad_output"; None draws a map for each that was cast, side by side.

    Raises:
        ConfigError: an unknown metric or tensor, no record to draw, no matplotlib, or a file that cannot be written.
    """
    records = list(records)
    for name, value, known in (("metric", metric, _METRICS), ("tensor", tensor, SLOTS)):
        if value not in known and not (name == "tensor" and value is None):
            raise ConfigError(
                f"plot_statistics: unknown {name} {value!r}", do=f"use one of {', '.join(known)}"
            )
    cast = {record.tensor for record in records}
    tensors = [name for name in SLOTS if name in cast and tensor in (None, name)]
    if not tensors:
        raise ConfigError(
            f"plot_statistics: there is no record of {tensor or 'any tensor'} to draw",
            why="only what was cast in a sampled step has statistics",
            do="sample a step of a model with a low-precision recipe first",
        )
    try:
        _draw(records, tensors, Path(path), metric)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "plot_statistics: matplotlib is not installed",
            why="the library itself works without it, so it is an extra",
            do='pip install "fullgraph[cli]"',
        ) from error
    except OSError as error:
        raise ConfigError(
            f"plot_statistics: cannot write {path}: {error.strerror}", do="choose another place"
        ) from error


def _draw(records: list[TensorStatistics], tensors: list[str], path: Path, metric: str) -> None:
    """Draw a map for each tensor, all with the same colours."""
    from matplotlib import cm, colormaps, colors
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style = _METRICS[metric]
    layers = list(dict.fromkeys([record.layer for record in records]))
    steps = sorted({record.step for record in records})
    maps = {name: _cells(records, name, layers, steps, metric) for name in tensors}
    low, high = _limits([v for cells in maps.values() for row in cells for v in row], style)
    norm = (colors.LogNorm if style.logarithmic else colors.Normalize)(low, high)
    colormap = colormaps["viridis_r" if style.low_is_bad else "viridis"].with_extremes(bad="0.9")

    rows = min(len(layers), _MOST_NAMES)
    size = (3 + 0.08 * max(map(len, layers)) + 3 * len(tensors), 2 + 0.22 * rows)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(tensors), sharey=True, squeeze=False)[0]
    for ax, name in zip(axes, tensors, strict=True):
        ax.imshow(maps[name], aspect="auto", interpolation="nearest", cmap=colormap, norm=norm)
        places = _ticks(len(steps), 6)
        ax.set_xticks(places, [str(steps[i]) for i in places])
        ax.set(title=name, xlabel="step")
    places = _ticks(len(layers), _MOST_NAMES)
    axes[0].set_yticks(places, [layers[i] or "(model)" for i in places])
    axes[0].set(ylabel="layer")
    figure.colorbar(cm.ScalarMappable(norm, colormap), ax=list(axes), label=style.title)
    figure.supxlabel("grey: not cast, or no number", fontsize="small", color="0.4")
    FigureCanvasAgg(figure).print_figure(path, format="png", dpi=120)


def _cells(
    records: list[TensorStatistics],
    tensor: str,
    layers: Sequence[str],
    steps: Sequence[int],
    metric: str,
) -> list[list[float]]:
    """The numbers of a map, NaN where there is none: [layers][steps]."""
    style = _METRICS[metric]
    cells = [[math.nan] * len(steps) for _ in layers]
    row_of = {layer: i for i, layer in enumerate(layers)}
    column_of = {step: i for i, step in enumerate(steps)}
    for record in records:
        value = getattr(record, metric)
        if record.tensor == tensor and value is not None and (value > 0 or not style.logarithmic):
            cells[row_of[record.layer]][column_of[record.step]] = value * style.factor
    return cells


def _limits(values: list[float], style: _Metric) -> tuple[float, float]:
    """What the ends of the colours stand for."""
    numbers = [v for v in values if not math.isnan(v)] or [1.0]
    low, high = min(numbers), max(numbers)
    if style.factor != 1.0:  # shares start at nothing
        low = 0.0
    if high <= low:
        high = low * 2 if style.logarithmic else low + 1
    return low, high


def _ticks(count: int, most: int) -> list[int]:
    """At most so many of the first `count` numbers, evenly spaced."""
    return list(range(0, count, -(-count // most)))
