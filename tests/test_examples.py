"""Each example runs as it is if its packages are installed, and its model learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.wrapped import missing

EXAMPLES = Path(__file__).parents[1] / "examples"
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

# The packages that it needs, and how it is launched.
TABLE: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "plain": ([], ()),
    "finetune": (["safetensors"], ()),
    "hf_trainer": (["transformers", "accelerate"], ()),
    "accelerate_loop": (["accelerate"], ()),
    "lightning_fit": (["lightning or pytorch_lightning"], ()),
    "fsdp2": ([], TWO_RANKS),
    "torchtitan_container": (["torchtitan"], TWO_RANKS),
    "deepspeed_zero": (["deepspeed"], TWO_RANKS),
    "ray_train": (["ray", "pandas"], ()),
    "ray_tune": (["ray", "pandas"], ()),
    "optuna_search": (["optuna"], ()),
    "peft_lora": (["peft", "transformers"], ()),
    "timm_train": (["timm"], ()),
    "torchao_8bit": (["torchao"], ()),
    "trl_sft": (["trl", "datasets", "tokenizers"], ()),
}
SURROUNDINGS = {
    "OMP_NUM_THREADS": "1",
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
    needs, launcher = TABLE[name]
    if missing(*needs):
        pytest.skip(f"{missing(*needs)} not installed")
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | SURROUNDINGS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"^loss (\S+) -> (\S+)$", done.stdout, re.M)
    assert said or name == "finetune", done.stdout
    assert all(float(last) < float(first) / 1.2 for first, last in said), done.stdout
    assert not list(tmp_path.iterdir()), "it left files behind"
