"""The training loop: update, check the loss, validate, save, and resume after a stop.

Step numbers count completed updates: the loss of step k is taken at the weights after k updates.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import checkpoint, parallel, sharded
from .checkpoint import WRONG_CONTENT, Damaged, SaveError, first_line
from .clock import Stopwatch
from .data import Dataset, Loader, val_batches
from .diagnostics import RoleDiagnostics
from .divergence import Diverged, LossMonitor
from .environment import peak_memory
from .execution import Execution, allow_recompilation
from .identity import check_checkpoint, identity
from .job import ResolvedJob
from .model import GPT
from .optimizers import averaged, build, state_bytes
from .parallel import World
from .presets import preset
from .progress import Progress
from .records import DIVERGED, FINISHED, STOPPED
from .runlog import RunLog
from .sample import PROMPTS, SAMPLE_TOKENS, generate

MINUTE = 60.0


class Training:
    """One run, from its start or its last checkpoint to its end or a stop.

    stopped: called after each step. If it returns True, the run is saved and stops there.
    """

    def __init__(
        self,
        resolved: ResolvedJob,
        data: Dataset,
        folder: Path,
        execution: Execution,
        device: torch.device,
        ranks: World,
        progress: Progress,
        stopped: Callable[[], bool],
    ) -> None:
        self.resolved, self.data, self.folder, self.execution = resolved, data, folder, execution
        self.device, self.ranks, self.stopped = device, ranks, stopped
        self.checkpoints = folder / checkpoint.FOLDER
        self.step = 0
        self.val: float | None = None
        self.monitor = LossMonitor()
        self.pending: list[Tensor] = []
        """Losses since the last check, on the device."""
        self.sequences = execution.sequences(resolved.batch, resolved.shape, ranks.size, device)
        self.passes = resolved.batch // ranks.size // self.sequences
        self.watch = Stopwatch(device)
        self.model = self._initial_model()
        self.module = parallel.parallelize(self.model, execution, ranks, device)
        self.call = self._compiled(self.module)
        group = parallel.process_group(self.module)
        self.optimizer = build(resolved.name, self.model, resolved.settings, group)
        # LambdaLR saves the attributes of a callable object in its state, but not of a function.
        factor = lambda k: resolved.lr_factor(k)  # noqa: E731
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.loader = Loader(
            data.train, resolved.batch, resolved.shape.context, seed=resolved.job.seed,
            rank=ranks.rank, world=ranks.size, device=device,
            shuffled=preset(resolved.job.preset).shuffled,
        )  # fmt: skip
        self.log = RunLog(folder, resolved, device, ranks, self.watch, progress, execution.log)
        self.log_every = execution.log_every or (50 if device.type == "cuda" else 10)
        self.roles = RoleDiagnostics(self.model, self.optimizer) if execution.diagnostics else None

    def _initial_model(self) -> GPT:
        """Return the model with the same initial weights on every device and rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.resolved.job.seed)
            return GPT(self.resolved.shape).to(self.device)

    def _compiled(self, model: nn.Module) -> nn.Module:
        if not self.execution.compiles(self.device):
            return model
        allow_recompilation()
        replay = self.execution.replays(self.device, self.passes, self.ranks.size)
        mode = "reduce-overhead" if replay else None
        return torch.compile(model, dynamic=False, mode=mode)  # type: ignore[return-value]

    # -- the loop -----------------------------------------------------------------------------

    def run(self) -> None:
        try:
            fingerprint = self.loader.windows.fingerprint()
            self.identity = identity(self.resolved, fingerprint)
            self._resume()
            self.log.write_head(self.data, fingerprint, self.sequences, self.step)
            self.watch.start()
            self._end(*self._loop())
        finally:
            self.log.close()

    def _loop(self) -> tuple[str, str]:
        """Train. Return the status of the run and its reason."""
        try:
            while self.step < self.resolved.steps:
                if self.resolved.validates(self.step):
                    self._validate()
                self._update()
                check = self.step % self.log_every == 0
                if check:
                    self._check_losses()
                if self._stop_requested(check):
                    self._save()
                    return STOPPED, f"stopped after step {self.step}: run it again to continue"
                if self._checkpoint_due(check):
                    self._save()
            self._validate()
        except Diverged as e:
            return DIVERGED, str(e)
        return FINISHED, ""

    def _update(self) -> None:
        """Do one optimizer step. The host runs ahead of the device by two batches at most."""
        epochs = max(1, self.loader.started_epochs)
        batch: Any = self.loader.next()  # torch's split has no types
        if self.loader.started_epochs > epochs:
            self._record_epoch(self.loader.started_epochs)
        self._release_replay_memory()
        parts = [t.split(self.sequences) for t in batch]
        loss = torch.zeros((), device=self.device)
        for j, (x, y) in enumerate(zip(*parts, strict=True)):
            with parallel.accumulating(self.module, last=j == self.passes - 1):
                with self.execution.autocast(self.device):
                    part = self.call(x, y) / self.passes
                part.backward()
            loss += part.detach()
        if self.roles:
            self.roles.arm((self.step + 1) % self.log_every == 0)
        with self.watch.optimizer_step():
            self.optimizer.step()
        if self.roles:
            self.roles.collect()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.pending.append(loss)
        self.step += 1

    def _release_replay_memory(self) -> None:
        """Allow CUDA graphs to overwrite the outputs of their last replay.

        Only for compiled models, because the call imports the compiler, which takes seconds.
        """
        if self.execution.compiles(self.device):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def _check_losses(self) -> None:
        """Wait for the device, then record and check the losses since the last check."""
        if not self.pending:
            return
        means, sums = self.ranks.mean(torch.stack(self.pending)), torch.empty(0)
        if self.roles:
            sums = self.roles.sums()
        values = torch.cat([means, sums.to(self.device)]).tolist()  # one wait for the device
        losses = values[: len(self.pending)]
        first = self.step - len(losses)
        self.pending.clear()
        each = self.watch.lap(len(losses)) / len(losses)
        speed, now = self.resolved.tokens_per_step / each, self.watch.total()
        for k, loss in enumerate(losses, first):
            seconds, lr = now - (self.step - 1 - k) * each, self.resolved.lr(k)
            self.log.write("step", k, seconds, loss=loss, lr=lr, tokens_per_second=round(speed))
            if problem := self.monitor.add(loss):
                raise self._diverged(problem, k)
        if self.roles and (rows := self.roles.rows(values[len(losses) :])):
            self.log.write("diagnostics", self.step, roles=rows)
        self.log.show_step(self.step, self.monitor.smooth, self.val, speed)

    def _diverged(self, problem: str, k: int) -> Diverged:
        """Return an error that names the last good checkpoint, which is from before step k."""
        good = [p for p in checkpoint.found(self.checkpoints) if checkpoint.step(p) < k]
        kept = f"the last good checkpoint is {good[-1]}" if good else "there is no good checkpoint"
        lr = self.resolved.lr(min(k, self.resolved.steps - 1))
        return Diverged(f"diverged: {problem} at step {k}, lr {lr:.3g}; {kept}")

    @torch.no_grad()
    def _validate(self) -> None:
        self._check_losses()
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        batches = val_batches(
            self.data.val, self.sequences, self.resolved.shape.context,
            self.resolved.eval_tokens or None, self.ranks.rank, self.ranks.size, self.device,
        )  # fmt: skip
        with averaged(self.optimizer):
            for x, y, count in batches:
                self._release_replay_memory()
                with self.execution.autocast(self.device):
                    total[0] += self.call(x, y).double() * count
                total[1] += count
        parallel.forget_gathered(self.module)
        sums: list[float] = self.ranks.mean(total).tolist()
        self.val = loss = sums[0] / sums[1]
        self.log.write("val", self.step, loss=loss)
        self.watch.skip()
        if not math.isfinite(loss):
            raise self._diverged(f"the validation loss is {loss}", self.step)

    def _record_epoch(self, epoch: int) -> None:
        self.log.write("epoch", self.step, epoch=epoch)
        self.log.say(f"step {self.step}: epoch {epoch} begins, so training data repeats from here")

    # -- the end ------------------------------------------------------------------------------

    def _end(self, status: str, reason: str) -> None:
        if status == FINISHED and not self._save_weights():
            status, reason = STOPPED, f"{self._last_saved()}: free disk space and run it again"
        values: dict[str, Any] = {"status": status, "epochs": round(self.loader.epoch, 4)}
        if reason:
            self.log.say(reason)
            values["reason"] = reason
        if status == FINISHED:
            values["val_loss"] = self.val
        if each := self.watch.step_seconds():
            values["tokens_per_second"] = speed = self.resolved.tokens_per_step / each
            values["mfu"] = self.log.mfu(speed)
        values["optimizer_ms"] = self.watch.optimizer_ms()
        values["state_bytes"] = state_bytes(self.optimizer)
        values["peak_memory"] = peak_memory(self.device)
        self.log.write("end", self.step, **values)
        # After the record, because a run that is killed in between needs its checkpoints.
        if status == FINISHED and self.ranks.first:
            checkpoint.clear(self.folder)

    def _save_weights(self) -> bool:
        """Save the weights and record samples. Return whether the last step is saved."""
        with averaged(self.optimizer):
            weights = parallel.whole_weights(self.model)
            if not self.ranks.first:
                return True
            saved = True
            try:
                checkpoint.write(self.folder / checkpoint.WEIGHTS, weights)
            except SaveError as e:
                saved = self._last_step_exists(weights)
                self.log.note(self.step, f"{e}{': the last step is saved' if saved else ''}")
            model, tokenizer = parallel.whole_model(self.model, weights), self.data.tokenizer()
            for prompt in PROMPTS:
                text = generate(model, tokenizer, prompt, tokens=SAMPLE_TOKENS, seed=0)
                self.log.write("sample", self.step, prompt=prompt, text=text)
        return saved

    def _last_step_exists(self, weights: dict[str, Any]) -> bool:
        """Return whether existing files contain the model of the last step.

        Weights of another state are removed, because `sample` would use them.
        """
        path = self.folder / checkpoint.WEIGHTS
        if checkpoint.contains(path, weights):
            return True
        path.unlink(missing_ok=True)
        return any(checkpoint.step(p) == self.step for p in checkpoint.found(self.checkpoints))

    def _last_saved(self) -> str:
        kept = checkpoint.found(self.checkpoints)
        if not kept:
            return "nothing of the run is saved"
        return f"the last saved step is {checkpoint.step(kept[-1])}"

    # -- stop and resume ----------------------------------------------------------------------

    def _stop_requested(self, check: bool) -> bool:
        """Whether to stop.

        Several ranks must agree by a message. They send it only when losses are checked.

        check: whether losses are checked at this step
        """
        if self.ranks.size == 1:
            return self.stopped()
        return check and self.ranks.any(self.stopped(), self.device)

    def _checkpoint_due(self, check: bool) -> bool:
        if self.execution.checkpoint_every:
            return self.step % self.execution.checkpoint_every == 0
        return check and self.ranks.any(self.watch.since_save() > MINUTE, self.device)

    def _save(self) -> None:
        self._check_losses()
        try:
            if parallel.is_sharded(self.model):
                parts = self._state(), self.model, self.optimizer, self.ranks.first
                checkpoint.save_shards(self.checkpoints, self.step, *parts)
            elif self.ranks.first:
                checkpoint.save(self.checkpoints, self.step, self._state())
        except SaveError as e:
            kept = checkpoint.found(self.checkpoints)
            before = f"{kept[-1].name} is kept" if kept else "there is no earlier checkpoint"
            self.log.note(self.step, f"step {self.step}: {e}; {before}")
        self.ranks.wait()
        self.watch.saved()

    def _state(self) -> dict[str, Any]:
        return {
            "run": self.identity,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "loader": self.loader.state_dict(),
            "rng": torch.get_rng_state(),
            **self.monitor.state(),
            "val": self.val,
            "watch": self.watch.state(),
        }

    def _resume(self) -> None:
        """Load the newest checkpoint, if there is one."""
        if self.ranks.first:
            checkpoint.remove_partial(self.folder, self.checkpoints)
        kept = checkpoint.found(self.checkpoints)
        if not kept:
            return
        path, state = checkpoint.agreed(kept, self.ranks, self.device, self.log.say)
        if warning := check_checkpoint(path, state, self.identity):
            self.log.say(warning)
        try:
            sharded.fill(path, state, self.model, self.optimizer)
            self._load(state)
        except WRONG_CONTENT as e:
            raise Damaged(
                f"{path} does not fit this run ({first_line(e)}): remove it, and run this again to "
                "continue from the checkpoint before"
            ) from e
        self.log.say(f"continuing from step {self.step} ({path})")

    def _load(self, state: dict[str, Any]) -> None:
        self.step, self.val = state["step"], state["val"]
        self.monitor.load(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["rng"])
        self.watch.load(state["watch"])
