"""The analysis of a study: its fit, and that the numbers in results/ follow from its runs."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy")

from benchmarks.study import analyse
from sodaopt.lab import results
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
    pairs = [(d["variant"], analysis["baseline"]) for d in analysis["differences"]]
    for d, want in zip(
        results.differences(numbers["cells"], pairs), analysis["differences"], strict=True
    ):
        assert {k: d[k] for k in ("low", "high")} == pytest.approx(
            {k: want["pooled"][k] for k in ("low", "high")}
        )
        assert (d["p"] is None) == (not want["primary"])
    for cell in numbers["cells"]:
        found = [r for r in numbers["runs"] if r["variant"] == cell["column"] and not r["tuning"]]
        assert [r["loss"] for r in found] == cell["losses"]
