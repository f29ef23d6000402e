"""A training script that saves at every step, killed at a random moment, goes on as if it had not
been: the same losses and weights, bit by bit, twenty times out of twenty."""

import os
import random
import signal
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.training import batch, equal, weights
from tests.wrapped import loss_of, started, warmup

KILLS, STEPS = 20, 40

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL and no fork")


def script(folder: Path, dtype: torch.dtype) -> list[Tensor]:
    """The script: it goes on from what it finds, and writes each loss as soon as it is known."""
    torch.set_num_threads(1)
    model, opt = started("SODAWrapper", dtype)
    schedule = warmup(opt)
    owners = {"model": model, "opt": opt, "schedule": schedule}
    saved, first = folder / "saved.pt", 0
    if saved.exists():
        found = torch.load(saved, weights_only=True)
        first = found.pop("step")
        for name, state in found.items():
            owners[name].load_state_dict(state)
    with open(folder / "losses", "a") as losses:
        for k in range(first, STEPS):
            opt.zero_grad()
            loss = loss_of(model, *batch(k, dtype))
            loss.backward()
            opt.step()
            schedule.step()
            print(k, loss.item().hex(), file=losses, flush=True)
            states = {name: owner.state_dict() for name, owner in owners.items()}
            torch.save({"step": k + 1, **states}, folder / "new.pt")
            os.replace(folder / "new.pt", saved)
    return weights(model)


def losses(folder: Path) -> list[tuple[int, str]]:
    rows = (line.split() for line in (folder / "losses").read_text().splitlines())
    return [(int(k), loss) for k, loss in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_killed(dtype: torch.dtype, tmp_path: Path) -> None:
    import torch._dynamo  # a first step imports it, which is not to be timed

    # Processes are forked from one that has all this, so that each begins at once.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    straight = tmp_path / "straight"
    straight.mkdir()
    begun = time.perf_counter()
    final = script(straight, dtype)
    seconds = time.perf_counter() - begun
    truth = dict(losses(straight))
    assert len(set(truth.values())) > STEPS / 2

    rng, kills, stopped = random.Random(0), 0, set()
    for attempt in range(5 * KILLS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        victim = context.Process(target=script, args=(folder, dtype))
        victim.start()
        while not (folder / "losses").exists() and victim.is_alive():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, seconds))
        victim.kill()
        victim.join()
        if victim.exitcode == 0:  # it was faster than the signal
            continue
        assert victim.exitcode == -signal.SIGKILL
        stopped.add(len(losses(folder)))
        second = context.Process(target=script, args=(folder, dtype))
        second.start()
        second.join()
        assert second.exitcode == 0
        found = losses(folder)
        assert {k for k, _ in found} == set(range(STEPS))
        assert all(truth[k] == loss for k, loss in found)
        saved = torch.load(folder / "saved.pt", weights_only=True)
        assert equal(list(saved["model"].values()), final)
        kills += 1
        if kills == KILLS:
            break
    assert kills == KILLS
    assert len(stopped) > KILLS / 4, "not at random moments"
