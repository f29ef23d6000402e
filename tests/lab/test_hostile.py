"""Lost, foreign and damaged files. Each gives a sentence that names the file, and no traceback."""

import errno
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sodaopt import cli
from sodaopt.lab import records, train
from sodaopt.lab.checkpoint import WEIGHTS, found, load
from sodaopt.lab.execution import Execution
from sodaopt.lab.files import write_atomically
from tests.support.lab_jobs import Said, embedded, flags, job, lines, losses, working

assert embedded  # fixtures
assert working
pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="no fork and no signals"),
    pytest.mark.usefixtures("lab"),
]
A, B = Path("a"), Path("b")
EACH_STEP = Execution(checkpoint_every=1)


def stopped(folder: Path, **settings: Any) -> list[Path]:
    """Train 4 steps of a run. Return its checkpoints, of the steps 3 and 4."""
    left = iter(range(3))
    train.train(job(**settings), folder, EACH_STEP, stop=lambda: next(left, None) is None)
    return found(folder / "checkpoints")


# -- lost records ---------------------------------------------------------------------------------


def test_checkpoint_of_another_run() -> None:
    """Without run.jsonl, the checkpoint says which run it is of."""
    _, newest = stopped(A, lr=0.01)
    (A / records.FILE).unlink()
    with pytest.raises(
        train.Refused, match=r"step-00000004.pt is of another run \(lr 0.01 -> 0.02"
    ):
        train.train(job(lr=0.02), A)
    assert newest.exists()
    assert records.begun(A) is None
    assert train.train(job(lr=0.01), A).finished
    train.train(job(lr=0.01), B)
    assert losses(A)["val", 6] == losses(B)["val", 6]


def test_checkpoint_of_other_data(capsys: pytest.CaptureFixture[str]) -> None:
    for word, more in (("whale", []), ("people", ["--force"])):
        Path(f"{word}.txt").write_text(f"The {word} of the sea. " * 400)
        made = ["--vocab", "300", "--val-fraction", "0.3", "--out", "mine", *more]
        assert cli.main(["data", "prepare", f"{word}.txt", *made]) == 0
        if not more:
            stopped(A, data="mine")
            (A / records.FILE).unlink()
    assert cli.main(["train", *flags(optimizer="muon", data="mine"), "--out", "a"]) == 2
    assert "is of a run on other data with the name mine" in capsys.readouterr().err


def test_sample_of_another_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The records are of a new run, and the checkpoint is of the run before."""
    stopped(A, lr=0.01)
    stopped(B, lr=0.02)
    (B / records.FILE).replace(A / records.FILE)
    assert cli.main(["sample", "a"]) == 2
    assert "is of another run (lr 0.01 -> 0.02): remove a/checkpoints" in capsys.readouterr().err


def test_checkpoint_of_version_0_1() -> None:
    for path in stopped(A):
        state = load(path)
        del state["run"]
        torch.save(state, path)
    said = Said()
    assert train.train(job(), A, progress=said).finished
    assert sum("version 0.1" in text for text in said.texts) == 1
    assert lines(A, "run")[-1]["resumed"] == 4


def test_records_survive_a_power_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    synced, ordinary = [], os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.fstat(handle).st_ino)
        ordinary(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    writer = records.Writer(A)
    for kind, times in (("run", 1), ("step", 1), ("end", 2)):
        writer.write(kind)
        assert synced.count((A / records.FILE).stat().st_ino) == times
        assert synced.count(A.stat().st_ino) == times
    writer.close()


# -- damaged files --------------------------------------------------------------------------------


class Code:
    """An object whose pickle creates a file when it is loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("code-was-run",)


def without(name: str) -> Callable[[Any], Any]:
    return lambda state: {k: v for k, v in state.items() if k != name}


WRONG_STATES: dict[str, Callable[[Any], Any]] = {
    "no model": without("model"),
    "no loader": without("loader"),
    "no watch": without("watch"),
    "no keys": lambda state: {},
    "list": lambda state: [1, 2],
    "code": lambda state: state | {"model": Code()},
    "step": lambda state: state | {"step": 2},
    "run": lambda state: state | {"run": 5},
}


