"""Format the numbers of the page and the terminal table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from sodaopt.memory import size

from ..comparison import Comparison
from ..stats import Difference

MANY = 8
"""Most rows of a table that is in the order of the runs. Longer tables are ordered by loss."""


@dataclass(frozen=True)
class Column:
    """A column of the headline table on the page and in a terminal, and its values for `--json`."""

    name: str
    key: str
    """Name of the value for `--json`."""
    drop: int
    """Place in the order in which a table that is too wide leaves out columns. 0: it stays."""
    value: Callable[[Comparison], Any]
    """The number by which readers of the page sort a long table. It sorts words by their text."""
    text: Callable[[Comparison], str]
    """The text of a cell. A terminal leaves out a column if all its texts are empty."""
    words: bool = False
    """Whether the cells are words, which a terminal may wrap. It never wraps numbers."""


def measured(name: str, key: str, drop: int, text: Callable[[Any], str]) -> Column:
    """Return the column of a property of `Variant`.

    key: name of the property, and of its value for `--json`
    text: function that formats the property, which may be None
    """
    get = attrgetter(f"variant.{key}")
    return Column(name, key, drop, get, lambda c: text(get(c)))


def loss(comparison: Comparison) -> str:
    """Return the loss and its spread, or the loss so far in parentheses if no run has finished."""
    variant = comparison.variant
    if variant.mean is None:
        return "" if variant.so_far is None else f"({variant.so_far:.4f})"
    return f"{variant.mean:.4f}" + ("" if variant.spread is None else f" ± {variant.spread:.4f}")


def count_seeds(comparison: Comparison) -> str:
    """Return the number of seeds: '3', or '2/3' if one of three runs has no final loss."""
    known, runs = comparison.variant.n, len(comparison.variant.runs)
    return str(runs) if known == runs else f"{known}/{runs}"


def gap(comparison: Comparison) -> str:
    """Return the difference with its stars."""
    if comparison.variant is comparison.base:
        return "baseline"
    difference = comparison.difference
    return "" if difference is None else f"{difference.mean:+.4f} {comparison.stars}".rstrip()


def interval(comparison: Comparison) -> str:
    return "" if comparison.difference is None else span(comparison.difference) or "one seed"


def ordered(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the rows in the order of the runs. If there are many, the best of a scale is first."""
    if len(comparisons) <= MANY:
        return list(comparisons)
    scales = list(dict.fromkeys(c.scale for c in comparisons))
    return sorted(comparisons, key=lambda c: (scales.index(c.scale), c.variant.rank))


def span(gap: Difference) -> str:
    """Return the interval of a difference, or an empty string if it has none."""
    return "" if gap.low is None else f"{gap.low:+.4f} to {gap.high:+.4f}"


def probability(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return _three(1000 * seconds) if seconds < 0.9995 else f"{1000 * seconds:,.0f}"


def count(x: float | None) -> str:
    """Format a count: 4700000 -> '4.70M'."""
    if x is None:
        return ""
    power = sum(abs(x) >= limit for limit in (999.5, 999.5e3, 999.5e6, 999.5e9))
    return f"{_three(x / 1000**power)}{('', 'k', 'M', 'B', 'T')[power]}"


def _three(x: float) -> str:
    """Format three digits with trailing zeros, so that the numbers of a column align."""
    return f"{x:#.3g}".rstrip(".")


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 48 * 3600:
        return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:,.0f} days"


def seeds(n: int) -> str:
    return "one seed" if n == 1 else f"{n} seeds"


COLUMNS = (
    Column("variant", "variant", 0, lambda c: c.variant.label, lambda c: c.variant.label,
           words=True),
    Column("val loss", "mean", 0, lambda c: c.variant.mean, loss),
    # a chart on the page: a terminal leaves out a column without texts
    Column("seeds", "sd", 1, lambda c: c.variant.spread, lambda c: ""),
    Column("n", "n", 6, lambda c: c.variant.n, count_seeds),
    Column("difference", "difference", 8, lambda c: c.difference and c.difference.mean, gap),
    Column("95 % interval", "low", 7, lambda c: c.difference and c.difference.low, interval),
    measured("ms/step", "step_seconds", 4, milliseconds),
    measured("tok/s", "tokens_per_second", 2, count),
    measured("state", "state_bytes", 3, lambda n: size(n or 0)),
    Column("status", "status", 5, lambda c: c.variant.summary(),
           lambda c: c.variant.summary(), words=True),
)  # fmt: skip
