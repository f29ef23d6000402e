"""Variants, their comparison and sweeps of runs, against numbers worked out by hand."""

import math
import statistics

import numpy as np
import pytest

from sodaopt.lab import labels, stats
from sodaopt.lab import variants as lab
from sodaopt.lab.comparison import bases, compare
from tests.support.lab_runs import fake


def made(folder, *runs):
    return lab.group_by_variant([fake(folder, **run) for run in runs])


# -- labels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (2.0**-10, "2^-10"), (2.0**-4, "2^-4"), (0.125, "0.125"), (0.1, "0.1"), (0.0, "0"),
        (2.0, "2"), (1024, "1024"), (3e-4, "0.0003"), ("init", "init"), (None, "null"),
        (True, "true"), ([0.1, 0.9], "[0.1, 0.9]"), (math.inf, "Infinity"),
    ],
)  # fmt: skip
def test_values_are_written_as_people_write_them(x, text):
    assert labels.value(x) == text


def test_a_label_names_only_what_differs():
    jobs = [
        {"optimizer": "muon", "preset": "nano", "width": 64, "lr": 2.0**-10, "wd": 0.1, "z0": None},
        {"optimizer": "muon", "preset": "nano", "width": 64, "lr": 2.0**-10, "wd": 0.0, "z0": None},
        {"optimizer": "soda(muon)", "preset": "nano", "width": 64, "lr": 2.0**-11, "wd": 0.0},
    ]
    want = ["muon lr=2^-10 wd=0.1", "muon lr=2^-10 wd=0", "soda(muon) lr=2^-11"]
    assert labels.labels(jobs) == want
    assert labels.labels(jobs[:1]) == ["muon"]


def test_a_label_leaves_out_what_the_rest_of_it_implies():
    small = {"optimizer": "muon", "preset": "nano", "width": 64, "steps": 200, "warmdown": 57}
    large = {"optimizer": "muon", "preset": "small", "width": 256, "steps": 900, "warmdown": 256}
    adam = small | {"optimizer": "adamw", "warmup": 10}
    assert labels.labels([small, large, adam]) == [
        "muon preset=nano", "muon preset=small", "adamw preset=nano"
    ]  # fmt: skip


def test_different_jobs_never_share_a_label():
    jobs = [{"optimizer": "soda(muon)", "alpha": a, "z0": z}
            for a in (None, 0.05, 0.1) for z in ("init", "zero")]  # fmt: skip
    assert len(set(labels.labels(jobs))) == len(jobs)


def test_superscripts():
    assert labels.pretty("muon lr=2^-10 wd=0.1") == "muon lr=2⁻¹⁰ wd=0.1"
    assert labels.pretty("2^ and 12^-3x") == "2 and 12⁻³x"


# -- variants -------------------------------------------------------------------------------------


def test_a_variant_has_the_runs_of_all_its_seeds(tmp_path):
    losses = [3.5, 3.6, 3.9]
    runs = [{"seed": s, "final": x} for s, x in zip((2, 0, 1), losses, strict=True)]
    (variant, other) = made(tmp_path, *runs, {"optimizer": "adamw", "final": 4.0})
    assert (variant.label, variant.n, variant.summary()) == ("muon", 3, "finished")
    assert variant.mean == pytest.approx(statistics.fmean(losses))
    assert variant.spread == pytest.approx(statistics.stdev(losses))
    assert [run.job["seed"] for run in variant.runs] == [0, 1, 2]
    assert (other.n, other.spread) == (1, None)
    assert variant.step_seconds == pytest.approx(0.05, rel=0.05)
    assert variant.tokens_per_second == pytest.approx(16 * 128 / 0.05, rel=0.05)
    assert variant.state_bytes == 2_097_152


