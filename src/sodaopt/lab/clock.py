"""Measure the time of training steps without validation and saving, and of optimizer steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WARM = 2
"""Laps at the start that the mean speed ignores, because they include compilation."""


class Stopwatch:
    """Time a run in laps of several steps. A lap ends when the host waits for the device anyway."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = 0.0
        self.laps: list[tuple[int, float]] = []
        self.events: list[Any] = []
        self.optimizer_seconds: list[float] = []
        self.start()

    def start(self) -> None:
        self.began = self.lap_began = self.saved_at = time.perf_counter()

    def total(self) -> float:
        """Return the seconds of the run so far, including the time before a resume."""
        return self.before + time.perf_counter() - self.began

    def lap(self, steps: int) -> float:
        """End a lap of `steps` steps. Return the seconds since the last lap or skip."""
        now = time.perf_counter()
        seconds, self.lap_began = now - self.lap_began, now
        self.laps.append((steps, seconds))
        self._collect()
        return max(seconds, 1e-9)

    def step_seconds(self) -> float | None:
        """Return the mean seconds of a step, without the first laps if there are later ones."""
        laps = self.laps[WARM:] or self.laps
        return sum(s for _, s in laps) / sum(n for n, _ in laps) if laps else None

    def skip(self) -> None:
        """Leave the time since the last lap out of the next one, because it was not training."""
        self.lap_began = time.perf_counter()

    def saved(self) -> None:
        """Note that a checkpoint was saved now. Its time is not part of a lap."""
        self.lap_began = self.saved_at = time.perf_counter()

    def since_save(self) -> float:
        return time.perf_counter() - self.saved_at

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Time the enclosed step of the optimizer."""
        if self.device.type == "cuda":
            event: Any = torch.cuda.Event
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self.events.append((begin, end))
        else:
            began = time.perf_counter()
            yield
            self.optimizer_seconds.append(time.perf_counter() - began)

    def _collect(self) -> None:
        self.optimizer_seconds += [a.elapsed_time(b) / 1e3 for a, b in self.events]
        self.events.clear()

    def optimizer_ms(self) -> float | None:
        """Return the median milliseconds of an optimizer step, or None if none was measured."""
        times = sorted(self.optimizer_seconds)
        return 1e3 * times[len(times) // 2] if times else None

    def state(self) -> dict[str, float]:
        return {"before": self.total()}

    def load(self, state: dict[str, float]) -> None:
        self.before = state["before"]
