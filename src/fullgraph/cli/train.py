"""`fullgraph train`: a small GPT on real text, in one recipe or in two side by side.

Both models start from the same weights and see the same batches; each step trains the one, then the other, so that
losses and times are taken under the same conditions, and an interrupted run is complete for the steps that it did.
Saved and resumed (`checkpoint.py`), it has the losses of a run that was not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import platform
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

from fullgraph._version import __version__
from fullgraph.cli import checkpoint
from fullgraph.cli.curves import Log, draw, smoothed
from fullgraph.cli.device import cpp_compiler, find_device
from fullgraph.cli.gpt import GPT, SIZES, GPTSize
from fullgraph.cli.output import console, writable
from fullgraph.cli.text import Batches, read_text
from fullgraph.customop.graphs import GraphRecorder, isolated
from fullgraph.errors import ConfigError
from fullgraph.explain import ROUTES
from fullgraph.nn import Linear, attach
from fullgraph.recipes import Recipe, get
from fullgraph.statistics import Statistics, collect_statistics, plot_statistics, read_statistics

BATCH_SIZE = 8
LINES_WITHOUT_TERMINAL = 12
"""Lines of progress in all where there is no terminal to draw a bar on."""


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Options of a run, as on the command line.

    Args:
        recipe, compare: names of recipes; `compare` None trains one model only.
        data: text to train on; None for Python's standard library.
        steps: optimizer steps of the whole training, over which the learning rate falls.
        device: where to train.
        out: directory for the log and the curves.
        seed: of weights and batches.
        save: file for checkpoints; None writes none.
        save_every: steps between two checkpoints; the last step is saved too.
        stop_after: the step to end after, for a while; None goes on to `steps`.
        resume: checkpoint to go on from; None begins anew.
        statistics_every: sample what the casts of the first model do in one step of so many; None does not.
        size: of the model.
    """

    recipe: str
    compare: str | None = None
    data: Path | None = None
    steps: int = 200
    device: str = "cpu"
    out: Path = Path("runs/train")
    seed: int = 0
    save: Path | None = None
    save_every: int = 50
    stop_after: int | None = None
    resume: Path | None = None
    statistics_every: int | None = None
    size: GPTSize = dataclasses.field(default_factory=GPTSize)

    @property
    def last_step(self) -> int:
        """The step that this run ends with."""
        return self.steps if self.stop_after is None else min(self.stop_after, self.steps)

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ConfigError: fewer than one step.
        """
        counts = {"steps": self.steps, "save-every": self.save_every, "stop-after": self.last_step}
        if self.statistics_every is not None:
            counts["statistics-every"] = self.statistics_every
        for name, count in counts.items():
            if count < 1:
                raise ConfigError(
                    f"train: at least one step is needed, got {count}", do=f"raise --{name}"
                )


class Trainee:
    """One model in training, and what was measured of it.

    Args:
        name, recipe: of its linear layers.
        options: of the run.
        device: where it lives.
        compiler: for `GraphRecorder`.
    """

    def __init__(
        self, name: str, recipe: Recipe, options: TrainOptions, device: torch.device, compiler: str
    ) -> None:
        torch.manual_seed(options.seed)
        self.name = name
        self.model = GPT(options.size, recipe).to(device)
        self.recorder = GraphRecorder(compiler)
        self.compiled = torch.compile(
            isolated(self.model), backend=self.recorder, fullgraph=True, dynamic=False
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=options.size.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, options.steps)
        )
        if recipe.scaling_rule_text:
            attach(self.optimizer, self.model)
        self.device_type = device.type
        self.statistics: Statistics | None = None
        self.sampled: set[bool] = (
            set()
        )  # whether there were steps of the one kind, and of the other
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, text: Tensor, target: Tensor) -> None:
        """Train on one batch."""
        start = time.perf_counter()
        self.sampled.add(self.statistics is not None and self.statistics.is_sampling)
        with torch.autocast(self.device_type, dtype=torch.bfloat16):
            loss = self.compiled(text, target)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        if self.statistics is not None:
            self.statistics.step()
        value = loss.item()  # waits for the device, so the time is that of the whole step
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(value)

    def state_dict(self) -> dict[str, Any]:
        """All that decides the next steps, but for batches and random numbers."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    def measurements(self, tokens: int) -> dict[str, Any]:
        """What the run shows of this model.

        Args:
            tokens: in one step.
        """
        later = self.seconds[1:]
        step_seconds = statistics.median(later) if later else None
        return {
            "loss": self.losses,
            "final_loss": smoothed(self.losses)[-1] if self.losses else None,
            "num_linears": sum(isinstance(m, Linear) for m in self.model.modules()),
            "forward_nodes": len(self.recorder.forward),
            "backward_nodes": len(self.recorder.backward),
            "graph_breaks": len(self.recorder.breaks),
            "recompiles": self._recompiles(),
            "gemms": self._routes(),
            "cold_seconds": self.seconds[0] if self.seconds else None,
            "step_seconds": step_seconds,
            "tokens_per_second": None if step_seconds is None else tokens / step_seconds,
        }

    def _recompiles(self) -> int:
        """Graphs beyond one for steps that are sampled and one for those that are not, and beyond graph breaks."""
        expected = max(1, len(self.sampled))
        return max(0, len(self.recorder.graphs) - len(self.recorder.breaks) - expected)

    def _routes(self) -> list[str]:
        """How the GEMMs in the compiled graphs run."""
        nodes = (*self.recorder.forward, *self.recorder.backward)
        return sorted({ROUTES[b] for node in nodes for b in node.plan.decisions.gemms.values()})


