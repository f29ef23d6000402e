"""The scales of the studies: model sizes, lengths, seeds and grids of the baselines."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .optimizers import BASES


@dataclass(frozen=True)
class Scale:
    """Model sizes, lengths and grids of the studies. The preset has the standard size."""

    preset: str
    sizes: tuple[tuple[str, dict[str, Any]], ...]
    """Labels and settings of the models, from small to large."""
    horizons: tuple[str, ...]
    """Lengths of the runs in units of Chinchilla. The first one is the standard length: learning
    rates and weight decays are tuned there."""
    lengths: tuple[str, ...]
    """Lengths for the studies of the horizon. The last one is four times the standard length."""
    decays: dict[str, tuple[float, ...]]
    """Weight decays of the baselines to choose from."""
    about: str
    lr: Mapping[str, float] = field(default_factory=dict)
    """Learning rates of the baselines that differ from the paper's. If they are tuned, the first
    grid has its middle there."""
    tuned: bool = True
    """Whether the learning rates of the baselines are tuned first."""
    seeds: int | None = None
    """Number of seeds in every row, instead of the study's own."""
    tuning_seeds: tuple[int, ...] = (100,)
    """Seeds on which settings are tuned and chosen. No number of a study comes from them."""

    def rate(self, base: str) -> float:
        """Return the learning rate of a baseline before it is tuned."""
        return self.lr.get(base, BASES[base].lr)


DECAYS = {"muon": (0.5, 1.0, 2.0), "adamw": (0.5, 0.25, 0.1, 0.0)}
LENGTHS = ("0.5x", "1x", "2x", "4x")

SCALES = {
    "paper": Scale(
        preset="gpt-124m",
        sizes=tuple(
            # The paper's steps for 124M are 21.6 tokens a parameter. If a job names its depth,
            # the paper's steps are not used, and every size has 20 tokens a parameter.
            (size, {"preset": f"gpt-{size}", "depth": 12})
            for size in ("64m", "124m", "200m", "300m", "420m", "700m", "1b")
        ),
        horizons=("1x", "4x"),
        lengths=LENGTHS,
        decays=DECAYS,
        about="124M parameters on FineWeb (64M to 1B in scaling figures), the paper's settings",
        tuned=False,
    ),
    "proxy": Scale(
        preset="proxy",
        sizes=tuple((f"width {w}", {"width": w}) for w in (128, 256, 384, 512)),
        horizons=("1x",),
        lengths=LENGTHS,
        decays=DECAYS,
        about="6.8M parameters, half a minute a run on one H200, with tuned baselines",
        lr={"adamw": 2**-9, "muon": 2**-10, "scion": 2**-11, "uscion": 2**-11},
    ),
    "nano": Scale(
        preset="nano",
        sizes=tuple((f"width {w}", {"width": w}) for w in (32, 64, 96, 128)),
        horizons=("0.03x",),
        lengths=("0.015x", "0.03x", "0.06x", "0.12x"),
        # A run has 14 times fewer steps than at scale proxy, so weight decay acts 14 times less.
        decays={"muon": (1.0, 2.0, 4.0, 8.0), "adamw": (4.0, 2.0, 1.0, 0.5, 0.0)},
        about="262k parameters on the embedded text, ten seconds a run on one CPU core",
        lr={
            "adamw": 2**-8,
            "muon": 2**-9,
            "scion": 2**-11,
            "uscion": 2**-11,
            "soda_dagger": 2**-11,
        },
        seeds=8,
        tuning_seeds=(100, 101, 102, 103),
    ),
}
