"""The training loop: update, look at the loss, validate, save; and how a run goes on after a stop.

Step numbers count updates done: the loss of step k is taken at the weights after k updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from . import checkpoint
from .checkpoint import Damaged, SaveError
from .clock import Stopwatch
from .data import Dataset, Loader, val_batches
from .environment import environment, git, peak
from .execution import Execution, World
from .job import Plan
from .model import GPT
from .optimizers import averaged, build, state_bytes
from .progress import Progress
from .records import DIVERGED, FINISHED, FORMAT, STOPPED, Writer
from .sample import PROMPTS, generate

MINUTE = 60.0
DIVERGENCE = 2.0
"""Nats that the smoothed loss may rise above its lowest value before a run is given up."""


class Diverged(RuntimeError):
    """The loss is not a number any more, or far above where it was."""


class Training:
    """A run under way."""

    def __init__(
        self,
        plan: Plan,
        data: Dataset,
        folder: Path,
        execution: Execution,
        device: torch.device,
        among: World,
        progress: Progress,
        stopped: Callable[[], bool],
    ) -> None:
        self.plan, self.data, self.folder, self.execution = plan, data, folder, execution
        self.device, self.among, self.progress, self.stopped = device, among, progress, stopped
        self.checkpoints = folder / checkpoint.FOLDER
        self.step, self.smooth, self.lowest = 0, math.nan, math.inf
        self.val: float | None = None
        self.pending: list[Tensor] = []
        self.sequences = execution.sequences(plan.batch, plan.shape, among.size, device)
        self.passes = plan.batch // among.size // self.sequences
        self.watch = Stopwatch(device)
        self.model = self._model()
        self.call = self._callable()
        self.optimizer = build(plan.name, self.model, plan.settings)
        # a plain function: of anything else the schedule would put the attributes into its state
        factor = lambda k: plan.lr_factor(k)  # noqa: E731
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.loader = Loader(
            data.train, plan.batch, plan.shape.context, seed=plan.job.seed, rank=among.rank,
            world=among.size, device=device,
        )  # fmt: skip
        self.writer = Writer(folder) if among.first else None
        self.log_every = execution.log_every or (50 if device.type == "cuda" else 10)

    def _model(self) -> GPT:
        """The same initial weights on every device and rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.plan.job.seed)
            return GPT(self.plan.shape).to(self.device)

    def _callable(self) -> nn.Module:
        call: nn.Module = self.model
        if self.among.size > 1:
            ids = [self.device.index] if self.device.type == "cuda" else None
            call = DistributedDataParallel(call, device_ids=ids)
        if self.execution.compiles(self.device):
            # rows of a sweep share compiled code: each shape of model and mode adds an entry
            torch._dynamo.config.recompile_limit = 64
            replay = self.execution.replays(self.device, self.passes, self.among.size)
            mode = "reduce-overhead" if replay else None
            call = torch.compile(call, dynamic=False, mode=mode)  # type: ignore[assignment]
        return call

    # -- the loop -----------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._resume()
            self._head()
            self.watch.start()
            self._end(*self._loop())
        finally:
            self.progress.close()
            if self.writer:
                self.writer.close()

    def _loop(self) -> tuple[str, str]:
        """How the run ended, and why."""
        try:
            while self.step < self.plan.steps:
                if self.step % self.plan.eval_every == 0:
                    self._validate()
                self._update()
                look = self.step % self.log_every == 0
                if look:
                    self._look()
                if self._asked_to_stop(look):
                    self._save()
                    return STOPPED, f"stopped after step {self.step}: run it again to go on"
                if self._due(look):
                    self._save()
            self._validate()
        except Diverged as e:
            return DIVERGED, str(e)
        return FINISHED, ""

    def _update(self) -> None:
        """One step of the optimizer. The host runs ahead of the device, by two batches at most."""
        epochs = max(1, self.loader.started_epochs)
        batch: Any = self.loader.next()  # torch's split has no types
        if self.loader.started_epochs > epochs:
            self._epoch(self.loader.started_epochs)
        self._mark()
        parts = [t.split(self.sequences) for t in batch]
        loss = torch.zeros((), device=self.device)
        for j, (x, y) in enumerate(zip(*parts, strict=True)):
            with self._alone(j < self.passes - 1):
                with self.execution.autocast(self.device):
                    part = self.call(x, y) / self.passes
                part.backward()
            loss += part.detach()
        with self.watch.part():
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.pending.append(loss)
        self.step += 1

    def _mark(self) -> None:
        """What the last replay left may be overwritten. (Seconds of imports: not for all.)"""
        if self.execution.compiles(self.device):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def _alone(self, alone: bool) -> AbstractContextManager[Any]:
        """Gradients travel between ranks with the last pass only."""
        call: Any = getattr(self.call, "_orig_mod", self.call)
        ddp = isinstance(call, DistributedDataParallel)
        return call.no_sync() if alone and ddp else nullcontext()

    def _look(self) -> None:
        """Wait for the device, write down the losses since the last look, and judge them."""
        if not self.pending:
            return
        losses = self.among.mean(torch.stack(self.pending)).tolist()
        first = self.step - len(losses)
        self.pending.clear()
        each = self.watch.lap(len(losses)) / len(losses)
        speed, now = self.plan.tokens_per_step / each, self.watch.total()
        for k, loss in enumerate(losses, first):
            seconds = now - (self.step - 1 - k) * each
            self._write(
                "step", k, seconds, loss=loss, lr=self._lr(k), tokens_per_second=round(speed)
            )
            self._judge(k, loss)
        self._progress(speed)

    def _lr(self, k: int) -> float:
        return self.plan.settings.lr * self.plan.lr_factor(k)

    def _judge(self, k: int, loss: float) -> None:
        keep = 0.0 if math.isnan(self.smooth) else 0.9
        self.smooth = loss if keep == 0 else keep * self.smooth + (1 - keep) * loss
        self.lowest = min(self.lowest, self.smooth)
        if math.isfinite(loss) and self.smooth < self.lowest + DIVERGENCE:
            return
        if math.isfinite(loss):
            what = f"the loss has risen from {self.lowest:.2f} to {self.smooth:.2f}"
        else:
            what = f"the loss is {loss}"
        raise self._diverged(what, k)

    def _diverged(self, what: str, k: int) -> Diverged:
        """A checkpoint is good if the loss at its weights was."""
        good = [p for p in checkpoint.found(self.checkpoints) if checkpoint.step(p) < k]
        kept = f"the last good checkpoint is {good[-1]}" if good else "there is no good checkpoint"
        lr = self._lr(min(k, self.plan.steps - 1))
        return Diverged(f"diverged: {what} at step {k}, lr {lr:.3g}; {kept}")

    @torch.no_grad()
    def _validate(self) -> None:
        self._look()
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        batches = val_batches(
            self.data.val, self.sequences, self.plan.shape.context, self.plan.eval_tokens or None,
            self.among.rank, self.among.size, self.device,
        )  # fmt: skip
        with averaged(self.optimizer):
            for x, y in batches:
                self._mark()
                with self.execution.autocast(self.device):
                    total[0] += self.call(x, y).double() * x.numel()
                total[1] += x.numel()
        sums: list[float] = self.among.mean(total).tolist()
        self.val = loss = sums[0] / sums[1]
        self._write("val", self.step, loss=loss)
        self.watch.skip()
        if not math.isfinite(loss):
            raise self._diverged(f"the validation loss is {loss}", self.step)

    def _epoch(self, epoch: int) -> None:
        self._write("epoch", self.step, epoch=epoch)
        self.progress.say(
            f"step {self.step}: epoch {epoch} begins: tokens are seen again from here"
        )

    # -- records ------------------------------------------------------------------------------

    def _write(self, kind: str, step: int, seconds: float | None = None, **values: Any) -> None:
        if self.writer:
            tokens = step * self.plan.tokens_per_step
            at = round(self.watch.total() if seconds is None else seconds, 4)
            self.writer.write(kind, step=step, tokens=tokens, seconds=at, **values)

    def _note(self, text: str) -> None:
        """Say it, and write it down for those who do not listen, such as a sweep."""
        self._write("note", self.step, text=text)
        self.progress.say(text)

    def _head(self) -> None:
        if not self.writer:
            return
        self.writer.write(
            "run",
            format=FORMAT,
            name=self.folder.name,
            job=self.plan.record(),
            model={"parameters": self.plan.shape.parameters, "tokens": self.plan.tokens},
            data={"name": self.data.name, "vocab": self.data.vocab,
                  "train_tokens": self.data.train_tokens, "val_tokens": self.data.val_tokens,
                  "fingerprint": self.loader.windows.fingerprint()},
            environment=environment(self.device) | {"micro_batch": self.sequences},
            git=git(),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            resumed=self.step,
        )  # fmt: skip

    def _progress(self, speed: float) -> None:
        left = (self.plan.steps - self.step) * self.plan.tokens_per_step / speed
        record = {
            "step": self.step,
            "loss": self.smooth,
            "val": self.val,
            "lr": self._lr(self.step - 1),
        }
        record |= {"tokens_per_second": speed, "eta": left, "mfu": self._mfu(speed)}
        self.progress.step(record)

    def _mfu(self, speed: float) -> float | None:
        most = peak(self.device)
        flops = self.plan.shape.flops_per_token
        return speed * flops / (most * self.among.size) if most else None

    def _end(self, status: str, why: str) -> None:
        if status == FINISHED and not self._finish():
            status, why = STOPPED, "nothing of the run is saved: make room and run it again"
        values: dict[str, Any] = {"status": status, "epochs": round(self.loader.epoch, 4)}
        if why:
            self.progress.say(why)
            values["reason"] = why
        if status == FINISHED:
            values["val_loss"] = self.val
        if each := self.watch.step_seconds():
            values["tokens_per_second"] = speed = self.plan.tokens_per_step / each
            values["mfu"] = self._mfu(speed)
        values["optimizer_ms"] = self.watch.part_ms()
        values["state_bytes"] = state_bytes(self.optimizer)
        values["peak_memory"] = peak_memory(self.device)
        self._write("end", self.step, **values)
        if status == FINISHED and self.among.first:  # killed before this line, it needs them
            checkpoint.clear(self.folder)

    def _finish(self) -> bool:
        """The trained weights and a sample of what they write; whether anything is saved."""
        if not self.writer:
            return True
        saved = True
        with averaged(self.optimizer):
            try:
                checkpoint.write(self.folder / checkpoint.WEIGHTS, self.model.state_dict())
            except SaveError as e:
                saved = bool(checkpoint.found(self.checkpoints))
                self._note(f"{e}{': the last checkpoint stays' if saved else ''}")
            tokenizer = self.data.tokenizer()
            for prompt in PROMPTS:
                text = generate(self.model, tokenizer, prompt, tokens=80, seed=0)
                self._write("sample", self.step, prompt=prompt, text=text)
        return saved

    # -- stop and go on -----------------------------------------------------------------------

    def _asked_to_stop(self, look: bool) -> bool:
        """Ranks must agree, which takes a message: they do so at each look only."""
        if self.among.size == 1:
            return self.stopped()
        return look and self.among.any(self.stopped(), self.device)

    def _due(self, look: bool) -> bool:
        """Whether to save now."""
        if self.execution.checkpoint_every:
            return self.step % self.execution.checkpoint_every == 0
        return look and self.among.any(self.watch.since_save() > MINUTE, self.device)

    def _save(self) -> None:
        self._look()
        if self.among.first:
            try:
                checkpoint.save(self.checkpoints, self.step, self._state())
            except SaveError as e:
                kept = checkpoint.found(self.checkpoints)
                before = f"{kept[-1].name} is kept" if kept else "there is none before it"
                self._note(f"step {self.step}: {e}; {before}")
        self.among.wait()
        self.watch.saved()

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "loader": self.loader.state_dict(),
            "rng": torch.get_rng_state(),
            "smooth": self.smooth,
            "lowest": self.lowest,
            "val": self.val,
            "watch": self.watch.state(),
        }

    def _resume(self) -> None:
        """From the newest checkpoint, if there is one."""
        if self.among.first:
            checkpoint.tidy(self.folder, self.checkpoints)
        kept = checkpoint.found(self.checkpoints)
        if not kept:
            return
        path, state = self._newest(kept)
        self.step, self.val = state["step"], state["val"]
        self.smooth, self.lowest = state["smooth"], state["lowest"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["rng"])
        self.watch.load(state["watch"])
        self.progress.say(f"going on from step {self.step} ({path})")

    def _newest(self, kept: list[Path]) -> tuple[Path, dict[str, Any]]:
        """The newest checkpoint that every rank can read; those after it are put aside."""
        best = checkpoint.newest(kept, self.progress.say)
        agreed = self.among.least(checkpoint.step(best[0]) if best else -1, self.device)
        if best is None or agreed < 0:
            raise Damaged(
                f"all checkpoints in {self.checkpoints} are damaged: remove it to begin anew"
            )
        path, state = best
        if checkpoint.step(path) != agreed:  # another rank cannot read this one
            path = next(p for p in kept if checkpoint.step(p) == agreed)
            state = checkpoint.load(path)
        if self.among.first:
            for later in kept[kept.index(path) + 1 :]:
                later.rename(later.with_suffix(".damaged"))
        return path, state


def peak_memory(device: torch.device) -> int:
    """Bytes: of the device, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
