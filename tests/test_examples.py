"""Each example runs as it is if its packages are installed, and its model learns."""

import os
import re
import runpy
import socket
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from tests.support.ranks import PRELOAD
from tests.support.wrapped import missing

EXAMPLES = Path(__file__).parents[1] / "examples"

# The packages that each example needs, and the number of its ranks.
TABLE: dict[str, tuple[list[str], int]] = {
    "plain": ([], 1),
    "finetune": (["safetensors"], 1),
    "hf_trainer": (["transformers", "accelerate"], 1),
    "accelerate_loop": (["accelerate"], 1),
    "lightning_fit": (["lightning or pytorch_lightning"], 1),
    "fsdp2": ([], 2),
    "torchtitan_container": (["torchtitan"], 2),
    "deepspeed_zero": (["deepspeed"], 2),
    "ray_train": (["ray", "pandas"], 1),
    "ray_tune": (["ray", "pandas"], 1),
    "optuna_search": (["optuna"], 1),
    "peft_lora": (["peft", "transformers"], 1),
    "timm_train": (["timm"], 1),
    "torchao_8bit": (["torchao"], 1),
    "trl_sft": (["trl", "datasets", "tokenizers"], 1),
}
SURROUNDINGS = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "RAY_USAGE_STATS_ENABLED": "0",
    **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
}


def test_every_example_is_here() -> None:
    assert {f.stem for f in EXAMPLES.glob("*.py")} == set(TABLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_example(name: str, tmp_path: Path) -> None:
    needs, size = TABLE[name]
    if missing(*needs):
        pytest.skip(f"{missing(*needs)} not installed")
    folder, log = tmp_path / "folder", tmp_path / "log"
    folder.mkdir()
    codes = run(EXAMPLES / f"{name}.py", size, folder, log)
    said = log.read_text()
    assert codes == [0] * size, said
    losses = re.findall(r"^loss (\S+) -> (\S+)$", said, re.M)
    assert losses or name == "finetune", said
    assert all(float(last) < float(first) / 1.2 for first, last in losses), said
    assert not list(folder.iterdir()), "it left files behind"


def run(script: Path, size: int, folder: Path, log: Path) -> list[int | None]:
    """Run a script in processes that have imported torch. Several are ranks, as under torchrun."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in map(str, range(size)):
        more = world | {"RANK": rank, "LOCAL_RANK": rank} if size > 1 else {}
        process = context.Process(target=_script, args=(script, folder, log, SURROUNDINGS | more))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def _script(script: Path, folder: Path, log: Path, surroundings: dict[str, str]) -> None:
    os.environ |= surroundings
    os.chdir(folder)
    torch.set_num_threads(1)
    number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(number, stream)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")
