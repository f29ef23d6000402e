"""A damaged run.jsonl is named and skipped. It does not stop the report of other runs."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from sodaopt import cli
from sodaopt.lab import board, records
from sodaopt.lab.data import open_data
from sodaopt.lab.progress import Lines
from sodaopt.lab.visible import visible
from tests.support.lab_runs import fake

HUGE = 10**400
WRONG: dict[str, dict[str, Any]] = {
    "run": {"job": 5, "model": [1], "data": "x", "time": 1e20},
    "job": {"seed": [1], "steps": "x", "lr": {}, "wd": HUGE},
    "model": {"parameters": "x"},
    "step": {"step": "x", "loss": "x", "seconds": [1], "tokens": {}, "tokens_per_second": "x"},
    "val": {"step": [1], "loss": math.inf, "seconds": "x"},
    "end": {"status": 5, "step": "x", "val_loss": "x", "epochs": "x", "seconds": "x",
            "optimizer_ms": "x", "state_bytes": "x", "peak_memory": [1]},
}  # fmt: skip
CASES = [(kind, name, value) for kind, values in WRONG.items() for name, value in values.items()]
CASES += [("step", "loss", None), ("val", "loss", HUGE), ("end", "val_loss", None)]
CASES += [("step", "loss", "absent"), ("val", "loss", "absent"), ("end", "status", "absent")]


def change(path: Path, kind: str, name: str, value: Any) -> None:
    """Replace a value in the last record of a kind, or in a part of the first record."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    part = kind in ("job", "model")
    record = lines[0][kind] if part else [r for r in lines if r["kind"] == kind][-1]
    record[name] = value
    if value == "absent":
        del record[name]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize(("kind", "name", "value"), CASES)
def test_one_damaged_run(
    kind: str, name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(tmp_path, "adamw")
    bad = fake(tmp_path, "muon").folder / records.FILE
    change(bad, kind, name, value)
    assert cli.main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "adamw" in said
    if (kind, name, value) == ("step", "loss", None):  # a loss that is not finite
        return
    assert f"skipped: {bad} is damaged (" in said
    assert f"remove {bad.parent} and train it again" in said
    assert cli.main(["report", str(bad.parent)]) == 2


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b"5", b"null", b'{"kind": {}}', b"\xff\xfe", b'{"kind": "no"}']
)
def test_lines_that_are_not_records(line: bytes, tmp_path: Path) -> None:
    run = fake(tmp_path)
    with (run.folder / records.FILE).open("ab") as file:
        file.write(b"\n" + line + b"\n")
    assert cli.main(["report", str(tmp_path)]) == 0
    board._last(run.folder)


def test_half_of_a_surrogate_pair(tmp_path: Path) -> None:
    fake(tmp_path, sample="The \ud800 whale")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert " ? whale" in (tmp_path / "report.html").read_text()


# -- control characters ---------------------------------------------------------------------------

ESCAPE = "\x1b]0;title\x07[/red]"


def test_control_characters_are_shown_as_codes() -> None:
    assert (
        visible("a\tb\n\x1b[31m\x9b\r\u202e\ud800é") == "a\tb\n\\x1b[31m\\x9b\\x0d\\u202e\\ud800é"
    )


def test_no_text_of_a_file_controls_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    fake(runs, f"muon{ESCAPE}", status=f"done{ESCAPE}")
    bad = fake(runs, "muon").folder / records.FILE
    change(bad, "end", "val_loss", ESCAPE)
    assert cli.main(["report", str(runs), "--baseline", f"muon{ESCAPE}"]) == 0
    assert cli.main(["report", str(runs), "--baseline", "moun"]) == 2
    assert cli.main(["report", str(bad.parent)]) == 2
    Lines(1).say(ESCAPE)
    said = "".join(capsys.readouterr())
    assert "\\x1b" in said
    assert not {"\x1b", "\x07"} & set(said)


def test_no_text_of_a_data_set_controls_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = open_data("embedded", tmp_path).folder
    folder = tmp_path / f"data{ESCAPE.replace('/', '')}"
    shutil.copytree(whole, folder)
    meta = json.loads((folder / "meta.json").read_text())
    for change, code in (({"licence": ESCAPE, "sodaopt": ESCAPE}, 0), ({"vocab": ESCAPE}, 2)):
        (folder / "meta.json").write_text(json.dumps(meta | change))
        assert cli.main(["data", "info", str(folder)]) == code
        said = "".join(capsys.readouterr())
        assert "\\x1b" in said
        assert not {"\x1b", "\x07"} & set(said)


def test_sample_of_a_job_with_missing_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fake(tmp_path)
    change(run.folder / records.FILE, "job", "data", "absent")
    assert cli.main(["sample", str(run.folder)]) == 2
    assert f"{run.folder / records.FILE} does not describe a whole job" in capsys.readouterr().err
