"""The tasks of `sodaopt theory`, run in one process or in several."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.context import BaseContext
from typing import Literal, TypeAlias, get_args

import torch

from sodaopt._errors import unknown

from . import compare, lemmas, mutants, remarks
from .checks import Check
from .compare import Result
from .experiments import CASES, Case, Curve, Measurement, measure
from .remarks import Anchor

Part: TypeAlias = Literal["lemmas", "rates", "tandem", "anchor", "comparison", "mutants"]


@dataclass
class Study:
    """All measurements: the rows of the table and the curves of the figures."""

    rows: list[Measurement] = field(default_factory=list)
    curves: dict[str, Curve] = field(default_factory=dict)
    tandem: list[Curve] = field(default_factory=list)
    anchors: dict[str, Anchor] = field(default_factory=dict)
    comparison: list[Result] = field(default_factory=list)
    mutants: dict[str, dict[str, Check]] = field(default_factory=dict)

    def add(self, part: "Study") -> None:
        self.rows += part.rows
        self.curves |= part.curves
        self.tandem += part.tandem
        self.anchors |= part.anchors
        self.comparison += part.comparison
        self.mutants |= part.mutants

    @property
    def holds(self) -> bool:
        return all(row.holds for row in self.rows)


def _lemma(setting: lemmas.Setting) -> Study:
    return Study(rows=lemmas.measure(setting))


def _case(case: Case) -> Study:
    row, curve = measure(case)
    return Study(rows=[row], curves={case.key: curve})


def _tandem() -> Study:
    rows, curves = remarks.tandem()
    return Study(rows=rows, tandem=curves)


def _anchor(name: str, run: Callable[[], tuple[list[Measurement], Anchor]]) -> Study:
    rows, anchor = run()
    return Study(rows=rows, anchors={name: anchor})


def _compare(problem: str, method: str) -> Study:
    return Study(comparison=[compare.compare(problem, method)])


def _untuned(problem: str) -> Study:
    return Study(comparison=compare.untuned(problem))


def _mutant(mutant: mutants.Mutant) -> Study:
    return Study(mutants={mutant.name: mutants.examine(mutant)})


def tasks() -> dict[str, dict[str, Callable[[], Study]]]:
    """Return the tasks by part and name. `--only` selects parts."""
    return {
        "lemmas": {f"{s.label}, {s.problem.__name__}": partial(_lemma, s) for s in lemmas.SETTINGS},
        "rates": {case.key: partial(_case, case) for case in CASES},
        "tandem": {"optimism and averaging": _tandem},
        "anchor": {
            "distance": partial(_anchor, "distance", remarks.anchor_distance),
            "ablation": partial(_anchor, "ablation", remarks.anchor_ablation),
        },
        "comparison": {
            **{
                f"{method} on {problem}": partial(_compare, problem, method)
                for problem in compare.PROBLEMS
                for method in compare.METHODS
            },
            **{
                f"theory's lr on {problem}": partial(_untuned, problem)
                for problem in compare.PROBLEMS
            },
        },
        "mutants": {m.name: partial(_mutant, m) for m in mutants.MUTANTS},
    }


PARTS: tuple[str, ...] = get_args(Part)


def select(only: Sequence[str]) -> list[tuple[str, str]]:
    """Return (part, name) of every task in these parts, or of all tasks if `only` is empty."""
    for part in only:
        if part not in PARTS:
            raise ValueError(unknown("part", part, PARTS))
    return [(part, name) for part, named in tasks().items() for name in named
            if not only or part in only]  # fmt: skip


def _run(part: str, name: str) -> Study:
    """Run one task, given by name because a worker process cannot receive the lambdas in a task.

    The task runs on one thread: the variables are small, and results must not depend on `jobs`.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return tasks()[part][name]()
    finally:
        torch.set_num_threads(threads)


def _context() -> BaseContext:
    """Return a context that starts workers without a fork of this process, which has threads.

    With a fork server, torch is imported once for all workers.
    """
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    # The first optimizer step imports torch._dynamo. The server ignores a failed import, so a torch
    # without that module only makes the workers start more slowly.
    context.set_forkserver_preload(["sodaopt.theory.study", "torch._dynamo"])
    return context


def run(only: Sequence[str] = (), jobs: int = 1) -> Iterator[tuple[str, Study | None]]:
    """Yield (name of the finished task, None) after each task, then ("done", the whole study)."""
    todo, done = select(only), {}
    if jobs == 1:
        for task in todo:
            done[task] = _run(*task)
            yield ": ".join(task), None
    else:
        with ProcessPoolExecutor(jobs, mp_context=_context()) as pool:
            waiting = {pool.submit(_run, *task): task for task in todo}
            for future in as_completed(waiting):
                done[waiting[future]] = future.result()
                yield ": ".join(waiting[future]), None
    study = Study()
    for task in todo:
        study.add(done[task])
    yield "done", study
