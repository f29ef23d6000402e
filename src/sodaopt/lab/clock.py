"""Times of a run: training apart from validation and saving, and the optimizer's own part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WARM = 2
"""Laps left out of the mean speed: compilation and first touches."""


class Stopwatch:
    """Laps end where the device was waited for anyway, so that timing adds no waiting."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = 0.0
        self.laps: list[tuple[int, float]] = []
        self.parts: list[Any] = []
        self.part_seconds: list[float] = []
        self.start()

    def start(self) -> None:
        self.began = self.mark = self.saved_at = time.perf_counter()

    def total(self) -> float:
        """Seconds of the run so far, those before a resume included."""
        return self.before + time.perf_counter() - self.began

    def lap(self, steps: int) -> float:
        """Seconds of training since the last lap or skip."""
        now = time.perf_counter()
        seconds, self.mark = now - self.mark, now
        self.laps.append((steps, seconds))
        self._collect()
        return max(seconds, 1e-9)

    def step_seconds(self) -> float | None:
        """The mean over all laps but the first ones, if there are more."""
        laps = self.laps[WARM:] or self.laps
        return sum(s for _, s in laps) / sum(n for n, _ in laps) if laps else None

    def skip(self) -> None:
        """What happened since the last lap was not training."""
        self.mark = time.perf_counter()

    def saved(self) -> None:
        self.mark = self.saved_at = time.perf_counter()

    def since_save(self) -> float:
        return time.perf_counter() - self.saved_at

    @contextmanager
    def part(self) -> Iterator[None]:
        """Around the optimizer's step."""
        if self.device.type == "cuda":
            event: Any = torch.cuda.Event
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self.parts.append((begin, end))
        else:
            began = time.perf_counter()
            yield
            self.part_seconds.append(time.perf_counter() - began)

    def _collect(self) -> None:
        self.part_seconds += [a.elapsed_time(b) / 1e3 for a, b in self.parts]
        self.parts.clear()

    def part_ms(self) -> float | None:
        """The median."""
        times = sorted(self.part_seconds)
        return 1e3 * times[len(times) // 2] if times else None

    def state(self) -> dict[str, float]:
        return {"before": self.total()}

    def load(self, state: dict[str, float]) -> None:
        self.before = state["before"]
