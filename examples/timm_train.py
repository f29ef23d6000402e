"""SODAWrapper with a model and a scheduler of timm, on images of stripes in two directions."""

import timm
import timm.scheduler
import torch
from torch.nn.functional import cross_entropy

from sodaopt import SODAWrapper, hidden, plan, schedules

STEPS, WARMUP = 80, 10

torch.manual_seed(0)
model = timm.create_model(
    "vit_tiny_patch16_224",
    img_size=32,
    patch_size=8,
    depth=2,
    embed_dim=64,
    num_heads=4,
    num_classes=2,
)
print(plan(model, "adamw"))

adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
opt = SODAWrapper(adamw, only=hidden(model), decay=schedules.coupled(), start=WARMUP)
schedule = timm.scheduler.CosineLRScheduler(
    opt, t_initial=STEPS, warmup_t=WARMUP, warmup_lr_init=1e-5, t_in_epochs=False
)

losses = []
for step in range(STEPS):
    label = torch.randint(2, (32,))
    stripes = torch.arange(32) // 4 % 2 * 2.0 - 1
    across = stripes.expand(32, 3, 32, 32)
    image = torch.where(label.view(-1, 1, 1, 1) == 1, across, across.mT)
    loss = cross_entropy(model(image + torch.randn(32, 3, 32, 32)), label)
    opt.zero_grad()
    loss.backward()
    opt.step()
    schedule.step_update(step + 1)
    losses.append(loss.item())
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
