"""Several processes train as one does, and a run continues with another number of them."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sodaopt.lab import checkpoint, records, restore, train
from sodaopt.lab.execution import Execution
from sodaopt.lab.parallel import LostRank
from sodaopt.lab.training import Training
from tests.support.lab_jobs import Said, context, embedded, flags, job, lines, losses, working
from tests.support.ranks import available

assert embedded  # fixtures
assert working
pytestmark = [available, pytest.mark.slow, pytest.mark.usefixtures("lab")]
A, B = Path("a"), Path("b")
# Nine windows to validate on: the ranks have different numbers of them.
JOB = {"batch": 8, "eval_tokens": 9 * 32, "steps": 20}


def ranks(size: int, work: Callable[..., None], *args: Any) -> list[int | None]:
    """Run a function in several processes, as torchrun does. Return their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = os.getcwd()
    processes = [
        context.Process(target=_rank, args=(rank, size, port, where, work, args))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        process.kill()
    return [process.exitcode for process in processes]


def _rank(rank: int, size: int, port: int, where: str, work: Any, args: Any) -> None:
    os.chdir(where)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}  # fmt: skip
    work(*args)
    if dist.is_initialized():
        dist.destroy_process_group()


def stopping(at: int | None) -> Callable[[], bool]:
    """Stop after a step of this process."""
    left = iter(range(10**9 if at is None else at - 1))
    return lambda: next(left, None) is None


def run(
    name: str,
    folder: Path,
    parallel: str,
    steps: int | None = None,
    micro: int | None = None,
    **more: Any,
) -> None:
    """Train a number of steps, or to the end."""
    more |= {"shards": 2 if parallel == "hsdp" else None, "micro_batch": micro}
    execution = Execution(parallel=parallel, log_every=1, **more)  # type: ignore[arg-type]
    train.train(job(name, **JOB), folder, execution, stop=stopping(steps))


def close(one: Path, other: Path) -> None:
    a, b = losses(one), losses(other)
    assert a.keys() == b.keys()
    assert list(a.values()) == pytest.approx(list(b.values()), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "size", "parallel", "micro"),
    [("soda(muon)", 2, "ddp", None), ("schedule_free(soda(muon))", 2, "fsdp", None),
     ("adamw", 4, "hsdp", 1)],
)  # fmt: skip
def test_the_number_of_ranks_does_not_matter(
    name: str, size: int, parallel: str, micro: int | None
) -> None:
    """Each rank may also go through its part of the batch in pieces."""
    run(name, A, "ddp")
    assert ranks(size, run, name, B, parallel, None, micro) == [0] * size
    close(A, B)
    assert len(lines(B, "run")) == len(lines(B, "end")) == 1
    assert len(lines(B, "step")) == JOB["steps"]
    assert lines(B, "run")[0]["environment"]["world"] == size
    one, several = (checkpoint.load(folder / checkpoint.WEIGHTS) for folder in (A, B))
    assert one.keys() == several.keys()
    for key, t in one.items():
        torch.testing.assert_close(several[key], t, rtol=1e-3, atol=5e-5)
    assert [r["text"] for r in lines(A, "sample")] == [r["text"] for r in lines(B, "sample")]
    for one, several in zip(lines(A, "diagnostics"), lines(B, "diagnostics"), strict=True):
        assert present(several["roles"]) == pytest.approx(present(one["roles"]), rel=1e-3)


def present(roles: dict[str, dict[str, float | None]]) -> dict[str, float]:
    return {f"{r} {k}": x for r, row in roles.items() for k, x in row.items() if x is not None}


def test_a_run_continues_with_other_ranks() -> None:
    """From a folder to a file and back: 4 FSDP, 2 DDP, 2 FSDP, 4 HSDP, and one process."""
    name = "schedule_free(soda(muon))"  # x and z of the one, and z0 of the other
    run(name, A, "ddp")
    for size, parallel, kind in ((4, "fsdp", "dcp"), (2, "ddp", "pt"), (2, "fsdp", "dcp"),
                                 (4, "hsdp", "dcp")):  # fmt: skip
        assert ranks(size, run, name, B, parallel, 1) == [0] * size
        assert checkpoint.found(B / checkpoint.FOLDER)[-1].suffix == f".{kind}"
    model, _ = restore.restore(records.read(B))
    assert sum(p.numel() for p in model.parameters())
    run(name, B, "ddp")
    close(A, B)
    assert not (B / checkpoint.FOLDER).exists()


