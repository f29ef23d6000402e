"""The command line: help, dry runs, quiet and JSON output, and messages about missing parts."""

import ast
import builtins
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

pytest.importorskip("tyro")

from sodaopt import __version__, cli
from sodaopt.lab import execution, job, train
from sodaopt.lab.arguments import Output, parse_seeds
from sodaopt.lab.commands import Sample, Train
from sodaopt.lab.data.command import Download, Info, Prepare, Wikipedia
from sodaopt.lab.many import Compare, Many, Sweep, placed
from sodaopt.lab.report import Page
from sodaopt.lab.report.command import Report
from sodaopt.lab.reproduce import Reproduce
from sodaopt.lab.track3 import Track3
from tests.support.lab_jobs import embedded, exit_code, flags, working

assert embedded  # fixtures
assert working
lab = pytest.mark.usefixtures("lab")
RECORDS = (Train, Sample, Many, Compare, Sweep, Report, Reproduce, Prepare, Download, Info, Output,
           Wikipedia, Track3, job.Common, job.Job, execution.Execution)  # fmt: skip
NESTED = {"job", "common", "execution", "output"}


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_flag_has_a_sentence(kind):
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    pairs = list(zip(body.body, [*body.body[1:], None], strict=True))
    fields = [(a, b) for a, b in pairs if isinstance(a, ast.AnnAssign)]
    assert fields
    for field, after in fields:
        said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        assert said or field.target.id in NESTED, f"{field.target.id} has no sentence"


def test_help_has_groups_and_names(capsys):
    assert exit_code(["compare", "--help"]) == 0
    said = capsys.readouterr().out
    for words in ("OPTIMIZER ...", "common options", "execution options", "output options",
                  "SEED|FIRST-LAST"):  # fmt: skip
        assert words in said, words
    assert "[STR [STR ...]]]   Names" not in said


SLOW = ("scipy", "sklearn", "matplotlib", "tokenizers", "tiktoken", "huggingface_hub", "pandas",
        "torch._dynamo", "torch.distributed.tensor")  # fmt: skip


