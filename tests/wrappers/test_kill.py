"""A killed training script continues with the same losses and weights, bit by bit.

The script saves at every step, and is killed at random moments.
"""

import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import batch, equal
from tests.support.wrapped import ANCHORED, DTYPES, loss_of, missing, started, warmup

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL and no fork"),
]


def script(folder: Path, names: list[str], dtype: torch.dtype, steps: int) -> None:
    """Train from the last checkpoint in the folder, and write each loss as soon as it is known.

    Several optimizers share a process, each with a model of its own.
    """
    torch.set_num_threads(1)
    tempfile.tempdir = str(folder)  # a killed process leaves its files
    runs: dict[str, dict[str, Any]] = {}
    for name in names:
        model, opt = started(name, dtype)
        runs[name] = {"model": model, "opt": opt, "schedule": warmup(opt)}
    saved, first = folder / "saved.pt", 0
    if saved.exists():
        found = torch.load(saved, weights_only=True)
        first = found.pop("step")
        for name, states in found.items():
            for part, state in states.items():
                runs[name][part].load_state_dict(state)
    with open(folder / "losses", "a") as losses:
        for k in range(first, steps):
            for name, run in runs.items():
                run["opt"].zero_grad()
                loss = loss_of(run["model"], *batch(k, dtype))
                loss.backward()
                run["opt"].step()
                run["schedule"].step()
                print(name, k, loss.item().hex(), file=losses, sep="\t", flush=True)
            states = {n: {part: o.state_dict() for part, o in r.items()} for n, r in runs.items()}
            torch.save({"step": k + 1, **states}, folder / "new.pt")
            os.replace(folder / "new.pt", saved)


def losses(folder: Path) -> list[tuple[tuple[str, int], str]]:
    rows = (line.split("\t") for line in (folder / "losses").read_text().splitlines())
    return [((name, int(k)), loss) for name, k, loss in rows]


def weights(folder: Path) -> dict[str, list[torch.Tensor]]:
    saved = torch.load(folder / "saved.pt", weights_only=True)
    return {name: list(s["model"].values()) for name, s in saved.items() if name != "step"}


def cases() -> dict[str, tuple[list[str], torch.dtype, int, int]]:
    """The optimizers of one process, the dtype of their parameters, the kills, and the steps."""
    dtypes = torch.float32, torch.bfloat16
    found = {f"default-{d}": (["SODAWrapper"], d, 6, 40) for d in dtypes}
    for short, dtype in DTYPES.items():
        names = [n for n, (policy, its) in ANCHORED.items() if its == short]
        names = [n for n in names if not (n.startswith("file") and missing("safetensors"))]
        found[f"anchors-{dtype}"] = names, dtype, 3, 16
    return found


@pytest.mark.parametrize(("names", "dtype", "kills", "steps"), cases().values(), ids=cases())
def test_killed(
    names: list[str], dtype: torch.dtype, kills: int, steps: int, tmp_path: Path
) -> None:
    # Processes are forked from one that has imported these modules, so that each begins at once.
    # The first step imports torch._dynamo, and this must not count as time of the run.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])

    def begin(folder: Path) -> Any:
        """Start the script in a process of its own, and wait for its first step."""
        process = context.Process(target=script, args=(folder, names, dtype, steps))
        process.start()
        while not (folder / "losses").exists() and process.is_alive():
            time.sleep(0.001)
        return process

    straight = tmp_path / "straight"
    straight.mkdir()
    whole = begin(straight)
    begun = time.perf_counter()
    whole.join()
    seconds = time.perf_counter() - begun
    truth, final = dict(losses(straight)), weights(straight)
    for name in names:
        assert len({loss for (n, _), loss in truth.items() if n == name}) > steps / 2

    rng, done, stopped = random.Random(0), 0, set()
    for attempt in range(5 * kills):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        victim = begin(folder)
        time.sleep(rng.uniform(0, seconds))
        victim.kill()
        victim.join()
        if victim.exitcode == 0:  # it was faster than the signal
            continue
        assert victim.exitcode == -signal.SIGKILL
        stopped.add(len(losses(folder)))
        second = begin(folder)
        second.join()
        assert second.exitcode == 0
        found = losses(folder)
        assert {at for at, _ in found} == set(truth)
        assert [at for at, loss in found if truth[at] != loss] == []
        assert [n for n, ws in weights(folder).items() if not equal(ws, final[n])] == []
        done += 1
        if done == kills:
            break
    assert done == kills
    assert len(stopped) > kills / 4, "the script was not killed at different moments"
