"""Numbers and sentences, for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sodaopt.layers.table import size

from .. import stats
from ..records import DIVERGED
from ..stats import AXES, UNFINISHED, Difference, Row, bases, difference, sweep, swept

COLUMNS = ("variant", "val loss", "n", "difference", "p", "ms/step", "tok/s", "state", "status")


@dataclass(frozen=True)
class Line:
    """A row of the headline table, ready to show."""

    row: Row
    base: Row
    difference: Difference | None

    @property
    def loss(self) -> str:
        if self.row.mean is not None:
            return f"{self.row.mean:.4f}"
        return "" if self.row.so_far is None else f"({self.row.so_far:.4f})"

    @property
    def spread(self) -> str:
        return "" if self.row.spread is None else f"± {self.row.spread:.4f}"

    @property
    def n(self) -> str:
        """'3', or '2/3' where a run has no final loss."""
        runs = len(self.row.runs)
        return str(runs) if self.row.n == runs else f"{self.row.n}/{runs}"

    @property
    def gap(self) -> str:
        if self.row is self.base:
            return "baseline"
        if self.difference is None:
            return ""
        return f"{self.difference.mean:+.4f} {self.difference.mark}".strip()

    @property
    def p(self) -> str:
        """Says that one seed has no p value, instead of saying nothing."""
        if self.row is self.base or self.difference is None:
            return ""
        return "one seed" if self.difference.p is None else probability(self.difference.p)

    def cells(self) -> tuple[str, ...]:
        """In the order of COLUMNS."""
        row = self.row
        loss = f"{self.loss} {self.spread}".strip()
        return (row.label, loss, self.n, self.gap, self.p, milliseconds(row.step_seconds),
                count(row.tokens_per_second), size(row.state_bytes or 0),
                row.summary())  # fmt: skip


def lines(rows: Sequence[Row]) -> list[Line]:
    return [
        Line(row, base, None if row is base else difference(row, base))
        for row, base in zip(rows, bases(rows), strict=True)
    ]


def probability(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return _three(1000 * seconds) if seconds < 0.9995 else f"{1000 * seconds:,.0f}"


def count(x: float | None) -> str:
    """4700000 -> '4.70M'"""
    if x is None:
        return ""
    power = sum(abs(x) >= limit for limit in (999.5, 999.5e3, 999.5e6, 999.5e9))
    return f"{_three(x / 1000**power)}{('', 'k', 'M', 'B', 'T')[power]}"


def _three(x: float) -> str:
    """Three digits, zeros too: numbers in a column line up."""
    return f"{x:#.3g}".rstrip(".")


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def seeds(n: int) -> str:
    return "one seed" if n == 1 else f"{n} seeds"


# -- sentences ------------------------------------------------------------------------------------


def headlines(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What the numbers say, in a sentence for each scale of the runs: its subject and the rest."""
    groups: dict[int, list[Line]] = {}
    for line in lines(rows):
        groups.setdefault(id(line.base), []).append(line)
    return [_headline(group) for group in groups.values()]


def _headline(group: Sequence[Line]) -> tuple[str, str]:
    done = sorted((line for line in group if line.row.n), key=lambda line: line.row.mean or 0.0)
    if not done:
        gone = all(line.row.diverged == len(line.row.runs) for line in group)
        return "", "Every run diverged." if gone else "No run has finished yet."
    best, name = done[0], done[0].row.label
    value = f"{best.loss} {best.spread}".strip() + f" ({seeds(best.row.n)})"
    if len(group) == 1:
        return name, f"reaches a validation loss of {value}."
    return name, f"has the lowest validation loss, {value}{_against(best, done[1:])}."


def _against(best: Line, others: Sequence[Line]) -> str:
    """The best and the baseline; if they are the same, the baseline and the next best."""
    if best.difference is not None:
        return f": {_compared(best.difference)} than {best.base.label}{_doubt(best)}"
    second = next((line for line in others if line.difference is not None), None)
    if best.row is not best.base or second is None or second.difference is None:
        return ""
    return f"; next, {second.row.label} is {_compared(second.difference)}{_doubt(second)}"


def _compared(gap: Difference) -> str:
    return f"{abs(gap.mean):.4f} {'lower' if gap.mean < 0 else 'higher'}"


def _doubt(line: Line) -> str:
    """How sure the difference is."""
    gap = line.difference
    if gap is None or gap.p is None:
        return ", with one seed each"
    p = probability(gap.p)
    shown = f"p {p}" if p.startswith("<") else f"p = {p}"
    return f" ({shown})" if gap.mark else f", which {seeds(gap.n)} do not tell from noise ({shown})"


def notes(rows: Sequence[Row]) -> list[str]:
    """What a reader must know to read the table."""
    found = lines(rows)
    said = []
    if any(line.row.spread is not None for line in found):
        said.append("± is the sample standard deviation over seeds.")
    if any(line.difference and line.difference.p is not None for line in found):
        said.append("Differences are to the baseline, seed by seed; p is of a two-sided paired "
                    "t-test, with * below 0.05, ** below 0.01, *** below 0.001 and no correction "
                    "for the number of rows.")  # fmt: skip
    if any(swept(sweep(rows, axis)) for axis in AXES):
        said.append("Of a sweep, the best row is the baseline.")
    if any(line.difference and line.difference.p is None for line in found):
        said.append("One seed has no p value: small differences may be noise.")
    return said + _caveats(rows)


def _caveats(rows: Sequence[Row]) -> list[str]:
    """What did not go as planned; a loss of a diverged run is in no mean."""
    said = []
    counts = {name: sum(row.statuses[name] for row in rows) for name in (DIVERGED, UNFINISHED)}
    total = sum(len(row.runs) for row in rows)
    if counts[DIVERGED]:
        said.append(f"{counts[DIVERGED]} of {total} runs diverged and are in no mean.")
    if counts[UNFINISHED]:
        said.append(f"{counts[UNFINISHED]} of {total} runs have not finished: a loss in "
                    "parentheses is the latest one.")  # fmt: skip
    if repeats := sum(row.repeats for row in rows):
        said.append(f"{repeats} earlier runs of the same job and seed do not count.")
    runs = [(row, run) for row in rows for run in row.runs]
    if again := [seen for _, run in runs if (seen := stats.epochs(run)) > 1]:
        said.append(f"{len(again)} of {total} runs saw some tokens more than once, in up to "
                    f"{max(again):.3g} epochs.")  # fmt: skip
    if noted := [(row, run) for row, run in runs if stats.notes(run)]:
        row, run = noted[0]
        said.append(f"{len(noted)} of {total} runs left a note; {row.label}, seed "
                    f"{run.job.get('seed', '?')}: {stats.notes(run)[-1]}")  # fmt: skip
    return said
