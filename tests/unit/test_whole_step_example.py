"""The example of a whole step in one graph: short, and true to its word."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "whole_step.py"


def test_the_example_runs(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out == "1 graph, 4 nodes forward, 4 backward\nthe loss fell\n"


def test_the_example_is_short():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 60
