"""Measure how fast the lab trains: tokens a second, MFU, and the GPU's time by kernel.

    python -m benchmarks.training gpt-124m:soda_dagger gpt-124m:adamw [--steps 30] [--out FILE]
    python -m benchmarks.training proxy:soda_dagger proxy:plain --steps 400 --out FILE
    python -m benchmarks.training --docs

A row is a preset and an optimizer, trained by the loop of `sodaopt train`. "plain" is the same
compiled model in a bare loop with torch's fused AdamW. This loop repeats one batch, uses no CUDA
graphs, and waits for the device every 5 steps. The data are random ids of GPT-2's vocabulary, or
the package's own corpus for a preset with another vocabulary.

The times leave out validation, saving and the first laps, in which the model is compiled. MFU
counts 6 operations for each parameter and token and 12 x depth x width x context for attention,
over the vendor's dense bf16 peak. The last three steps run under torch's profiler, after the times
were taken. Kernel times are summed by kind, and the rest of a step is idle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.records import RESULTS
from sodaopt.lab import train as lab
from sodaopt.lab.data import build, corpus, open_data, texts, tokenizer
from sodaopt.lab.data.shards import write_shard
from sodaopt.lab.environment import environment, peak
from sodaopt.lab.execution import Execution
from sodaopt.lab.job import Job, resolve
from sodaopt.lab.model import GPT
from sodaopt.lab.presets import preset
from sodaopt.lab.progress import Lines
from sodaopt.lab.training import Training
from tools.pages import DOCS, filled, markdown

PROFILED = 3
KINDS = {
    "compiled kernels": ("triton",),
    "attention": ("sdpa", "flash", "fmha", "attention"),
    "matrix products": ("nvjet", "gemm", "cutlass", "cublas"),
}
PAGE = DOCS / "performance.md"


def data(vocab: int | None, tokens: int, folder: Path) -> Path:
    """Write a data set with the vocabulary of the preset, and return its folder."""
    if vocab in (None, 50304):
        folder.mkdir()
        ids = np.random.default_rng(0).integers(50257, size=tokens, dtype=np.uint16)
        write_shard(folder / "fineweb_train_000001.bin", ids)
        write_shard(folder / "fineweb_val_000000.bin", ids[: tokens // 8])
    else:
        words = tokenizer.train(texts.documents(corpus.SMALL["train"]), vocab)
        files = corpus.SMALL
        build.build(build.Recipe([files["train"]], words, [files["val"]]), folder)
    return folder


# -- the two loops --------------------------------------------------------------------------------


def lab_loop(job: Job, folder: Path, execution: Execution) -> dict[str, Any]:
    """Run `sodaopt train` with the profiler around its last steps."""
    update, found = Training._update, {}

    def watched(self: Training) -> None:
        if self.step == self.resolved.steps - PROFILED and self.device.type == "cuda":
            self._check_losses()
            found.update(kernels(lambda: update(self)))
            self.step = self.resolved.steps
            self.pending.clear()
            self.watch.skip()
        else:
            update(self)

    Training._update = watched  # type: ignore[method-assign]
    try:
        run = lab.train(job, folder, execution, Lines(job.steps or 0, 1.0))
    finally:
        Training._update = update  # type: ignore[method-assign]
    end = run.end or {}
    return {
        "tokens_per_second": round(end["tokens_per_second"]),
        "optimizer_ms": end["optimizer_ms"],
        "peak_memory": end["peak_memory"],
        "micro_batch": run.head["environment"]["micro_batch"],
        "kernels_ms": found,
    }


def plain_loop(job: Job, folder: Path, execution: Execution) -> dict[str, Any]:
    """Train the compiled model with torch's AdamW in a bare loop."""
    device = execution.target()
    plan = resolve(job, open_data(str(job.data), lab.DATA).vocab)
    micro = execution.sequences(plan.batch, plan.shape, 1, device)
    passes = plan.batch // micro
    model = GPT(plan.shape).to(device)
    call = torch.compile(model, dynamic=False) if execution.compiles(device) else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    ids = torch.randint(plan.shape.vocab, (micro, plan.shape.context + 1), device=device)

    def update() -> None:
        for _ in range(passes):
            with execution.autocast(device):
                loss = call(ids[:, :-1], ids[:, 1:]) / passes
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    laps = []
    for _ in range(plan.steps // 5):
        began = time.perf_counter()
        for _ in range(5):
            update()
        if device.type == "cuda":
            torch.cuda.synchronize()
        laps.append((time.perf_counter() - began) / 5)
    step = statistics.mean(laps[2:] or laps)
    cuda = device.type == "cuda"
    return {
        "tokens_per_second": round(plan.tokens_per_step / step),
        "optimizer_ms": None,
        "peak_memory": torch.cuda.max_memory_allocated(device) if cuda else None,
        "micro_batch": micro,
        "kernels_ms": kernels(update) if cuda else {},
    }


def kernels(update: Callable[[], Any]) -> dict[str, float]:
    """Return the milliseconds of a step by kind of kernel. The optimizer's kernels are one kind."""
    with torch.profiler.profile() as profiler:
        for _ in range(PROFILED):
            update()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    steps = [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "gpu_user_annotation" and e["name"].startswith("Optimizer.step")
    ]
    sums: dict[str, float] = {}
    for e in events:
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            inside = any(a <= e["ts"] < b for a, b in steps)
            kind = "optimizer" if inside else kind_of(e["name"].lower())
            sums[kind] = sums.get(kind, 0.0) + e["dur"] / 1e3 / PROFILED
    return {kind: round(ms, 3) for kind, ms in sorted(sums.items(), key=lambda item: -item[1])}


def kind_of(kernel: str) -> str:
    for kind, words in KINDS.items():
        if any(word in kernel for word in words):
            return kind
    return "other"


# -- rows and the page ----------------------------------------------------------------------------


def measure(name: str, steps: int, micro_batch: int | None) -> dict[str, Any]:
    at, optimizer = name.split(":")
    sizes = preset(at)
    plain = optimizer == "plain"
    log = min(50, max(1, steps // 6))  # 50 is the default. Each logged step waits for the device
    execution = Execution(log_every=log, checkpoint_every=10**9, micro_batch=micro_batch)
    with tempfile.TemporaryDirectory() as folder:
        tokens = 4 * sizes.batch * sizes.context + 1
        job = Job(
            optimizer="adamw" if plain else optimizer, preset=at, steps=steps + PROFILED,
            data=str(data(sizes.vocab, tokens, Path(folder) / "data")), eval_every=10**9,
            eval_tokens=sizes.batch * sizes.context // 8,
        )  # fmt: skip
        found = (plain_loop if plain else lab_loop)(job, Path(folder) / "run", execution)
        shape = resolve(job, open_data(str(job.data), lab.DATA).vocab).shape
    device, speed = execution.target(), found["tokens_per_second"]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    most, step = peak(device), 1e3 * sizes.batch * sizes.context / speed
    row = {"preset": at, "optimizer": optimizer, "parameters": shape.parameters}
    row |= {"batch": sizes.batch, "context": sizes.context, **found, "step_ms": round(step, 3)}
    if found["kernels_ms"]:
        busy = sum(found["kernels_ms"].values())
        row["kernels_ms"] = found["kernels_ms"] | {"idle": round(max(0.0, step - busy), 3)}
    return row | {"mfu": speed * shape.flops_per_token / most if most else None}


def table() -> str:
    """Return the results of every machine as markdown."""
    parts = []
    for file in sorted(RESULTS.glob("training-*.json")):
        r = json.loads(file.read_text())
        head = ["preset", "optimizer", "batch", "in a pass", "step, ms", "tokens/s", "MFU, %"]
        lines = [[*head, "peak memory, GB"]]
        for x in r["rows"]:
            line = [x["preset"], x["optimizer"], f"{x['batch']} x {x['context']}"]
            line += [str(x["micro_batch"]), f"{x['step_ms']:.2f}", f"{x['tokens_per_second']:,}"]
            line += [f"{100 * x['mfu']:.1f}" if x["mfu"] else ""]
            memory = x["peak_memory"]
            lines.append([*line, f"{memory / 1e9:.1f}" if memory else ""])
        where = f"{r['device']}, torch {r['torch']} (`{r['command']}`):"
        parts.append(f"{where}\n\n{markdown(lines)}")
        if any(x["kernels_ms"] for x in r["rows"]):
            kinds = [*KINDS, "optimizer", "other", "idle"]
            lines = [["milliseconds of a step", *kinds]]
            for x in r["rows"]:
                ms = [f"{x['kernels_ms'].get(kind, 0.0):.2f}" for kind in kinds]
                lines.append([f"{x['preset']}, {x['optimizer']}", *ms])
            parts.append(markdown(lines))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", default=["gpt-124m:soda_dagger"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--docs", action="store_true", help="only write docs/performance.md")
    args = parser.parse_args()
    if args.docs:
        PAGE.write_text(filled(PAGE, "training", table()), encoding="utf-8")
        return
    rows = []
    for name in args.rows:
        rows.append(measure(name, args.steps, args.micro_batch))
        print(json.dumps(rows[-1]), flush=True)
    micro = f" --micro-batch {args.micro_batch}" if args.micro_batch else ""
    command = f"python -m benchmarks.training {' '.join(args.rows)} --steps {args.steps}{micro}"
    result = {"command": command, **environment(Execution().target()), "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
