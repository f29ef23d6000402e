"""SODA in torchtitan: a container of optimizers, with FSDP2 and a checkpoint that can be resharded.

    pip install torchtitan
    torchrun --standalone --nproc-per-node 2 examples/torchtitan_container.py

In torchtitan's own trainer, set the optimizer of a model's config to `SODAContainer.Config()`.
"""

import shutil
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import OptimizersContainer

from sodaopt import SODA, param_groups

STEPS = 200


class SODAContainer(OptimizersContainer):
    """One SODA for each part of the model. The layer plan replaces torchtitan's patterns."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        recipe: str = "soda(muon)"
        lr: float = 5e-3

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self.model_parts = model_parts
        self.optimizers = [SODA(param_groups(p, config.recipe), config.lr) for p in model_parts]
        groups = [group for opt in self.optimizers for group in opt.param_groups]
        params = [p for group in groups for p in group["params"]]
        self._validate_params(params)
        self._post_init(params)


def build() -> tuple[nn.Module, SODAContainer]:
    torch.manual_seed(0)
    layers = nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    model = nn.Sequential(*layers)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model, SODAContainer.Config().build(model_parts=[model])


def train(model: nn.Module, opt: SODAContainer, steps: range) -> list[float]:
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
    dcp.save({"model": model.state_dict(), "opt": opt.state_dict()}, checkpoint_id=folder[0])

    model, opt = build()  # another number of ranks could load it too
    saved = {"model": model.state_dict(), "opt": opt.state_dict()}
    dcp.load(saved, checkpoint_id=folder[0])
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    second = train(model, opt, range(STEPS // 2, STEPS))
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
        print(f"loss {first[0]:.4f} -> {second[-1]:.4f}")
    dist.monitored_barrier()  # all ranks end together, see fsdp2.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