def test_help_imports_nothing_slow():
    """--help takes little more time than the import of torch."""
    script = f"""
import subprocess
import sys
from sodaopt import cli
for name in {list(cli.COMMANDS)!r}:
    try:
        cli.main([name, "--help"])
    except SystemExit:
        pass
print("found:", [name for name in {SLOW!r} if name in sys.modules])"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "found: []"


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version(flag, capsys):
    assert cli.main([flag]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(
    ("words", "seeds"),
    [(["0", "1"], (0, 1)), (["0-4"], (0, 1, 2, 3, 4)), (["0,2", "2-3"], (0, 2, 3)), ([7], (7,))],
)
def test_seeds(words, seeds):
    assert parse_seeds(words) == seeds


@pytest.mark.parametrize("module", ["fcntl", "resource"])
def test_windows_gets_the_right_sentence(module, monkeypatch, capsys):
    load = builtins.__import__

    def without(name, *rest):
        if name == module:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    for name in ("sodaopt.lab.train", "sodaopt.lab.reproduce", "sodaopt.lab.commands"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if module == "resource":
        monkeypatch.setitem(cli.COMMANDS, "train", (module, ""))
        monkeypatch.setattr(cli, "resolve_name", without)
    assert cli.main(["train"]) == 2
    assert f"needs Linux or macOS ({module}): on Windows, use WSL" in capsys.readouterr().err


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="'mps' is not supported: use cpu, cuda or cuda:1"):
        execution.Execution("mps")


# -- dry runs -------------------------------------------------------------------------------------

DRY = [
    (["train", "--optimizer", "soda(muon)", "--preset", "gpt-124m"],
     ("124M parameters", "blocks.*.mlp.fc.weight", "soda_z0 340 MB", "last 1450 of 5100 steps",
      "2.67G tokens", "time: about", "folder: runs/train/soda-muon-s0-",
      "first: sodaopt data download fineweb100B 27")),
    (["train"], ("embedded, which is part of the package",)),
    (["compare", "adamw", "lion", "--preset", "proxy", "--seeds", "0-1"],
     ("proxy is not in runs/data", "4 runs. time: about", "runs/compare/lion-s1-")),
    (["sweep", "muon", "--over", "lr=2^-10,2^-9"], ("2 runs. time: about", "lr 0.001953")),
    (["reproduce", "muon", "--seeds", "0"], ("6.82M parameters", "16 runs. time: about",
     "all of them: sodaopt reproduce muon --scale proxy --seeds 0 --device cpu\n")),
    (["reproduce", "fig-scale", "--scale", "paper", "--seeds", "0", "--mfu", "0.24", "--price",
      "2"], ("sodaopt train --preset gpt-1b", "data download fineweb100B 215",
             "hours of one H200 at 24% of its peak", "USD at 2 USD an hour")),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), DRY, ids=lambda x: x[0] if x else "")
def test_dry_runs_need_no_data_and_make_no_files(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*arguments, "--dry-run", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    for word in (*words, "schedule: lr ", "memory: weights ", "parameter  "):
        assert word in said, word
    assert list(tmp_path.iterdir()) == []


@lab
def test_a_dry_run_knows_earlier_runs_and_epochs(capsys):
    arguments = ["train", *flags(steps=2)]
    assert cli.main([*arguments, "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert cli.main([*arguments, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "from earlier runs of this size" in said
    assert re.search(r"embedded, 3\.24M training tokens, \S+ epochs", said)


def test_repeated_data_is_reported_before_the_run(monkeypatch, capsys):
    class Data:
        name, vocab, train_tokens = "mine", 1024, 1000

    def stop(*_):
        raise ValueError("no further")

    monkeypatch.setattr("sodaopt.lab.commands.open_data", lambda *_: Data)
    monkeypatch.setattr("sodaopt.lab.commands.train", stop)
    assert cli.main(["train"]) == 2
    assert "mine has 1k training tokens: each run reads them 158 times" in capsys.readouterr().out


# -- output ---------------------------------------------------------------------------------------


@lab
def test_json(capsys):
    more = [*flags(steps=2), "--seeds", "0-1", "--workers", "1", "--out", "out", "--json"]
    assert cli.main(["compare", "muon", "lion", *more]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["job"]["optimizer"] for row in found["variants"]] == ["muon", "lion"]
    lion = found["variants"][1]
    assert set(lion["losses"]) == {"0", "1"}
    assert lion["low"] < lion["difference"] < lion["high"]
    assert (lion["primary"], lion["p"] is not None) == (True, True)
    assert Path(found["report"]).exists()
    assert cli.main(["report", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert cli.main(["train", *flags(steps=2), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "finished"


@lab
def test_the_page_has_the_command_that_made_it(capsys):
    words = ["sweep", "muon", "soda(muon)", "--over", "lr=0.1,0.2", "--over", "wd=0,1",
             "--seeds", "3", "--no-diagnostics", "--workers", "1", "--out", "out",
             *flags(steps=1)]  # fmt: skip
    assert cli.main([*words, "--quiet"]) == 0
    command = Page.load(Path("out")).command
    again = shlex.split(command)
    assert (again[:4], set(again[1:])) == (["sodaopt", *words[:3]], set(words))
    capsys.readouterr()
    assert cli.main([*again[1:], "--json"]) == 0, "and it runs: nothing is left to do"
    assert len(json.loads(capsys.readouterr().out)["variants"]) == 6


@lab
def test_nano_uses_one_thread(monkeypatch):
    used = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr(train, "join_world", lambda _: used.append(0) or 1 / 0)
    for preset, threads in (("nano", None), ("small", None), ("nano", 3)):
        with pytest.raises(ZeroDivisionError):
            train.train(
                job.Job(preset=preset), Path("a"), execution.Execution("cpu", threads=threads)
            )
    assert used == [1, 0, 0, 3, 0]
    for name, threads in (("nano", 1), ("small", 8)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16), raising=False)
        assert placed(execution.Execution("cpu"), 2, 9, name) == (
            2, execution.Execution("cpu", threads=threads)
        )  # fmt: skip


@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_closed_pipe_is_silent(buffered):
    """As in `sodaopt env | head`, with Python's buffers and without."""
    code = "import sys; sys.stdin.read(); from sodaopt import cli; sys.exit(cli.main(['--help']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": buffered},
    )  # fmt: skip
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1


def test_track_3_asks_for_folders(capsys):
    assert exit_code(["track3"]) == 2
    assert "name the folders of runs" in capsys.readouterr().err
