"""Load the model of a recorded run."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from . import records, sharded
from .checkpoint import (
    FOLDER,
    WEIGHTS,
    WRONG_CONTENT,
    Damaged,
    first_line,
    found,
    load,
    newest,
)
from .data import open_data
from .identity import differences
from .job import Job, resolve
from .model import GPT
from .optimizers import averaged, build
from .records import Run
from .train import DATA
from .visible import visible


def restore(run: Run) -> tuple[GPT, Any]:
    """Return the model of a run with its latest weights, and its data set."""
    job = job_of(run)
    data = open_data(job.dataset, DATA)
    resolved = resolve(job, data.vocab)
    model, weights = GPT(resolved.shape), run.folder / WEIGHTS
    # Weights in the folder of an unfinished run may belong to an earlier run.
    if run.finished and weights.exists():
        with _fitting(weights, run):
            model.load_state_dict(load(weights))
        return model, data
    best = newest(found(run.folder / FOLDER), lambda text: print(visible(text), file=sys.stderr))
    if best is None:
        raise ValueError(
            f"{run.folder} has neither weights nor a readable checkpoint: train it again"
        )
    path, state = best
    if "run" in state and (changes := differences(state["run"]["job"], run.job)):
        raise ValueError(f"{path} is of another run ({changes}): remove {path.parent}")
    with _fitting(path, run):
        opt = build(resolved.name, model, resolved.settings)
        sharded.fill(path, state, model, opt)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["optimizer"])
        with averaged(opt), torch.no_grad():
            x = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(x)
    return model, data


@contextmanager
def _fitting(path: Path, run: Run) -> Iterator[None]:
    """Raise ValueError with the name of the file if its content does not fit the run."""
    remedy = f"remove {run.folder} and train it again"
    try:
        yield
    except Damaged as e:
        raise ValueError(f"{e}: {remedy}") from e
    except WRONG_CONTENT as e:
        why = first_line(e).rstrip(":")
        raise ValueError(
            f"{path} does not fit the model in {records.FILE} ({why}): {remedy}"
        ) from e


def job_of(run: Run) -> Job:
    """Return the job that a run's record describes."""
    try:
        return _job(run.job)
    except (KeyError, TypeError, ZeroDivisionError) as e:
        raise ValueError(
            f"{run.folder / records.FILE} does not describe a whole job ({type(e).__name__}: {e}): "
            f"remove {run.folder} and train it again"
        ) from e


def _job(r: records.Record) -> Job:
    names = ("optimizer", "preset", "data", "seed", "lr", "wd", "steps", "batch", "context")
    more = ("width", "depth", "head_dim", "activation", "alpha", "alpha_bar", "z0")
    fade = tuple(r["fade"]) if r.get("fade") else None
    decay = r.get("decay", "uniform")
    parts = {part: r[part] / r["steps"] for part in ("warmup", "warmdown")}
    return Job(**{name: r[name] for name in (*names, *more)}, fade=fade, decay=decay, **parts)
