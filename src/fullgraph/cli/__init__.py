"""The command line: `fullgraph train | explain | doctor`.

`app.py` has the commands and their options, one module each does the work: `train.py` (with `gpt.py`, `text.py` and
`curves.py`), `explain.py`, `doctor.py`. Needs the extra `cli`.
"""

from __future__ import annotations

import importlib.util
import signal
import sys

NEEDED = ("typer", "rich", "matplotlib")
"""What the extra `cli` brings."""


def main() -> None:
    """Run the command line; exits with 2 if the packages that it needs are not there."""
    # Shells start background jobs with Ctrl-C's signal ignored, and Python then leaves it so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"fullgraph: the command line needs {', '.join(missing)}, not installed here.\n"
            "Why: the library itself works without them, so they are an extra.\n"
            'Do: pip install "fullgraph[cli]"\n'
        )
        sys.exit(2)
    from fullgraph.cli.app import app

    app()
