"""Parse swept settings and seeds of commands, and write settings as command lines again."""

import math
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any

import tyro
from rich.console import Console

from .job import Common, Job
from .labels import number

Grouped: Any = tyro.conf.OmitArgPrefixes
"""Marks a nested record: its flags have no prefix, and a group of their own in --help."""
SeedWords = Annotated[tuple[str, ...], tyro.conf.arg(metavar="SEED|FIRST-LAST ...")]


@dataclass(frozen=True)
class Output:
    """Settings of the printed output."""

    quiet: bool = False
    """Print errors only."""
    json: bool = False
    """Print the results as JSON, and nothing else."""

    @property
    def shown(self) -> bool:
        """Whether progress and tables are printed."""
        return not (self.quiet or self.json)

    def console(self) -> Console:
        """Return the console for progress and tables."""
        if not self.shown:
            return Console(quiet=True)
        return Console() if sys.stdout.isatty() else Console(width=110, soft_wrap=False)


def parse_seeds(words: Iterable[str]) -> tuple[int, ...]:
    """Parse seeds and ranges of seeds: ('0-2', '7') -> (0, 1, 2, 7)"""
    found: list[int] = []
    for word in (part for text in words for part in str(text).split(",")):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", word.strip())
        if not ends:
            raise ValueError(f"--seeds must be seeds such as 0 1 2 or 0-4, got {word!r}")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last < first or last - first > 10_000:
            raise ValueError(f"--seeds {word} is not an increasing range of at most 10000 seeds")
        found += range(first, last + 1)
    if not found:
        raise ValueError("name at least one seed, such as --seeds 0 1 or --seeds 0-4")
    return tuple(dict.fromkeys(found))


def plain(common: Common) -> dict[str, Any]:
    """Return the shared settings as keyword arguments of `Job`."""
    return {f.name: getattr(common, f.name) for f in fields(common)}


def axis(text: str) -> tuple[str, list[Any]]:
    """Parse a setting and its values.

    'lr=2^-12..2^-8' -> ("lr", [2**-12, ..., 2**-8])
    'wd=0,0.1' -> ("wd", [0.0, 0.1])
    """
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    kinds = {f.name: str(f.type) for f in fields(Job) if f.name != "optimizer"}
    if not equals or not values or name not in kinds:
        known = ", ".join(sorted(kinds))
        raise ValueError(
            f"expected SETTING=VALUE,VALUE,... with a SETTING of {known}, got {text!r}"
        )
    kind = kinds[name]
    if ".." in values and _is_number(kind):  # the name of a folder may contain dots
        return name, [_value(kind, str(power)) for power in _powers(values)]
    return name, [_value(kind, part.strip()) for part in values.split(",")]


def _powers(text: str) -> list[float]:
    """Return the powers of two of a range: '2^-2..2^0' -> [0.25, 0.5, 1.0]"""
    begin, _, end = text.partition("..")
    ends = sorted((number(begin), number(end)))
    found = [math.frexp(value) for value in ends]  # (0.5, e + 1) for 2^e
    if any(part != 0.5 for part, _ in found):
        raise ValueError(f"a range needs powers of two, such as 2^-12..2^-8, got {text!r}")
    return [2.0**e for e in range(found[0][1] - 1, found[1][1])]


def _is_number(kind: str) -> bool:
    return "float" in kind or "int" in kind


def _value(kind: str, text: str) -> Any:
    if not _is_number(kind):
        return text
    if "tuple" in kind:
        return tuple(number(part) for part in text.split(":"))
    value = number(text)
    if "float" in kind:
        return value
    if not value.is_integer():
        raise ValueError(f"expected a whole number, got {text!r}")
    return int(value)


def command_line(name: str, positional: Iterable[str], command: Any) -> str:
    """Return the command line that runs a command again, without the flags of its output.

    positional: the arguments of the command that have no flag
    """
    return shlex.join(["sodaopt", name, *positional, *typed(command)])


POSITIONAL = ("optimizers", "name")
REPEATED = ("over",)
"""Flags that are given once for each value."""


def typed(command: Any) -> list[str]:
    """Return the command-line flags of the settings that differ from their defaults."""
    words = []
    for f in fields(command):
        value, flag = getattr(command, f.name), f"--{f.name.replace('_', '-')}"
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if is_dataclass(value):
            words += [] if isinstance(value, Output) else typed(value)
        elif f.name not in POSITIONAL and value != default:
            parts = list(map(str, value if isinstance(value, tuple) else (value,)))
            if isinstance(default, bool):
                words.append(flag if value else f"--no-{flag[2:]}")
            elif f.name in REPEATED:
                words += [word for part in parts for word in (flag, part)]
            else:
                words += [flag, *parts]
    return words
