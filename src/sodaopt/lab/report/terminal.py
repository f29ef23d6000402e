"""The headline table for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..records import FINISHED, Run
from ..stats import rows
from . import text

if TYPE_CHECKING:
    from rich.table import Table

WORDS = ("variant", "status")


def comparison_table(runs: Sequence[Run]) -> Table:
    """A line for each variant, with the numbers of the page."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in text.COLUMNS:
        words = name in WORDS
        # words wrap where the line is too long, numbers never
        table.add_column(name, justify="left" if words else "right", no_wrap=not words,
                         overflow="fold")  # fmt: skip
    found = text.lines(rows(runs))
    least = min((line.row.mean for line in found if line.row.mean is not None), default=None)
    for line in found:
        style = "bold" if line.row.mean == least is not None else None
        style = style if line.row.statuses[FINISHED] else "dim"
        table.add_row(*map(escape, line.cells()), style="red" if line.row.diverged else style)
    return table
