"""How fast the lab trains: tokens a second and MFU of `sodaopt train`, the loop as it is.

    python -m benchmarks.training [--preset gpt-124m] [--optimizer soda_dagger] [--steps 40]
        [--data NAME] [--out FILE] [--profile FILE]

Without --data, random ids of GPT-2's vocabulary: nothing has to be prepared. Validation and saving
are not counted, nor are the first laps, in which the model is compiled. MFU counts 6 operations for
each parameter and token and 12 x depth x width x context for attention, over the maker's dense bf16
peak. --profile writes the kernels of three steps by their time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch

from sodaopt.lab import train as lab
from sodaopt.lab.data.shards import write_shard
from sodaopt.lab.environment import environment
from sodaopt.lab.execution import Execution
from sodaopt.lab.job import Job, preset
from sodaopt.lab.progress import Lines
from sodaopt.lab.training import Training


def random_data(folder: Path, vocab: int, tokens: int) -> Path:
    """A data set of its own: shards of random ids."""
    folder.mkdir()
    ids = np.random.default_rng(0).integers(vocab, size=tokens, dtype=np.uint16)
    write_shard(folder / "fineweb_train_000001.bin", ids)
    write_shard(folder / "fineweb_val_000000.bin", ids[: tokens // 8])
    return folder


def profiled(file: Path) -> None:
    """The last three updates of the run under torch's profiler."""
    update = Training._update

    def watched(self: Training) -> None:
        if self.step == self.plan.steps - 3:
            self.profiler = torch.profiler.profile()  # type: ignore[attr-defined]
            self.profiler.__enter__()  # type: ignore[attr-defined]
        update(self)
        if self.step == self.plan.steps:
            torch.cuda.synchronize()
            self.profiler.__exit__(None, None, None)  # type: ignore[attr-defined]
            table = self.profiler.key_averages()  # type: ignore[attr-defined]
            file.write_text(table.table(sort_by="self_cuda_time_total", row_limit=40))

    Training._update = watched  # type: ignore[method-assign]


def measure(args: argparse.Namespace) -> dict[str, object]:
    sizes = preset(args.preset)
    tokens = 4 * sizes.batch * sizes.context + 1
    with tempfile.TemporaryDirectory() as name:
        data = args.data or random_data(Path(name) / "data", 50257, tokens)
        job = Job(
            optimizer=args.optimizer, preset=args.preset, data=str(data), steps=args.steps,
            eval_every=args.steps + 1, eval_tokens=sizes.batch * sizes.context // 8,
        )  # fmt: skip
        execution = Execution(log_every=5, checkpoint_every=10**9, micro_batch=args.micro_batch)
        run = lab.train(job, Path(name) / "run", execution, Lines(args.steps, 1.0))
        end = run.end or {}
    return {
        "preset": args.preset,
        "optimizer": args.optimizer,
        "parameters": run.head["model"]["parameters"],
        "batch": run.job["batch"],
        "context": run.job["context"],
        "micro_batch": run.head["environment"]["micro_batch"],
        "tokens_per_second": round(end["tokens_per_second"]),
        "mfu": end["mfu"],
        "optimizer_ms": end["optimizer_ms"],
        "peak_memory": end["peak_memory"],
        **environment(execution.target()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="gpt-124m")
    parser.add_argument("--optimizer", default="soda_dagger")
    parser.add_argument("--data")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    if args.profile:
        profiled(args.profile)
    text = json.dumps(measure(args), indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
