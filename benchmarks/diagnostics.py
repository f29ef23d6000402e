"""Measure the time that the diagnostics add to a run of the lab.

    python -m benchmarks.diagnostics [--preset nano] [--steps 50] [--rounds 6]

Runs with and without diagnostics take turns in one process. Both log every step, so that the cost
of one measured step stands out from the noise. By default, a run on a CPU logs every tenth step, so
the reported share is a tenth of the measured one. Times are processor times, because a busy machine
changes them less than the clock.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.records import where
from sodaopt.lab.execution import Execution
from sodaopt.lab.job import Job
from sodaopt.lab.train import train

LOG_EVERY = 10
RESULT = Path(__file__).parent / "results" / "diagnostics-cpu.json"


def seconds(job: Job, folder: Path, diagnostics: bool) -> float:
    """Return the processor time of one run, in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    start = time.process_time()
    train(job, folder, Execution("cpu", diagnostics=diagnostics, log_every=1))
    return time.process_time() - start


def measure(preset: str, optimizer: str, steps: int, rounds: int) -> dict[str, Any]:
    """Compare runs of `steps` steps that validate only at the start and at the end."""
    job = Job(preset=preset, optimizer=optimizer, steps=steps, eval_every=steps, eval_tokens=2048)
    times: dict[bool, list[float]] = {True: [], False: []}
    with TemporaryDirectory() as folder:
        for _ in range(rounds + 1):  # the first round prepares the data
            for on in times:
                times[on].append(seconds(job, Path(folder) / "run", on))
    on, off = times[True][1:], times[False][1:]
    added = [(a / b - 1) / LOG_EVERY for a, b in zip(on, off, strict=True)]
    return {
        "preset": preset, "optimizer": optimizer, "steps": steps, "rounds": rounds,
        "seconds": statistics.median(off), "share": statistics.median(added),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--optimizer", default="soda(adamw)")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    found = measure(args.preset, args.optimizer, args.steps, args.rounds)
    print(f"diagnostics take {found['share']:.2%} of a run (median of {args.rounds} pairs)")
    RESULT.write_text(json.dumps(where("cpu") | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
