"""A plain training loop, in which SODAWrapper is one more line."""

import torch
from torch import nn

from sodaopt import SODAWrapper, hidden

STEPS = 300

torch.manual_seed(0)
x = torch.randn(512, 8)
y = x[:, :1] * x[:, 1:2]
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
opt = SODAWrapper(opt, only=hidden(model))  # the added line: it pulls hidden layers toward z0

losses = []
for step in range(STEPS):
    at = torch.randint(len(x), (128,))
    loss = (model(x[at]) - y[at]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
    if step % 50 == 0:
        (row,) = opt.diagnostics()  # one row, because there is one group
        print(f"step {step:4d}  loss {loss.item():.4f}  ||x - z0|| {row['distance']:.3f}")
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