@pytest.mark.parametrize("kind", WRONG_STATES)
def test_checkpoint_before_a_wrong_one(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    older, newest = stopped(A)
    torch.save(WRONG_STATES[kind](load(newest)), newest)
    assert cli.main(["sample", "a", "--tokens", "2"]) == 0
    assert f"{newest} is damaged" in capsys.readouterr().err
    said = Said()
    assert train.train(job(), A, progress=said).finished
    assert f"{newest} is damaged" in said.texts[0]
    assert f"continuing from step 3 ({older})" in said.texts[1]
    train.train(job(), B)
    assert losses(A) == losses(B)
    assert not Path("code-was-run").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {"model": {"head.weight": torch.zeros(2)}},
        lambda state: {"model": 5},
        lambda state: {"optimizer": {}},
        lambda state: {"optimizer": {"state": 5, "param_groups": [5]}},
        lambda state: {"schedule": 5},
        lambda state: {"loader": 5},
        lambda state: {"loader": {}},
        lambda state: {"rng": 5},
        lambda state: {"watch": {}},
    ],
)
def test_checkpoint_that_does_not_fit(change: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, newest = stopped(A)
    state = load(newest)
    torch.save(state | change(state), newest)
    assert cli.main(["train", *flags(optimizer="muon"), "--out", "a"]) == 2
    err = capsys.readouterr().err
    assert f"{newest} does not fit this run" in err
    assert "remove it" in err
    newest.unlink()
    assert cli.main(["train", *flags(optimizer="muon"), "--out", "a"]) == 0


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"head.weight": torch.zeros(2)}, "a/weights.pt does not fit the model in run.jsonl"),
        ([1], "a/weights.pt does not fit the model in run.jsonl"),
        ({"head.weight": Code()}, "a/weights.pt is damaged (it contains more than tensors"),
    ],
)
def test_weights_of_another_model(
    weights: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train.train(job(), A)
    torch.save(weights, A / WEIGHTS)
    assert cli.main(["sample", "a"]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "remove a and train it again" in err
    assert not Path("code-was-run").exists()


# -- temporary files ------------------------------------------------------------------------------


def killed_while_writing(path: Path) -> None:
    """Kill a process that is about to rename its temporary file."""
    child = os.fork()
    if child == 0:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        write_atomically(path, [b"half"])
    os.waitpid(child, 0)


def full_disk() -> Iterator[bytes]:
    yield b"half"
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_error_of_a_full_disk_names_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    with pytest.raises(OSError, match=r"No space left on device: .*report\.html"):
        write_atomically(folder / "report.html", full_disk())
    assert not list(folder.iterdir())


def test_temporary_files_of_killed_processes(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    page = folder / "report.html"
    killed_while_writing(page)
    assert len(list(folder.iterdir())) == 1
    mine = folder / f".report.html.{socket.gethostname()}.{os.getpid()}.abcdefgh"
    other = folder / ".report.html.elsewhere.1.abcdefgh"
    new, old = folder / ".report.html.abcdefg1", folder / ".report.html.abcdefg2"  # version 0.1
    another = folder / ".report.json.abcdefgh"
    for path in (mine, other, new, old, another):
        path.write_bytes(b"")
    os.utime(old, (0, 0))
    os.utime(another, (0, 0))
    write_atomically(page, [b"whole"])
    assert set(folder.iterdir()) == {page, mine, other, new, another}
    assert page.read_bytes() == b"whole"


def test_a_killed_check_does_not_prevent_force() -> None:
    Path("whale.txt").write_text("The whale of the sea. " * 400)
    arguments = ["data", "prepare", "whale.txt", "--vocab", "300", "--val-fraction", "0.3",
                 "--out", "mine"]  # fmt: skip
    assert cli.main(arguments) == 0
    killed_while_writing(Path("mine/checked.json"))
    assert cli.main([*arguments, "--force"]) == 0
