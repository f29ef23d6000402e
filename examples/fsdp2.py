"""Muon with FSDP2: ranks share the polar factors, and checkpoints can be resharded.

torchrun --standalone --nproc-per-node 2 examples/fsdp2.py
"""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from sodaopt import SODA, param_groups

STEPS = 200


def build() -> tuple[nn.Module, SODA]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model, SODA(param_groups(model, "soda(muon)"), lr=5e-3)  # the only change


def train(model: nn.Module, opt: SODA, steps: range) -> list[float]:
    losses = []
    for step in steps:  # each rank has data of its own
        rng = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(64, 8, generator=rng)
        loss = (model(x) - x[:, :1] * x[:, 1:2]).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model, opt = build()
    first = train(model, opt, range(STEPS // 2))

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    weights, states = get_state_dict(model, opt)
    dcp.save({"model": weights, "opt": states}, checkpoint_id=folder[0])

    model, opt = build()  # another number of ranks could load it too
    weights, states = get_state_dict(model, opt)
    dcp.load({"model": weights, "opt": states}, checkpoint_id=folder[0])
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=states)
    second = train(model, opt, range(STEPS // 2, STEPS))
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
        print(f"loss {first[0]:.4f} -> {second[-1]:.4f}")
    # All ranks end together. After dist.barrier() a thread of gloo may still hold its tensor, which
    # aborts the process if Python ends first.
    dist.monitored_barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
