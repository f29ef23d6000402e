"""`sodaopt reproduce`: run a study, such as a figure of the paper, and write its numbers."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from sodaopt._errors import unknown

from . import results
from .arguments import Grouped, Output, SeedWords, axis, command_line, parse_seeds
from .commands import train_command
from .data import open_data
from .describe import gpu_cost, outline, time_of, without_data
from .execution import Execution
from .job import Job, resolve
from .many import placed
from .report import Page, write_report
from .scales import SCALES, Scale
from .studies import DEFINITIONS, STUDIES
from .study import Study
from .study_runs import Unfinished, Work
from .sweep import make_trials
from .train import DATA
from .visible import visible


@dataclass
class Reproduce:
    """Run a study: a figure or a table of the paper, or a study of this project.

    Finished runs are kept. Run the same command again to continue after a stop."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")] = ""
    """Name of the study. --list shows the names."""
    list: bool = False
    """List every study."""
    scale: Literal["proxy", "nano", "paper"] = "proxy"
    """paper: the paper's own sizes. proxy: a small size, half a minute a run on one large GPU.
    nano: a tiny size, ten seconds a run on one CPU core."""
    data: str | None = None
    """Data set, instead of the preset's."""
    seeds: SeedWords = ()
    """Seeds such as 0 1 2 or 0-4, instead of the study's seeds."""
    horizons: tuple[str, ...] = ()
    """Horizons such as 1x 4x, instead of the scale's horizons."""
    rows: tuple[str, ...] = ()
    """Labels of the rows to run, such as 4x or "width 128", instead of all rows. The numbers of
    other rows that are done stay in results.json."""
    columns: tuple[str, ...] = ()
    """Columns to run, such as "Muon, best wd", instead of all columns."""
    known: tuple[Path, ...] = ()
    """Files with the numbers of earlier commands, such as results/muon-proxy.json. Learning rates
    and settings from these files are not tuned or chosen again. Numbers of the same study are
    merged with the new ones."""
    tune: bool | None = None
    """First tune the learning rates of the baselines on a grid of powers of two. These runs use
    seeds that the study does not use. Default: the scale decides."""
    settings: tuple[str, ...] = ()
    """More settings for every run, as NAME=VALUE, for example a smaller model for a trial run."""
    execution: Annotated[Execution, Grouped] = field(default_factory=Execution)
    output: Annotated[Output, Grouped] = field(default_factory=Output)
    workers: int | None = None
    """Number of processes. Default: one for each CPU core, or one for each GPU."""
    out: Path = Path("runs/reproduce")
    """Parent folder of the study's folder, which holds the runs, report.html and results.json."""
    dry_run: bool = False
    """List the command of each run, the data, the GPU hours and the cost, and stop."""
    gpu: Literal["H200", "H100", "A100", "L40S", "B200"] = "H200"
    """GPU for which --dry-run estimates the hours and the cost."""
    mfu: float = 0.48
    """Fraction of the GPU's peak FLOP/s in that estimate. 0.48 is measured at 124M parameters on an
    H200 (benchmarks/results/training-124m-h200.json)."""
    price: float = 3.0
    """Price of a GPU hour in that estimate, in USD."""

    def run(self) -> int:
        if self.list or not self.name:
            print(listing())
            return 0 if self.list else 2
        if self.name in DEFINITIONS:
            print(f"nothing to train: {DEFINITIONS[self.name]}")
            return 0
        if self.name not in STUDIES:
            raise ValueError(unknown("study", self.name, (*STUDIES, *DEFINITIONS)))
        board = self.output.console()
        try:
            self._carry_out(board)
        except Unfinished as e:
            board.out(visible(f"{e}: run the same command again to continue"), highlight=False)
            return e.code
        return 0

    def _carry_out(self, board: Console) -> None:
        study, scale = STUDIES[self.name], self._scale()
        folder = self.out / f"{self.name}-{self.scale}"
        seeds = parse_seeds(self.seeds) if self.seeds else ()
        first = self._job(study, scale)
        resolved, data = without_data(first)
        most = 1000  # more runs than any machine has workers: the search decides how many there are
        workers, execution = placed(self.execution, self.workers, most, first.preset)
        known = [self._read(path) for path in self.known]
        vocab = resolved.shape.vocab if self.dry_run else open_data(first.dataset, DATA).vocab
        work = Work(study, scale, self._settings(), folder, execution, workers, vocab, board,
                    seeds, self.rows, self.columns, *results.searched(known))  # fmt: skip
        if self.dry_run:
            self._dry(work, outline(resolved, data, execution))
            return
        lr, tuned, chosen, work = self._search(work)
        jobs = work.jobs(lr)
        page = Page(study.title, work.folders(jobs), work.primary(lr), self._command())
        page.save(folder)
        try:
            runs = work.run(jobs)
        finally:  # a stopped command, too, writes the numbers of its finished runs
            here = self._identity() | work.numbers(lr, tuned) | {"choices": chosen}
            found = results.completed(here, known)
            results.write(folder / "results.json", found)
        report = write_report(runs, folder / "report.html", page.title, page.primary, page.command)
        board.print(f"report: {report}", highlight=False, markup=False)
        if self.output.json:
            print(json.dumps(found))
        elif self.output.shown:
            print(results.markdown(found))
        board.print(f"numbers: {folder / 'results.json'}", highlight=False, markup=False)

    def _read(self, path: Path) -> results.Numbers:
        wrong = ValueError(
            f"{path} is not a results.json of sodaopt reproduce: remove it from --known"
        )
        try:
            numbers = results.read(path)
        except ValueError as e:
            raise wrong from e
        needed = {"study", "scale", "data", "cells", "learning_rates"}
        if not (isinstance(numbers, dict) and numbers.keys() >= needed):
            raise wrong
        if numbers["scale"] != self.scale:
            raise ValueError(
                f"{path} has numbers of the scale {numbers['scale']}, not {self.scale}: remove it "
                "from --known"
            )
        return numbers

    def _identity(self) -> dict[str, Any]:
        return {"study": self.name, "scale": self.scale, "command": self._command()}

    def _search(self, work: Work) -> tuple[dict[str, float], Any, Any, Work]:
        """Tune the learning rates, and choose the settings of cells that have choices.

        Return (learning rates, losses by learning rate, losses by choice, the work with the best
        choices). All but the last are by baseline or column.
        """
        tuned = work.tune()
        lr = dict(work.scale.lr) | {base: results.best(losses) for base, losses in tuned.items()}
        return lr, tuned, *work.choose(lr)

    def _dry(self, work: Work, first: str) -> None:
        """Describe the runs, or print them as JSON.

        first: the description of the first run
        """
        lr = dict(work.scale.lr)
        searches = [*work.first_grids(), *work.candidates(lr)]
        if not searches:
            lr, _, _, work = self._search(work)
        jobs = [*searches, *work.jobs(lr)]
        todo = make_trials(jobs, work.folder, self.execution, work.vocab)
        if self.output.json:
            print("\n".join(trial.text() for trial in todo))
            return
        print(first, "", sep="\n")
        print(*(train_command(trial.job, trial.folder) for trial in todo), sep="\n")
        known = [resolve(trial.job, work.vocab) for trial in todo]
        print(f"{len(todo)} runs. {time_of(known, self.execution)}")
        if searches:
            print("settings that are tuned or chosen have their first value in these commands")
        print(gpu_cost(known, self.gpu, self.mfu, self.price))
        print(f"all of them: {self._command()}")

    def _command(self) -> str:
        """Return the command line that runs this study again."""
        words = [self.name, "--scale", self.scale]
        estimate = {name: getattr(Reproduce, name) for name in ("gpu", "mfu", "price")}
        it = replace(self, scale="proxy", dry_run=False, **estimate)
        return command_line("reproduce", words, it)

    def _scale(self) -> Scale:
        scale = SCALES[self.scale]
        if self.horizons:
            scale = replace(scale, horizons=self.horizons)
        return scale if self.tune is None else replace(scale, tuned=self.tune)

    def _settings(self) -> dict[str, Any]:
        pairs = [axis(text) for text in self.settings]
        more = {name: values[0] for name, values in pairs}
        if "steps" in more:  # replaces the horizon of each row
            more["horizon"] = None
        return more | ({"data": self.data} if self.data else {})

    def _job(self, study: Study, scale: Scale) -> Job:
        row = study.rows(scale)[0]
        more = row.settings | self._settings()
        return study.cells[0].job(scale, replace(row, settings=more), 0, None)


def listing() -> str:
    """Return a line about each study and scale, as text."""
    lines = [f"  {name:<22} {study.title}" for name, study in STUDIES.items()]
    lines += [f"  {name:<22} {about}" for name, about in DEFINITIONS.items()]
    scales = [f"  --scale {name:<14} {scale.about}" for name, scale in SCALES.items()]
    return "\n".join(["sodaopt reproduce NAME [--scale paper|proxy|nano]", "", *lines, "", *scales])
