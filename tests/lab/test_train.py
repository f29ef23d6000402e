"""A resumed run has the same losses and weights as an uninterrupted one, bit by bit. Wrong settings
are refused before any data is read, and failures are reported."""

import math
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sodaopt import SODA, cli, zoo
from sodaopt.core.diagnostics import SUMS
from sodaopt.lab import checkpoint, records, train, training
from sodaopt.lab.checkpoint import WEIGHTS, found, load
from sodaopt.lab.diagnostics import RoleDiagnostics
from sodaopt.lab.execution import Execution
from sodaopt.lab.job import Job, ResolvedJob, resolve
from sodaopt.lab.model import GPT
from sodaopt.lab.records import DIVERGED, STOPPED
from sodaopt.lab.restore import job_of
from tests.support.lab_jobs import (
    TINY,
    Command,
    Said,
    begin,
    embedded,
    exit_code,
    flags,
    job,
    lines,
    losses,
    working,
)

assert embedded  # fixtures
assert working
pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="no fork and no signals"),
    pytest.mark.usefixtures("lab"),
]
A, B = Path("a"), Path("b")


def after(steps: int) -> Any:
    """A stop callback: it is asked after every step."""
    left = iter(range(steps - 1))
    return lambda: next(left, None) is None


def same_weights(one: Path, other: Path) -> bool:
    a, b = load(one / WEIGHTS), load(other / WEIGHTS)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# -- stop and go on -------------------------------------------------------------------------------

