"""A sweep on a Ray cluster whose node is lost and replaced."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sodaopt import cli
from sodaopt.lab import on_ray, records, sweep, train
from sodaopt.lab.checkpoint import WEIGHTS
from sodaopt.lab.execution import Execution
from sodaopt.lab.on_ray import OnRay
from tests.support.lab_jobs import embedded, flags, job, losses, working

ray = pytest.importorskip("ray", reason="ray is not installed")
assert embedded  # fixtures
assert working
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("lab")]


@pytest.fixture(name="cluster")
def started() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_the_trials_of_a_lost_node_run_again(
    cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their results are those of this machine, and their records arrive while they run."""
    lost = cluster.add_node(num_cpus=1)
    jobs = [job("adamw", seed=seed, steps=300) for seed in range(2)]
    execution = Execution(device="cpu", log_every=1, threads=1)
    trials = [sweep.Trial(j, Path(f"on-ray/{n}"), execution) for n, j in enumerate(jobs)]
    seen: list[int] = []

    def poll() -> None:
        begun = [run for trial in trials if (run := trial.run()) and run.of("step")]
        if not seen and any(run.end is None for run in begun):
            seen.append(len(begun))
            cluster.remove_node(lost, allow_graceful=False)
            cluster.add_node(num_cpus=1)

    outcomes = list(OnRay(poll)(trials))
    assert seen, "no record arrived before the end"
    assert [(o.error, o.run is not None and o.run.finished) for o in outcomes] == [("", True)] * 2
    for n, j in enumerate(jobs):
        train.train(j, Path(f"here/{n}"), execution)
        assert losses(Path(f"here/{n}")) == pytest.approx(losses(Path(f"on-ray/{n}")), rel=1e-5)
        assert (Path(f"on-ray/{n}") / WEIGHTS).exists()

    command = ["sweep", "adamw", *flags(steps=2), "--over", "lr=0.001,0.002", "--on", "ray",
               "--device", "cpu", "--out", "sweep", "--json"]  # fmt: skip
    assert cli.main(command) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["report"]
    assert len(records.find([Path("sweep")])) == 2


def test_the_last_records_are_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A trial may end between two reads of its records."""
    go_on, is_done = threading.Event(), threading.Event()

    def work(text: str) -> str:
        trial = sweep.Trial.parse(text)
        trial.folder.mkdir(parents=True)
        with (trial.folder / records.FILE).open("w") as file:
            file.write("first\n")
            file.flush()
            go_on.wait()
            file.write("last\n")
        is_done.set()
        return ""

    monkeypatch.setattr(on_ray, "work", work)
    trial = sweep.Trial(job("adamw"), Path("run"), Execution(device="cpu"))
    parts = on_ray.parts_of(trial.text(), str(tmp_path / "absent"))
    found = [next(parts)]
    go_on.set()
    is_done.wait()
    time.sleep(0.1)  # the thread ends
    found += parts
    assert [part for name, part in found if name == records.FILE] == [b"first\n", b"last\n"]
