"""Tells mkdocstrings of the parts that our docstrings have beyond Google's."""

import re

import griffe


class HouseStyle(griffe.Extension):
    """Reads `Example:` as examples, `Numerics:` and `Source:` as paragraphs with a bold word."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Rewrite the docstring before it is parsed."""
        if obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        part = re.compile(r"^(Numerics|Source): (.+(?:\n +.+)*)$", re.MULTILINE)
        obj.docstring.value = part.sub(self._paragraph, text)

    @staticmethod
    def _paragraph(part: re.Match[str]) -> str:
        return f"\n**{part[1]}:** {' '.join(part[2].split())}\n"
