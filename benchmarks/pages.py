"""Where a benchmark ran, and tables of results in pages of the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"


def where(device: str) -> dict[str, Any]:
    """The machine of a result."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def filled(page: Path, name: str, table: str) -> str:
    """The page with the table between its marks."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, rest = page.read_text(encoding="utf-8").split(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def markdown(lines: list[list[str]]) -> str:
    """A table. The first line is its head."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
