"""Train with the polar factors of the kernels and with factors in float64, and compare the losses.

    python -m benchmarks.precision [--seeds 3] [--steps 600] [--out FILE]

The model is the preset proxy on the package's own text. The runs called "float64" step with plain
torch operations, and multiply in float64 in the plain form of the iteration. For each seed, both
kinds of run have the same initial weights and batches, so their difference shows the effect of
rounding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.records import RESULTS, where
from sodaopt import cli
from sodaopt.backends.products import dense
from sodaopt.lab import records

OUT = RESULTS / "precision-h200.json"


@contextmanager
def in_float64() -> Iterator[None]:
    """Step with plain operations, with products in float64."""
    with (
        patch("sodaopt.core.optimizer.runs_kernels", lambda p: False),
        patch("sodaopt.geometry.polar.choice", lambda X: ("plain", dense)),
        patch("sodaopt.geometry.polar.Newton.dtype_on", lambda *_: torch.float64),
    ):
        yield


def losses(optimizer: str, seed: int, args: argparse.Namespace) -> list[float]:
    """Return the validation losses of one run. The last one is that of the final weights."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "--preset", args.preset, "--data", "embedded", "--optimizer", optimizer]
        words += ["--steps", str(args.steps), "--eval-every", str(args.steps // 4)]
        if cli.main([*words, "--seed", str(seed), "--out", folder]):
            raise RuntimeError(f"the run of {optimizer} with seed {seed} failed")
        return [v["loss"] for v in records.read(Path(folder)).of("val")]


def measured(optimizer: str, args: argparse.Namespace) -> dict[str, Any]:
    kernels, float64 = [], []
    for seed in range(args.seeds):
        kernels.append(losses(optimizer, seed, args))
        with in_float64():
            float64.append(losses(optimizer, seed, args))
    gaps = [a[-1] - b[-1] for a, b in zip(kernels, float64, strict=True)]
    return {
        "optimizer": optimizer, "kernels": kernels, "float64": float64,
        "mean_difference": statistics.fmean(gaps),
        "largest_difference": max(map(abs, gaps)),
        "spread_of_seeds": statistics.stdev(run[-1] for run in float64),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("optimizers", nargs="*", default=["muon"])
    parser.add_argument("--preset", default="proxy")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    rows = [measured(optimizer, args) for optimizer in args.optimizers]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = where(device) | {"preset": args.preset, "steps": args.steps, "rows": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
