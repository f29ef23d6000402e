"""Check that the files in a folder belong to the job that is to be trained there."""

from pathlib import Path
from typing import Any

from .job import ResolvedJob
from .records import Run


class Refused(ValueError):
    """The run must not start in this folder."""


def identity(resolved: ResolvedJob, fingerprint: str) -> dict[str, Any]:
    """Return the part of a checkpoint that identifies its run.

    fingerprint: identifies the training data
    """
    return {"job": plain(resolved.record()), "fingerprint": fingerprint}


def plain(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record as it is after it was written as JSON and read again: tuples are lists."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in record.items()}


def check_run(run: Run, asked: dict[str, Any], folder: Path) -> None:
    """Raise if the records in a folder are of another job, or of other data with the same name.

    asked: the identity of the run that is to be trained there
    """
    remedy = "choose another --out, or remove the folder"
    if changes := differences(run.job, asked["job"]):
        raise Refused(f"{folder} contains another run ({changes}): {remedy}")
    if run.head.get("data", {}).get("fingerprint") not in (None, asked["fingerprint"]):
        name = asked["job"]["data"]
        raise Refused(f"{folder} contains a run on other data with the name {name}: {remedy}")


def check_checkpoint(path: Path, state: dict[str, Any], asked: dict[str, Any]) -> str:
    """Raise if a checkpoint is of another run.

    Checkpoints of version 0.1 do not identify their run. Return a warning for them, and an empty
    string for all others.

    asked: the identity of the run that is to be continued
    """
    found = state.get("run")
    if found is None:
        return f"{path} has no record of its job (version 0.1): continuing without comparing it"
    remedy = f"choose another --out, or remove {path.parent}"
    if changes := differences(found["job"], asked["job"]):
        raise Refused(f"{path} is of another run ({changes}): {remedy}")
    if found["fingerprint"] != asked["fingerprint"]:
        name = asked["job"]["data"]
        raise Refused(f"{path} is of a run on other data with the name {name}: {remedy}")
    return ""


def differences(found: dict[str, Any], asked: dict[str, Any]) -> str:
    """Return the settings in which two jobs differ, such as 'lr 0.01 -> 0.02'."""
    names = sorted(k for k in {*asked, *found} if asked.get(k) != found.get(k))
    return ", ".join(f"{k} {found.get(k)} -> {asked.get(k)}" for k in names)
