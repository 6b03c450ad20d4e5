"""How commands speak: the console, JSON files, and errors as messages rather than tracebacks."""

from __future__ import annotations

import contextlib
import json
import os
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
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", do="choose another place"
        ) from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: not permitted", do="choose another place")
    return path


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write a result, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
