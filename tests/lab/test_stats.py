"""Variants, differences and sweeps of runs, against numbers worked out by hand."""

import math
import statistics

import pytest

from sodaopt.lab import labels, stats
from tests.support.lab_runs import fake


def made(folder, *runs):
    return stats.group_by_variant([fake(folder, **run) for run in runs])


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


def test_variants_hold_the_seeds_of_a_variant(tmp_path):
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


def test_diverged_runs_are_counted_and_in_no_mean(tmp_path):
    variant, gone = made(
        tmp_path,
        {"seed": 0, "final": 3.5},
        {"seed": 1, "final": 3.5, "status": "diverged"},
        {"seed": 0, "status": "diverged", "lr": 1.0},
    )
    assert (variant.n, variant.mean, variant.diverged) == (1, 3.5, 1)
    assert variant.summary() == "1 finished, 1 diverged"
    assert (gone.n, gone.mean, gone.so_far, gone.summary()) == (0, None, None, "diverged")


def test_runs_that_go_on_say_how_far_they_are(tmp_path):
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


# -- differences ----------------------------------------------------------------------------------


def test_differences_are_by_seed(tmp_path):
    base, variant = made(
        tmp_path,
        *({"seed": s, "final": x} for s, x in enumerate((3.50, 3.60, 3.70, 3.80))),
        *({"optimizer": "adamw", "seed": s, "final": x} for s, x in ((1, 3.59), (2, 3.68))),
        {"optimizer": "adamw", "seed": 3, "status": "diverged"},
        {"optimizer": "adamw", "seed": 9, "final": 1.0},
    )
    gap = stats.difference(variant, base)
    assert (gap.mean, gap.n) == (pytest.approx(-0.015), 2)
    # t = -0.015 / (0.01/sqrt(2) / sqrt(2)) = -3, and with one degree P(|t| > 3) = 2 atan(1/3)/pi
    assert gap.p == pytest.approx(2 * math.atan(1 / 3) / math.pi)
    assert gap.stars == ""


def test_one_seed_has_no_p_value(tmp_path):
    base, variant, alone = made(
        tmp_path, {}, {"optimizer": "adamw"}, {"optimizer": "lion", "seed": 5}
    )
    assert stats.difference(variant, base) == stats.Difference(0.0, 1, None)
    assert stats.difference(alone, base) is None, "no seed in common"


@pytest.mark.parametrize(
    ("p", "mark"), [(0.06, ""), (0.05, ""), (0.04, "*"), (0.009, "**"), (0.0009, "***"), (None, "")]
)
def test_marks(p, mark):
    assert stats.Difference(0.1, 3, p).stars == mark


def test_variants_are_compared_at_their_own_scale(tmp_path):
    grid = [{"optimizer": o, "steps": n} for n in (100, 200) for o in ("muon", "adamw")]
    variants = made(tmp_path, *grid)
    assert stats.bases(variants) == [variants[0], variants[0], variants[2], variants[2]]
    variants = made(tmp_path / "scale", {"steps": 100}, {"steps": 200})
    assert stats.bases(variants) == [variants[0]] * 2, "the variants differ in scale only"


# -- the t-test -----------------------------------------------------------------------------------

TABLE = [(1, 12.706), (2, 4.303), (4, 2.776), (30, 2.042)]


@pytest.mark.parametrize(("df", "t"), TABLE)
def test_printed_tables_of_t_at_five_per_cent(df, t):
    """Gaps whose mean is t standard errors from zero."""
    gaps = [float(j) for j in range(df + 1)]
    shift = t * statistics.stdev(gaps) / math.sqrt(df + 1) - statistics.fmean(gaps)
    assert stats.p_value([gap + shift for gap in gaps]) == pytest.approx(0.05, rel=2e-3)


def test_p_values_of_exact_differences():
    assert stats.p_value([0.5, 0.5, 0.5]) == 0
    assert stats.p_value([0.0, 0.0]) == 1
    assert stats.p_value([0.5]) is None


# -- sweeps ---------------------------------------------------------------------------------------


def test_the_best_value_of_each_line(tmp_path):
    variants = made(
        tmp_path,
        *({"wd": wd, "final": x} for wd, x in ((0.0, 3.7), (0.1, 3.5), (0.2, 3.6))),
        *({"optimizer": "lion", "wd": wd, "final": x} for wd, x in ((0.1, 3.9), (0.2, 3.8))),
        {"optimizer": "soda(muon)", "final": 3.4},
    )
    assert stats.best(variants, "wd") == {"muon": 0.1, "lion": 0.2}
    assert stats.best(variants, "lr") == {}
    muon, lion, soda = stats.sweep(variants, "wd")
    assert (muon.edge, lion.edge, soda.edge) == (False, True, False)
    assert [x for x, _ in soda.points] == [0.0]


def test_a_line_takes_the_best_of_the_other_axis(tmp_path):
    grid = [(0.1, 0.0, 3.7), (0.1, 0.5, 3.6), (0.2, 0.0, 3.3), (0.2, 0.5, 3.4)]
    variants = made(tmp_path, *({"lr": lr, "wd": wd, "final": x} for lr, wd, x in grid))
    (line,) = stats.sweep(variants, "lr")
    assert [(x, variant.job["wd"]) for x, variant in line.points] == [(0.1, 0.5), (0.2, 0.0)]
    assert line.tried == 4


def test_diverged_points_stay_in_a_sweep(tmp_path):
    variants = made(tmp_path, {"lr": 0.1, "final": 3.5}, {"lr": 0.2, "status": "diverged"})
    (line,) = stats.sweep(variants, "lr")
    assert [variant.mean for _, variant in line.points] == [3.5, None]
    assert line.best[0] == 0.1
    variants = made(tmp_path / "all", *({"lr": lr, "status": "diverged"} for lr in (0.1, 0.2)))
    assert stats.best(variants, "lr") == {}
