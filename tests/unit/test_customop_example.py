"""The example of a user's own op: short, and true to its word."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_op.py"


def test_the_example_runs(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out == "1 node forward, 1 backward; compiled equals eager\n"


def test_the_example_is_short():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 60
