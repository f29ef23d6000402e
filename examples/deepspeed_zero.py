"""SODAWrapper under DeepSpeed ZeRO-2, which flattens the parameters and splits them over the ranks.

    torchrun --standalone --nproc-per-node 2 examples/deepspeed_zero.py

z0 is captured at the first step, so it is flattened and split too. A flat parameter does not show
its layers, so all layers are pulled. Base optimizers that need whole matrices (Muon) do not work
with ZeRO 1 and 2, with or without the wrapper.
"""

import shutil
import tempfile
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from sodaopt import SODAWrapper

STEPS = 200
CONFIG = {
    "train_micro_batch_size_per_gpu": 64,
    "zero_allow_untested_optimizer": True,  # DeepSpeed requires this
    "zero_optimization": {"stage": 2},
}


def build() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    opt = SODAWrapper(torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0))
    return deepspeed.initialize(model=model, optimizer=opt, config=CONFIG)[0]


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        rng = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(64, 8, generator=rng).to(engine.device)
        loss = (engine(x) - x[:, :1] * x[:, 1:2]).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    deepspeed.init_distributed()
    engine = build()
    first = train(engine, range(STEPS // 2))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    engine.save_checkpoint(folder[0])

    engine = build()
    engine.load_checkpoint(folder[0])
    second = train(engine, range(STEPS // 2, STEPS))
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
        print(f"loss {first[0]:.4f} -> {second[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
