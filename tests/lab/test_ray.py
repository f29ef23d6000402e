"""A sweep on a Ray cluster whose node is lost and replaced."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sodaopt import cli
from sodaopt.lab import records, sweep, train
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


def test_a_lost_nodes_rows_run_again(cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows are those of this machine, and their records arrive while they run."""
    lost = cluster.add_node(num_cpus=1)
    jobs = [job("adamw", seed=seed, steps=150) for seed in range(2)]
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
