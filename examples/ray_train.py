"""SODAWrapper under Ray Train: two workers, DDP, and a checkpoint to continue a failed run."""

import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from sodaopt import SODAWrapper, hidden

STEPS = 200


def work(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    model = prepare_model(net)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    opt = SODAWrapper(opt, only=hidden(model))
    first = 0
    if (found := ray.train.get_checkpoint()) is not None:
        with found.as_directory() as folder:
            saved = torch.load(Path(folder) / "saved.pt", weights_only=True)
        net.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        first = saved["step"]
    rank = ray.train.get_context().get_world_rank()
    for step in range(first, STEPS):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = (model(x) - x[:, :1] * x[:, 1:2]).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0 or step == STEPS - 1:
            with tempfile.TemporaryDirectory() as folder:
                kept = {"model": net.state_dict(), "opt": opt.state_dict(), "step": step + 1}
                torch.save(kept, Path(folder) / "saved.pt")
                checkpoint = Checkpoint.from_directory(folder) if rank == 0 else None
                ray.train.report({"step": step, "loss": loss.item()}, checkpoint=checkpoint)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = TorchTrainer(
            work,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        losses = result.metrics_dataframe["loss"].tolist()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
