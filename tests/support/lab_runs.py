"""Made-up runs in the lab's format, to try reports on. No number here was measured."""

import math
import random
from pathlib import Path
from typing import Any

from sodaopt.lab.records import DIVERGED, FINISHED, FORMAT, Run, Writer, read

NASTY = "</script><b>&amp; \"'`${x}<!--"
"""A name that would break a careless page."""
JOB = {
    "preset": "nano", "data": "embedded", "lr": 2.0**-10, "wd": 0.0, "steps": 200, "horizon": 0.1,
    "batch": 16, "context": 128, "width": 64, "depth": 4, "head_dim": 32, "warmup": 0.0,
    "warmdown": 57, "z0": "init", "alpha": None, "alpha_bar": None,
}  # fmt: skip
HEAD = {
    "format": FORMAT,
    "model": {"parameters": 262_144},
    "data": {"name": "embedded", "train_tokens": 1_000_000, "vocab": 1024},
    "environment": {"torch": "2.13.0", "python": "3.11.7", "device": "cpu"},
    "git": {"commit": "0123456789abcdef", "dirty": False},
    "time": "2026-01-01T00:00:00",
}


def fake(
    folder: Path,
    optimizer: str = "muon",
    seed: int = 0,
    *,
    final: float = 3.5,
    status: str | None = FINISHED,
    done: float = 1.0,
    every: int = 20,
    sample: str = "",
    head: dict[str, Any] | None = None,
    **job: Any,
) -> Run:
    """Write a run whose loss falls to `final`. A run with status None still runs."""
    job = JOB | {"optimizer": optimizer, "seed": seed} | job
    where = folder / f"{len(list(folder.glob('*'))) if folder.exists() else 0:03d}"
    writer = Writer(where)
    writer.write("run", name="run", job=job, **HEAD | (head or {}))
    last = int(job["steps"] * done)
    _steps(writer, job, last, every, final, status == DIVERGED)
    if sample:
        writer.write("sample", step=last, prompt="The", text=sample)
    if status:
        loss = final if status == FINISHED else None
        writer.write("end", step=last, status=status, val_loss=loss, seconds=0.05 * last,
                     epochs=0.4, optimizer_ms=10.0, peak_memory=10**9,
                     state_bytes=2_097_152)  # fmt: skip
    writer.close()
    return read(where)


def _steps(
    writer: Writer, job: dict[str, Any], last: int, every: int, final: float, bad: bool
) -> None:
    noise, size = random.Random(str(job)), job["batch"] * job["context"]
    pace = 0.05 * noise.uniform(0.97, 1.03)
    for step in range(0, last + 1, max(1, every // 4)):
        t = step / job["steps"]
        loss = final + 6.9 * math.exp(-9 * t) * (1 - t) + 0.9 * math.exp(-2.2 * t) * (1 - t)
        loss = math.nan if bad and t > 0.6 else loss + (math.exp(14 * t - 7) if bad else 0)
        common = {"step": step, "tokens": step * size, "seconds": pace * step}
        if step % every == 0 or step == last:
            writer.write("val", loss=loss, **common)
        if step:
            writer.write("step", loss=loss + noise.gauss(0, 0.08), lr=job["lr"], **common,
                         tokens_per_second=size / pace)  # fmt: skip


def comparison(folder: Path, seeds: int = 3) -> None:
    """Three optimizers. The difference of the first two is almost equal for each seed."""
    for optimizer, final in (("muon", 3.57), ("soda(muon)", 3.56), ("adamw", 3.7)):
        for s in range(seeds):
            fake(folder, optimizer, s, final=final + (0.01, -0.004, 0.002)[s] * (1 + final / 90),
                 sample=f"The sea, {optimizer}")  # fmt: skip
