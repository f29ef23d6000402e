"""SODAWrapper under Lightning: configure_optimizers with a scheduler, and a resumed fit."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sodaopt import SODAWrapper, hidden

try:
    import lightning as L
except ImportError:
    import pytorch_lightning as L

EPOCHS = 20


class Product(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, 1)
        self.losses: list[float] = []

    def training_step(self, pair: tuple[Tensor, Tensor], number: int) -> Tensor:
        x, y = pair
        loss = (self.head(self.net(x)) - y).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        opt = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0)
        opt = SODAWrapper(opt, only=hidden(self))
        schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.2, EPOCHS)
        return {"optimizer": opt, "lr_scheduler": schedule}


def fit(module: Product, epochs: int, **more: Any) -> L.Trainer:
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2]), batch_size=32)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=epochs, **quiet)
    trainer.fit(module, loader, **more)
    return trainer


if __name__ == "__main__":
    L.seed_everything(0)
    first, second = Product(), Product()
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "half.ckpt"
        fit(first, EPOCHS // 2).save_checkpoint(saved)
        fit(second, EPOCHS, ckpt_path=saved)
    n = len(first.losses) // (EPOCHS // 2)
    start, end = sum(first.losses[:n]) / n, sum(second.losses[-n:]) / n
    print(f"loss {start:.4f} -> {end:.4f}")