# torch's, ours, a wrapper that averages, and one that steps back after several steps
OPTIMIZERS = ["adamw", "soda_dagger", "schedule_free(adamw)", "lookahead(muon)"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resume(name: str) -> None:
    """Stopped after 2 steps, in the middle of an evaluation interval, and again after 5."""
    it = job(name, steps=8)
    whole = train.train(it, A)
    for steps, at in ((2, 2), (3, 5)):
        run = train.train(it, B, stop=after(steps))
        assert run.end
        assert (run.end["status"], run.end["step"]) == (STOPPED, at)
    again = train.train(it, B)
    assert whole.finished
    assert again.finished
    assert whole.val_loss == again.val_loss
    assert losses(A) == losses(B)
    assert same_weights(A, B)
    assert [head["resumed"] for head in lines(B, "run")] == [0, 2, 5]


def test_a_finished_run_is_not_repeated() -> None:
    it = job()
    train.train(it, A)
    before = (A / records.FILE).read_bytes()
    assert train.train(it, A).finished
    assert (A / records.FILE).read_bytes() == before


def test_killed() -> None:
    """Kill a run at random moments, also while it writes one of its checkpoints."""
    steps, kills, rng = 60, 3, random.Random(0)
    arguments = ["train", *flags(steps=steps, eval_every=10, optimizer="soda(adamw)"),
                 "--checkpoint-every", "1"]  # fmt: skip
    whole = begin([*arguments, "--out", "a"])
    assert whole.end() == 0, whole.output
    for _ in range(kills):
        saved = [checkpoint.step(p) for p in found(B / "checkpoints")]
        heads, more = len(lines(B, "run")), rng.randint(0, steps // (2 * kills))
        wanted = len(lines(B, "step")) + more  # steps, not seconds: a loaded machine is slower
        victim = begin([*arguments, "--out", "b"])
        victim.until(lambda: len(lines(B, "run")) > heads)  # noqa: B023
        victim.until(lambda: len(lines(B, "step")) >= wanted)  # noqa: B023
        victim.signal(signal.SIGKILL)
        assert victim.end() == -signal.SIGKILL
        assert lines(B, "run")[-1]["resumed"] == max(saved, default=0)
        for path in found(B / "checkpoints"):
            assert load(path)["step"] == checkpoint.step(path)
    (B / "checkpoints").mkdir(exist_ok=True)
    (B / "checkpoints" / "step-00000099.pt.1.part").write_bytes(b"half of")
    (B / f"{WEIGHTS}.1.part").write_bytes(b"half of")
    last = begin([*arguments, "--out", "b"])
    assert last.end() == 0, last.output
    assert losses(A) == losses(B)
    assert same_weights(A, B)
    assert list(B.rglob("*.part")) == []
    assert not (B / "checkpoints").exists()
    assert len(lines(B, "step")) <= steps + kills  # a step whose checkpoint was not written yet


@pytest.mark.parametrize("moment", ["weights", "sample", "end"])
def test_killed_at_the_end(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the last step and the last line nothing is lost either."""

    class Killed(BaseException):
        pass

    def at(name: str, ordinary: Any) -> Any:
        def call(*args: Any, **how: Any) -> Any:
            if name == moment:
                raise Killed
            return ordinary(*args, **how)

        return call

    it, execution = job("soda(muon)"), Execution(checkpoint_every=4)
    train.train(it, A)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", _but_last(at("weights", checkpoint.write)))
        patch.setattr(training, "generate", at("sample", training.generate))
        patch.setattr(checkpoint, "clear", at("end", checkpoint.clear))
        with pytest.raises(Killed):
            train.train(it, B, execution)
    assert found(B / "checkpoints")
    assert train.train(it, B, execution).finished
    assert losses(A) == losses(B)
    assert same_weights(A, B)
    assert not (B / "checkpoints").exists()
    assert lines(B, "run")[-1]["resumed"] == (0 if moment == "end" else 4)


def _but_last(write: Any) -> Any:
    """Replace the writing of the weights, but not of checkpoints."""
    ordinary = checkpoint.write
    return lambda path, value: (write if path.name == WEIGHTS else ordinary)(path, value)


def running(*more: str, steps: int = 100_000, **settings: Any) -> Command:
    command = begin(["train", *flags(steps=steps, eval_every=50_000, **settings), "--out", "b",
                     "--log-every", "1", *more])  # fmt: skip
    command.until(lambda: lines(B, "step"))
    return command


def test_interrupted() -> None:
    command = running()
    command.signal(signal.SIGINT)
    assert command.end() == 130
    step = lines(B, "end")[-1]["step"]
    assert f"stopped after step {step}: run it again to continue" in command.output
    command = running()
    command.until(lambda: len(lines(B, "run")) == 2)
    command.signal(signal.SIGTERM)
    assert command.end() == 130
    assert f"continuing from step {step}" in command.output
    steps = [r["step"] for r in lines(B, "step")]
    assert steps == list(range(len(steps)))


def hanging() -> None:
    """Let all updates but the first hang."""
    ordinary = training.Training._update

    def update(self: training.Training) -> None:
        if self.step:
            time.sleep(100)
        ordinary(self)

    training.Training._update = update  # type: ignore[method-assign]


def test_interrupted_twice() -> None:
    command = begin(["train", *flags(), "--out", "b", "--log-every", "1"], hanging)
    command.until(lambda: lines(B, "step"))
    time.sleep(0.05)
    command.signal(signal.SIGINT)
    time.sleep(0.2)
    assert command.process.is_alive()
    command.signal(signal.SIGINT)
    assert command.end() == 130
    assert not lines(B, "end")
    assert not found(B / "checkpoints")


# -- failures ------------------------------------------------------------------------------


def limit_file_size() -> None:
    """Refuse files over 50 kB at steps 2 and 3, such as checkpoints. run.jsonl is smaller."""
    ordinary = checkpoint.save

    def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
        if step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        if step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        return ordinary(folder, step, state)

    checkpoint.save = save


def test_full_disk() -> None:
    """Steps 2 and 3 cannot be saved. Training continues, with step 1 as its checkpoint."""
    saved = "--checkpoint-every", "1", "--out", "b"
    command = begin(["train", *flags(optimizer="muon"), *saved], limit_file_size)
    assert command.end() == 0, command.output
    for step in (2, 3):
        assert f"step {step}: " in command.output
    assert (
        command.output.count("could not be saved (File too large); step-00000001.pt is kept") == 2
    )
    assert list(B.rglob("*.part")) == []
    train.train(job(), A)
    assert losses(A) == losses(B)


DAMAGES = {
    "cut": lambda raw: raw[:5000],
    "empty": lambda raw: b"",
    "noise": lambda raw: random.Random(0).randbytes(len(raw)),
    "one bit": lambda raw: raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 1])
    + raw[len(raw) // 2 + 1 :],
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(damage: str) -> None:
    path = checkpoint.save(A, 1, {"x": torch.arange(10_000)})
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(checkpoint.Damaged, match=f"{path} is damaged"):
        load(path)


def test_damaged_checkpoint() -> None:
    """The run continues from the checkpoint before it, with the same results."""
    it, often, said = job("soda(adamw)"), Execution(checkpoint_every=1), Said()
    train.train(it, A)
    train.train(it, B, often, stop=after(4))
    older, newest = found(B / "checkpoints")
    newest.write_bytes(DAMAGES["one bit"](newest.read_bytes()))
    assert cli.main(["sample", "b", "--tokens", "2"]) == 0
    assert train.train(it, B, often, said).finished
    assert f"{newest} is damaged" in said.texts[0]
    assert f"continuing from step 3 ({older})" in said.texts[1]
    assert losses(A) == losses(B)
    assert same_weights(A, B)


def test_damaged_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    train.train(job(), B, Execution(checkpoint_every=1), stop=after(4))
    for path in found(B / "checkpoints"):
        path.write_bytes(b"")
    with pytest.raises(
        ValueError, match="all checkpoints in b/checkpoints are damaged: remove the folder"
    ):
        train.train(job(), B)
    train.train(job(), A)
    (A / WEIGHTS).write_bytes(b"PK")
    assert cli.main(["sample", "a"]) == 2
    assert "a/weights.pt is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("at", [6, 4, None])
def test_full_disk_at_the_end(at: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of the last step contains the model. Without it, the run is not done."""

    def full(value: Any, file: Any) -> None:
        raise OSError(28, "No space left on device")

    said, ordinary, there = Said(), checkpoint.save, torch.save

    def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
        path = ordinary(folder, step, state)
        monkeypatch.setattr(torch, "save", full)
        return path

    monkeypatch.setattr(checkpoint, "save", save)
    if at is None:
        monkeypatch.setattr(torch, "save", full)
    A.mkdir()
    there({"head.weight": torch.zeros(2)}, A / WEIGHTS)  # of another run
    run = train.train(job(), A, Execution(checkpoint_every=at or 99), said)
    saved = at == 6
    assert run.finished == saved
    assert [p.name for p in found(A / "checkpoints")] == ([f"step-0000000{at}.pt"] if at else [])
    assert not (A / WEIGHTS).exists()
    assert any("No space left on device" in text for text in said.texts)
    assert [note["text"] for note in lines(A, "note")] == said.texts[: 1 if saved else -1]
    if saved:
        assert train.train(job(), A).finished
        assert found(A / "checkpoints")
        assert cli.main(["sample", "a", "--tokens", "2"]) == 0
    else:
        last = f"the last saved step is {at}" if at else "nothing of the run is saved"
        assert f"{last}: free disk space and run it again" in said.texts[-1]
        monkeypatch.setattr(torch, "save", there)
        assert train.train(job(), A).finished
        assert (A / WEIGHTS).exists()


def test_full_disk_ends_the_command_as_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, value: Any) -> None:
        raise checkpoint.SaveError(f"{path} could not be saved (No space left on device)")

    arguments = ["train", *flags(), "--out", "a", "--checkpoint-every", "4"]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", _but_last(full))
        assert cli.main(arguments) == 130
    assert "the last saved step is 4: free disk space and run it again" in capsys.readouterr().out
    assert cli.main(arguments) == 0
    assert (A / WEIGHTS).exists()


def test_killed_between_weights_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the killed process are those of the last step, so the run is finished."""

    def fail(*args: Any, **how: Any) -> None:
        raise KeyboardInterrupt

    def full(path: Path, value: Any) -> None:
        raise checkpoint.SaveError(f"{path} could not be saved")

    with monkeypatch.context() as patch:
        patch.setattr(training, "generate", fail)
        with pytest.raises(KeyboardInterrupt):
            train.train(job(), A)
    assert (A / WEIGHTS).exists()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", _but_last(full))
        assert train.train(job(), A).finished


def test_other_files_between_checkpoints() -> None:
    train.train(job(), A, Execution(checkpoint_every=1), stop=after(4))
    (A / "checkpoints" / "step-best.pt").write_bytes(b"a copy")
    assert [checkpoint.step(p) for p in found(A / "checkpoints")] == [3, 4]
    assert train.train(job(), A).finished


def test_full_disk_for_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full after the checkpoints of 3 steps."""
    ordinary = records.Writer.write

    def write(self: records.Writer, kind: str, **values: Any) -> None:
        if kind == "step" and values["step"] == 4:
            self.file.close()
            self.file = Path("/dev/full").open("a")  # noqa: SIM115
        ordinary(self, kind, **values)

    monkeypatch.setattr(records.Writer, "write", write)
    every = Execution(checkpoint_every=1, log_every=1)
    with pytest.raises(OSError, match=r"No space left .* continues from its last .*'a/run.jsonl'"):
        train.train(job(), A, every)
    monkeypatch.setattr(records.Writer, "write", ordinary)
    assert train.train(job(), A, every).finished


@pytest.mark.parametrize(
    ("every", "good"), [(1, "the last good checkpoint is a/checkpoints/step-00000001.pt"),
                        (2, "there is no good checkpoint")],
)  # fmt: skip
def test_not_a_number(every: int, good: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The second update at lr 1e30 spoils the weights: a checkpoint that holds them is not good."""
    arguments = ["train", *flags(optimizer="adamw", lr=1e30, warmup=0), "--out", "a",
                 "--checkpoint-every", str(every), "--log-every", "1"]  # fmt: skip
    assert cli.main(arguments) == 1
    run = records.read(A)
    assert run.end
    assert run.end["status"] == DIVERGED
    assert run.end["reason"] == f"diverged: the loss is nan at step 2, lr 1e+30; {good}"
    assert run.end["reason"] in capsys.readouterr().out
    assert cli.main(arguments) == 1  # not trained again
    assert len(lines(A, "run")) == 1


def poisoned(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """A model whose k-th loss while training is changed."""
    ordinary, count = GPT.forward, iter(range(10**6))

    def forward(self: GPT, ids: Any, targets: Any = None) -> Any:
        loss = ordinary(self, ids, targets)
        return change(next(count), loss) if torch.is_grad_enabled() else loss

    monkeypatch.setattr(GPT, "forward", forward)


def test_not_a_number_later(monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned(monkeypatch, lambda k, loss: loss * float("nan") if k == 5 else loss)
    run = train.train(job("muon", steps=20, lr=0.001), A, Execution(checkpoint_every=2))
    assert run.end
    assert run.end["status"] == DIVERGED
    good = A / "checkpoints" / "step-00000004.pt"
    assert (
        f"the loss is nan at step 5, lr 0.001; the last good checkpoint is {good}"
        in (run.end["reason"])
    )
    assert all(p.isfinite().all() for p in load(good)["model"].values())
    assert [r["loss"] for r in run.of("step")][-1] is None


def test_not_a_number_in_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT, "forward", lambda self, x, y: (self.head.weight * 0).sum() / 0)
    run = train.train(job(lr=0.001), A)
    assert run.end
    assert "the validation loss is nan at step 0, lr 0.001; there is no good" in (run.end["reason"])


def test_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that rises by half a nat per step stops the run when its mean has risen by two."""
    poisoned(monkeypatch, lambda k, loss: loss * 0 + 5 + k / 2)
    run = train.train(job(steps=40, eval_every=40), A, Execution(log_every=1))
    smooth = [5.0]
    while smooth[-1] < 7:
        smooth.append(0.9 * smooth[-1] + 0.1 * (5 + len(smooth) / 2))
    assert run.end
    assert run.end["status"] == DIVERGED
    assert run.end["step"] == len(smooth)
    assert f"risen from 5.00 to {smooth[-1]:.2f} at step {len(smooth) - 1}" in run.end["reason"]


# -- the same numbers however it is run -----------------------------------------------------------


def close(one: Path, other: Path) -> None:
    a, b = losses(one), losses(other)
    assert a.keys() == b.keys()
    assert list(a.values()) == pytest.approx(list(b.values()), rel=1e-5)


@pytest.mark.parametrize(("name", "micro"), [("adamw", 1), ("soda_dagger", 2)])
def test_accumulation(name: str, micro: int) -> None:
    train.train(job(name, batch=4), A)
    train.train(job(name, batch=4), B, Execution(micro_batch=micro))
    close(A, B)


def test_second_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 5 windows and two per step, the third step reads tokens again."""
    ordinary = train.open_data

    def little(name: str, folder: Path) -> Any:
        data = ordinary(name, folder)
        ids = torch.arange(5 * 32 + 1, dtype=torch.int64).numpy().astype("<u2")
        short = Path("little_train_000000.bin")
        original = data.train[0].read_bytes()
        header = bytearray(original[: 256 * 4])
        header[8:12] = len(ids).to_bytes(4, "little")
        short.write_bytes(bytes(header) + ids.tobytes())
        object.__setattr__(data, "train", [short])
        return data

    monkeypatch.setattr(train, "open_data", little)
    said = Said()
    train.train(job(steps=4), A, progress=said, stop=after(3))
    run = train.train(job(steps=4), A, progress=said)
    assert [(r["step"], r["epoch"]) for r in run.of("epoch")] == [(2, 2)]
    assert sum("epoch 2 begins" in text for text in said.texts) == 1
    assert run.end
    assert run.end["epochs"] == pytest.approx(8 / 5)


# -- schedules and refusals -----------------------------------------------------------------------


def resolved(**settings: Any) -> ResolvedJob:
    return resolve(Job(**{"optimizer": "muon"} | settings), 50304)


@pytest.mark.parametrize(
    ("settings", "steps", "warmup", "warmdown"),
    [
        ({"preset": "gpt-124m"}, 5100, 0, 1450),
        ({"preset": "gpt-124m", "horizon": "4x"}, 20400, 0, 5800),
        ({"preset": "gpt-124m", "optimizer": "adamw"}, 5100, 255, 1450),
        ({"preset": "gpt-124m", "optimizer": "soda(adam)", "steps": 1000}, 1000, 50, 285),
        ({"preset": "gpt-64m"}, round(20 * 63_504_384 / 2**19), 0, 690),
        ({"steps": 100, "warmup": 0.1, "warmdown": 0.5}, 100, 10, 50),
        ({"steps": 100, "warmdown": 0.0}, 100, 0, 0),
    ],
)
def test_schedule(settings: dict[str, Any], steps: int, warmup: int, warmdown: int) -> None:
    p = resolved(**settings)
    assert (p.steps, p.warmup, p.warmdown) == (steps, warmup, warmdown)
    factors = [p.lr_factor(k) for k in range(steps)]
    assert max(factors) == 1
    if warmup:
        assert factors[:warmup] == pytest.approx([(k + 1) / warmup for k in range(warmup)])
    assert set(factors[warmup : steps - warmdown + 1]) == {1.0}
    if warmdown:
        assert factors[-1] == pytest.approx(1 / warmdown)
        assert factors[-warmdown:] == pytest.approx(
            [(warmdown - j) / warmdown for j in range(warmdown)]
        )


REFUSED = [
    (["--preset", "nanno"], "unknown preset 'nanno'; did you mean 'nano'?"),
    (["--optimizer", "soda(muom)"], "unknown optimizer 'soda(muom)'; did you mean 'soda(muon)'?"),
    (["--optimizer", "soda(muon"], "unknown optimizer"),
    (["--width", "100", "--head-dim", "64"], "width is 100 and head_dim is 64"),
    (["--width", "33", "--head-dim", "33"], "head_dim must be even"),
    (["--optimizer", "soda(muon)", "--wd", "0.1"], "has no weight decay"),
    (["--optimizer", "uscion", "--wd", "0.1"], "has no weight decay"),
    (["--steps", "5", "--horizon", "1x"], "steps is 5 and horizon is 1x: give only one"),
    (["--horizon", "four"], "horizon must be a positive multiple of Chinchilla"),
    (["--lr", "0"], "lr must be positive"),
    (["--lr", "inf"], "expected a number such as 0.1 or 2^-11"),
    (["--optimizer", "muon", "--z0", "zero"], "muon has no pull, so z0='zero'"),
    (["--optimizer", "soda(muon)", "--z0", "one"], "Expected one of ('init', 'zero')"),
    (
        ["--optimizer", "soda(muon)", "--fade", "0.9", "0.5"],
        "fade must be two fractions of the run",
    ),
    (["--optimizer", "soda(muon)", "--decay", "couplet"], "invalid choice 'couplet'"),
    (["--optimizer", "muon", "--decay", "coupled"], "muon has no pull, so decay='coupled'"),
    (["--optimizer", "gpa(muon)", "--decay", "coupled"], "has no pull, so decay='coupled'"),
    (["--optimizer", "adamw", "--alpha", "0.1"], "have alpha and alpha_bar, not adamw"),
    (["--optimizer", "muon", "--alpha", "5"], "alpha must be between 0 and 1, got 5"),
    (["--optimizer", "scion", "--alpha", "-0.1"], "alpha must be between 0 and 1, got -0.1"),
    (["--optimizer", "muon", "--alpha-bar", "1.5"], "alpha_bar must be between 0 and 1, got 1.5"),
    (["--eval-tokens", "-1"], "eval_tokens must be at least 0, got -1"),
    (["--device", "cuda"], "no CUDA device"),
    (["--device", "abacus"], "unknown device 'abacus'"),
    (["--seed", "-1"], "seed must be in 0..2^63-1"),
    (["--batch", "0"], "batch must be at least 1"),
    (["--micro-batch", "0"], "micro_batch must be at least 1"),
    (["--warmup", "2"], "warmup is a fraction of the run"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_refused(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Before any data is opened."""

    def unread(*args: Any) -> None:
        raise AssertionError("data was opened")

    monkeypatch.setattr("sodaopt.lab.commands.open_data", unread)
    monkeypatch.setattr(train, "open_data", unread)
    assert exit_code(["train", *arguments]) == 2
    said = capfd.readouterr().err.replace("│", " ")  # the parser draws a box
    assert words in " ".join(said.split())


def test_uneven_micro_batch(capfd: Any) -> None:
    assert cli.main(["train", *flags(batch=4), "--micro-batch", "3"]) == 2
    assert "micro_batch is 3: it must divide 4" in capfd.readouterr().err


def test_another_job_in_the_folder() -> None:
    train.train(job("muon", lr=0.01), A)
    with pytest.raises(train.Refused, match=r"another run \(lr 0.01 -> 0.02, seed 0 -> 1\)"):
        train.train(job("muon", lr=0.02, seed=1), A)


def test_other_data_of_the_same_name() -> None:
    """A finished run does not count for new data of the same name."""
    texts = [Path(f"{word}.txt") for word in ("whale", "people")]
    for text in texts:
        text.write_text(f"The {text.stem} of the sea. " * 400)
    for text, more in zip(texts, ([], ["--force"]), strict=True):
        made = ["--vocab", "300", "--val-fraction", "0.3", "--out", "mine", *more]
        assert cli.main(["data", "prepare", str(text), *made]) == 0
        if not more:
            assert train.train(job(data="mine"), A).finished
    with pytest.raises(train.Refused, match="contains a run on other data with the name mine"):
        train.train(job(data="mine"), A)


def test_two_processes_in_one_folder() -> None:
    command = running()
    with pytest.raises(train.Refused, match="another process is writing to b"):
        train.train(job(steps=100_000, eval_every=50_000), B)
    command.signal(signal.SIGKILL)
    assert command.end() == -signal.SIGKILL


# -- records --------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn", [b"", b'{"kind": "run", "for', b'{"kind"'])
def test_killed_before_the_first_line(torn: bytes) -> None:
    A.mkdir()
    (A / records.FILE).write_bytes(torn)
    assert records.begun(A) is None
    assert records.find([A]) == []
    assert train.train(job(), A).finished


def test_torn_last_line() -> None:
    train.train(job(), A, stop=after(3))
    with (A / records.FILE).open("ab") as file:
        file.write(b'{"kind": "step", "step": 3, "lo')
    run = train.train(job(), A)
    assert run.finished
    train.train(job(), B)
    assert losses(A) == losses(B)


def test_repeated_steps_count_once() -> None:
    writer = records.Writer(A)
    writer.write("run", format=1, job={})
    for step, loss in ((0, 5.0), (1, 4.0), (1, 4.5), (2, 3.0)):
        writer.write("step", step=step, loss=loss)
    writer.close()
    assert [r["loss"] for r in records.read(A).of("step")] == [5.0, 4.5, 3.0]


def test_job_settings_decide_the_folder() -> None:
    keys = {
        resolved(**TINY | more).key for more in ({}, {"lr": 0.1}, {"seed": 1}, {"warmdown": 0.5})
    }
    assert len(keys) == 4
    assert resolved(**TINY).key == resolved(**TINY | {"warmup": 0.0}).key


def test_a_new_setting_leaves_old_keys_alone() -> None:
    """Keys as version 0.1 wrote them: a sweep must find its finished runs again."""

    def key(**settings: Any) -> str:
        return resolve(Job(preset="proxy", lr=2**-10, seed=3, **settings), 8192).key

    assert key(optimizer="muon") == "muon-s3-d35765e6ee"
    assert key(optimizer="soda(muon)") == "soda-muon-s3-340f0adc14"
    assert key(optimizer="soda(muon)", decay="uniform") == "soda-muon-s3-340f0adc14"
    assert key(optimizer="soda(muon)", decay="coupled") != "soda-muon-s3-340f0adc14"


def test_coupled_pull() -> None:
    """It differs from the uniform pull only once the learning rate falls."""
    train.train(job("soda(muon)", warmdown=0.5), A)
    train.train(job("soda(muon)", warmdown=0.5, decay="coupled"), B)
    one, other = losses(A), losses(B)
    # 6 steps with a warmdown of 3: update 4 is the first with a lower rate
    assert all(one["step", k] == other["step", k] for k in range(5))
    assert one["step", 5] != other["step", 5]
    assert job_of(records.read(B)).decay == "coupled"
    with pytest.raises(train.Refused, match="decay coupled -> None"):
        train.train(job("soda(muon)", warmdown=0.5), B)


# -- diagnostics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["muon", "soda(adamw)", "soda_dagger", "gpa(soda(muon))"])
def test_diagnostics_are_recorded_and_change_nothing(name: str, lab: Path) -> None:
    on, off = (
        train.train(job(name), lab / name / str(on), Execution("cpu", log_every=2, diagnostics=on))
        for on in (True, False)
    )
    assert losses(on.folder) == losses(off.folder)
    assert not off.of("diagnostics")
    found = on.of("diagnostics")
    assert [r["step"] for r in found] == [2, 4, 6]
    for record in found:
        roles = record["roles"]
        assert set(roles) == {"tied", "hidden", "total"}
        total, parts = roles["total"], (roles["tied"], roles["hidden"])
        for number in ("gradient", "update", "step", "weight"):
            whole = math.sqrt(sum(part[number] ** 2 for part in parts))
            assert 0 < total[number] == pytest.approx(whole, rel=1e-4)
    pulled = {role: row["pull"] > 0 for role, row in found[-1]["roles"].items()}
    anchored = name in ("soda(adamw)", "soda_dagger")
    assert (pulled["hidden"], pulled["tied"]) == (anchored, name == "soda_dagger")
    if name == "soda(adamw)":
        assert found[-1]["roles"]["hidden"]["lam"] == pytest.approx(1 / 8)


def test_diagnostics_are_read_with_the_losses(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of the losses reads one tensor, so the device is waited for once."""
    reads = []
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append(t.numel()) or read(t))
    train.train(job("soda(adamw)", eval_every=100), lab / "a", Execution("cpu", log_every=3))
    # three losses, the sums of two roles and their total, and the distances of the two
    assert [n for n in reads if n > 2] == [3 + 3 * len(SUMS) + 2] * 2


def test_diagnostics_of_a_frozen_role() -> None:
    """A role without gradients has a step of 0, and the numbers of the others stay theirs."""
    model = torch.nn.Sequential(
        torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    )
    model[0].requires_grad_(False)
    opt = SODA(model.parameters(), 0.1, zoo.adam())
    roles = RoleDiagnostics(model, opt)
    roles.arm(True)
    model(torch.arange(5)).square().mean().backward()
    opt.step()
    roles.collect()
    rows = roles.rows(roles.sums().tolist())
    frozen = roles.roles[model[0].weight]
    assert rows[frozen]["step"] == 0
    want = math.hypot(*(float(p.detach().norm()) for p in model.parameters()))
    assert rows["total"]["weight"] == pytest.approx(want, rel=1e-4)
    assert rows["total"]["step"] > 0


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("adamw", {}),
        ("adamw", {"wd": 1.0}),
        ("soda(adamw)", {}),
        ("soda_dagger", {}),
        ("soda_dagger", {"z0": "zero"}),
    ],
)
def test_the_distance_is_to_the_initial_weights(name: str, more: dict[str, Any], lab: Path) -> None:
    """For every role, also with weight decay, which pulls to zero, and after a stop."""
    asked, speed = job(name, **more), Execution("cpu", log_every=2)
    train.train(asked, lab / "run", speed, stop=after(3))
    run = train.train(asked, lab / "run", speed)
    torch.manual_seed(asked.seed)
    shape = resolve(asked, 1024).shape
    first, last = GPT(shape).state_dict(), load(run.folder / WEIGHTS)
    moved = {n: float((last[n] - first[n]).norm()) for n in first if n != "embed.weight"}
    hidden = math.hypot(*(x for n, x in moved.items() if n != "head.weight"))
    roles = run.of("diagnostics")[-1]["roles"]
    assert roles["tied"]["distance"] == pytest.approx(moved["head.weight"], rel=1e-4)
    assert roles["hidden"]["distance"] == pytest.approx(hidden, rel=1e-4)
    assert roles["total"]["distance"] == pytest.approx(math.hypot(*moved.values()), rel=1e-4)