def learning_rate_factor(step: int, steps: int) -> float:
    """Up to 30 steps to warm up, then a cosine down to a tenth of the peak."""
    warmup = max(1, min(30, steps // 2))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


def size_of(name: str) -> GPTSize:
    """The size of this name.

    Args:
        name: a key of `SIZES`.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in SIZES:
        raise ConfigError(
            f"--size must be one of {', '.join(SIZES)}, got {name!r}",
            do="choose one of these",
        )
    return SIZES[name]


def train(options: TrainOptions) -> dict[str, Any]:
    """Train, showing progress; write the log and the curves.

    Args:
        options: of the run.

    Returns:
        The result as plain data; its "interrupted" tells whether Ctrl-C ended it early.

    Raises:
        ConfigError: an option that cannot be meant.
        HardwareError: a device that is not there.
    """
    options.check()
    names = [name for name in (options.recipe, options.compare) if name is not None]
    recipes = [get(name) for name in names]
    device = find_device(options.device)
    text = read_text(options.data, options.size.context)
    log_path, curve_path = (writable(options.out / name) for name in ("loss.jsonl", "loss.png"))
    if options.save is not None:
        writable(options.save)
    identity = _identity(options, text)
    resumed = None if options.resume is None else checkpoint.load(options.resume, identity)
    compiler = _choose_compiler(device)

    console.print(f"{len(text):,} bytes of text, {device}, torch {torch.__version__}")
    trainees = [
        Trainee(name, recipe, options, device, compiler)
        for name, recipe in zip(names, recipes, strict=True)
    ]
    batches = Batches(text, BATCH_SIZE, options.size.context, device, options.seed)
    training = _Training(options, identity, trainees, batches)
    if resumed is not None:
        training.load(resumed)
    first_step = len(training.records) + 1
    with (
        Log(log_path) as log,
        _one_thread(),
        _statistics(options, trainees[0], first_step) as statistics,
    ):
        interrupted = _run(training, log)
    done = log.num_records
    for trainee in trainees:  # an interruption may come before a step is logged
        del trainee.losses[done:], trainee.seconds[done + 1 - first_step :]
    draw(curve_path, {trainee.name: trainee.losses for trainee in trainees})
    return {
        "recipe": options.recipe,
        "compare": options.compare,
        "device": str(device),
        "torch": torch.__version__,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "fullgraph": __version__,
        },
        "compiler": compiler,
        "seed": options.seed,
        "text_bytes": len(text),
        "num_parameters": sum(p.numel() for p in trainees[0].model.parameters()),
        "requested_steps": options.steps,
        "steps": done,
        "first_step": first_step,
        "interrupted": interrupted,
        "checkpoint": None if options.save is None else str(options.save),
        "statistics": None if statistics is None else str(options.out / "statistics.jsonl"),
        "log": str(log_path),
        "curve": str(curve_path),
        **_measurements(trainees, BATCH_SIZE * options.size.context),
    }


def _measurements(trainees: list[Trainee], tokens: int) -> dict[str, Any]:
    """Of the first model under plain keys, of the second under the same ones after "compare_"."""
    first, *others = [trainee.measurements(tokens) for trainee in trainees]
    if not others:
        return {**first, "compare_loss": []}
    second = others[0]
    difference = None
    if first["final_loss"] is not None:
        difference = first["final_loss"] / second["final_loss"] - 1
    compared = {f"compare_{key}": value for key, value in second.items()}
    return {**first, **compared, "relative_difference": difference}


def _choose_compiler(device: torch.device) -> str:
    if device.type == "cpu" and cpp_compiler() is None:
        console.print(
            "[yellow]There is no C++ compiler, so the graphs run as they are (aot_eager) instead of "
            "through Inductor: the same nodes, slower. `fullgraph doctor` says more.[/yellow]"
        )
        return "aot_eager"
    return "inductor"


@contextlib.contextmanager
def _statistics(
    options: TrainOptions, trainee: Trainee, first_step: int
) -> Iterator[Statistics | None]:
    """Collect statistics of a model while it trains, if that was asked for; then draw them, if there are any."""
    if options.statistics_every is None:
        yield None
        return
    path, picture = (writable(options.out / f"statistics.{ending}") for ending in ("jsonl", "png"))
    with collect_statistics(
        trainee.model, every=options.statistics_every, path=path, first_step=first_step
    ) as trainee.statistics:
        yield trainee.statistics
    records = read_statistics(path)
    if records:
        plot_statistics(records, picture)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one CPU thread: the model is small, and threads that share cores with others wait for each other.

    On two cores two threads take 0.6 of the time if the cores are idle, and five times as long if they are busy.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclasses.dataclass
class _Training:
    """A run in progress: what a checkpoint is made of.

    Args:
        options: of the run.
        identity: what a run must share with its checkpoint.
        trainees: the models.
        batches: what they see.
        records: the lines of the log so far.
    """

    options: TrainOptions
    identity: dict[str, Any]
    trainees: list[Trainee]
    batches: Batches
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def save_if_due(self) -> None:
        """Write a checkpoint after a step, if there is to be one."""
        step, options = len(self.records), self.options
        if options.save is None or (step % options.save_every and step != options.last_step):
            return
        checkpoint.save(
            options.save,
            {
                "options": self.identity,
                "records": self.records,
                "trainees": [trainee.state_dict() for trainee in self.trainees],
                "batches": self.batches.generator.get_state(),
                "random": checkpoint.random_state(self.batches.device),
            },
        )

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was taken.

        Raises:
            ConfigError: nothing is left to do.
        """
        self.records = state["records"]
        if len(self.records) >= self.options.last_step:
            raise ConfigError(
                f"train: the checkpoint has {len(self.records)} steps of {self.options.last_step}",
                why="nothing is left to train",
                do="leave --resume out, or raise --stop-after",
            )
        for prefix, trainee, saved in zip(
            ("", "compare_"), self.trainees, state["trainees"], strict=False
        ):
            trainee.load_state_dict(saved)
            trainee.losses = [record[f"{prefix}loss"] for record in self.records]
        self.batches.generator.set_state(state["batches"])
        checkpoint.set_random_state(state["random"], self.batches.device)


def _identity(options: TrainOptions, text: Tensor) -> dict[str, Any]:
    """What must be the same for a run to go on from a checkpoint."""
    return {
        "recipe": options.recipe,
        "compare": options.compare,
        "steps": options.steps,
        "seed": options.seed,
        "text": checkpoint.text_mark(text),
        "size": dataclasses.asdict(options.size),
    }


def _run(training: _Training, log: Log) -> bool:
    """Train all models step by step; whether Ctrl-C ended it early."""
    try:
        for record in training.records:
            log.write(record)
        first, last = len(training.records) + 1, training.options.last_step
        with _Display(first, last, training.batches.tokens) as display:
            for step in range(first, last + 1):
                batch = training.batches.draw()
                for trainee in training.trainees:
                    display.start(step, trainee)
                    trainee.step(*batch)
                record: dict[str, Any] = {"step": step}
                for prefix, trainee in zip(("", "compare_"), training.trainees, strict=False):
                    record[f"{prefix}loss"] = trainee.losses[-1]
                    record[f"{prefix}seconds"] = trainee.seconds[-1]
                training.records.append(record)
                log.write(record)
                training.save_if_due()
                display.finish(step, training.trainees)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what follows completes what was begun
        return True
    return False


class _Display:
    """Progress: a bar on a terminal, some lines elsewhere."""

    def __init__(self, first: int, last: int, tokens: int) -> None:
        self.first, self.last, self.tokens = first, last, tokens
        self.every = max(1, (last + 1 - first) // LINES_WITHOUT_TERMINAL)
        self.progress = Progress(
            TextColumn("[progress.description]{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("starting", total=last, completed=first - 1, facts="")

    def start(self, step: int, trainee: Trainee) -> None:
        """A model is about to be trained for a step."""
        if step == self.first:
            self._describe(f"compiling {trainee.name}")

    def finish(self, step: int, trainees: list[Trainee]) -> None:
        """A step is done."""
        facts = ", ".join(
            f"{t.name} loss {t.losses[-1]:.3f}, {self.tokens / t.seconds[-1]:,.0f} tokens/s"
            for t in trainees
        )
        self.progress.update(self.task, completed=step, facts=facts, description="training")
        ends = (self.first, self.last)
        if not console.is_terminal and (step % self.every == 0 or step in ends):
            console.print(f"step {step}/{self.last}: {facts}", highlight=False, soft_wrap=True)

    def _describe(self, what: str) -> None:
        self.progress.update(self.task, description=what)
        if not console.is_terminal:
            console.print(what, highlight=False)

    def __enter__(self) -> _Display:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()


def summary(result: dict[str, Any]) -> Table:
    """The result of `train` as a table."""
    title = f"{result['steps']} steps on {result['device']}"
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("")
    prefixes = [""] if result["compare"] is None else ["", "compare_"]
    for name in filter(None, (result["recipe"], result["compare"])):
        table.add_column(name, justify="right")
    rows: dict[str, Callable[[str], str]] = {
        "loss at the start": lambda p: _number(next(iter(result[f"{p}loss"]), None)),
        "loss at the end (mean of 20)": lambda p: _number(result[f"{p}final_loss"]),
        "linear layers": lambda p: str(result[f"{p}num_linears"]),
        "forward / backward nodes": lambda p: (
            f"{result[f'{p}forward_nodes']} / {result[f'{p}backward_nodes']}"
        ),
        "graph breaks / recompiles": lambda p: (
            f"{result[f'{p}graph_breaks']} / {result[f'{p}recompiles']}"
        ),
        "GEMMs": lambda p: ", ".join(result[f"{p}gemms"]),
        "first step, compiling (s)": lambda p: _number(result[f"{p}cold_seconds"], 1),
        "later steps, median (ms)": lambda p: _number(result[f"{p}step_seconds"], 0, 1000),
        "tokens per second": lambda p: _number(result[f"{p}tokens_per_second"], 0),
    }
    for label, text in rows.items():
        table.add_row(label, *[text(prefix) for prefix in prefixes])
    notes = []
    if result.get("relative_difference") is not None:
        notes.append(
            f"Final loss: {result['recipe']} {result['relative_difference']:+.2%} against {result['compare']}."
        )
    if "emulated" in result["gemms"]:
        notes.append(
            "Emulated: the device has no units for this, so the same operands are multiplied in high "
            "precision. The loss is the point here, not the speed."
        )
    table.caption = "\n".join(notes)
    return table


def _number(value: float | None, digits: int = 3, factor: float = 1) -> str:
    return "-" if value is None else f"{value * factor:,.{digits}f}"
