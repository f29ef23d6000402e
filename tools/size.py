"""Count the library's lines of code, without blank lines, comments and docstrings.

    python -m tools.size          by package, with the capabilities that came after 0.1 apart
    python -m tools.size --all    every file

The lab and the theory are not counted, because no optimizer needs them. The base is the code
without the files and definitions of `LATER`, and with the lines of 0.1 that they have replaced.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "sodaopt"
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}

LATER = {
    "ranks share the work on matrices": (
        "parallel/exchange.py",
        "parallel/stages.py",
        "parallel/agree.py",
        "parallel/deal.py",
        "parallel/order.py",
        "parallel/layout.py: boxes Grid Kind Param Task Piece Round located is_in_order"
        " _piece _flops _tasks _within _size",
        "core/together.py",
        "core/validation.py: check_sharing",
        "wrappers/live.py: LiveOptimizer._describe",
        "geometry/views.py: Frame.boxes Frame.one Frame.sides _steps",
        "geometry/shards.py",
        "geometry/norms.py: _beside _is_beside _Lengths.units _Lengths.needs_matrices"
        " Norm.needs_matrices Sign.needs_matrices",
        "geometry/maps.py: Exchanged Context.shards Context.results Geometry.exchanges"
        " Geometry.reads_m_bar Geometry.exchanged Geometry.tensors Geometry.mapped"
        " _NormMap.exchanges _NormMap.exchanged _NormMap.mapped Ball.reads_m_bar"
        " MultiNorm.exchanges MultiNorm.reads_m_bar MultiNorm.exchanged MultiNorm.mapped",
        "geometry/kronecker.py: Kronecker.exchanges Kronecker.reads_m_bar Kronecker.exchanged",
        "core/update.py: Bucket.ranks Bucket.release inputs check_shardable",
    ),
    "the spectral step by kernels before the products, and Gram products": (
        "backends/products.py: -dense",
        "backends/triton/spectral.py: _average _normalise Matrices.average_ Matrices.normalised"
        " SIDE DEPTH REGISTERS _product product _launch",
        "core/fused.py: WORKSPACE SHARE _matrices _bytes _limit _parts",
        "geometry/maps.py: Geometry.kernel_polar Geometry.kernel_frame _NormMap.kernel_polar"
        " _NormMap.kernel_frame",
        "geometry/norms.py: Euclidean.polar BiasRMS.polar",
        "geometry/polar.py: DIRECTION Newton.restarts Newton._gram_blocks",
        "geometry/views.py: Stored Frame.stored",
    ),
    "fp32 copies of a wrapped step in few allocations": (
        "wrappers/low_precision.py: BLOCK _allocated",
    ),
    "steps that are planned once, CUDA graphs, torch.compile, GradScaler on the device": (
        "core/compiled.py",
        "core/optimizer.py: SODA._repeated SODA._signature SODA._step"
        " SODA._step_supports_amp_scaling SODA.__setstate__ _uncount",
        "core/fused.py: Fused._are_filled _pointers _scaled _copy_tensors",
        "core/state.py: StatefulOptimizer.capturable StatefulOptimizer._repeatable",
        "core/update.py: Bucket.grad_scale Bucket.found_inf",
        "core/validation.py: check_capturable unreadable",
        "backends/triton/tables.py: Table Launch number scale",
    ),
    "diagnostics of SODA, and by parameter or label": (
        "core/diagnostics.py: Labels Watched._pulls Watched._counters Measured._of_update"
        " _update_sums _mean _names",
        "core/optimizer.py: SODA._pulls",
        "parallel/sharded.py: total",
    ),
    "Ctrl-C waits for the end of a step": ("wrappers/base.py: _ctrl_c_waits",),
    "a pull that fails halfway is undone": ("anchors/pull.py: _undo inverse",),
    "uses of optimizers, and state of others, that went wrong without an error are refused": (
        "_errors.py: check_shape",
        "anchors/stored.py: Constant.__post_init__",
        "core/state.py: _warn_of_settings",
        "wrappers/refusals.py: WRAPPERS PREFIXES NEEDED MOMENTS check_kind check_only"
        " unchanged check_writer check_moments check_shapes",
        "wrappers/base.py: _check_capture",
        "wrappers/live.py: LiveOptimizer.__init_subclass__",
        "core/method.py: without_addresses",
    ),
    "a wrong seed is refused": ("core/validation.py: check_seed",),
    "checkpoints with other groups, by the parameters' names": (
        "wrappers/migrate.py: _names _regrouped",
    ),
    "distributed checkpoints of wrappers around SODA": (
        "wrappers/live.py: _is_unstepped LiveOptimizer._complete LiveOptimizer._unstepped"
        " LiveOptimizer._members",
    ),
    "global step hooks run once": ("wrappers/base.py: _global_hooks",),
    "steps that are counted by group": (
        "schedules.py: lr_weighted.by_group",
        "core/method.py: Method._counts_by_group",
        "core/optimizer.py: SODA._catch_up",
    ),
    "the bytes of quantised state": ("memory.py: _parts",),
    "AMUSE": (
        "zoo/averages.py: amuse",
        "zoo/coefficients.py: falling",
    ),
    "the pull that falls with the learning rate": ("schedules.py: coupled _RelativeLr",),
    "the roles of 62 architectures": (
        "layers/locations.py: Location.is_depthwise Location._stack_by_sizes is_projection"
        " _at_layer",
        "layers/roles.py: POSITION LEARNED_INPUT FACTOR EMBEDDING _unread _is_parallel",
        "geometry/views.py: grouped.of heads",
    ),
    "optimizers by name": (
        "_names.py: ANCHORED Name every_name",
        "factory.py",
        "layers/recipes.py: decayed",
    ),
}
"""Capabilities that 0.1 did not have: files, definitions in other files, or files without some
definitions ("-name"). A definition that also does work of 0.1 is not listed. A line that calls a
listed definition counts as base.

