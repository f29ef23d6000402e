"""Write tests/fixtures/v0_1: state dicts, pickles and runs of the lab as version 0.1 saves them.

    python -m tools.write_fixtures_v0_1

This script was run with version 0.1. It is kept to show how the fixtures were made. Later versions
must load these files and therefore must not write them again: the script refuses to run with any
other version.
"""

import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import sodaopt
from tests.support.fixtures_v0_1 import (
    ANCHOR_FILE,
    CASES,
    DTYPES,
    FOLDER,
    LAB_EXECUTION,
    LAB_JOB,
    MATRIX_ROWS,
    PICKLES,
    ROWS,
    SODA_ROWS,
    Case,
    Weights,
    lab_command,
    step,
    weights,
)

BEFORE, AFTER = 3, 2
"""Steps before and after the state dict is taken."""


def main() -> None:
    if sodaopt.__version__ != "0.1.0":
        sys.exit(f"these are fixtures of version 0.1.0, and sodaopt is {sodaopt.__version__}")
    check_table()
    FOLDER.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    save_file({n: t + 1 for n, t in gradients(torch.float32)[0].items()}, ANCHOR_FILE)
    for file, cases in CASES.items():
        torch.save(recorded(cases), FOLDER / f"{file}.pt")
    for file, case in PICKLES.items():
        torch.save(stepped(case, torch.float32)[1], FOLDER / file)
    write_lab()


def check_table() -> None:
    """Raise if the table of cases misses a row of the zoo, or lists one that does not fit."""
    from sodaopt.method import ROWS as ZOO

    vector = [torch.nn.Parameter(torch.ones(6))]
    methods = {name: make() for name, make in ZOO.items()}
    takes = {n: accepts(lambda n=n: sodaopt.zoo.soda(methods[n])) for n in ZOO}
    vectors = {n: accepts(lambda n=n: sodaopt.SODA(vector, 0.1, methods[n])) for n in ZOO}
    assert tuple(ZOO) == ROWS
    assert tuple(n for n in ZOO if takes[n]) == SODA_ROWS
    assert tuple(n for n in ZOO if not vectors[n]) == MATRIX_ROWS


def accepts(call: Any) -> bool:
    try:
        call()
    except ValueError:
        return False
    return True


# -- state dicts ----------------------------------------------------------------------------------


def gradients(dtype: torch.dtype) -> list[Weights]:
    """Return the gradients of all steps, which are the same for every case."""
    rng = torch.Generator().manual_seed(1)
    shapes = {"0.weight": (4, 3), "1.weight": (6,)}
    return [
        {name: torch.randn(shape, generator=rng).to(dtype) for name, shape in shapes.items()}
        for _ in range(BEFORE + AFTER)
    ]


def stepped(case: Case, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a case's model and optimizer after the first steps."""
    torch.manual_seed(2)
    model = case.model(dtype)
    opt = case.build(model)
    for grads in gradients(dtype)[:BEFORE]:
        step(model, opt, grads)
    return model, opt


def recorded(cases: dict[str, Case]) -> dict[str, Any]:
    # Cases share the tensors of the gradients, which torch.save then writes once.
    following = {label: gradients(dtype)[BEFORE:] for label, dtype in DTYPES.items()}
    return {
        f"{name}, {label}": record(case, dtype, following[label])
        for name, case in cases.items()
        for label, dtype in DTYPES.items()
    }


def record(case: Case, dtype: torch.dtype, following: list[Weights]) -> dict[str, Any]:
    """Record a case.

    weights and state: after the first steps. grads: of the following steps.
    expected: the weights after those. output: the weights after those in eval mode.
    """
    model, opt = stepped(case, dtype)
    found = {"weights": weights(model), "state": copy.deepcopy(opt.state_dict())}
    for grads in following:
        step(model, opt, grads)
    expected = weights(model)
    opt.eval()
    output = weights(model)
    same = all(torch.equal(expected[n], output[n]) for n in expected)
    grads = [{n: g[n] for n in expected} for g in following]
    return found | {"grads": grads, "expected": expected, "output": expected if same else output}


# -- runs of the lab ------------------------------------------------------------------------------


def write_lab() -> None:
    """Record a finished run, and the same run stopped in the middle with its checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "sodaopt.cli", *lab_command()], cwd=folder, check=True
        )
        (finished,) = Path(folder, "runs", "train").iterdir()
        stopped = Path(folder, "stopped", finished.name)
        stop_in_the_middle(Path(folder), stopped)
        for kind, source in (("finished", finished), ("stopped", stopped)):
            target = FOLDER / "lab" / kind / finished.name
            shutil.rmtree(target.parent, ignore_errors=True)
            # No later version reads the page or the lock.
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.html", ".lock"))
        lines = [json.loads(line) for line in (finished / "run.jsonl").read_text().splitlines()]
    losses = {
        kind: {str(r["step"]): r["loss"] for r in lines if r["kind"] == kind}
        for kind in ("step", "val")
    }
    facts = {"key": finished.name, "command": lab_command(), "losses": losses}
    (FOLDER / "lab" / "lab.json").write_text(json.dumps(facts, indent=1) + "\n")


def stop_in_the_middle(folder: Path, target: Path) -> None:
    from sodaopt.lab.execution import Execution
    from sodaopt.lab.job import Job
    from sodaopt.lab.train import train

    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > LAB_JOB["steps"] // 2

    before = Path.cwd()
    os.chdir(folder)  # the lab finds its data under the working folder
    try:
        train(Job(**LAB_JOB), target, Execution(**LAB_EXECUTION), stop=stop)
    finally:
        os.chdir(before)


if __name__ == "__main__":
    main()
