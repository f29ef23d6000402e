"""Show the arguments of a docstring as a list on the site, and examples as code.

Docstrings here describe an argument on a line of its own, `lr: the learning rate.`, with no heading
above it. Markdown would join such lines into one paragraph, and take >>> for a quotation.
mkdocs.yml names this file.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"^([a-z]\w*(?:, [a-z]\w*)*): ")


def listed(paragraph: str) -> str:
    """Return a paragraph that begins with an argument as a list, and an example as code."""
    if paragraph.startswith(">>>"):
        return f"```pycon\n{paragraph}\n```"
    if not ARGUMENT.match(paragraph):
        return paragraph
    lines = [
        f"- `{found[1]}`: {line[found.end() :]}" if (found := ARGUMENT.match(line)) else f"  {line}"
        for line in paragraph.splitlines()
    ]
    return "\n".join(lines)


class ArgumentLists(griffe.Extension):
    """Rewrite the docstring of every object that griffe loads, except its first paragraph."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            first, *rest = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join([first, *map(listed, rest)])
