"""SODAWrapper around an AdamW whose moments have 8 bits, from torchao."""

import torch
from torch import nn
from torchao.optim import AdamW8bit

from sodaopt import SODAWrapper, hidden, memory

STEPS = 60

torch.manual_seed(0)
x = torch.randn(512, 8)
y = x[:, :1] * x[:, 1:2]
model = nn.Sequential(
    nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)
)

adamw = AdamW8bit(model.parameters(), lr=3e-3, weight_decay=0)
opt = SODAWrapper(adamw, only=hidden(model), anchor="bf16")  # z0 in 16 bits

losses = []
for _ in range(STEPS):
    loss = (model(x) - y).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print(memory(model, opt))
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
