"""Write the records of a run and show its progress."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .clock import Stopwatch
from .data import Dataset
from .environment import environment, git, peak
from .job import ResolvedJob
from .parallel import World
from .progress import Progress
from .records import FORMAT, Writer
from .sinks import of_record, open_sinks


class RunLog:
    """Write the records of one run and show its progress. Only rank 0 writes records.

    sinks: names of other places that get the numbers, see `open_sinks`
    """

    def __init__(
        self,
        folder: Path,
        resolved: ResolvedJob,
        device: torch.device,
        ranks: World,
        watch: Stopwatch,
        progress: Progress,
        sinks: str = "",
    ) -> None:
        self.folder, self.resolved, self.device = folder, resolved, device
        self.ranks, self.watch, self.progress = ranks, watch, progress
        self.writer = Writer(folder) if ranks.first else None
        first = bool(sinks) and ranks.first
        self.sinks = open_sinks(sinks, folder, resolved.record()) if first else []

    def write(self, kind: str, step: int, seconds: float | None = None, **values: Any) -> None:
        """Write a record, and send its numbers to the sinks.

        seconds: time since the start of the run. Default: now.
        """
        if self.writer:
            tokens = step * self.resolved.tokens_per_step
            at = round(self.watch.total() if seconds is None else seconds, 4)
            self.writer.write(kind, step=step, tokens=tokens, seconds=at, **values)
        for sink in self.sinks:
            if numbers := of_record(kind, values):
                sink.log(step, numbers)

    def write_head(self, data: Dataset, fingerprint: str, micro_batch: int, step: int) -> None:
        """Write the first record of a run, or of its continuation after a stop.

        step: number of updates done so far
        """
        if not self.writer:
            return
        self.writer.write(
            "run",
            format=FORMAT,
            name=self.folder.name,
            job=self.resolved.record(),
            model={"parameters": self.resolved.shape.parameters, "tokens": self.resolved.tokens},
            data={"name": data.name, "vocab": data.vocab, "train_tokens": data.train_tokens,
                  "val_tokens": data.val_tokens, "fingerprint": fingerprint},
            environment=environment(self.device) | {"micro_batch": micro_batch},
            git=git(),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            resumed=step,
        )  # fmt: skip

    def say(self, text: str) -> None:
        """Show a message without recording it."""
        self.progress.say(text)

    def note(self, step: int, text: str) -> None:
        """Show a message and record it, because the workers of a sweep show nothing."""
        self.write("note", step, text=text)
        self.progress.say(text)

    def show_step(self, step: int, loss: float, val: float | None, speed: float) -> None:
        """Update the progress display.

        loss: the smoothed training loss
        speed: tokens per second
        """
        left = (self.resolved.steps - step) * self.resolved.tokens_per_step / speed
        record = {"step": step, "loss": loss, "val": val, "lr": self.resolved.lr(step - 1)}
        record |= {"tokens_per_second": speed, "eta": left, "mfu": self.mfu(speed)}
        self.progress.step(record)

    def mfu(self, speed: float) -> float | None:
        """Return the used fraction of the devices' peak FLOP/s, or None if the peak is unknown."""
        most = peak(self.device)
        flops = self.resolved.shape.flops_per_token
        return speed * flops / (most * self.ranks.size) if most else None

    def close(self) -> None:
        self.progress.close()
        for sink in self.sinks:
            sink.close()
        if self.writer:
            self.writer.close()
