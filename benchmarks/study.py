"""Analyse the runs of a study: python -m benchmarks.study FOLDER OUT --baseline A --primary B

FOLDER holds results.json and the runs of `sodaopt reproduce`. OUT gets the same numbers, a record
of every run, and a fit of loss = variant + seed. The fit pools the residuals of all variants: with
v variants and s seeds, an interval has (v-1)(s-1) degrees of freedom instead of s-1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from sodaopt.lab import records, results
from sodaopt.lab.records import Run

LEVEL = 0.95
Record = dict[str, Any]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--baseline", required=True, help="the variant that others are compared to")
    parser.add_argument("--primary", required=True, help="the variant of the primary comparison")
    parser.add_argument("--note", action="append", default=[], help="a sentence for the reader")
    args = parser.parse_args(words)
    numbers = results.read(args.folder / "results.json")
    numbers |= described(numbers, records.find([args.folder]))
    numbers["notes"] = args.note
    numbers["analysis"] = analyse(numbers["runs"], args.baseline, args.primary)
    results.write(args.out, numbers)
    print(results.markdown(numbers))


def described(numbers: results.Numbers, runs: Sequence[Run]) -> Record:
    """Return the settings that all runs share, and a record of each run."""
    tuning = {seed for choice in numbers["choices"] for seed in choice["seeds"]}
    jobs = [run.job for run in runs]
    names = dict.fromkeys(name for job in jobs for name in job)
    shared = [n for n in names if len({json.dumps(job.get(n)) for job in jobs}) == 1]
    found = [_record(run, numbers, shared, tuning) for run in runs]
    columns = [c["column"] for c in numbers["cells"]]
    found.sort(key=lambda r: (r["seed"], columns.index(r["variant"]), r["settings"]["wd"]))
    return {"shared": {n: jobs[0][n] for n in shared}, "runs": found}


def _record(run: Run, numbers: results.Numbers, shared: Sequence[str], tuning: set[int]) -> Record:
    job, end = run.job, run.end or {}
    known = job["seed"] in tuning
    return {
        "variant": _choice(job, numbers) if known else _cell(job, numbers),
        "seed": job["seed"],
        "tuning": known,
        "settings": {n: v for n, v in job.items() if n not in shared and n != "seed"},
        "loss": run.val_loss,
        "steps": end.get("step"),
        "key": run.folder.name,
        "commit": run.head["git"].get("commit"),
        "time": run.head["time"],
        "resumed_at_step": run.head["resumed"],
        "seconds": end.get("seconds"),
        "curve": [[v["step"], v["loss"]] for v in run.of("val")],
    }


def _cell(job: Record, numbers: results.Numbers) -> str:
    at = next(c for c in numbers["cells"] if _fits(job, c["optimizer"], c["settings"]))
    return str(at["column"])


def _choice(job: Record, numbers: results.Numbers) -> str:
    columns = {c["column"]: c["optimizer"] for c in numbers["cells"]}
    at = next(c for c in numbers["choices"] if _fits(job, columns[c["column"]], c["settings"]))
    return str(at["column"])


def _fits(job: Record, optimizer: str, settings: Record) -> bool:
    """Whether the job is this optimizer with exactly these settings; the rest has defaults."""
    wanted = {"optimizer": optimizer, "wd": 0.0, "decay": "uniform"} | settings
    known = {"decay": "uniform"} | job
    return all(known[n] == v for n, v in wanted.items())


# -- the fit --------------------------------------------------------------------------------------


def analyse(runs: Sequence[Record], baseline: str, primary: str) -> Record:
    """Fit loss = variant + seed by least squares, and compare each variant with the baseline."""
    used = [r for r in runs if not r["tuning"]]
    variants = list(dict.fromkeys(r["variant"] for r in used))
    seeds = sorted({r["seed"] for r in used})
    losses = np.full((len(variants), len(seeds)), np.nan)
    for r in used:
        at = variants.index(r["variant"]), seeds.index(r["seed"])
        losses[at] = np.nan if r["loss"] is None else r["loss"]
    if len(used) != losses.size or np.isnan(losses).any():
        raise ValueError("every variant needs one finished run for each seed")
    effects, covariance, sigma, freedom = fit(losses)
    base = variants.index(baseline)
    rows = []
    for j, variant in enumerate(variants):
        if j == base:
            continue
        variance = covariance[j, j] + covariance[base, base] - 2 * covariance[j, base]
        gaps = losses[j] - losses[base]
        rows.append(
            {
                "variant": variant,
                "primary": variant == primary,
                "by_seed": gaps.tolist(),
                "pooled": _interval(effects[j] - effects[base], np.sqrt(variance), freedom),
                "paired": _interval(
                    gaps.mean(), gaps.std(ddof=1) / np.sqrt(len(seeds)), len(seeds) - 1
                ),
            }
        )
    return {
        "model": "loss = variant + seed, least squares, residuals pooled over all variants",
        "baseline": baseline,
        "primary": [primary, baseline],
        "level": LEVEL,
        "seeds": seeds,
        "residual_sd": sigma,
        "degrees_of_freedom": freedom,
        "differences": sorted(rows, key=lambda r: not r["primary"]),
    }


def fit(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, int]:
    """Fit a table of variants x seeds.

    Returns the variants' effects, their covariance, the residual sd and its degrees of freedom.
    """
    v, s = losses.shape
    # one column for each variant, and one for each seed but the first, which is the reference
    design = np.hstack([np.kron(np.eye(v), np.ones((s, 1))), np.tile(np.eye(s)[:, 1:], (v, 1))])
    y = losses.reshape(-1)
    coefficients, *_ = np.linalg.lstsq(design, y, rcond=None)
    freedom = len(y) - design.shape[1]
    variance = float(((y - design @ coefficients) ** 2).sum()) / freedom
    covariance = variance * np.linalg.inv(design.T @ design)
    return coefficients[:v], covariance[:v, :v], float(np.sqrt(variance)), freedom


def _interval(difference: float, error: float, freedom: int) -> Record:
    half = float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * float(error)
    p = 2 * float(stats.t.sf(abs(difference) / error, freedom))
    return {
        "difference": float(difference),
        "low": float(difference) - half,
        "high": float(difference) + half,
        "p": p,
        "degrees_of_freedom": freedom,
    }


if __name__ == "__main__":
    main()
