"""Analyse the runs of a study: python -m benchmarks.study FOLDER OUT --baseline A --primary B

FOLDER holds results.json and the runs of `sodaopt reproduce`. OUT gets the same numbers, a record
of every run, and the differences to the baseline: by the fit of `sodaopt.lab.stats`, and by the
seeds of the two variants alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sodaopt.lab import records, results, stats
from sodaopt.lab.records import Run

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
    known = {(r["variant"], r["seed"]): r["loss"] for r in used}
    if len(known) != len(variants) * len(seeds) or None in known.values():
        raise ValueError("every variant needs one finished run for each seed")
    fit = stats.fit(known)
    rows = []
    for variant in variants:
        if variant != baseline:
            gaps = [known[variant, seed] - known[baseline, seed] for seed in seeds]
            rows.append(
                {
                    "variant": variant,
                    "primary": variant == primary,
                    "by_seed": gaps,
                    "pooled": _record_of(fit.difference(variant, baseline)),
                    "paired": _record_of(stats.paired(gaps)),
                }
            )
    return {
        "model": f"{stats.MODEL}, least squares, residuals pooled over all variants",
        "baseline": baseline,
        "primary": [primary, baseline],
        "level": stats.LEVEL,
        "seeds": seeds,
        "residual_sd": fit.sd,
        "degrees_of_freedom": fit.freedom,
        "differences": sorted(rows, key=lambda r: not r["primary"]),
    }


def _record_of(gap: stats.Difference | None) -> Record:
    assert gap is not None
    return {"difference": gap.mean, "low": gap.low, "high": gap.high, "p": gap.p,
            "degrees_of_freedom": gap.freedom}  # fmt: skip


if __name__ == "__main__":
    main()
