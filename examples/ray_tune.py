"""A search with Ray Tune: the learning rate of SODA(AdamW), two trials at a time."""

import tempfile
from typing import Any

import torch
from ray import tune
from torch import nn

import sodaopt

STEPS = 60


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    y = x[:, :1] * x[:, 1:2]
    model = nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    opt = sodaopt.optimizer(model, "soda(adamw)", config["lr"])
    for _ in range(STEPS):
        loss = (model(x) - y).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    (row,) = [row for row in opt.diagnostics() if row["distance"] > 0]
    tune.report({"loss": loss.item(), "distance": row["distance"]})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            train,
            param_space={"lr": tune.grid_search([1e-5, 1e-3, 1e-2])},
            tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=2),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        )
        results = tuner.fit()
        best, losses = results.get_best_result(), [r.metrics["loss"] for r in results]
        print(f"best lr {best.config['lr']}, {best.metrics['distance']:.3f} from z0")
    print(f"loss {max(losses):.4f} -> {min(losses):.4f}")


if __name__ == "__main__":
    main()
