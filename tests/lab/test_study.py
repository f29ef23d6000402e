"""The analysis of a study: its fit, and that the numbers in results/ follow from its runs."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy")

from benchmarks.study import analyse, fit
from sodaopt.lab import results
from sodaopt.lab.stats import p_value
from tools.results_doc import ROOT


def runs(losses: np.ndarray) -> list[dict[str, Any]]:
    return [
        {"variant": "abc"[v], "seed": s, "tuning": False, "loss": float(loss)}
        for (v, s), loss in np.ndenumerate(losses)
    ]


def test_two_variants_are_a_paired_test() -> None:
    losses = np.random.default_rng(0).normal(3.0, 0.01, (2, 6))
    (row,) = analyse(runs(losses), "a", "b")["differences"]
    assert row["pooled"] == pytest.approx(row["paired"])
    assert row["paired"]["p"] == pytest.approx(p_value((losses[1] - losses[0]).tolist()))


def test_an_additive_table_is_fitted_exactly() -> None:
    variants, seeds = np.array([3.0, 3.5, 2.0]), np.array([0.1, -0.2, 0.3, 0.0])
    effects, _, sigma, freedom = fit(variants[:, None] + seeds)
    assert np.diff(effects) == pytest.approx(np.diff(variants))
    assert sigma == pytest.approx(0, abs=1e-12)
    assert freedom == 6


def test_residuals_are_pooled_over_variants() -> None:
    """In a full table the fit is two-way means, and a difference has the variance 2 sd^2 / s."""
    losses = np.random.default_rng(1).normal(3.0, 0.01, (3, 5))
    effects, covariance, sigma, freedom = fit(losses)
    rest = losses - losses.mean(0) - losses.mean(1, keepdims=True) + losses.mean()
    assert freedom == 8
    assert sigma**2 == pytest.approx((rest**2).sum() / 8)
    assert np.diff(effects) == pytest.approx(np.diff(losses.mean(1)))
    variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    assert variance == pytest.approx(2 * sigma**2 / 5)


@pytest.mark.parametrize("lost", ["missing", "diverged"])
def test_every_run_is_needed(lost: str) -> None:
    found = runs(np.ones((2, 3)))
    found = found[:-1] if lost == "missing" else [*found[:-1], found[-1] | {"loss": None}]
    with pytest.raises(ValueError, match="one finished run for each seed"):
        analyse(found, "a", "b")


def test_tuning_runs_do_not_count() -> None:
    losses = np.random.default_rng(2).normal(3.0, 0.01, (2, 4))
    tuning = {"variant": "a", "seed": 100, "tuning": True, "loss": 1.0}
    assert analyse([*runs(losses), tuning], "a", "b") == analyse(runs(losses), "a", "b")


def test_the_numbers_of_the_study_follow_from_its_runs() -> None:
    numbers = results.read(ROOT / "results" / "study-muon-proxy.json")
    analysis = numbers["analysis"]
    again = analyse(numbers["runs"], analysis["baseline"], analysis["primary"][0])
    for one, other in zip(again["differences"], analysis["differences"], strict=True):
        assert one["variant"] == other["variant"]
        for kind in ("pooled", "paired"):
            assert one[kind] == pytest.approx(other[kind], rel=1e-6)
    for cell in numbers["cells"]:
        found = [r for r in numbers["runs"] if r["variant"] == cell["column"] and not r["tuning"]]
        assert [r["loss"] for r in found] == cell["losses"]
