"""Group runs into variants, which are jobs with all their seeds, and variants into sweeps."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Any

from . import labels, stats
from .records import DIVERGED, FINISHED, STOPPED, Record, Run

UNFINISHED = "unfinished"
AXES = ("lr", "wd")
SCALE = ("preset", "data", "horizon", "steps", "batch", "context", "width", "depth")
"""Settings that a comparison of optimizers keeps equal."""


@dataclass(frozen=True)
class Variant:
    """The runs of a job, one for each seed."""

    label: str
    job: Record
    runs: list[Run] = field(repr=False)
    repeats: int = 0
    """Number of earlier runs of the same jobs, which are ignored."""
    level: float | None = None
    """Loss at the average seed, from the fit. It is the mean if all variants have equal seeds."""

    @cached_property
    def sweep_key(self) -> str:
        """A text that is equal for the variants of a sweep of learning rate and weight decay."""
        return labels.key(labels.without_seed(self.job, AXES))

    @cached_property
    def losses(self) -> dict[Any, float]:
        """Final validation losses of the finished runs, by seed."""
        found = {run.job.get("seed"): run.val_loss for run in self.runs}
        return {seed: loss for seed, loss in found.items() if loss is not None}

    @property
    def n(self) -> int:
        return len(self.losses)

    @property
    def mean(self) -> float | None:
        return fmean(self.losses.values()) if self.losses else None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over seeds, or None for one seed."""
        return stdev(self.losses.values()) if self.n > 1 else None

    @property
    def so_far(self) -> float | None:
        """Mean of the latest validation losses if no run has finished, else None."""
        latest = [vals[-1]["loss"] for run in self.runs if (vals := run.of("val"))]
        known = [loss for loss in latest if loss is not None]
        return fmean(known) if known and not self.losses else None

    @property
    def statuses(self) -> Counter[str]:
        return Counter(status(run) for run in self.runs)

    @property
    def diverged(self) -> int:
        return self.statuses[DIVERGED]

    @property
    def step_seconds(self) -> float | None:
        return _mean(step_seconds(run) for run in self.runs)

    @property
    def tokens_per_second(self) -> float | None:
        return _mean(tokens_per_second(run) for run in self.runs)

    @property
    def state_bytes(self) -> float | None:
        return _mean((run.end or {}).get("state_bytes") for run in self.runs)

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key, best first. A variant with a diverged seed comes after all without one."""
        return self.diverged > 0, math.inf if self.level is None else self.level

    def summary(self) -> str:
        """Return 'finished', '1 of 3 diverged', or the number of runs with each status."""
        counts = self.statuses
        if counts.keys() <= {FINISHED, DIVERGED} and self.n and self.diverged:
            return f"{self.diverged} of {len(self.runs)} diverged"
        if len(counts) == 1:
            return _progress(self.runs) if UNFINISHED in counts else next(iter(counts))
        order = dict.fromkeys((FINISHED, DIVERGED, STOPPED, UNFINISHED, *counts))
        return ", ".join(f"{counts[name]} {name}" for name in order if counts[name])


def group_by_variant(runs: Iterable[Run]) -> list[Variant]:
    """Group runs by variant. Keep the latest run of each seed.

    Sweeps are in the order of their first runs. The variants of a sweep are sorted by learning rate
    and weight decay.
    """
    groups: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        seeds = groups.setdefault(labels.key(labels.without_seed(run.job)), {})
        seeds.setdefault(labels.value(run.job.get("seed")), []).append(run)
    found = [[max(same, key=_recency) for same in seeds.values()] for seeds in groups.values()]
    repeats = [sum(map(_repeats, seeds.values())) for seeds in groups.values()]
    jobs = [labels.without_seed(kept[0].job) for kept in found]
    named = zip(labels.labels(jobs), jobs, found, repeats, strict=True)
    variants = [
        Variant(label, job, sorted(kept, key=_seed), again) for label, job, kept, again in named
    ]
    sweeps = list(dict.fromkeys(variant.sweep_key for variant in variants))
    variants.sort(
        key=lambda v: (sweeps.index(v.sweep_key), *(float(v.job.get(a) or 0) for a in AXES))
    )
    at, known = scales(variants), fits(variants)
    return [replace(v, level=_level(v, known.get(a))) for v, a in zip(variants, at, strict=True)]


def scales(variants: Sequence[Variant]) -> list[str]:
    """Return the scale of each variant. Only variants of one scale are compared.

    If there is only one sweep at each scale, all count as one scale.
    """
    found = [scale(variant.job) for variant in variants]
    sweeps = {(at, variant.sweep_key) for at, variant in zip(found, variants, strict=True)}
    return found if len({at for at, _ in sweeps}) < len(sweeps) else [""] * len(found)


def fits(variants: Sequence[Variant]) -> dict[str, stats.Fit]:
    """Return the fit of the losses at each scale, by label and seed.

    A variant with a diverged seed is left out, because its other seeds are not a random sample.
    """
    cells: dict[str, dict[tuple[Any, Any], float]] = {}
    for variant, at in zip(variants, scales(variants), strict=True):
        if not variant.diverged:
            found = {(variant.label, seed): loss for seed, loss in variant.losses.items()}
            cells.setdefault(at, {}).update(found)
    return {at: stats.fit(some) for at, some in cells.items() if some}


def _level(variant: Variant, fit: stats.Fit | None) -> float | None:
    if fit is None or variant.label not in fit.variants:
        return variant.mean
    return fit.effect(variant.label)


def _repeats(same: Sequence[Run]) -> int:
    """Return how many of these runs repeat the job. Copies of a run do not count."""
    return len({(str(run.head.get("time")), run.val_loss) for run in same}) - 1


def _recency(run: Run) -> tuple[bool, str]:
    """Sort key: a run that is done wins over a later run that is not."""
    return run.done, str(run.head.get("time", ""))


def _seed(run: Run) -> tuple[int, str]:
    seed = run.job.get("seed")
    return (seed, "") if isinstance(seed, int) else (0, str(seed))


def status(run: Run) -> str:
    """Return finished, diverged or stopped. A running or killed run is unfinished."""
    return UNFINISHED if run.end is None else str(run.end.get("status", UNFINISHED))


def epochs(run: Run) -> float:
    """Return how often the run read its training data, or 0 if it has not ended."""
    return float((run.end or {}).get("epochs") or 0.0)


def notes(run: Run) -> list[str]:
    """Return the distinct notes of a run, such as a failure to save."""
    found = [str(r.get("text", "")) for r in run.records if r["kind"] == "note"]
    return list(dict.fromkeys(found))


def _progress(runs: Sequence[Run]) -> str:
    done = [r["step"] for run in runs for r in (run.of("step")[-1:] or run.of("val")[-1:])]
    total = sum(run.job.get("steps") or 0 for run in runs)
    return f"{UNFINISHED}, {sum(done) / total:.0%}" if total else UNFINISHED


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known else None


def step_seconds(run: Run) -> float | None:
    """Return the median time of a step. The median ignores pauses and validations."""
    steps = [r for r in run.of("step") if r.get("seconds") is not None]
    pairs = [(b["seconds"] - a["seconds"], b["step"] - a["step"])
             for a, b in pairwise(steps)]  # fmt: skip
    rates = [seconds / count for seconds, count in pairs if seconds > 0]
    return median(rates) if rates else None


def tokens_per_second(run: Run) -> float | None:
    rates = [r["tokens_per_second"] for r in run.of("step") if r.get("tokens_per_second")]
    return median(rates[1:] or rates) if rates else None  # the first one includes compilation


def scale(job: Record) -> str:
    """Return a text that is equal for jobs of the same scale."""
    return labels.key({name: job.get(name) for name in SCALE})


# -- sweeps ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepLine:
    """An optimizer along an axis of a sweep. Each point is the best variant over the other axis."""

    label: str
    job: Record
    points: list[tuple[float, Variant]]
    tried: int
    """Number of variants that the points were chosen from."""

    @property
    def best(self) -> tuple[float, Variant] | None:
        known = [(x, variant) for x, variant in self.points if variant.mean is not None]
        return min(known, key=lambda point: point[1].rank, default=None)

    @property
    def head(self) -> Variant:
        """The best variant of the line, or the first one if none has finished."""
        return self.best[1] if self.best else self.points[0][1]

    @property
    def edge(self) -> bool:
        """Whether the best value is the first or the last one, so a better one may lie outside."""
        ends = [self.points[0][0], self.points[-1][0]]
        return len(self.points) > 1 and self.best is not None and self.best[0] in ends


def sweep(variants: Sequence[Variant], axis: str) -> list[SweepLine]:
    """Return one line for each set of variants that differ in AXES only."""
    groups: dict[str, list[Variant]] = {}
    for variant in variants:
        groups.setdefault(variant.sweep_key, []).append(variant)
    jobs = [labels.without_seed(group[0].job, AXES) for group in groups.values()]
    named = zip(labels.labels(jobs), jobs, groups.values(), strict=True)
    return [SweepLine(label, job, _points(group, axis), len(group)) for label, job, group in named]


def swept(lines: Iterable[SweepLine]) -> bool:
    """Whether a line has several points."""
    return any(len(line.points) > 1 for line in lines)


def _points(variants: Iterable[Variant], axis: str) -> list[tuple[float, Variant]]:
    at: dict[float, Variant] = {}
    for variant in variants:
        x = float(variant.job.get(axis) or 0)
        at[x] = min(at.get(x, variant), variant, key=lambda one: one.rank)
    return sorted(at.items(), key=lambda point: point[0])


def best(variants: Sequence[Variant], axis: str) -> dict[str, float]:
    """Return the best value of the axis for each line with several points."""
    lines = [line for line in sweep(variants, axis) if len(line.points) > 1]
    return {line.label: line.best[0] for line in lines if line.best}
