"""A run of `fullgraph train` that takes a second."""

import signal

from fullgraph.cli import train
from fullgraph.cli.gpt import GPTSize
from fullgraph.cli.train import TrainOptions

TINY = GPTSize(num_layers=1, num_heads=2, features=16, context=16)


def tiny(monkeypatch, tmp_path):
    """The body of a fixture: options of a tiny model, no C++ compiler."""
    monkeypatch.setattr(train, "cpp_compiler", lambda: None)
    yield TrainOptions("fp8-current", compare="bf16", steps=8, out=tmp_path / "out", size=TINY)
    signal.signal(signal.SIGINT, signal.default_int_handler)
