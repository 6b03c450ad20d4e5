"""Checkpoints of `fullgraph train`: all that decides the steps to come, so that a resumed run repeats them exactly.

That is, for each model its parameters, the scales and amax histories of delayed scaling (they are in its state_dict),
its optimizer and its schedule; then the place in the data, and the random number generators, which stochastic rounding
draws from. A checkpoint holds tensors and plain values only: `torch.load` reads it with `weights_only=True`.
"""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullgraph.errors import ConfigError

KIND = "fullgraph train, 1"
"""Marks a file as ours; the number changes with what is in it."""


def save(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Write a checkpoint; whatever stops this, the file is complete, the old one or the new one.

    Args:
        path: the file, replaced.
        checkpoint: tensors and plain values by name.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    torch.save({"kind": KIND, **checkpoint}, unfinished)
    os.replace(unfinished, path)


def load(path: Path, meant: Mapping[str, Any]) -> dict[str, Any]:
    """Read a checkpoint, if it is one of the run that is meant.

    Args:
        path: a file of `save`.
        meant: the options of the run that is to go on, as its checkpoint has them under "options".

    Returns:
        What was saved, on the CPU.

    Raises:
        ConfigError: no such file, another kind of file, or the checkpoint of another run.
    """
    try:
        with path.open("rb") as stream:
            if not zipfile.is_zipfile(stream):  # torch.load fails in many ways on what is none
                raise _no_checkpoint(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(
            f"train: cannot read the checkpoint {path}: {error.strerror}",
            do="give --resume a file that --save wrote",
        ) from error
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise _no_checkpoint(path) from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise _no_checkpoint(path)
    for name, value in meant.items():
        if found["options"][name] != value:
            raise ConfigError(
                f"train: the checkpoint {path} has {name} {found['options'][name]}, this run {value}",
                why="the steps to come would not be those of the run that was interrupted",
                do=f"resume with the {name} that it began with",
            )
    return found


def _no_checkpoint(path: Path) -> ConfigError:
    return ConfigError(
        f"train: {path} is no checkpoint of `fullgraph train`, or one of another version",
        do="give --resume a file that --save wrote",
    )


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of the default generators of the CPU and of a device."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Put the generators into a state that `random_state` returned."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def text_mark(text: Tensor) -> str:
    """What tells one text from another: its length and a checksum.

    Args:
        text: uint8 [N].
    """
    return f"{len(text)} bytes, {zlib.crc32(text.numpy().data):08x}"
