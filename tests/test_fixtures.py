"""Files written by version 0.1: state dicts, whole optimizers and runs of the lab.

tests/fixtures/v0_1/README.md describes the files.
"""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.fixtures_v0_1 import (
    CASES,
    DTYPES,
    FOLDER,
    LAB_JOB,
    PICKLES,
    Case,
    Weights,
    lab_command,
    step,
    weights,
)

# -- state dicts ----------------------------------------------------------------------------------

RECORDED: dict[str, dict[str, Any]] = {
    file: torch.load(FOLDER / f"{file}.pt", weights_only=True) for file in CASES
}
NAMES = [(file, name, dtype) for file, cases in CASES.items() for name in cases for dtype in DTYPES]


def assert_continues(case: Case, dtype: torch.dtype, found: dict[str, Any]) -> None:
    """Load a recorded case, take its next steps and compare the weights in train and eval mode."""
    torch.manual_seed(9)  # other initial weights than the recorded ones: z0 must come from the file
    model = case.model(dtype)
    opt = case.build(model)
    model.load_state_dict(found["weights"])
    opt.load_state_dict(copy.deepcopy(found["state"]))
    for grads in found["grads"]:
        step(model, opt, grads)
    assert_near(weights(model), found["expected"])
    opt.eval()
    assert_near(weights(model), found["output"])


def assert_near(actual: Weights, expected: Weights) -> None:
    """Raise if weights differ by more than the results of two processors may."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert actual[name].dtype == x.dtype
        if x.dtype == torch.bfloat16:
            apart = (_rank(actual[name]) - _rank(x)).abs().max()
            assert apart <= 2, f"{name} is {apart} bf16 ulps off: {actual[name]} against {x}"
        else:
            torch.testing.assert_close(actual[name], x, rtol=1e-5, atol=1e-6)


def _rank(x: Tensor) -> Tensor:
    """Number the bf16 values in ascending order, so that neighbours differ by one."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def test_every_recorded_case_is_in_the_table():
    for file, cases in CASES.items():
        assert {f"{n}, {dtype}" for n in cases for dtype in DTYPES} == RECORDED[file].keys()


@pytest.mark.parametrize(("file", "name", "dtype"), NAMES)
def test_a_state_dict_of_version_0_1_continues(file, name, dtype):
    assert_continues(CASES[file][name], DTYPES[dtype], RECORDED[file][f"{name}, {dtype}"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("file", "name", "key"),
    [
        ("rows", "adam", "m"),
        ("rows", "soda(adam)", "z0"),
        ("rows", "dual_averaging", "x"),
        ("wrappers", "SODAWrapper(AdamW)", "exp_avg"),
        ("wrappers", "SODAWrapper(AdamW)", "soda_z0"),
        ("wrappers", "SNOO(AdamW)", "snoo_b"),
    ],
)
def test_the_comparison_notices_a_changed_state(file, name, key, dtype):
    found = copy.deepcopy(RECORDED[file][f"{name}, {dtype}"])
    found["state"]["state"][0][key].add_(0.5)
    with pytest.raises(AssertionError):
        assert_continues(CASES[file][name], DTYPES[dtype], found)


# -- whole optimizers -----------------------------------------------------------------------------


@pytest.mark.parametrize("file", PICKLES)
def test_a_pickled_optimizer_of_version_0_1_names_the_missing_module(file):
    """docs/guides/continue.md says what to do."""
    with pytest.raises(ModuleNotFoundError, match="sodaopt"):
        torch.load(FOLDER / file, weights_only=False)


# -- runs of the lab ------------------------------------------------------------------------------

LAB = json.loads((FOLDER / "lab" / "lab.json").read_text())


def losses(folder: Path) -> dict[str, dict[str, float]]:
    """Return the losses of the one run in a folder, as `sodaopt report` reads them."""
    from sodaopt.lab.records import find

    (run,) = find([folder])
    return {kind: {str(r["step"]): r["loss"] for r in run.of(kind)} for kind in ("step", "val")}


@pytest.fixture(name="runs", scope="module")
def working_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Change to a working folder of the lab and return its folder of runs."""
    pytest.importorskip("tyro")
    pytest.importorskip("rich")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("lab"))
        yield Path("runs/train").resolve()


def put(kind: str, runs: Path) -> Path:
    """Replace the runs by the recorded one of this kind, and return its folder."""
    shutil.rmtree(runs, ignore_errors=True)
    shutil.copytree(FOLDER / "lab" / kind, runs)
    return runs / LAB["key"]


def test_the_report_reads_a_run_of_version_0_1(runs):
    from sodaopt import cli

    folder = put("finished", runs)
    assert losses(folder) == LAB["losses"]
    assert cli.main(["report", str(folder)]) == 0
    assert (folder / "report.html").exists()


def test_the_key_of_a_job_is_that_of_version_0_1(runs):
    from sodaopt.lab.job import Job, resolve

    head = json.loads((put("finished", runs) / "run.jsonl").read_text().splitlines()[0])
    assert resolve(Job(**LAB_JOB), head["data"]["vocab"]).key == LAB["key"]


def test_the_same_command_finds_the_finished_run(runs):
    from sodaopt import cli

    folder = put("finished", runs)
    before = (folder / "run.jsonl").read_bytes()
    assert LAB["command"] == lab_command()
    assert cli.main(LAB["command"]) == 0
    assert [path.name for path in runs.iterdir()] == [LAB["key"]]
    assert (folder / "run.jsonl").read_bytes() == before


def test_the_same_command_continues_the_stopped_run(runs):
    from sodaopt import cli

    folder = put("stopped", runs)
    before = (folder / "run.jsonl").read_text()
    assert cli.main(LAB["command"]) == 0
    assert [path.name for path in runs.iterdir()] == [LAB["key"]]
    after = (folder / "run.jsonl").read_text()
    assert after.startswith(before)
    assert after.count('"kind": "step", "step": 0,') == 1, "it was trained from the beginning"
    found = losses(folder)
    for kind, expected in LAB["losses"].items():
        assert found[kind] == pytest.approx(expected, rel=1e-4)


def test_the_weights_of_a_run_make_text(runs, capsys):
    from sodaopt import cli

    assert cli.main(["sample", str(put("finished", runs)), "--tokens", "5"]) == 0
    assert capsys.readouterr().out.strip()


def test_the_numbers_of_version_0_1():
    """A study goes on from them: the seeds of both commands are in the page."""
    from sodaopt.lab import results

    old = results.read(FOLDER / "lab" / "results.json")
    assert "1x: seeds 0 to 2." in results.markdown(old)
    cells = [c | {"seeds": [3], "settings": {}} for c in old["cells"]]
    cells = [c | {n: c[n][:1] for n in ("losses", "seconds", "tokens_per_second")} for c in cells]
    both = results.completed(old | {"cells": cells, "planned": {"1x": 5}}, [old])
    assert [c["seeds"] for c in both["cells"]] == [[0, 1, 2, 3]] * len(cells)
    for before, after in zip(old["cells"], both["cells"], strict=True):
        assert after["losses"] == [*before["losses"], before["losses"][0]]
    assert "1x: seeds 0 to 3 of 5 planned." in results.markdown(both)
