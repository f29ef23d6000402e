"""Show the progress of a run: a live bar on a terminal, or a line every few seconds."""

import sys
import time
from typing import Any, Protocol

from .visible import visible


class Progress(Protocol):
    def step(self, record: dict[str, Any]) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


class Silent:
    """Show nothing, in workers. Their records contain everything."""

    def step(self, record: dict[str, Any]) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class Lines:
    """Print a line every few seconds, for logs."""

    def __init__(self, total: int, every: float = 5.0) -> None:
        self.total, self.every, self.last = total, every, 0.0

    def step(self, record: dict[str, Any]) -> None:
        if time.monotonic() - self.last >= self.every or record["step"] >= self.total:
            self.last = time.monotonic()
            print(f"step {record['step']}/{self.total}  {describe(record)}", flush=True)

    def say(self, text: str) -> None:
        print(visible(text), flush=True)

    def close(self) -> None:
        pass


class Bar:
    """Show a bar with the loss, the speed and the time left."""

    def __init__(self, total: int) -> None:
        from rich import progress

        columns = (
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.description}", markup=False),
        )
        self.bar = progress.Progress(*columns, transient=False)
        self.task = self.bar.add_task("", total=total)
        self.bar.start()

    def step(self, record: dict[str, Any]) -> None:
        self.bar.update(self.task, completed=record["step"], description=describe(record))

    def say(self, text: str) -> None:
        self.bar.console.print(visible(text), markup=False, highlight=False)

    def close(self) -> None:
        self.bar.stop()


def describe(record: dict[str, Any]) -> str:
    """Return a line such as 'loss 4.21  val 4.35  lr 4.9e-04  12.3k tok/s  eta 0:31'."""
    words = []
    if record.get("loss") is not None:
        words.append(f"loss {record['loss']:.3f}")
    if record.get("val") is not None:
        words.append(f"val {record['val']:.3f}")
    words.append(f"lr {record['lr']:.1e}")
    words.append(f"{short(record['tokens_per_second'])} tok/s")
    if record.get("mfu") is not None:
        words.append(f"mfu {100 * record['mfu']:.0f} %")
    if record.get("eta") is not None:
        words.append(f"eta {clock(record['eta'])}")
    return "  ".join(words)


def short(n: float) -> str:
    """Format a number with a unit: 12345 -> '12.3k'."""
    power = sum(n >= 0.9995 * 1000.0**k for k in range(1, 7))
    return f"{n / 1000**power:.3g}{' kMGTPE'[power].strip()}"


def clock(seconds: float) -> str:
    """Format a time in seconds: 75 -> '1:15'."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def progress(total: int) -> Progress:
    """Return the display for a run of `total` steps: a bar on a terminal, else lines."""
    return Bar(total) if sys.stdout.isatty() else Lines(total)
