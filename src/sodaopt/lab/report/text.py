"""Format the numbers and sentences of the page and the terminal table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sodaopt.layers.table import size

from .. import stats
from ..records import DIVERGED
from ..stats import AXES, UNFINISHED, Difference, Variant, bases, difference, sweep, swept

COLUMNS = ("variant", "val loss", "n", "difference", "p", "ms/step", "tok/s", "state", "status")


@dataclass(frozen=True)
class Comparison:
    """A variant and its baseline, with the texts of the headline table."""

    variant: Variant
    base: Variant
    difference: Difference | None

    @property
    def loss(self) -> str:
        if self.variant.mean is not None:
            return f"{self.variant.mean:.4f}"
        return "" if self.variant.so_far is None else f"({self.variant.so_far:.4f})"

    @property
    def spread(self) -> str:
        return "" if self.variant.spread is None else f"± {self.variant.spread:.4f}"

    @property
    def n(self) -> str:
        """'3', or '2/3' if a run has no final loss."""
        runs = len(self.variant.runs)
        return str(runs) if self.variant.n == runs else f"{self.variant.n}/{runs}"

    @property
    def gap(self) -> str:
        if self.variant is self.base:
            return "baseline"
        if self.difference is None:
            return ""
        return f"{self.difference.mean:+.4f} {self.difference.stars}".strip()

    @property
    def p(self) -> str:
        """The p value, or 'one seed', which has none."""
        if self.variant is self.base or self.difference is None:
            return ""
        return "one seed" if self.difference.p is None else probability(self.difference.p)

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the row, in the order of COLUMNS."""
        variant = self.variant
        loss = f"{self.loss} {self.spread}".strip()
        return (variant.label, loss, self.n, self.gap, self.p, milliseconds(variant.step_seconds),
                count(variant.tokens_per_second), size(variant.state_bytes or 0),
                variant.summary())  # fmt: skip


def comparisons(variants: Sequence[Variant]) -> list[Comparison]:
    return [
        Comparison(variant, base, None if variant is base else difference(variant, base))
        for variant, base in zip(variants, bases(variants), strict=True)
    ]


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
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def seeds(n: int) -> str:
    return "one seed" if n == 1 else f"{n} seeds"


# -- sentences ------------------------------------------------------------------------------------


def headlines(variants: Sequence[Variant]) -> list[tuple[str, str]]:
    """Return a sentence for each scale of the runs, as its subject and the rest."""
    groups: dict[int, list[Comparison]] = {}
    for line in comparisons(variants):
        groups.setdefault(id(line.base), []).append(line)
    return [_headline(group) for group in groups.values()]


def _headline(group: Sequence[Comparison]) -> tuple[str, str]:
    done = sorted(
        (line for line in group if line.variant.n), key=lambda line: line.variant.mean or 0.0
    )
    if not done:
        gone = all(line.variant.diverged == len(line.variant.runs) for line in group)
        return "", "Every run diverged." if gone else "No run has finished yet."
    best, name = done[0], done[0].variant.label
    value = f"{best.loss} {best.spread}".strip() + f" ({seeds(best.variant.n)})"
    if len(group) == 1:
        return name, f"reaches a validation loss of {value}."
    return name, f"has the lowest validation loss, {value}{_against(best, done[1:])}."


def _against(best: Comparison, others: Sequence[Comparison]) -> str:
    """Compare the best with the baseline, or the baseline with the next best."""
    if best.difference is not None:
        return f": {_compared(best.difference)} than {best.base.label}{_doubt(best)}"
    second = next((line for line in others if line.difference is not None), None)
    if best.variant is not best.base or second is None or second.difference is None:
        return ""
    return f"; next, {second.variant.label} is {_compared(second.difference)}{_doubt(second)}"


def _compared(gap: Difference) -> str:
    return f"{abs(gap.mean):.4f} {'lower' if gap.mean < 0 else 'higher'}"


def _doubt(line: Comparison) -> str:
    """Say how certain a difference is."""
    gap = line.difference
    if gap is None or gap.p is None:
        return ", with one seed each"
    p = probability(gap.p)
    shown = f"p {p}" if p.startswith("<") else f"p = {p}"
    return f" ({shown})" if gap.stars else f", not significant with {seeds(gap.n)} ({shown})"


def notes(variants: Sequence[Variant]) -> list[str]:
    """Return the notes below the table."""
    found = comparisons(variants)
    said = []
    if any(line.variant.spread is not None for line in found):
        said.append("± is the sample standard deviation over seeds.")
    if any(line.difference and line.difference.p is not None for line in found):
        said.append("Differences are to the baseline, seed by seed. p is the p value of a "
                    "two-sided paired t-test: * below 0.05, ** below 0.01, *** below 0.001, "
                    "without correction for the number of rows.")  # fmt: skip
    if any(swept(sweep(variants, axis)) for axis in AXES):
        said.append("The best row of a sweep is the baseline.")
    if any(line.difference and line.difference.p is None for line in found):
        said.append("One seed has no p value: small differences may be noise.")
    return said + _caveats(variants)


def _caveats(variants: Sequence[Variant]) -> list[str]:
    """Return notes about diverged, unfinished and repeated runs."""
    said = []
    counts = {
        name: sum(variant.statuses[name] for variant in variants) for name in (DIVERGED, UNFINISHED)
    }
    total = sum(len(variant.runs) for variant in variants)
    if counts[DIVERGED]:
        said.append(f"{counts[DIVERGED]} of {total} runs diverged and are not part of a mean.")
    if counts[UNFINISHED]:
        said.append(f"{counts[UNFINISHED]} of {total} runs have not finished: a loss in "
                    "parentheses is the latest one.")  # fmt: skip
    if repeats := sum(variant.repeats for variant in variants):
        said.append(f"{repeats} earlier runs of the same job and seed are ignored.")
    runs = [(variant, run) for variant in variants for run in variant.runs]
    if again := [seen for _, run in runs if (seen := stats.epochs(run)) > 1]:
        said.append(f"{len(again)} of {total} runs read training data more than once, up to "
                    f"{max(again):.3g} times.")  # fmt: skip
    if noted := [(variant, run) for variant, run in runs if stats.notes(run)]:
        variant, run = noted[0]
        said.append(f"{len(noted)} of {total} runs left a note, for example {variant.label}, seed "
                    f"{run.job.get('seed', '?')}: {stats.notes(run)[-1]}")  # fmt: skip
    return said
