"""Format settings for readers, and name variants by the settings in which they differ."""

import json
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from .records import Record

# These settings come first in a label. Others follow in the order of the job.
ORDER = ("preset", "data", "horizon", "steps", "lr", "wd")
# These settings are in a label if they differ, even if the rest of the label is unique.
ALWAYS = ("lr", "wd")


def value(x: Any) -> str:
    """Return a setting as text. Small powers of two are powers: 0.0009765625 -> '2^-10'."""
    if isinstance(x, float) and math.isfinite(x):
        mantissa, exponent = math.frexp(x)
        if mantissa == 0.5 and exponent <= -3:  # 1/16 and below
            return f"2^{exponent - 1}"
        return str(int(x)) if x == int(x) and abs(x) < 1e15 else repr(x)
    return x if isinstance(x, str) else json.dumps(x, default=str)


def number(text: str) -> float:
    """Parse a number such as 0.1, 1e-3, 2^-11 or 2**-11."""
    found = re.fullmatch(r"\s*2(?:\^|\*\*)\(?(-?\d+)\)?\s*", text)
    try:
        x = 2.0 ** int(found[1]) if found else float(text)
    except (ValueError, OverflowError):
        x = math.nan
    if not math.isfinite(x):
        raise ValueError(f"expected a number such as 0.1 or 2^-11, got {text!r}")
    return x


def parser_rules() -> Any:
    """Return a rule for the argument parser tyro: a number may be written as 2^-11."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    rules = ConstructorRegistry()

    @rules.primitive_rule
    def _(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[float] | None:
        if info.type is not float:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="FLOAT",
            instance_from_str=lambda words: number(words[0]),
            is_instance=lambda x: isinstance(x, float | int),
            str_from_instance=lambda x: [str(x)],
        )

    return rules


def without_seed(job: Record, also: Collection[str] = ()) -> Record:
    """Return a job without its seed, and without the settings in `also`."""
    return {k: v for k, v in job.items() if k != "seed" and k not in also}


def key(job: Record) -> str:
    """Return a text that is equal for equal jobs, in any order of their settings."""
    return json.dumps(job, sort_keys=True, default=str)


def differing(jobs: Sequence[Record]) -> list[str]:
    """Return the names of the settings that differ between the jobs, besides optimizer and seed."""
    names = dict.fromkeys([*ORDER, *(name for job in jobs for name in job)])
    return [
        name
        for name in names
        if name not in ("optimizer", "seed") and len({value(job.get(name)) for job in jobs}) > 1
    ]


def distinguishing(jobs: Sequence[Record]) -> list[str]:
    """Return the names of the settings that a label needs to tell the jobs apart.

    A preset decides width, depth and steps, so a label with the preset does not need them.
    """
    kept = ["optimizer"]
    for name in differing(jobs):
        if name in ALWAYS or _classes(jobs, [*kept, name]) > _classes(jobs, kept):
            kept.append(name)
    return kept[1:]


def _classes(jobs: Iterable[Record], names: Sequence[str]) -> int:
    """Return the number of different labels that these settings make."""
    return len({tuple(value(job.get(name)) for name in names) for job in jobs})


def labels(jobs: Sequence[Record]) -> list[str]:
    """Return a label for each job such as 'muon lr=2^-10 wd=0.1'."""
    names = distinguishing(jobs)
    decayed = {str(job.get("optimizer")) for job in jobs if job.get("wd")}
    return [_label(job, names, decayed) for job in jobs]


def _label(job: Record, names: Sequence[str], decayed: Collection[str]) -> str:
    optimizer = str(job.get("optimizer", "?"))
    # An optimizer without weight decay in any job does not need wd=0 in its label.
    shown = [name for name in names if name != "wd" or optimizer in decayed]
    return f"{optimizer} {settings(job, shown)}".strip()


def settings(job: Record, names: Iterable[str]) -> str:
    """Return a text such as 'lr=2^-10 wd=0.1', without settings that are None."""
    return " ".join(f"{n}={value(job[n])}" for n in names if job.get(n) is not None)


WRITTEN = {
    "adamw": "AdamW", "muon": "Muon", "lion": "Lion", "scion": "Scion", "uscion": "uScion",
    "soda": "SODA", "soda_all": "SODA-all", "soda_tied": "SODA-tied", "soda_dagger": "SODA-dagger",
    "gpa": "GPA", "snoo": "SNOO", "lookahead": "Lookahead", "schedule_free": "Schedule-Free",
}  # fmt: skip
"""Names of optimizers as people write them."""


def written(names: Iterable[str]) -> str:
    """Return names for a title: ['muon', 'soda(muon)'] -> 'Muon, SODA(Muon)'."""
    return ", ".join(re.sub(r"\w+", lambda m: WRITTEN.get(m[0], m[0]), name) for name in names)


SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def pretty(text: str) -> str:
    """Use superscripts, for pages and figures: 'lr=2^-10' -> 'lr=2⁻¹⁰'."""
    parts = text.split("2^")
    return parts[0] + "".join(_raised(part) for part in parts[1:])


def _raised(part: str) -> str:
    rest = part.lstrip("-0123456789")
    return "2" + part[: len(part) - len(rest)].translate(SUPERSCRIPT) + rest