"optimizers by name" is listed because 0.1 built them in its lab, which is not counted.
"""

REPLACED = {
    "gather and scatter of DTensors, now in `exchange.py` and `stages.py`": 20,
    "the loop over the buckets of a step, now in `SODA._repeated`": 2,
    "recipes with names such as soda(muon), now in `_names.py`": 3,
}
"""Lines of 0.1 whose work is now done by code that `LATER` lists. They count as lines of the base.
"""

NOT_COUNTED = ("lab", "theory")


@cache
def code_lines(source: str) -> frozenset[int]:
    """The numbers of the lines that hold a token of code.

    A string that is a statement of its own is documentation, wherever it stands.
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return frozenset(lines)


@cache
def definitions(source: str) -> dict[str, range]:
    """The lines of each function, class and method, decorators included, and of each constant and
    field, which is a name assigned in a module or a class.
    """
    found: dict[str, range] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                found[prefix + child.name] = range(first, (child.end_lineno or first) + 1)
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(node, ast.Module | ast.ClassDef):
                for name in assigned(child):
                    found[prefix + name] = range(child.lineno, (child.end_lineno or 0) + 1)

    visit(ast.parse(source), "")
    return found


def assigned(node: ast.AST) -> list[str]:
    """The names that a statement assigns."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def sources() -> dict[str, str]:
    """The library's files by their path in the package."""
    paths = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {
        name: path.read_text(encoding="utf-8")
        for name, path in paths.items()
        if Path(name).parts[0] not in NOT_COUNTED
    }


def later(files: dict[str, str]) -> dict[str, dict[str, set[int]]]:
    """The lines of code of each later capability, by file. Each line belongs to one capability."""
    found: dict[str, dict[str, set[int]]] = {}
    taken: dict[str, set[int]] = {name: set() for name in files}
    for capability, entries in LATER.items():
        found[capability] = {}
        for entry in entries:
            name, _, words = entry.partition(": ")
            lines, known = set(code_lines(files[name])), definitions(files[name])
            named = {n for word in words.split() for n in known[word.removeprefix("-")]}
            if words.startswith("-"):
                lines -= named
            elif words:
                lines &= named
            found[capability][name] = lines - taken[name]
            taken[name] |= lines
    return found


def base_lines(files: dict[str, str]) -> Counter[str]:
    """The lines of code of each file, without those of later capabilities."""
    base = Counter({name: len(code_lines(source)) for name, source in files.items()})
    for by_file in later(files).values():
        base.subtract({name: len(lines) for name, lines in by_file.items()})
    return base


def base_size(files: dict[str, str]) -> int:
    """The lines of code of the base, with those that later capabilities have replaced."""
    return base_lines(files).total() + sum(REPLACED.values())


def report(files: dict[str, str]) -> str:
    """The lines of code by package, of the base and of each later capability."""
    sizes = {name: len(code_lines(source)) for name, source in files.items()}
    added, base = later(files), base_lines(files)
    packages = sorted({Path(name).parts[0] for name in files})
    lines = [" code  base  package"]
    for package in packages:
        its = [name for name in files if Path(name).parts[0] == package]
        lines.append(f"{sum(sizes[n] for n in its):5d} {sum(base[n] for n in its):5d}  {package}")
    without = ", ".join(NOT_COUNTED)
    lines += [f"      {count:5d}  {what}" for what, count in REPLACED.items()]
    lines.append(
        f"{sum(sizes.values()):5d} {base_size(files):5d}  in {len(files)} files, without {without}"
    )
    lines += ["", "later capabilities"]
    lines += [f"{sum(map(len, found.values())):5d}  {name}" for name, found in added.items()]
    return "\n".join(lines)


def listing(files: dict[str, str]) -> str:
    """The lines of code and all lines of each file, longest file first."""
    sizes = {name: (source.count("\n"), len(code_lines(source))) for name, source in files.items()}
    rows = sorted(sizes.items(), key=lambda item: (-item[1][0], item[0]))
    return "\n".join(
        [" code   all  file", *(f"{code:5d} {all_:5d}  {n}" for n, (all_, code) in rows)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="list every file")
    arguments, files = parser.parse_args(), sources()
    print(listing(files) if arguments.all else report(files))


if __name__ == "__main__":
    main()
