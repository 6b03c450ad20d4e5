"""Plain text tables for reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write rows under a head, in columns as wide as they need to be.

    Args:
        head: names of the columns.
        rows: as many texts as there are columns, each.

    Returns:
        Lines without trailing spaces, the second one a rule.

    Example:
        >>> print(table(("name", "loss"), [("fp8", "2.3")]))
        name  loss
        ----  ----
        fp8   2.3
    """
    lines = [tuple(head), *[tuple(row) for row in rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple(["-" * width for width in widths]))
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
