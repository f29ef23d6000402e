"""`sodaopt train` and `sodaopt sample`."""

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import tyro

from . import records
from .arguments import Grouped, Output, command_line
from .data import open_data
from .describe import describe, outline, repeats, shards_needed, without_data
from .execution import NO_MEMORY, Execution
from .job import Job, resolve
from .progress import Silent, progress
from .records import DIVERGED, FINISHED, Run
from .report import write_report
from .restore import restore
from .sample import generate
from .train import DATA, train
from .visible import visible

INTERRUPTED = 130
"""Exit code of a command that was stopped by Ctrl-C."""


def train_command(job: Job, folder: Path) -> str:
    """Return the command line that runs a job alone."""
    return command_line("train", [], Train(job, out=folder))


@dataclass
class Train:
    """Train one model. Run the same command again to continue after a stop."""

    job: Annotated[Job, Grouped] = field(default_factory=Job)
    execution: Annotated[Execution, Grouped] = field(default_factory=Execution)
    output: Annotated[Output, Grouped] = field(default_factory=Output)
    out: Path | None = None
    """Folder of the run. Default: a folder under runs/train with a name made of the settings."""
    dry_run: bool = False
    """Describe the run and stop. This works without the data."""

    def run(self) -> int:
        if self.dry_run:
            return self._dry()
        data = open_data(self.job.dataset, DATA)
        resolved = resolve(self.job, data.vocab)
        folder = self.out or Path("runs/train") / resolved.key
        first = int(os.environ.get("RANK", "0")) == 0
        show = first and self.output.shown
        if show:
            print("\n".join(filter(None, (describe(resolved), repeats(resolved, data)))))
        before = records.begun(folder) if first else None
        done = before is not None and before.done
        shown = progress(resolved.steps) if show and not done else Silent()
        try:
            run = train(self.job, folder, self.execution, shown)
        except torch.OutOfMemoryError:
            raise ValueError(NO_MEMORY) from None
        if not first:
            return 0
        if done and not run.finished and show:
            reason = (run.end or {}).get("reason", DIVERGED)
            print(visible(f"the run in {folder} has already ended: {reason}"))
        return self._report(run, folder)

    def _dry(self) -> int:
        resolved, data = without_data(self.job)
        folder = self.out or Path("runs/train") / resolved.key
        print(outline(resolved, data, self.execution))
        print(f"folder: {folder}")
        if data is None and "fineweb" in self.job.dataset:
            print(f"first: sodaopt data download {self.job.dataset} {shards_needed(resolved)}")
        return 0

    def _report(self, run: Run, folder: Path) -> int:
        end = run.end or {}
        finished = end.get("status") == FINISHED
        page = write_report([run], folder / "report.html", run.optimizer) if finished else None
        if self.output.json:
            print(json.dumps({"folder": str(folder), **end, "report": str(page or "")}))
        elif finished and self.output.shown:
            print(f"validation loss {end['val_loss']:.4f} after {end['step']} steps")
            for sample in run.of("sample")[-1:]:
                print(f"\n{visible(sample.get('text', ''))}\n")
            print(f"report: {page}")
        return 0 if finished else 1 if end.get("status") == DIVERGED else INTERRUPTED


@dataclass
class Sample:
    """Generate text with a trained model."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of a run, which contains run.jsonl."""
    prompt: str = "The people of the United States"
    """Beginning of the text."""
    tokens: int = 200
    """Most tokens to generate."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, ... or auto, which is a GPU if there is one."""
    temperature: float = 0.8
    """0 always takes the most likely token."""
    top_k: int = 50
    """Draw among this many of the most likely tokens."""
    seed: int = 0
    """Seed of the first text. The next texts have the next seeds."""
    count: int = 1
    """Number of texts."""

    def __post_init__(self) -> None:
        for name in ("tokens", "top_k", "count"):
            if (value := getattr(self, name)) < 1:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} must be at least 1, got {value}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature must be at least 0 and finite, got {self.temperature}")

    def run(self) -> int:
        runs = records.find([self.folder])
        if len(runs) != 1:
            names = ", ".join(str(run.folder) for run in runs[:5]) or "none"
            raise ValueError(
                f"{self.folder} contains {len(runs)} runs ({names}): name the folder of one run"
            )
        model, data = restore(runs[0])
        model = model.to(Execution(self.device).target())
        for j in range(self.count):
            text = generate(
                model, data.tokenizer(), self.prompt, tokens=self.tokens,
                temperature=self.temperature, top_k=self.top_k, seed=self.seed + j,
            )  # fmt: skip
            print(visible(text))
        return 0
