"""Check the types of the records of a run, so that readers can rely on them."""

from typing import Any

HEAD_PARTS = ("job", "model", "data", "environment", "git")
JOB_NUMBERS = ("lr", "wd", "steps", "batch", "context", "width", "depth", "warmup", "warmdown")
NUMBERS = ("tokens", "seconds", "loss", "lr", "tokens_per_second", "epoch", "epochs", "val_loss",
           "mfu", "optimizer_ms", "state_bytes", "peak_memory")  # fmt: skip
REQUIRED = {"step": ("step", "loss"), "val": ("step", "loss"), "end": ("step", "status"),
            "diagnostics": ("step", "roles")}  # fmt: skip
LARGEST = 1e300
LATEST = 1e11
"""The largest time in seconds that is still a date."""


def problem(record: dict[str, Any]) -> str:
    """Return a description of the first wrong value in a record, or an empty string."""
    if record["kind"] == "run":
        return _head_problem(record)
    kind = str(record["kind"])
    if missing := [name for name in REQUIRED.get(kind, ()) if name not in record]:
        return f"a record of kind {kind!r} has no {missing[0]}"
    if "step" in record and not _is_count(record["step"]):
        return _said(record, "step")
    if kind == "end" and not isinstance(record["status"], str):
        return _said(record, "status")
    if kind == "end" and record["status"] == "finished" and record.get("val_loss") is None:
        return "the run is finished, but has no val_loss"
    if kind == "diagnostics":
        return _roles_problem(record)
    return _wrong_number(record, NUMBERS)


def _roles_problem(record: dict[str, Any]) -> str:
    roles = record["roles"]
    if not isinstance(roles, dict) or not all(isinstance(row, dict) for row in roles.values()):
        return _said(record, "roles")
    return next(filter(None, (_wrong_number(row, tuple(row)) for row in roles.values())), "")


def _head_problem(head: dict[str, Any]) -> str:
    for name in HEAD_PARTS:
        if not isinstance(head.get(name, {}), dict):
            return _said(head, name)
    job, time = head.get("job", {}), head.get("time")
    if isinstance(job.get("seed"), list | dict):
        return _said(job, "seed")
    if isinstance(time, int | float) and not 0 <= time < LATEST:
        return _said(head, "time")
    return _wrong_number(job, JOB_NUMBERS) or _wrong_number(head.get("model", {}), ("parameters",))


def _wrong_number(record: dict[str, Any], names: tuple[str, ...]) -> str:
    """Return a description of the first entry that is neither a finite number nor None."""
    for name in names:
        value = record.get(name)
        if value is not None and not (
            isinstance(value, int | float) and -LARGEST < value < LARGEST
        ):
            return _said(record, name)
    return ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < LARGEST


def _said(record: dict[str, Any], name: str) -> str:
    """Return the name of an entry and its value, cut short."""
    return f"{name} is {str(record[name])[:40]!r}"
