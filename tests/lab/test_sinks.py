"""A run sends its numbers to TensorBoard, wandb and trackio. So do other training loops."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from sodaopt import SODAWrapper
from sodaopt.lab import train
from sodaopt.lab.execution import Execution
from sodaopt.lab.sinks import (
    SINKS,
    flat,
    lightning_callback,
    log_diagnostics,
    open_sinks,
    trainer_callback,
)
from tests.support.lab_jobs import embedded, job, working

assert embedded  # fixtures
assert working


class Kept:
    """A sink that keeps everything."""

    def __init__(self, *_):
        self.rows, self.closed = {}, 0

    def log(self, step, numbers):
        self.rows.setdefault(step, {}).update(numbers)

    def close(self):
        self.closed += 1


def test_a_run_sends_losses_and_diagnostics(lab, monkeypatch):
    kept = Kept()
    monkeypatch.setitem(SINKS, "tensorboard", lambda *_: kept)
    run = train.train(job("soda(adamw)"), lab / "a", Execution(log="tensorboard", log_every=2))
    assert kept.closed == 1
    assert kept.rows[6]["val/loss"] == run.val_loss
    for record in run.of("step"):
        assert kept.rows[record["step"]]["train/loss"] == record["loss"]
    last = run.of("diagnostics")[-1]
    assert kept.rows[6]["hidden/share"] == last["roles"]["hidden"]["share"]
    assert list(kept.rows) == sorted(kept.rows), "some sinks drop a step that comes late"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracked_run(name, tmp_path, monkeypatch):
    said = []
    module = SimpleNamespace(
        init=lambda **options: said.append(options),
        log=lambda numbers, step: said.append((step, numbers)),
        finish=lambda: said.append("end"),
    )
    monkeypatch.setitem(sys.modules, name, module)
    (sink,) = open_sinks(name, tmp_path / "run", {"lr": 0.1})
    sink.log(3, {"a": 1.0})
    sink.close()
    first, *rest = said
    assert (first["name"], first["config"], rest) == ("run", {"lr": 0.1}, [(3, {"a": 1.0}), "end"])


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (sink,) = open_sinks("wandb", tmp_path / "run")
    sink.log(1, {"train/loss": 3.0})
    sink.close()
    assert list((tmp_path / "run").rglob("*.wandb"))


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = open_sinks("tensorboard", tmp_path)
    sink.log(7, {"train/loss": 3.5})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Scalars("train/loss")
    assert (event.step, event.value) == (7, 3.5)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ValueError, match="--log trackio needs trackio: pip install trackio"):
        open_sinks("trackio", tmp_path)
    with pytest.raises(ValueError, match="did you mean 'wandb'"):
        Execution(log="wand")


def test_flat_numbers():
    rows = {"hidden": {"share": 0.5, "angle": float("nan"), "lam": None}}
    assert flat(rows) == {"hidden/share": 0.5}


# -- other loops ----------------------------------------------------------------------------------


def soda(params):
    return SODAWrapper(AdamW(params, lr=0.1, weight_decay=0))


def test_a_plain_loop():
    net, sink = nn.Linear(4, 2), Kept()
    opt = soda(net.parameters())
    log_diagnostics(opt, [sink], by=dict.fromkeys(net.parameters(), "all"), every=3)
    for step in range(7):
        net(torch.randn(8, 4)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        assert (opt._sums != {}) == (step % 3 == 2), "every third step is measured"
    assert list(sink.rows) == [3, 6]
    assert sink.rows[6]["all/share"] > 0


def test_a_trainer_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(4, 1)

        def forward(self, x, labels=None):
            return {"loss": (self.line(x) - labels).square().mean()}

    data = [{"x": torch.randn(4), "labels": torch.zeros(1)} for _ in range(16)]
    net, sink = Model(), Kept()
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(opt := soda(net.parameters()), lambda k: 1.0)
    trainer = transformers.Trainer(
        net, arguments, train_dataset=data, optimizers=(opt, schedule),
        callbacks=[trainer_callback([sink], every=2)],
    )  # fmt: skip
    trainer.train()
    assert (list(sink.rows), sink.closed) == ([2, 4], 1)
    assert sink.rows[4]["group0/pull"] > 0


def test_a_trainer_of_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(4, 1)

        def training_step(self, batch, _):
            return self.line(batch).square().mean()

        def configure_optimizers(self):
            return soda(self.parameters())

    sink = Kept()
    trainer = lightning.Trainer(
        max_steps=4, logger=False, accelerator="cpu", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        callbacks=[lightning_callback([sink], every=2)],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4))
    assert (list(sink.rows), sink.closed) == ([2, 4], 1)
    assert sink.rows[4]["group0/pull"] > 0
    assert json.dumps(sink.rows)
    assert Path(tmp_path).exists()
