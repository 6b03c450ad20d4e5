"""Which device to run on, and what compiles for it."""

from __future__ import annotations

import torch

from fullgraph.errors import ConfigError, HardwareError


def find_device(name: str) -> torch.device:
    """The device of this name.

    Args:
        name: such as "cpu", "cuda" or "cuda:1".

    Raises:
        ConfigError: no kind of device has this name, or none that computes.
        HardwareError: this machine does not have it.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"--device: unknown device {name!r}", do=f"use one of {', '.join(present_devices())}"
        ) from error
    if device.type == "meta":
        raise ConfigError(
            "--device: meta computes nothing", do=f"use one of {', '.join(present_devices())}"
        )
    try:
        torch.zeros(1, device=device)
    except (
        RuntimeError,
        AssertionError,
        NotImplementedError,
    ) as error:  # torch has no one class for it
        raise HardwareError(
            f"--device: {name} is not there",
            why=str(error).splitlines()[0],
            do=f"use one of {', '.join(present_devices())}",
        ) from error
    return device


def present_devices() -> list[str]:
    """The devices of this machine that fullgraph knows."""
    return ["cpu", *[f"cuda:{index}" for index in range(torch.cuda.device_count())]]


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would use for a CPU, or None if it finds none."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return get_cpp_compiler()
    except InvalidCxxCompiler:
        return None
