"""Format the headline table for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..records import FINISHED, Run
from ..stats import group_by_variant
from ..visible import visible
from . import text

if TYPE_CHECKING:
    from rich.table import Table

WORDS = ("variant", "status")


def comparison_table(runs: Sequence[Run]) -> Table:
    """Return a table with a row for each variant, and the same numbers as the page."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in text.COLUMNS:
        words = name in WORDS
        # Only columns of words may wrap.
        table.add_column(name, justify="left" if words else "right", no_wrap=not words,
                         overflow="fold")  # fmt: skip
    found = text.comparisons(group_by_variant(runs))
    least = min(
        (line.variant.mean for line in found if line.variant.mean is not None), default=None
    )
    for line in found:
        style = "bold" if line.variant.mean == least is not None else None
        style = style if line.variant.statuses[FINISHED] else "dim"
        cells = [escape(visible(cell)) for cell in line.cells()]
        table.add_row(*cells, style="red" if line.variant.diverged else style)
    return table
