"""Decide from the training losses whether a run has diverged."""

import math

RISE = 2.0
"""Nats that the smoothed loss may rise above its lowest value before the run is stopped."""
SMOOTHING = 0.9
"""Weight of the earlier losses in the smoothed loss."""


class Diverged(RuntimeError):
    """The loss is not finite, or far above its lowest value."""


class LossMonitor:
    """Smoothed training loss and its lowest value so far."""

    def __init__(self) -> None:
        self.smooth, self.lowest = math.nan, math.inf

    def add(self, loss: float) -> str:
        """Add a loss. Return the reason if the run has diverged, else an empty string."""
        if math.isnan(self.smooth):
            self.smooth = loss
        else:
            self.smooth = SMOOTHING * self.smooth + (1 - SMOOTHING) * loss
        self.lowest = min(self.lowest, self.smooth)
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if self.smooth < self.lowest + RISE:
            return ""
        return f"the loss has risen from {self.lowest:.2f} to {self.smooth:.2f}"

    def state(self) -> dict[str, float]:
        return {"smooth": self.smooth, "lowest": self.lowest}

    def load(self, state: dict[str, float]) -> None:
        self.smooth, self.lowest = state["smooth"], state["lowest"]
