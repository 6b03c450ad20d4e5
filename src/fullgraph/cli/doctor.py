"""`fullgraph doctor`: what this machine can do, and what is missing."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import re
import warnings
from typing import Any

import torch
from rich.table import Table

from fullgraph import gemm, kernels
from fullgraph._version import __version__
from fullgraph.cli.device import cpp_compiler, present_devices
from fullgraph.customop.tangent import has_tangent_shim
from fullgraph.errors import EmulationWarning
from fullgraph.explain import ROUTES
from fullgraph.formats import COLUMNWISE, ROWWISE, Orientation, Scaling
from fullgraph.recipes import BY_NAME, LinearNumerics
from fullgraph.tensor import Quantizer

OLDEST_TORCH, TOO_NEW_TORCH = (2, 11), (2, 16)
COPIES = {
    "fprop": (ROWWISE, ROWWISE),
    "dgrad": (ROWWISE, COLUMNWISE),
    "wgrad": (COLUMNWISE, COLUMNWISE),
}
"""The copies of its two operands that each GEMM reads."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that is not as it should be.

    Args:
        what: what was found, and what follows from it.
        do: the remedy.
        blocks: whether compiled training does not work here at all.
    """

    what: str
    do: str
    blocks: bool


def examine() -> dict[str, Any]:
    """Look at versions, devices and compilers.

    Returns:
        Plain data: "versions", "devices", "compiler", "tangent_shim", "problems".
    """
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "fullgraph": __version__,
    }
    devices = [_device(name) for name in present_devices()]
    compiler = cpp_compiler()
    problems = _problems(versions, compiler, has_gpu=len(devices) > 1)
    return {
        "versions": versions,
        "devices": devices,
        "compiler": compiler,
        "tangent_shim": has_tangent_shim(),
        "problems": [dataclasses.asdict(problem) for problem in problems],
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(name: str) -> dict[str, Any]:
    device = torch.device(name)
    is_gpu = device.type == "cuda"
    capability = kernels.compute_capability(device)
    return {
        "device": name,
        "name": torch.cuda.get_device_name(device) if is_gpu else platform.processor() or "CPU",
        "capability": list(capability) if is_gpu else None,
        "casts": "Triton" if kernels.available(device) else "reference",
        "recipes": {
            recipe: routes(made.linear_numerics(), device) for recipe, made in BY_NAME.items()
        },
    }


def routes(numerics: LinearNumerics, device: torch.device) -> dict[str, str]:
    """How the GEMMs of a linear layer run on a device: fprop, dgrad, wgrad -> one of `ROUTES`."""
    operands = {
        "fprop": (numerics.low_precision_fprop, numerics.input, numerics.weight),
        "dgrad": (numerics.low_precision_dgrad, numerics.grad_output, numerics.weight),
        "wgrad": (numerics.low_precision_wgrad, numerics.grad_output, numerics.input),
    }
    found = {}
    for name, (is_low_precision, a, b) in operands.items():
        backend = None
        if is_low_precision:
            copies = COPIES[name]
            kinds = [_kind(q, copy) for q, copy in zip((a, b), copies, strict=True)]
            with warnings.catch_warnings():  # of emulation: that is what the table says
                warnings.simplefilter("ignore", EmulationWarning)
                backend = gemm.select(device, *kinds)
        found[name] = ROUTES[backend]
    return found


def _kind(quantizer: Quantizer | None, copy: Orientation) -> gemm.Kind:
    made_by = None if quantizer is None else quantizer.for_copy(copy)
    assert made_by is not None
    is_custom = made_by.scaling is Scaling.CUSTOM
    return gemm.Kind(None if is_custom else made_by.format, made_by.scaling)


def _problems(
    versions: dict[str, str | None], compiler: str | None, *, has_gpu: bool
) -> list[Problem]:
    problems = []
    found = tuple(map(int, re.findall(r"\d+", versions["torch"] or "")[:2]))
    if not OLDEST_TORCH <= found < TOO_NEW_TORCH:
        problems.append(
            Problem(
                f"torch {versions['torch']} is not one that fullgraph is tested with",
                "install torch 2.11 to 2.15",
                blocks=found < OLDEST_TORCH,
            )
        )
    if compiler is None:
        problems.append(
            Problem(
                "there is no C++ compiler, so torch.compile with its default backend fails on CPU",
                'install g++ (Debian, Ubuntu: apt install g++), or compile with backend="aot_eager"',
                blocks=not has_gpu,
            )
        )
    if has_gpu and versions["triton"] is None:
        problems.append(
            Problem(
                "there is a GPU but no Triton, so torch.compile fails on it and casts are slow",
                "install the CUDA build of torch, which brings the Triton that it needs",
                blocks=True,
            )
        )
    if not has_tangent_shim():
        problems.append(
            Problem(
                "the tangent shim is off, so a differentiable quantized output cannot leave a graph",
                "call fullgraph.customop.install_tangent_shim(), or return customop.to_container(output)",
                blocks=False,
            )
        )
    return problems


def tables(findings: dict[str, Any]) -> list[Table]:
    """What `examine` found, for the console: this machine, then the recipes on each device."""
    machine = Table(show_header=False)
    for name, version in findings["versions"].items():
        machine.add_row(name, version or "not installed")
    machine.add_row("C++ compiler", findings["compiler"] or "none")
    machine.add_row("tangent shim", "installed" if findings["tangent_shim"] else "removed")
    shown = [machine]
    for device in findings["devices"]:
        capability = device["capability"]
        text = device["name"] + (
            f", compute capability {capability[0]}.{capability[1]}" if capability else ""
        )
        machine.add_row(device["device"], f"{text}; casts: {device['casts']}")
        recipes = Table("recipe", *COPIES, title=device["device"], title_justify="left")
        for recipe, found in device["recipes"].items():
            recipes.add_row(recipe, *[found[name] for name in COPIES])
        shown.append(recipes)
    return shown
