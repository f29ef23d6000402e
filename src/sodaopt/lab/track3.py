"""`sodaopt track3`: judge runs by the rules of modded-nanogpt's track 3, and write logs of them.

The track counts the steps to a validation loss of 3.28. Its rules are in
https://github.com/KellerJordan/modded-nanogpt/tree/master/records/track_3_optimization
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from tyro.conf import Positional, arg

import sodaopt

from .arguments import Grouped, Output
from .presets import PRESETS
from .records import Run, find
from .variants import Variant, group_by_variant
from .visible import visible

TARGET = 3.28
MARGIN = 0.004
"""3.09 standard deviations of 0.0013: p < 0.001 in a one-sided z-test."""
FIXED = {"preset": "track3", "data": "fineweb10B", "activation": 1.0} | {
    name: getattr(PRESETS["track3"], name)
    for name in ("width", "depth", "head_dim", "context", "batch", "vocab", "eval_tokens")
}
"""Settings that a submission must not change."""


def is_significant(losses: Sequence[float]) -> bool:
    """Whether the mean of the losses of all runs is significantly below 3.28."""
    return bool(losses) and (TARGET - fmean(losses)) * math.sqrt(len(losses)) >= MARGIN


def steps_to_target(curves: Sequence[Mapping[int, float]]) -> int | None:
    """Return the first step at which the runs are significantly below 3.28, or None.

    The step is the same for all runs, and no run is left out. If a run has diverged before a step,
    it has no loss there, so the step does not count.

    curves: validation losses of each run, by step
    """
    shared = set.intersection(*map(set, curves)) if curves else set()
    return min((k for k in shared if is_significant([c[k] for c in curves])), default=None)


def curve(run: Run) -> dict[int, float]:
    """Return the validation losses of a run by step."""
    return {r["step"]: r["loss"] for r in run.of("val") if r["loss"] is not None}


def changes(job: Mapping[str, Any]) -> str:
    """Return the settings of a job that the rules do not allow, or ''."""
    different = {k: job.get(k) for k, fixed in FIXED.items() if job.get(k) != fixed}
    return ", ".join(f"{k} {value}" for k, value in different.items())


@dataclass(frozen=True)
class Result:
    """The result of a variant by the rules of the track."""

    variant: Variant

    @property
    def row(self) -> dict[str, Any]:
        """Numbers by the headings of the table."""
        curves = [curve(run) for run in self.variant.runs]
        steps = steps_to_target(curves)
        last = max(set.intersection(*map(set, curves)), default=None)
        at = last if steps is None else steps
        return {
            "variant": self.variant.label,
            "n": len(curves),
            "steps to 3.28": steps,
            "step": at,
            "mean loss at step": None if at is None else fmean(c[at] for c in curves),
            "against the rules": changes(self.variant.job),
        }


@dataclass
class Track3:
    """Judge runs of the preset track3: steps to a validation loss of 3.28, by its rules."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="FOLDER ...")]
    """Folders of runs. All runs of an optimizer count, so name all seeds that were trained."""
    logs: Path | None = None
    """Folder for logs in the form of the track. Each log contains the source of this library."""
    output: Annotated[Output, Grouped] = field(default_factory=Output)

    def run(self) -> int:
        from rich.table import Table

        if not self.runs:
            raise ValueError("name the folders of runs, such as sodaopt track3 runs/train")
        found = find(self.runs)
        if not found:
            raise FileNotFoundError(f"no runs in {', '.join(map(str, self.runs))}")
        rows = [Result(variant).row for variant in group_by_variant(found)]
        table = Table(*rows[0])
        for row in rows:
            table.add_row(*(visible(_shown(value)) for value in row.values()))
        self.output.console().print(table)
        if self.output.json:
            print(json.dumps(rows))
        if self.logs is not None:
            self.logs.mkdir(parents=True, exist_ok=True)
            for run in found:
                path = self.logs / f"{run.folder.name}.txt"
                path.write_text(log(run), encoding="utf-8")
        return 0


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def log(run: Run) -> str:
    """Return the log of a run: source code, machine, and a line for each validation."""
    rule, machine = "=" * 100, run.head.get("environment", {})
    return "\n".join([source(), rule, f"{json.dumps(machine)} {json.dumps(run.job)}", rule,
                      *_lines(run), ""])  # fmt: skip


def _lines(run: Run) -> list[str]:
    """Return a line for each validation, in the form of the track."""
    steps, lines = run.job.get("steps"), []
    for record in run.of("val"):
        step, loss, seconds = (record[name] for name in ("step", "loss", "seconds"))
        each = 1000 * seconds / step if step else math.nan
        lines.append(f"step:{step}/{steps} val_loss:{math.nan if loss is None else loss:.5f} "
                     f"train_time:{seconds:.3f}s step_avg:{each:.2f}ms")  # fmt: skip
    return lines


def source() -> str:
    """Return the source of every module of this library, because a log must contain all code."""
    root = Path(sodaopt.__file__).parent
    return "\n".join(
        f"# -- {path.relative_to(root.parent)}\n{path.read_text(encoding='utf-8')}"
        for path in sorted(root.rglob("*.py"))
    )
