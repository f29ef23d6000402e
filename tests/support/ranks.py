"""Checks on several gloo ranks. The ranks are started once for all checks.

A test module has a table `CHECKS` of functions. Each takes a folder, and raises if it fails. The
module may set `RANKS`, the number of ranks, which is 2 otherwise. The fixture `world` runs the
selected checks of all modules with the same number of ranks, because starting the ranks takes
longer than most checks. Each test looks up the result of its check.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

Check = Callable[[Path], None]
PATIENCE = timedelta(seconds=60)  # a rank that failed leaves the others waiting for it
# All ranks are forked from one process that has imported them, which takes seconds.
PRELOAD = ("torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo", "sodaopt")

available = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch without gloo"
)


@dataclass
class World:
    """The folder that the ranks wrote to, and the message of each failed check."""

    where: Path
    failures: dict[str, str]

    def assert_passed(self, module: str, check: str) -> None:
        failure = self.failures.get(
            f"{module}:{check}", "not run: the ranks ended before this check"
        )
        assert not failure, failure


@pytest.fixture(name="world", scope="module")
def spawned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    size = getattr(request.module, "RANKS", 2)
    where = root / f"{size} ranks"
    with FileLock(root / f"{size} ranks.lock"):  # the first of several test workers runs them
        if not where.exists():
            where.mkdir()
            _spawn(size, _selected(size, request.session.items), where)
    return World(where, _read(size, where))


def _selected(size: int, items: list[pytest.Item]) -> list[str]:
    """module:check for every test that has a check on this number of ranks."""
    found = []
    for item in items:
        checks = getattr(item.module, "CHECKS", {})
        checks = checks if getattr(item.module, "RANKS", 2) == size else {}
        check = item.callspec.params.get("check") if hasattr(item, "callspec") else None
        found += [f"{item.module.__name__}:{check}"] if check in checks else []
    return found


def _spawn(size: int, names: list[str], where: Path) -> None:
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, *PRELOAD])
    spawn = context.Process
    ranks = [spawn(target=_rank, args=(rank, size, names, where)) for rank in range(size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # as for every test that needs no GPU
        for p in ranks:
            p.start()
    for p in ranks:
        p.join()


def _read(size: int, where: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for rank in range(size):
        file = where / f"rank{rank}.json"
        lines = file.read_text().splitlines() if file.exists() else []
        for name, failure in map(json.loads, lines):
            said = f"rank {rank}: {failure}" if failure else ""
            found[name] = "\n".join(filter(None, (found.get(name), said)))
    return found


def _rank(rank: int, size: int, names: list[str], where: Path) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(where / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    with open(where / f"rank{rank}.json", "w") as out:
        for name in names:
            module, check = name.split(":", 1)
            torch.manual_seed(0)
            failure = ""
            try:
                import_module(module).CHECKS[check](where)
            except (Exception, pytest.fail.Exception):  # the latter is not an Exception
                failure = traceback.format_exc()
            print(json.dumps((name, failure)), file=out, flush=True)
            # Not a barrier: if a rank fails alone, the others may still be in a collective.
            store.set(f"{name}/{rank}", "done")
            store.wait([f"{name}/{r}" for r in range(size)], 2 * PATIENCE)
    dist.destroy_process_group()
