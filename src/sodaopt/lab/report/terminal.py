"""Format the headline table for a terminal of any width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..comparison import Pairs, comparisons
from ..records import FINISHED, Run
from ..variants import group_by_variant
from ..visible import visible
from . import text

if TYPE_CHECKING:
    from rich.table import Table

WORDS = ("variant", "status")
"""Columns of words, which may wrap. Columns of numbers never do."""
FIRST_TO_GO = ("tok/s", "state", "ms/step", "status", "n", "95 % interval", "difference")
"""Columns that a narrow terminal does not show. The first ones are left out first."""
NARROWEST = 14
"""Least width of a column of words."""


def comparison_table(runs: Sequence[Run], width: int = 100, primary: Pairs = ()) -> Table:
    """Return a table with a row for each variant, and the same numbers as the page.

    width: the characters of a line
    primary: the comparisons that were named before the runs
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    lines = text.ordered(comparisons(group_by_variant(runs), primary))
    rows = [[visible(cell) for cell in text.Row(line).cells()] for line in lines]
    columns = fitting(rows, width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for j in columns:
        words = text.COLUMNS[j] in WORDS
        table.add_column(text.COLUMNS[j], justify="left" if words else "right", no_wrap=not words,
                         overflow="fold")  # fmt: skip
    best = min((line.variant.rank for line in lines if line.variant.n), default=None)
    for line, row in zip(lines, rows, strict=True):
        style = "bold" if line.variant.n and line.variant.rank == best else None
        style = style if line.variant.statuses[FINISHED] else "dim"
        cells = [escape(row[j]) for j in columns]
        table.add_row(*cells, style="red" if line.variant.diverged else style)
    return table


def fitting(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the indices of the columns that fit. Columns that no row uses are left out."""
    used = [j for j in range(len(text.COLUMNS)) if any(row[j] for row in rows)]
    for name in (None, *FIRST_TO_GO):
        used = [j for j in used if text.COLUMNS[j] != name]
        if sum(_width(rows, j) + 1 for j in used) <= width:
            break
    return used


def _width(rows: Sequence[Sequence[str]], j: int) -> int:
    """Return the width that a column needs. A column of words needs at most NARROWEST."""
    name = text.COLUMNS[j]
    widest = max(len(name), *(len(row[j]) for row in rows))
    return min(widest, NARROWEST) if name in WORDS else widest
