"""The headline table for a terminal of any width, and its rows as plain records for `--json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..comparison import Comparison, Pairs, compare
from ..records import FINISHED, Run
from ..variants import group_by_variant
from ..visible import visible
from . import text

if TYPE_CHECKING:
    from rich.table import Table

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

    comparisons = text.ordered(compare(group_by_variant(runs), primary))
    cells = {column: [visible(column.text(c)) for c in comparisons] for column in text.COLUMNS}
    columns = fitting(cells, width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column.name, justify="left" if column.words else "right",
                         no_wrap=not column.words, overflow="fold")  # fmt: skip
    best = min((c.variant.rank for c in comparisons if c.variant.n), default=None)
    for comparison, *row in zip(comparisons, *(cells[column] for column in columns), strict=True):
        style = "bold" if comparison.variant.n and comparison.variant.rank == best else None
        style = style if comparison.variant.statuses[FINISHED] else "dim"
        table.add_row(*map(escape, row), style="red" if comparison.variant.diverged else style)
    return table


def fitting(cells: Mapping[text.Column, Sequence[str]], width: int) -> list[text.Column]:
    """Return the columns that fit. Columns that no row uses are left out."""
    for last in sorted({column.drop for column in cells} | {0}):
        used = [c for c, texts in cells.items() if any(texts) and not 0 < c.drop <= last]
        if sum(_width(column, cells[column]) + 1 for column in used) <= width:
            break
    return used


def _width(column: text.Column, cells: Sequence[str]) -> int:
    """Return the width that a column needs. A column of words needs at most NARROWEST."""
    widest = max(map(len, (column.name, *cells)))
    return min(widest, NARROWEST) if column.words else widest


def rows(runs: Sequence[Run], primary: Pairs = ()) -> dict[str, Any]:
    """Return the rows of the headline table with all digits, and facts that it does not show."""
    found = text.ordered(compare(group_by_variant(runs), primary))
    return {"variants": [_row(comparison) for comparison in found]}


def _row(comparison: Comparison) -> dict[str, Any]:
    variant, gap = comparison.variant, comparison.difference
    return {column.key: column.value(comparison) for column in text.COLUMNS} | {
        "job": variant.job, "losses": {str(seed): x for seed, x in variant.losses.items()},
        "diverged": variant.diverged, "baseline": comparison.base.label,
        "high": gap.high if gap else None, "primary": comparison.primary, "p": comparison.p,
    }  # fmt: skip