def test_a_damaged_shard_is_noticed() -> None:
    run("muon", A, "ddp")
    assert ranks(2, run, "muon", B, "fsdp", 2) == [0] * 2
    assert ranks(2, run, "muon", B, "fsdp", 1) == [0] * 2
    first, second = checkpoint.found(B / checkpoint.FOLDER)
    shard = next(second.glob("__1*"))
    shard.write_bytes(shard.read_bytes()[:-8] + b"damaged!")
    said = Said()
    train.train(job("muon", **JOB), B, Execution(log_every=1), said)
    assert any(f"{second} is damaged (in {shard.name})" in text for text in said.texts)
    assert any(f"continuing from step 2 ({first})" in text for text in said.texts)
    close(A, B)


KEPT = ["step-00000002.dcp", "step-00000005.dcp"]


def test_a_full_disk_leaves_the_last_checkpoint() -> None:
    assert ranks(2, full) == [0] * 2
    assert [p.name for p in checkpoint.found(B / checkpoint.FOLDER)] == KEPT
    assert "No space left" in lines(B, "note")[0]["text"]
    assert "step-00000002.dcp is kept" in lines(B, "note")[0]["text"]
    assert not list((B / checkpoint.FOLDER).glob("*.part"))


def full() -> None:
    """The disk of rank 1 is full from step 4 on."""
    import torch.distributed.checkpoint as dcp

    write = dcp.FileSystemWriter.write_data

    def fail(self: Any, *args: Any) -> Any:
        if dist.get_rank() == 1 and "0004" in str(self.path):
            raise OSError(28, "No space left on device")
        return write(self, *args)

    dcp.FileSystemWriter.write_data = fail
    run("muon", B, "fsdp", 5, checkpoint_every=2)


# -- ranks that stop ------------------------------------------------------------------------------


def dying(parallel: str) -> None:
    """Rank 1 is killed after the third step."""
    update = Training._update

    def die(self: Training) -> None:
        update(self)
        if (self.ranks.rank, self.step) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)

    Training._update = die  # type: ignore[method-assign]
    try:
        run("muon", B, parallel, checkpoint_every=2)
    except LostRank as e:
        Path(f"rank{dist.get_rank()}").write_text(str(e))
        os._exit(3)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_others_stop_if_a_rank_is_killed(parallel: str) -> None:
    assert ranks(2, dying, parallel) == [3, -signal.SIGKILL]
    said = Path("rank0").read_text()
    assert "rank 0 lost the connection to another rank" in said
    assert "Run the same command again" in said
    run("muon", A, "ddp"), run("muon", B, "ddp")
    close(A, B)
    assert lines(B, "run")[1]["resumed"] == 2


SCRIPT = """
import os, signal, sys
from sodaopt import cli
from sodaopt.lab.training import Training

update = Training._update

def die(self):
    update(self)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if (self.ranks.rank, self.step, first) == (1, 3, True):
        os.kill(os.getpid(), signal.SIGKILL)

Training._update = die
sys.exit(cli.main(sys.argv[1:]))
"""


def test_torchrun_restarts_from_the_last_checkpoint() -> None:
    run("muon", A, "ddp")
    Path("script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               "2", "--max-restarts", "1", "script.py", "train", "--optimizer", "muon",
               *flags(**JOB), "--parallel", "fsdp", "--checkpoint-every", "2", "--log-every", "1",
               "--out", "b", "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "rank 0 lost the connection to another rank" in done.stderr
    assert json.loads(done.stdout)["status"] == "finished"
    assert [r["resumed"] for r in lines(B, "run")] == [0, 2]
    close(A, B)


def test_the_folder_is_shared() -> None:
    assert ranks(2, refused) == [0] * 2


def refused() -> None:
    with pytest.raises(train.Refused, match="not the same folder on all ranks"):
        run("muon", Path(f"of-rank-{os.environ['RANK']}"), "ddp")


def test_the_number_of_shards() -> None:
    """Three do not divide two processes. The default is the processes of a node."""
    assert ranks(2, wrong_shards) == [0] * 2
    assert ranks(2, train.train, job("muon", **JOB), B, Execution(parallel="hsdp")) == [0] * 2
    assert records.read(B).finished


def wrong_shards() -> None:
    with pytest.raises(ValueError, match="shards is 3: it must divide the 2 processes"):
        train.train(job("muon", **JOB), A, Execution(parallel="hsdp", shards=3))
