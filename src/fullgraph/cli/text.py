"""Real text to train on, and the batches drawn from it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from fullgraph.errors import ConfigError

LONGEST = 64 * 2**20
"""Bytes that are read at most."""


def read_text(path: Path | None, context: int) -> Tensor:
    """Read text as bytes.

    Args:
        path: a file; or a directory, whose text files are joined in the order of their names; None for the source of
            Python's standard library.
        context: bytes of a training sequence; the text must be longer.

    Returns:
        uint8 [N], N at most `LONGEST`.

    Raises:
        ConfigError: nothing there, nothing readable, or too little of it.
    """
    if path is None:
        path = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(path.glob("*.py"))
    elif path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if _is_visible_file(file, path)]
    elif path.exists():
        files = [path]
    else:
        raise ConfigError(
            f"train: no such file or directory: {path}",
            why="the text to train on is read from it",
            do="give --data an existing path, or leave it out to train on Python's standard library",
        )
    text = bytearray()
    for file in files:
        text += _bytes_of(file, is_alone=file == path)
        if len(text) >= LONGEST:
            break
    if len(text) <= context:
        raise ConfigError(
            f"train: the text must be longer than one sequence of {context} bytes, "
            f"got {len(text)} bytes from {path}",
            why="each training example is a sequence and the byte after it",
            do="give --data a longer file, or a directory with text files in it",
        )
    return torch.frombuffer(text[:LONGEST], dtype=torch.uint8)


def _is_visible_file(file: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
    return file.is_file() and not hidden


def _bytes_of(file: Path, *, is_alone: bool) -> bytes:
    """The content; of many files those that are not text count as empty."""
    try:
        with file.open("rb") as stream:
            content = stream.read(LONGEST)
    except OSError as error:
        raise ConfigError(
            f"train: cannot read {file}: {error.strerror}",
            why="the text to train on is read from it",
            do="give --data a path that this user may read",
        ) from error
    return content if is_alone or _is_text(content) else b""


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


class Batches:
    """Sequences drawn at random, the same ones for the same seed.

    Args:
        text: uint8 [N].
        batch_size: sequences in a batch.
        context: bytes in a sequence.
        device: where batches go.
        seed: of the draw.
    """

    def __init__(
        self, text: Tensor, batch_size: int, context: int, device: torch.device, seed: int
    ) -> None:
        self.text, self.device = text, device
        self.batch_size, self.context = batch_size, context
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def tokens(self) -> int:
        """Bytes to predict in one batch."""
        return self.batch_size * self.context

    def draw(self) -> tuple[Tensor, Tensor]:
        """A batch of sequences, and the same one byte later: int64 [batch, context] each."""
        last = len(self.text) - self.context
        starts = torch.randint(last, (self.batch_size, 1), generator=self.generator)
        places = starts + torch.arange(self.context + 1)
        sequences = self.text[places].long().to(self.device)
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
