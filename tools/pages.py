"""Write tables into documentation pages."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def filled(page: Path, name: str, table: str) -> str:
    """Return the page's text with the table between the comments NAME:begin and NAME:end."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, rest = page.read_text(encoding="utf-8").split(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def markdown(lines: list[list[str]]) -> str:
    """Format a markdown table. The first line is its header."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
