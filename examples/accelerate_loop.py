"""SODAWrapper under accelerate: gradient accumulation, a scheduler and a saved state."""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sodaopt import SODAWrapper, hidden

EPOCHS = 30

set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
x = torch.randn(512, 8)
loader = DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2]), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
opt = SODAWrapper(opt, only=hidden(model))
schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.2, EPOCHS * len(loader) // 2)
model, opt, schedule, loader = accelerator.prepare(model, opt, schedule, loader)

losses = []
with tempfile.TemporaryDirectory() as folder:
    for _ in range(EPOCHS):
        total = 0.0
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                opt.step()
                schedule.step()
                opt.zero_grad()
            total += loss.item()
        losses.append(total / len(loader))
        accelerator.save_state(folder)  # weights, z0 and k, to continue exactly
    accelerator.load_state(folder)
accelerator.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
