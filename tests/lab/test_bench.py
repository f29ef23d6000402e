"""`sodaopt bench` steps every optimizer of the table, and writes its files."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from sodaopt import SODA, cli, zoo
from sodaopt.lab import bench, peers
from sodaopt.lab.model import GPT, Shape


def model() -> nn.Module:
    return GPT(Shape(vocab=32, width=16, depth=1, head_dim=8, context=8))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "soda_dagger", "bf16 lion", "--model", "nano", "--rounds", "2"]
    args += ["--against", "torch", "--device", "cpu", "--out", str(tmp_path)]
    assert cli.main(args) == 0
    result = json.loads((tmp_path / "bench.json").read_text())
    names = [row["optimizer"] for row in result["rows"]]
    assert names == ["torch AdamW", "torch Muon", "soda_dagger", "bf16 lion"]
    assert all(row["ms"] > 0 for row in result["rows"])
    assert [row["state"] for row in result["rows"][::2]] == [2.0, 2.0]
    assert "soda_dagger" in capsys.readouterr().out
    assert (tmp_path / "bench.svg").read_text().count("soda_dagger")


def test_several_models_are_drawn_against_their_size(tmp_path: Path) -> None:
    args = ["bench", "lion", "--against", "torch", "--model", "nano", "small", "--rounds", "2"]
    assert cli.main([*args, "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["model"] for row in rows] == ["nano"] * 3 + ["small"] * 3
    assert rows[0]["parameters"] < rows[-1]["parameters"]
    assert "parameters" in (tmp_path / "bench.svg").read_text()


def test_the_floor_counts_bytes_and_products() -> None:
    """For a square matrix with momentum: p and m twice, g once, and five plain iterations."""
    net = nn.Linear(64, 64, bias=False)
    opt = SODA(net.parameters(), 0.1, zoo.muon(weight_decay=0))
    at = {"copy_tb_per_s": 1e-9, "product_tflop_per_s": 1e-9}
    assert bench.floor(opt, **at) == 5 * 4 * 64**2 + 5 * 4 * 64**3


@pytest.mark.parametrize("name", bench.DEFAULT)
def test_ours_move_every_parameter(name: str) -> None:
    check_moves(bench.ours(name))


@pytest.mark.parametrize("name", [n for builds in peers.PEERS.values() for n in builds])
def test_peers_move_every_parameter(name: str) -> None:
    build = next(builds[name] for builds in peers.PEERS.values() if name in builds)
    try:
        check_moves(build)
    except ModuleNotFoundError as e:
        pytest.skip(f"{e.name} is not installed")


def check_moves(build: peers.Build) -> None:
    net = model()
    before = [p.detach().clone() for p in net.parameters()]
    opt = build(net)
    for _ in range(3):
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        opt.step()
    assert not any(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["lino"], "did you mean 'lion'"),
        (["--against", "dino"], "did you mean 'dion'"),
        (["graph muon"], "needs a GPU"),
    ],
)
def test_wrong_arguments(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *args, "--device", "cpu"]) == 2
    assert says in capsys.readouterr().err
