"""Describe the results of the runs in sentences, and how certain they are."""

from collections.abc import Sequence

from ..comparison import Comparison
from ..records import DIVERGED
from ..stats import LEVEL, MODEL, POWER, Difference, detectable
from ..variants import AXES, UNFINISHED, Variant, epochs, sweep, swept
from ..variants import notes as run_notes
from .text import loss, probability, seeds, span


def headlines(comparisons: Sequence[Comparison]) -> list[tuple[str, str]]:
    """Return a sentence for each scale of the runs, as (subject, rest of the sentence)."""
    groups: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault(comparison.scale, []).append(comparison)
    return [_headline(group) for group in groups.values()]


def _headline(group: Sequence[Comparison]) -> tuple[str, str]:
    done = sorted((c for c in group if c.variant.n), key=lambda c: c.variant.rank)
    if not done:
        gone = all(c.variant.diverged == len(c.variant.runs) for c in group)
        return "", "Every run diverged." if gone else "No run has finished yet."
    best, name = done[0].variant, done[0].variant.label
    value = f"{loss(done[0])} ({seeds(best.n)})"
    if best.diverged:
        return name, f"has the lowest validation loss, {value}, but {best.summary()}."
    if len(group) == 1:
        return name, f"reaches a validation loss of {value}."
    return name, f"has the lowest validation loss, {value}{_against(done[0], done[1:])}."


def _against(best: Comparison, others: Sequence[Comparison]) -> str:
    """Compare the best variant with the baseline, or with the next best if it is the baseline."""
    if best.difference is not None:
        return f": {_compared(best.difference)} than {best.base.label}{_doubt(best)}"
    second = next((c for c in others if c.difference and c.base is best.variant), None)
    if second is None or second.difference is None:
        return ""
    gap = _compared(second.difference)
    return f". The next best, {second.variant.label}, is {gap}{_doubt(second)}"


def _compared(gap: Difference) -> str:
    return f"{abs(gap.mean):.4f} {'lower' if gap.mean < 0 else 'higher'}"


def _doubt(comparison: Comparison) -> str:
    """Say how certain a difference is."""
    gap = comparison.difference
    if gap is None or gap.low is None:
        return ", with one seed each"
    p = f", {_p(comparison.p)}" if comparison.p is not None else ""
    zero = "" if gap.clear else ", which includes zero"
    return f" ({LEVEL:.0%} interval {span(gap)}{zero}{p})".replace("%", " %")


def _p(p: float) -> str:
    shown = probability(p)
    return f"p {shown}" if shown.startswith("<") else f"p = {shown}"


def notes(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the notes below the table."""
    found = [c.variant for c in comparisons]
    said = []
    if any(variant.spread is not None for variant in found):
        said.append("± is the sample standard deviation over seeds.")
    said += [*_fitted(comparisons), *_primary(comparisons), *_unequal(found)]
    if any(swept(sweep(found, axis)) for axis in AXES):
        said.append("The best row of a sweep is the baseline. Its loss is a little too low, "
                    "because it was chosen by the same seeds.")  # fmt: skip
    if any(c.difference and c.difference.low is None for c in comparisons):
        said.append("With one seed, a difference has no interval: if it is small, it may be noise.")
    return said + _caveats(found)


def _fitted(comparisons: Sequence[Comparison]) -> list[str]:
    """Describe the fit and its power. If several scales have a fit, describe the first."""
    tested = [c for c in comparisons if c.difference and c.difference.low is not None]
    fit = next((c.fit for c in tested if c.fit is not None), None)
    if fit is None or fit.sd is None:
        return []
    n = min(min(c.variant.n, c.base.n) for c in tested if c.fit is fit)
    least = detectable(fit.sd, n, fit.freedom)
    return [f"Differences are to the baseline. Their 95 % intervals are from one fit, {MODEL}, to "
            f"all rows (residual sd {fit.sd:.4f}, {fit.freedom} degrees of freedom).",
            f"Power: with {seeds(n)}, a difference of {least:.4f} is found with a probability of "
            f"{POWER:.0%}.".replace("%.", " %.")]  # fmt: skip


def _primary(comparisons: Sequence[Comparison]) -> list[str]:
    """Name the primary comparisons with their p values."""
    tested = [c for c in comparisons if c.p is not None]
    if not tested:
        several = sum(c.difference is not None and c.difference.low is not None
                      for c in comparisons) > 1  # fmt: skip
        return ["The intervals are not corrected for the number of rows."] if several else []
    named = ", ".join(f"{c.variant.label} against {c.base.label} ({_p(c.p or 0.0)})"
                      for c in tested)  # fmt: skip
    holm = f", after Holm's correction for {len(tested)}" if len(tested) > 1 else ""
    return [f"Primary comparisons, named before the runs: {named}{holm}. Stars are only for them: "
            "* is p below 0.05, ** below 0.01, *** below 0.001."]  # fmt: skip


def _unequal(variants: Sequence[Variant]) -> list[str]:
    counts = {variant.n for variant in variants if variant.n and not variant.diverged}
    if len(counts) < 2:
        return []
    return [f"Rows have {min(counts)} to {max(counts)} seeds (n). The differences and the order "
            "are from the fit, which corrects for missing seeds."]  # fmt: skip


def _caveats(variants: Sequence[Variant]) -> list[str]:
    """Return notes about diverged, unfinished and repeated runs."""
    said = []
    counts = {
        name: sum(variant.statuses[name] for variant in variants) for name in (DIVERGED, UNFINISHED)
    }
    total = sum(len(variant.runs) for variant in variants)
    if counts[DIVERGED]:
        said.append(f"{counts[DIVERGED]} of {total} runs diverged. A row with a diverged seed "
                    "ranks after all rows without one. Its mean leaves this seed out.")  # fmt: skip
    if counts[UNFINISHED]:
        said.append(f"{counts[UNFINISHED]} of {total} runs have not finished: a loss in "
                    "parentheses is the latest one.")  # fmt: skip
    if repeats := sum(variant.repeats for variant in variants):
        said.append(f"{repeats} earlier runs of the same job and seed are ignored.")
    runs = [(variant, run) for variant in variants for run in variant.runs]
    if again := [seen for _, run in runs if (seen := epochs(run)) > 1]:
        said.append(f"{len(again)} of {total} runs read training data more than once, up to "
                    f"{max(again):.3g} times.")  # fmt: skip
    if noted := [(variant, run) for variant, run in runs if run_notes(run)]:
        variant, run = noted[0]
        said.append(f"{len(noted)} of {total} runs left a note, for example {variant.label}, seed "
                    f"{run.job.get('seed', '?')}: {run_notes(run)[-1]}")  # fmt: skip
    return said
