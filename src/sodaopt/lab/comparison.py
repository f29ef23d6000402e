"""Compare each variant with its baseline. Test the primary comparisons.

Primary comparisons are named before the runs start. Only they have p values and stars, with Holm's
correction for their number. All other comparisons have only an interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .stats import Difference, Fit, holm, stars
from .variants import AXES, Variant, fits, scales, sweep

Pairs = Sequence[tuple[str, str]]
"""Primary comparisons. Each has the folder names of a run of the variant and of its baseline."""


@dataclass(frozen=True)
class Comparison:
    """A variant and its baseline.

    scale: a text that is equal for variants that can be compared
    fit: the fit of all variants of this scale, or None if no run has finished
    difference: loss of the variant minus loss of its baseline, None if it is not known
    p: corrected p value of a primary comparison, else None
    """

    variant: Variant
    base: Variant
    scale: str
    fit: Fit | None
    difference: Difference | None = None
    primary: bool = False
    p: float | None = None

    @property
    def stars(self) -> str:
        return stars(self.p)


def compare(variants: Sequence[Variant], primary: Pairs = ()) -> list[Comparison]:
    """Compare each variant with its baseline, in the order of the variants."""
    at, known, named = scales(variants), fits(variants), _named(variants, primary)
    rows = []
    for variant, base, scale in zip(variants, bases(variants, named), at, strict=True):
        fit, other = known.get(scale), named.get(variant.label, base)
        gap = fit.difference(variant.label, other.label) if fit and variant is not other else None
        rows.append(Comparison(variant, other, scale, fit, gap, variant.label in named))
    return _tested(rows)


def _named(variants: Sequence[Variant], primary: Pairs) -> dict[str, Variant]:
    """Return the baseline of each variant that has a primary comparison, by its label."""
    by_folder = {run.folder.name: variant for variant in variants for run in variant.runs}
    known = [(by_folder[a], by_folder[b]) for a, b in primary if {a, b} <= by_folder.keys()]
    return {one.label: other for one, other in known if one is not other}


def _tested(rows: list[Comparison]) -> list[Comparison]:
    """Return the rows with the corrected p values of the primary comparisons, if all have one."""
    tested = [row for row in rows if row.primary and row.difference]
    ps = [row.difference.p for row in tested if row.difference]
    if not ps or any(p is None for p in ps):
        return rows
    corrected = holm([p for p in ps if p is not None])
    found = {row.variant.label: p for row, p in zip(tested, corrected, strict=True)}
    return [replace(row, p=found.get(row.variant.label)) for row in rows]


def bases(variants: Sequence[Variant], named: dict[str, Variant] | None = None) -> list[Variant]:
    """Return the baseline of each variant.

    Each scale has its own baseline: that of its first primary comparison, or else its first
    variant. If this variant belongs to a sweep, the best variant of the sweep is the baseline,
    because nobody would use a poor learning rate.

    named: the baselines of primary comparisons, by the label of the variant
    """
    at = scales(variants)
    scale_of = {variant.label: scale for variant, scale in zip(variants, at, strict=True)}
    first: dict[str, Variant] = {}
    for other in (named or {}).values():
        first.setdefault(scale_of[other.label], other)
    for line in sweep(variants, AXES[0]):
        first.setdefault(scale_of[line.head.label], line.head)
    return [first[scale] for scale in at]
