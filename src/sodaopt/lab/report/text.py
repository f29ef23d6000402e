"""Format the numbers of the page and the terminal table."""

from collections.abc import Sequence
from dataclasses import dataclass

from sodaopt.memory import size

from ..comparison import Comparison
from ..stats import Difference

COLUMNS = ("variant", "val loss", "n", "difference", "95 % interval", "ms/step", "tok/s", "state",
           "status")  # fmt: skip
MANY = 8
"""Most rows of a table that is in the order of the runs. Longer tables are ordered by loss."""


@dataclass(frozen=True)
class Row:
    """A row of the headline table as texts."""

    line: Comparison

    @property
    def loss(self) -> str:
        variant = self.line.variant
        if variant.mean is not None:
            return f"{variant.mean:.4f}"
        return "" if variant.so_far is None else f"({variant.so_far:.4f})"

    @property
    def spread(self) -> str:
        spread = self.line.variant.spread
        return "" if spread is None else f"± {spread:.4f}"

    @property
    def n(self) -> str:
        """The number of seeds: '3', or '2/3' if one of three runs has no final loss."""
        known, runs = self.line.variant.n, len(self.line.variant.runs)
        return str(runs) if known == runs else f"{known}/{runs}"

    @property
    def gap(self) -> str:
        if self.line.variant is self.line.base:
            return "baseline"
        return "" if self.line.difference is None else f"{self.line.difference.mean:+.4f}"

    @property
    def range(self) -> str:
        gap = self.line.difference
        return "" if gap is None else span(gap) or "one seed"

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the row, in the order of COLUMNS."""
        variant = self.line.variant
        loss, gap = f"{self.loss} {self.spread}".strip(), f"{self.gap} {self.line.stars}".strip()
        return (variant.label, loss, self.n, gap, self.range, milliseconds(variant.step_seconds),
                count(variant.tokens_per_second), size(variant.state_bytes or 0),
                variant.summary())  # fmt: skip


def ordered(lines: Sequence[Comparison]) -> list[Comparison]:
    """Return the rows in the order of the runs. If there are many, the best of a scale is first."""
    if len(lines) <= MANY:
        return list(lines)
    scales = list(dict.fromkeys(line.scale for line in lines))
    return sorted(lines, key=lambda line: (scales.index(line.scale), line.variant.rank))


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
