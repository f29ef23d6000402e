"""Compute the data of the curves. page.py draws them with uPlot, figures.py with matplotlib."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from ..comparison import Comparison
from ..records import DIVERGED, FINISHED, Run
from ..stats import paired
from ..variants import AXES, Variant, status, sweep

POINTS = 1500
"""Most points of a curve."""
BUDGET = 12_000
"""Most points of all curves of a chart together, to limit the size of the page."""
FEW = 200
"""Most points of a curve in a small chart."""
DYNAMICS = {
    "lr": "learning rate",
    "distance": "distance to the initial weights",
    "share": "share of the pull in the step",
    "angle": "angle between pull and update, degrees",
    "update_rms": "RMS of the update",
    "gradient": "gradient norm",
}
"""Diagnostics that the page shows, with their titles."""
Record = dict[str, Any]
Value = Callable[[Record], float | None]


@dataclass(frozen=True)
class Curve:
    """A quantity along a run: the mean over seeds, and a band if there are several seeds."""

    label: str
    colour: int
    main: bool
    """Whether the variant is the best of its optimizer. A chart of many variants shows only these
    curves at first."""
    alone: bool
    """Whether the curve is one diverged seed of a variant with other seeds."""
    steps: list[float]
    tokens: list[float]
    seconds: list[float]
    loss: list[float]
    """Values of the quantity, which is the loss in most charts."""
    low: list[float]
    high: list[float]


def loss(record: Record) -> float | None:
    value = record.get("loss")
    return None if value is None else float(value)


def colours(variants: Sequence[Variant]) -> list[int]:
    """Return the number of a colour for each variant.

    The best variant of a sweep has the colour that the sweep's line has in the other charts.
    """
    heads = [line.head for line in sweep(variants, AXES[0])]
    order = [
        *heads,
        *(variant for variant in variants if not any(variant is head for head in heads)),
    ]
    at = {id(variant): j for j, variant in enumerate(order)}
    return [at[id(variant)] for variant in variants]


def curves(variants: Sequence[Variant], kind: str) -> list[Curve]:
    """Return the curves of the variants.

    kind: 'val' for the validation loss, or 'step' for the training loss
    """
    heads, found = len(sweep(variants, AXES[0])), []
    for variant, colour in zip(variants, colours(variants), strict=True):
        for label, runs in _drawn(variant):
            curve = _curve(label, colour, colour < heads, _common(runs, kind, loss), kind == "val")
            found.append(replace(curve, alone=label != variant.label))
    limit = max(100, min(POINTS, BUDGET // max(1, len(found))))
    return [thin(curve, limit, kind == "step") for curve in found if curve.steps]


def gaps(comparisons: Sequence[Comparison]) -> list[Curve]:
    """Return the difference of each variant to its baseline along the run.

    A curve is the mean over the seeds that both have, and its band is the 95 % interval.
    """
    variants = [c.variant for c in comparisons]
    heads, found = len(sweep(variants, AXES[0])), []
    for comparison, colour in zip(comparisons, colours(variants), strict=True):
        if comparison.variant is not comparison.base:
            at = _differences(comparison.variant, comparison.base)
            curve = _curve(comparison.variant.label, colour, colour < heads, at, False)
            found.append(_with_interval(curve, at))
    limit = max(100, min(POINTS, BUDGET // max(1, len(found))))
    return [thin(curve, limit) for curve in found if curve.steps]


def _differences(variant: Variant, base: Variant) -> dict[int, list[Record]]:
    """Return the records of the variant by step, with the difference to the baseline as the loss.

    Only steps at which all pairs of runs have a loss are returned.
    """
    seeds = {run.job.get("seed"): run for run in base.runs if run.finished}
    pairs = [(run, seeds[seed]) for run in variant.runs
             if run.finished and (seed := run.job.get("seed")) in seeds]  # fmt: skip
    at: dict[int, list[Record]] = {}
    for run, other in pairs:
        known = {r["step"]: r["loss"] for r in other.of("val") if r.get("loss") is not None}
        for r in run.of("val"):
            if r.get("loss") is not None and r["step"] in known:
                at.setdefault(r["step"], []).append(r | {"loss": r["loss"] - known[r["step"]]})
    return {step: found for step, found in at.items() if len(found) == len(pairs)}


def _with_interval(curve: Curve, at: dict[int, list[Record]]) -> Curve:
    """Return the curve with the 95 % intervals as its band, if every step has an interval."""
    found = [paired([r["loss"] for r in at[step]]) for step in sorted(at)]
    ends = [(gap.low, gap.high) for gap in found if gap and gap.low is not None]
    if len(ends) < len(found):
        return curve
    return replace(curve, low=[a or 0.0 for a, _ in ends], high=[b or 0.0 for _, b in ends])


def dynamics(variants: Sequence[Variant]) -> dict[str, dict[str, list[Curve]]]:
    """Return the curves of the diagnostics, by role and name.

    If there are many variants, only the best of each optimizer has curves.
    """
    heads = len(sweep(variants, AXES[0]))
    drawn = [(variant, colour) for variant, colour in zip(variants, colours(variants), strict=True)
             if colour < heads or len(variants) <= 8]  # fmt: skip
    records = [r for variant, _ in drawn for run in variant.runs for r in run.of("diagnostics")]
    roles = dict.fromkeys(role for r in records for role in r["roles"])
    found: dict[str, dict[str, list[Curve]]] = {}
    for role in sorted(roles, key=lambda role: role != "hidden"):
        for name in DYNAMICS:
            value = partial(_diagnostic, role=role, name=name)
            all_of = [_curve(v.label, colour, colour < heads, _common(v.runs, "diagnostics", value),
                             False, value) for v, colour in drawn]  # fmt: skip
            found.setdefault(role, {})[name] = [thin(c, FEW) for c in all_of if c.steps]
    return found


def _diagnostic(record: Record, role: str, name: str) -> float | None:
    value = record["roles"].get(role, {}).get(name)
    return None if value is None else float(value)


def _drawn(variant: Variant) -> list[tuple[str, list[Run]]]:
    """Return the curves of a variant as (label, runs). A diverged seed has a curve of its own."""
    bad = [run for run in variant.runs if status(run) == DIVERGED]
    good = [run for run in variant.runs if status(run) != DIVERGED]
    if not bad or not good:
        return [(variant.label, variant.runs)]
    alone = [(f"{variant.label}, seed {run.job.get('seed')} diverged", [run]) for run in bad]
    return [(variant.label, good), *alone]


def _curve(
    label: str, colour: int, main: bool, at: dict[int, list[Record]], band: bool,
    value: Value = loss,
) -> Curve:  # fmt: skip
    """Return the mean of `value` over seeds, and with `band` also its range.

    at: the records by step, one of each seed
    """
    ys = [[y for r in at[step] if (y := value(r)) is not None] for step in sorted(at)]
    several = band and any(len(some) > 1 for some in ys)
    return Curve(
        label,
        colour,
        main,
        False,
        [float(step) for step in sorted(at)],
        _along(at, "tokens"),
        _along(at, "seconds"),
        [fmean(some) for some in ys],
        [min(some) for some in ys] if several else [],
        [max(some) for some in ys] if several else [],
    )


def _common(runs: Sequence[Run], kind: str, value: Value) -> dict[int, list[Record]]:
    """Return the records of the steps that all runs have, so that each mean is over the same seeds.

    Unfinished runs are left out if some runs have finished.
    """
    done = [run for run in runs if status(run) == FINISHED] or list(runs)
    at: dict[int, list[Record]] = {}
    for run in done:
        for record in run.of(kind):
            if value(record) is not None:
                at.setdefault(record["step"], []).append(record)
    most = max(map(len, at.values()), default=0)
    return {step: found for step, found in at.items() if len(found) == most}


def _along(at: dict[int, list[Record]], name: str) -> list[float]:
    """Return the mean of `name` over seeds at each step, or an empty list if a step has none."""
    known = [[r[name] for r in at[step] if r.get(name) is not None] for step in sorted(at)]
    return [fmean(some) for some in known] if all(known) else []


def thin(curve: Curve, limit: int, average: bool = False) -> Curve:
    """Reduce a curve to `limit` evenly spaced points, including the first and the last.

    average: whether a point is the mean since the previous one, which smooths noisy losses
    """
    count = len(curve.steps)
    if count <= limit:
        return curve
    kept = sorted({round(j * (count - 1) / (limit - 1)) for j in range(limit)})

    def some(values: list[float]) -> list[float]:
        return [values[j] for j in kept] if values else []

    starts = [0, *(j + 1 for j in kept[:-1])]
    means = [fmean(curve.loss[a : b + 1]) for a, b in zip(starts, kept, strict=True)]
    return replace(
        curve, steps=some(curve.steps), tokens=some(curve.tokens), seconds=some(curve.seconds),
        loss=means if average else some(curve.loss), low=some(curve.low), high=some(curve.high),
    )  # fmt: skip
