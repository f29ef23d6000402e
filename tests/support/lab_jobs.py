"""Tiny jobs of the lab, a folder to run them in, and its commands in processes of their own."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from sodaopt import cli
from sodaopt.lab import commands, records, reproduce, sweep, training
from sodaopt.lab.data import open_data
from sodaopt.lab.job import Job
from sodaopt.lab.progress import Silent
from sodaopt.lab.train import DATA

assert commands  # loaded before any process is forked
assert reproduce
# Samples take half the time of a tiny run. Set here, so that forked processes have it too.
training.SAMPLE_TOKENS = 4
TINY: dict[str, Any] = {"steps": 6, "width": 32, "depth": 1, "head_dim": 16, "context": 32,
                        "batch": 2, "eval_tokens": 256, "eval_every": 3}  # fmt: skip
Prepare = Callable[[], None]


class Said(Silent):
    """Keep the messages of a run."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)


def job(optimizer: str = "muon", **settings: Any) -> Job:
    return Job(**TINY | {"optimizer": optimizer} | settings)


def flags(**settings: Any) -> list[str]:
    """Return settings as arguments of a command."""
    values = TINY | settings
    return [a for k, v in values.items() for a in (f"--{k.replace('_', '-')}", str(v))]


@cache
def start_forkserver() -> None:
    """Start the process that others fork from, with all modules loaded.

    A server that another test has started does not have these modules, so each process would
    import torch again, which takes seconds. `_stop` is private, and made for tests.
    """
    forkserver._forkserver._stop()
    fsdp = "torch.distributed.fsdp", "torch.distributed.checkpoint"
    context.set_forkserver_preload([__name__, "torch._dynamo", *fsdp])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # the server starts before a test hides the GPU
        forkserver.ensure_running()


@pytest.fixture(name="data", scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the shards of the package's data once, and start the process that others fork from."""
    start_forkserver()
    folder = tmp_path_factory.mktemp("data")
    open_data("embedded", folder)
    return folder


@pytest.fixture(name="lab")
def working(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to a working folder with the data in it. Workers of sweeps start fast."""
    (tmp_path / DATA).parent.mkdir(parents=True)
    (tmp_path / DATA).symlink_to(data)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "START", "forkserver")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(before)


def exit_code(args: Sequence[str]) -> int | str | None:
    """Return the exit code of a command. The argument parser raises SystemExit."""
    try:
        return cli.main(args)
    except SystemExit as e:
        return e.code


def losses(folder: Path) -> dict[tuple[str, int], float]:
    """Return the exact losses of every step and validation of a run."""
    run = records.read(folder)
    return {(kind, r["step"]): r["loss"] for kind in ("step", "val") for r in run.of(kind)}


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return all records of a kind in order, including repeated ones."""
    if not (folder / records.FILE).exists():
        return []
    every = records._records(folder / records.FILE)
    return [r for r in every if r["kind"] == kind]


# -- commands in processes ------------------------------------------------------------------------

context = get_context("forkserver")


@dataclass
class Command:
    """A running `sodaopt` command. It and its children are a process group."""

    process: BaseProcess
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text()

    def until(self, ready: Callable[[], Any], patience: float = 60) -> None:
        """Wait until `ready` returns True while the command runs."""
        end = time.monotonic() + patience
        while not ready():
            assert time.monotonic() < end, self.output
            assert self.process.is_alive(), self.output
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        """Send a signal to the whole group, as a terminal does."""
        assert self.process.pid is not None
        os.killpg(self.process.pid, number)

    def end(self) -> int | None:
        self.process.join(60)
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
            pytest.fail(f"the command did not end: {self.output}")
        return self.process.exitcode


def begin(args: Sequence[str], prepare: Prepare | None = None) -> Command:
    """Start a command, and call `prepare` in its process first."""
    log = Path(f"{time.monotonic_ns()}.log").resolve()
    process = context.Process(target=_main, args=(list(args), log, os.getcwd(), prepare))
    process.start()
    command = Command(process, log)
    command.until(log.exists)
    return command


def _main(args: list[str], log: Path, folder: str, prepare: Prepare | None) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout, sys.stderr = (os.fdopen(s, "w", buffering=1) for s in (1, 2))
    torch.set_num_threads(1)
    sweep.START = "fork"
    if prepare:
        prepare()
    code = cli.main(args)
    sys.stdout.flush()
    sys.exit(code)
