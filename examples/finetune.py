"""Finetuning with the anchor at the pretrained weights, which stay in their file on disk.

The pull keeps the model near the pretrained weights. The optimizer holds no copy of them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sodaopt import SODAWrapper, anchors, export, memory


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))


def fit(net: nn.Module, opt: torch.optim.Optimizer, slope: float, steps: int) -> float:
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
    y = torch.sin(x[:, :1]) + slope * x[:, 1:2]
    for _ in range(steps):
        loss = (net(x) - y).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


def main() -> None:
    file = Path(tempfile.mkdtemp()) / "pretrained.safetensors"
    net = model()
    print(f"pretraining: loss {fit(net, torch.optim.Adam(net.parameters(), 1e-2), 1.0, 200):.4f}")
    save_file(net.state_dict(), file)

    net = model()
    net.load_state_dict(load_file(file))
    base = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0)
    opt = SODAWrapper(base, anchor=anchors.FromFile(file, net))
    print(f"finetuning:  loss {fit(net, opt, 0.8, 200):.4f}")
    [row] = opt.diagnostics()
    print(f"distance from the pretrained weights {row['distance']:.3f}, pull now {row['lam']:.4f}")
    print(memory(net, opt))
    torch.save(export(net, opt), file.with_suffix(".pt"))


if __name__ == "__main__":
    main()