def test_diverged_runs_are_counted_but_not_averaged(tmp_path):
    variant, gone = made(
        tmp_path,
        {"seed": 0, "final": 3.5},
        {"seed": 1, "final": 3.5, "status": "diverged"},
        {"seed": 0, "status": "diverged", "lr": 1.0},
    )
    assert (variant.n, variant.mean, variant.diverged) == (1, 3.5, 1)
    assert variant.summary() == "1 of 2 diverged"
    assert (gone.n, gone.mean, gone.so_far, gone.summary()) == (0, None, None, "diverged")


def test_unfinished_runs_report_their_progress(tmp_path):
    (variant,) = made(tmp_path, {"status": None, "done": 0.5, "final": 3.5})
    assert variant.mean is None
    assert variant.so_far == pytest.approx(3.5 + 0.45 * math.exp(-1.1) + 3.45 * math.exp(-4.5))
    assert variant.summary() == "unfinished, 50%"


def test_the_later_of_two_runs_of_a_job_counts(tmp_path):
    later = {"head": {"time": "2026-01-02T00:00:00"}}
    (variant,) = made(tmp_path, {"final": 3.4} | later, {"final": 3.6})
    assert (variant.n, variant.mean, variant.repeats) == (1, 3.4, 1)
    unfinished = later | {"status": None, "done": 0.2}
    (variant,) = made(tmp_path / "more", {"final": 3.6}, unfinished)
    assert variant.mean == 3.6, "a run that ended counts before one that did not"


# -- the fit --------------------------------------------------------------------------------------


def cells(losses):
    """The finite entries of a table of variants x seeds."""
    return {at: float(loss) for at, loss in np.ndenumerate(losses) if np.isfinite(loss)}


def test_a_full_table_is_fitted_by_its_means():
    """A difference has the variance 2 sd^2 / s, with residuals of all variants."""
    losses = np.random.default_rng(1).normal(3.0, 0.01, (3, 5))
    found = stats.fit(cells(losses))
    rest = losses - losses.mean(0) - losses.mean(1, keepdims=True) + losses.mean()
    assert (found.freedom, found.sd) == (8, pytest.approx(math.sqrt((rest**2).sum() / 8)))
    assert found.effects == pytest.approx(losses.mean(1))
    gap = found.difference(1, 0)
    half = 2.306 * found.sd * math.sqrt(2 / 5)  # t at 97.5 % with 8 degrees of freedom
    assert gap.mean == pytest.approx(losses[1].mean() - losses[0].mean())
    assert (gap.high - gap.mean, gap.mean - gap.low) == pytest.approx((half, half), rel=1e-3)


def test_a_table_with_gaps_is_fitted_by_least_squares():
    losses = np.random.default_rng(2).normal(3.0, 0.01, (4, 5)) + np.linspace(0, 0.3, 5)
    losses[1, 1:], losses[2, :2] = np.nan, np.nan
    found, known = stats.fit(cells(losses)), cells(losses)
    design = np.zeros((len(known), 8))
    for row, (v, s) in enumerate(known):
        design[row, v] = 1
        if s:
            design[row, 3 + s] = 1
    y = np.array(list(known.values()))
    want, rest, *_ = np.linalg.lstsq(design, y, rcond=None)
    covariance = np.linalg.inv(design.T @ design) * rest[0] / (len(y) - 8)
    gap, t = found.difference(1, 2), 2.447  # 14 losses and 8 coefficients
    assert (found.freedom, gap.mean) == (len(y) - 8, pytest.approx(want[1] - want[2]))
    error = math.sqrt(covariance[1, 1] + covariance[2, 2] - 2 * covariance[1, 2])
    assert gap.high - gap.mean == pytest.approx(t * error, rel=1e-3)


def test_a_seed_that_a_variant_lacks_is_allowed_for():
    """The second variant ran on the good seed only, and is worse than the first one there."""
    found = stats.fit({("a", 0): 3.0, ("a", 1): 4.0, ("b", 0): 3.1, ("c", 0): 3.0, ("c", 1): 4.0})
    assert found.difference("b", "a").mean == pytest.approx(0.1)
    assert found.effect("b") == pytest.approx(3.6)


