"""How a job is run: what changes its speed and not, but for rounding, its numbers."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist

from .model import Shape

NO_MEMORY = "the GPU has too little memory: use a smaller --micro-batch"


@dataclass(frozen=True)
class Execution:
    """Device, precision and saving."""

    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto is a GPU if there is one."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16 autocast, on a GPU the default; parameters are fp32 in any case."""
    compile: bool | None = None
    """torch.compile the model; on a GPU the default."""
    graphs: bool | None = None
    """Replay the compiled model as CUDA graphs: small models wait for the CPU otherwise. The
    default where one pass makes a step on one GPU."""
    micro_batch: int | None = None
    """Sequences in one forward pass on one device; gradients are averaged over the passes."""
    threads: int | None = None
    """CPU threads."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; about a minute apart if not given."""
    log_every: int | None = None
    """Steps between looks at the loss, each of which waits for the device; 50 on a GPU, else 10."""

    def __post_init__(self) -> None:
        for name in ("micro_batch", "threads", "checkpoint_every", "log_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.device != "auto":
            self.target()

    def target(self) -> torch.device:
        """The device of this process."""
        if self.device == "auto":
            rank = int(os.environ.get("LOCAL_RANK", "0"))
            return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as e:
            raise ValueError(f"no such device: {self.device!r}; use cpu, cuda or cuda:1") from e
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device {self.device!r} is not supported: use cpu, cuda or cuda:1")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("this torch finds no CUDA device: use --device cpu")
        if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
            raise ValueError(f"there is no {self.device}: use cuda:0 to cuda:{count - 1}")
        return device

    def gpus(self) -> int:
        """How many this may choose from."""
        return torch.cuda.device_count() if self.device == "auto" else 0

    def placed(self, slot: int) -> Execution:
        """For one of several workers: where there are several GPUs, each takes its own."""
        count = self.gpus()
        return replace(self, device=f"cuda:{slot % count}") if count > 1 else self

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        bf16 = device.type == "cuda" if self.precision == "auto" else self.precision == "bf16"
        return torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()

    def compiles(self, device: torch.device) -> bool:
        return device.type == "cuda" if self.compile is None else self.compile

    def replays(self, device: torch.device, passes: int, world: int) -> bool:
        alone = device.type == "cuda" and passes == 1 and world == 1
        return alone if self.graphs is None else self.graphs

    def sequences(self, batch: int, shape: Shape, world: int, device: torch.device) -> int:
        """Sequences of one forward pass: they divide this rank's part of the batch."""
        if batch % world:
            raise ValueError(f"{world} processes cannot share a batch of {batch} sequences evenly")
        share = batch // world
        if self.micro_batch is not None:
            if share % self.micro_batch:
                raise ValueError(
                    f"micro_batch {self.micro_batch} does not divide {share} sequences"
                )
            return self.micro_batch
        tokens = 2**16 * 768 // max(shape.width, 384) if device.type == "cuda" else 2**14
        most = max(1, tokens // shape.context)
        return next(n for n in range(min(most, share), 0, -1) if share % n == 0)


@dataclass(frozen=True)
class World:
    """This process among those that train together (torchrun starts them)."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            dist.all_reduce(value)
            value /= self.size
        return value

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether any process says so: all must stop together."""
        if self.size == 1:
            return flag
        seen = torch.tensor(float(flag), device=device)
        dist.all_reduce(seen)
        return bool(seen)

    def least(self, value: int, device: torch.device) -> int:
        """The smallest of what the processes say."""
        if self.size == 1:
            return value
        seen = torch.tensor(value, device=device)
        dist.all_reduce(seen, dist.ReduceOp.MIN)
        return int(seen)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def world(device: torch.device) -> World:
    """Join the other processes, if torchrun started several."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return World(dist.get_rank(), size)
