"""Settings as people write them, and names for variants that say only what differs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from .records import Record

# what a reader looks for first; other settings follow in the order of the job
ORDER = ("preset", "data", "horizon", "steps", "lr", "wd")
# named whenever they differ, also where the optimizer alone would tell two variants apart
ALWAYS = ("lr", "wd")


def value(x: Any) -> str:
    """0.0009765625 -> '2^-10': small powers of two by their exponent, the rest as it is."""
    if isinstance(x, float) and math.isfinite(x):
        mantissa, exponent = math.frexp(x)
        if mantissa == 0.5 and exponent <= -3:  # 1/16 and below
            return f"2^{exponent - 1}"
        return str(int(x)) if x == int(x) and abs(x) < 1e15 else repr(x)
    return x if isinstance(x, str) else json.dumps(x, default=str)


def number(text: str) -> float:
    """0.1, 1e-3, 2^-11 or 2**-11"""
    found = re.fullmatch(r"\s*2(?:\^|\*\*)\(?(-?\d+)\)?\s*", text)
    try:
        x = 2.0 ** int(found[1]) if found else float(text)
    except (ValueError, OverflowError):
        x = math.nan
    if not math.isfinite(x):
        raise ValueError(f"a number such as 0.1 or 2^-11 is needed, got {text!r}")
    return x


def variant(job: Record, without: Collection[str] = ()) -> Record:
    """A job without its seed, and without these settings."""
    return {k: v for k, v in job.items() if k != "seed" and k not in without}


def key(job: Record) -> str:
    """Something to compare jobs by that does not depend on the order of their settings."""
    return json.dumps(job, sort_keys=True, default=str)


def differing(jobs: Sequence[Record]) -> list[str]:
    """The settings whose values are not the same in all jobs, the seed apart."""
    names = dict.fromkeys([*ORDER, *(name for job in jobs for name in job)])
    return [
        name
        for name in names
        if name not in ("optimizer", "seed") and len({value(job.get(name)) for job in jobs}) > 1
    ]


def telling(jobs: Sequence[Record]) -> list[str]:
    """Of the settings that differ, those that a name needs.

    A preset decides width, depth and steps: once it is named, they tell nothing more.
    """
    kept = ["optimizer"]
    for name in differing(jobs):
        if name in ALWAYS or _classes(jobs, [*kept, name]) > _classes(jobs, kept):
            kept.append(name)
    return kept[1:]


def _classes(jobs: Iterable[Record], names: Sequence[str]) -> int:
    return len({tuple(value(job.get(name)) for name in names) for job in jobs})


def labels(jobs: Sequence[Record]) -> list[str]:
    """'muon lr=2^-10 wd=0.1': the optimizer, and what tells this job from the others."""
    names = telling(jobs)
    decayed = {str(job.get("optimizer")) for job in jobs if job.get("wd")}
    return [_label(job, names, decayed) for job in jobs]


def _label(job: Record, names: Sequence[str], decayed: Collection[str]) -> str:
    optimizer = str(job.get("optimizer", "?"))
    # an optimizer that never decays has nothing to say about weight decay
    shown = [name for name in names if name != "wd" or optimizer in decayed]
    return f"{optimizer} {settings(job, shown)}".strip()


def settings(job: Record, names: Iterable[str]) -> str:
    """'lr=2^-10 wd=0.1'; what a job leaves open is left out."""
    return " ".join(f"{n}={value(job[n])}" for n in names if job.get(n) is not None)


SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def pretty(text: str) -> str:
    """'lr=2^-10' -> 'lr=2⁻¹⁰', for pages and figures."""
    parts = text.split("2^")
    return parts[0] + "".join(_raised(part) for part in parts[1:])


def _raised(part: str) -> str:
    rest = part.lstrip("-0123456789")
    return "2" + part[: len(part) - len(rest)].translate(SUPERSCRIPT) + rest