def test_variants_without_a_common_seed_are_not_compared():
    found = stats.fit({("a", 0): 3.0, ("b", 1): 3.1, ("c", 1): 3.2})
    assert found.difference("b", "a") is None
    assert found.difference("c", "b") == stats.Difference(pytest.approx(0.1))
    assert found.effect("a") == 3.0


TABLE = [(1, 12.706), (2, 4.303), (4, 2.776), (30, 2.042)]


@pytest.mark.parametrize(("df", "t"), TABLE)
def test_two_variants_are_a_paired_test(df, t):
    """Gaps whose mean is t standard errors from zero, from printed tables at five per cent."""
    gaps = [float(j) for j in range(df + 1)]
    shift = t * statistics.stdev(gaps) / math.sqrt(df + 1) - statistics.fmean(gaps)
    found = stats.paired([gap + shift for gap in gaps])
    assert (found.p, found.freedom) == (pytest.approx(0.05, rel=2e-3), df)
    assert found.low == pytest.approx(0, abs=1e-2)


def test_differences_without_residuals():
    assert stats.paired([0.5, 0.5, 0.5]).p == 0
    assert stats.paired([0.0, 0.0]).p == 1
    assert stats.paired([0.5]) == stats.Difference(0.5)
    assert stats.paired([]) is None


def test_holm():
    """Holm (1979): 0.01 * 4, then 0.02 * 3, 0.03 * 2, and never below the one before."""
    assert stats.holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert stats.holm([0.9, 0.8]) == [1.0, 1.0]
    assert stats.holm([]) == []


@pytest.mark.parametrize(
    ("p", "mark"), [(0.06, ""), (0.05, ""), (0.04, "*"), (0.009, "**"), (0.0009, "***"), (None, "")]
)
def test_stars(p, mark):
    assert stats.stars(p) == mark


@pytest.mark.parametrize(("seeds", "d"), [(17, 0.99), (64, 0.4997), (2, 5.65)])
def test_power_of_two_groups(seeds, d):
    """Cohen's tables: 64 in each group find half a standard deviation with 80 %, 17 find one."""
    assert stats.detectable(1.0, seeds, 2 * seeds - 2) == pytest.approx(d, rel=0.01)


# -- comparisons ----------------------------------------------------------------------------------

SEEDS = ((0, 3.50), (1, 3.61), (2, 3.70))


def test_a_diverged_seed_ranks_last(tmp_path):
    """The lowest mean is that of the one seed that survived a learning rate too high."""
    variants = made(
        tmp_path,
        *({"lr": 0.2, "seed": s, "final": 3.1, "status": x} for s, x in
          ((0, "finished"), (1, "diverged"), (2, "diverged"))),
        *({"lr": 0.1, "seed": s, "final": x} for s, x in SEEDS),
        *({"lr": 0.05, "seed": s, "final": x + 0.2} for s, x in SEEDS),
    )  # fmt: skip
    assert [v.job["lr"] for v in sorted(variants, key=lambda v: v.rank)] == [0.1, 0.05, 0.2]
    assert lab.best(variants, "lr") == {"muon": 0.1}
    assert [v.job["lr"] for v in bases(variants)] == [0.1] * 3
    rest, base, gone = compare(variants)
    assert (gone.difference, gone.variant.summary()) == (None, "2 of 3 diverged")
    assert (base.difference, rest.difference.mean) == (None, pytest.approx(0.2))


def test_rows_with_unequal_seeds(tmp_path):
    """A sweep with one seed beside a comparison with three. That seed is a good one."""
    three = [{"seed": s, "final": x} for s, x in SEEDS]
    variants = made(
        tmp_path,
        *three,
        *({"optimizer": "soda(muon)"} | run | {"final": run["final"] - 0.02} for run in three),
        *({"wd": wd, "final": 3.50 + gap} for wd, gap in ((0.1, 0.01), (0.2, 0.03))),
    )
    assert [v.n for v in variants] == [3, 1, 1, 3]
    assert min(variants, key=lambda v: v.mean).job["wd"] == 0.1
    rows = compare(variants)
    assert [row.base.label for row in rows] == ["muon wd=0"] * 4
    assert [row.difference.mean for row in rows[1:]] == pytest.approx([0.01, 0.03, -0.02])
    assert all(row.difference.low is not None for row in rows[1:]), "residuals are pooled"
    assert min(variants, key=lambda v: v.rank).label == "soda(muon)"


