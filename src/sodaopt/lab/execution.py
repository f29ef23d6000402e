"""Execution settings: they change the speed of a run, and its results only by rounding."""

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.compiler.config

from .model import Shape
from .sinks import parse_sinks

NO_MEMORY = "the GPU has too little memory: use a smaller --micro-batch"


@dataclass(frozen=True)
class Execution:
    """Settings of the device, of speed, of saving and of logging."""

    device: str = "auto"
    """cpu, cuda, cuda:1, ... or auto, which is a GPU if there is one."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16 is autocast, the default on a GPU. Parameters are always fp32."""
    compile: bool | None = None
    """Use torch.compile on the model. The default on a GPU."""
    graphs: bool | None = None
    """Replay the compiled model as CUDA graphs, because small models wait for the CPU otherwise.
    The default on one GPU if a step is one forward pass."""
    parallel: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """How the processes of torchrun share the model: each has all of it (ddp), each has a shard
    (fsdp), or groups of processes have shards (hsdp)."""
    shards: int | None = None
    """Number of shards for hsdp. Default: the processes of a node."""
    micro_batch: int | None = None
    """Sequences per forward pass and device. Gradients are averaged over the passes."""
    threads: int | None = None
    """Number of CPU threads."""
    checkpoint_every: int | None = None
    """Steps between checkpoints. Default: about one minute."""
    log_every: int | None = None
    """Steps between checks of the loss, which synchronise the device. Default: 50 on a GPU, else
    10."""

    diagnostics: bool = True
    """Record norms, the pull and its share of the step, by role, at each check of the loss."""

    log: str = ""
    """Also send the numbers to tensorboard, wandb or trackio, or to several: wandb,trackio."""

    def __post_init__(self) -> None:
        parse_sinks(self.log)
        for name in ("shards", "micro_batch", "threads", "checkpoint_every", "log_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.device != "auto":
            self.target()

    def target(self) -> torch.device:
        """Return the device of this process."""
        if self.device == "auto":
            rank = int(os.environ.get("LOCAL_RANK", "0"))
            return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as e:
            raise ValueError(f"unknown device {self.device!r}: use cpu, cuda or cuda:1") from e
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device {self.device!r} is not supported: use cpu, cuda or cuda:1")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("torch finds no CUDA device: use --device cpu")
        if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
            raise ValueError(f"{self.device} does not exist: use cuda:0 to cuda:{count - 1}")
        return device

    def gpus(self) -> int:
        """Return the number of GPUs to choose from: all of them for auto, else none."""
        return torch.cuda.device_count() if self.device == "auto" else 0

    def placed(self, slot: int) -> "Execution":
        """Return the settings for the worker with number `slot`. Each worker gets its own GPU."""
        count = self.gpus()
        return replace(self, device=f"cuda:{slot % count}") if count > 1 else self

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        bf16 = device.type == "cuda" if self.precision == "auto" else self.precision == "bf16"
        return torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()

    def compiles(self, device: torch.device) -> bool:
        return device.type == "cuda" if self.compile is None else self.compile

    def replays(self, device: torch.device, passes: int, world: int) -> bool:
        """Whether the model runs as CUDA graphs.

        passes: the number of forward passes of a step on this device
        world: the number of processes
        """
        alone = device.type == "cuda" and passes == 1 and world == 1
        return alone if self.graphs is None else self.graphs

    def sequences(self, batch: int, shape: Shape, world: int, device: torch.device) -> int:
        """Return the number of sequences per forward pass. It divides the batch of this rank."""
        if batch % world:
            raise ValueError(
                f"batch is {batch}: use a multiple of {world}, the number of processes"
            )
        share = batch // world
        if self.micro_batch is not None:
            if share % self.micro_batch:
                raise ValueError(
                    f"micro_batch is {self.micro_batch}: it must divide {share}, the number of "
                    "sequences of a process"
                )
            return self.micro_batch
        tokens = 2**16 * 768 // max(shape.width, 384) if device.type == "cuda" else 2**14
        most = max(1, tokens // shape.context)
        return next(n for n in range(min(most, share), 0, -1) if share % n == 0)


def allow_recompilation() -> None:
    """Raise the number of compiled variants of one function that torch keeps.

    The trials of a sweep share compiled code, and each model shape and mode adds a variant. At the
    limit, torch silently stops compiling.
    """
    torch.compiler.config.recompile_limit = 64
