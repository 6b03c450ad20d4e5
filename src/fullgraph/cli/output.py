"""How commands speak: the console, JSON files, and errors as messages rather than tracebacks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from fullgraph.errors import ConfigError, FullgraphError

console = Console()
error_console = Console(stderr=True)

REFUSED = 2
"""Exit status of a command that cannot start with the options it got."""


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Show what fullgraph raises as a message and exit with `REFUSED`."""
    try:
        yield
    except FullgraphError as error:
        error_console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(REFUSED) from error


def writable(path: Path) -> Path:
    """A path whose directory exists from now on, so that a long run does not end in vain.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("ab"):  # permissions alone do not tell: the place may take no files at all
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", do="choose another place"
        ) from error
    return path


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write a result, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