def test_only_primary_comparisons_are_tested(tmp_path):
    runs = [{"optimizer": o, "seed": s, "final": x + gap + noise * (-1) ** s}
            for o, gap, noise in (("muon", 0, 0), ("soda(muon)", -0.1, 0.004), ("lion", 0.1, 0.003))
            for s, x in SEEDS]  # fmt: skip
    variants = made(tmp_path, *runs)
    assert [row.p for row in compare(variants)] == [None] * 3
    folder = {v.label: v.runs[0].folder.name for v in variants}
    one = [(folder["soda(muon)"], folder["muon"])]
    _, soda, lion = compare(variants, one)
    assert (soda.p, lion.p) == (soda.difference.p, None)
    assert (soda.stars, lion.stars, lion.difference.clear) == ("***", "", True)
    both = compare(variants, [*one, (folder["lion"], folder["soda(muon)"])])
    assert [row.base.label for row in both] == ["muon", "muon", "soda(muon)"]
    assert [row.p for row in both[1:]] == stats.holm([row.difference.p for row in both[1:]])


def test_variants_are_compared_at_their_own_scale(tmp_path):
    grid = [{"optimizer": o, "steps": n} for n in (100, 200) for o in ("muon", "adamw")]
    variants = made(tmp_path, *grid)
    assert bases(variants) == [variants[0], variants[0], variants[2], variants[2]]
    variants = made(tmp_path / "scale", {"steps": 100}, {"steps": 200})
    assert bases(variants) == [variants[0]] * 2, "the variants differ in scale only"


# -- sweeps ---------------------------------------------------------------------------------------


def test_the_best_value_of_each_line(tmp_path):
    variants = made(
        tmp_path,
        *({"wd": wd, "final": x} for wd, x in ((0.0, 3.7), (0.1, 3.5), (0.2, 3.6))),
        *({"optimizer": "lion", "wd": wd, "final": x} for wd, x in ((0.1, 3.9), (0.2, 3.8))),
        {"optimizer": "soda(muon)", "final": 3.4},
    )
    assert lab.best(variants, "wd") == {"muon": 0.1, "lion": 0.2}
    assert lab.best(variants, "lr") == {}
    muon, lion, soda = lab.sweep(variants, "wd")
    assert (muon.edge, lion.edge, soda.edge) == (False, True, False)
    assert [x for x, _ in soda.points] == [0.0]


def test_a_line_takes_the_best_of_the_other_axis(tmp_path):
    grid = [(0.1, 0.0, 3.7), (0.1, 0.5, 3.6), (0.2, 0.0, 3.3), (0.2, 0.5, 3.4)]
    variants = made(tmp_path, *({"lr": lr, "wd": wd, "final": x} for lr, wd, x in grid))
    (line,) = lab.sweep(variants, "lr")
    assert [(x, variant.job["wd"]) for x, variant in line.points] == [(0.1, 0.5), (0.2, 0.0)]
    assert line.tried == 4


def test_diverged_points_stay_in_a_sweep(tmp_path):
    variants = made(tmp_path, {"lr": 0.1, "final": 3.5}, {"lr": 0.2, "status": "diverged"})
    (line,) = lab.sweep(variants, "lr")
    assert [variant.mean for _, variant in line.points] == [3.5, None]
    assert line.best[0] == 0.1
    variants = made(tmp_path / "all", *({"lr": lr, "status": "diverged"} for lr in (0.1, 0.2)))
    assert lab.best(variants, "lr") == {}
