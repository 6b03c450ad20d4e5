"""Run one benchmark: `python -m benchmarks NAME ...`; its own arguments follow its name."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import benchmarks


def names() -> list[str]:
    """The benchmarks: the modules of this folder, but for what they share."""
    found = {module.name for module in pkgutil.iter_modules(benchmarks.__path__)}
    return sorted(found - {"__main__", "timing"})


def main(arguments: list[str]) -> None:
    """Hand the arguments behind a name to the benchmark of that name."""
    if not arguments or arguments[0] not in names():
        sys.exit(f"usage: python -m benchmarks {{{','.join(names())}}} ...")
    importlib.import_module(f"benchmarks.{arguments[0]}").main(arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
