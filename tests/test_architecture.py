"""Rules of the package's structure that the checks of `make lint` do not express.

The tests parse the source, so they see imports inside functions too.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import sodaopt
from tools import size

ROOT = Path(__file__).parents[1] / "src" / "sodaopt"
FILES = {str(f.relative_to(ROOT)): f for f in sorted(ROOT.rglob("*.py"))}

LONGEST = 350
FOLDERS = ("src", "tests", "examples", "tools", "benchmarks")

HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
PRIVATE = {
    "backends/__init__.py": {"_disable_dynamo"},
    "core/validation.py": {"_fsdp_flattened"},
    "geometry/norms.py": {"_base"},
    "lab/sweep.py": {"_processes"},
    "layers/locations.py": {
        "_checkpoint_wrapped_module", "_flat_param", "_fsdp_wrapped_module", "_orig_mod",
    },
    "parallel/agree.py": {"_device_types", "_get_backend", "_timeout"},
    "parallel/exchange.py": {"_world"},
    "parallel/sharded.py": {"_local_tensor"},
    "theory/study.py": {"torch._dynamo"},
    "wrappers/base.py": {
        *HOOKS, "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks",
    },
    "wrappers/live.py": {
        *HOOKS, "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
    },
    "wrappers/low_precision.py": {"_version"},
}  # fmt: skip
"""Private names of other packages by file. A comment beside each use tells how to replace it."""
ALLOWED = {"_exit", "_fields", "_form", "_optimizer", "_tokens"}
"""Two documented names of Python, and three of our own."""


@cache
def tree(file: str) -> ast.Module:
    return ast.parse(FILES[file].read_text(), file)


def imports(module: ast.Module, file: str) -> Iterator[str]:
    """The full name of every imported module or object, at any depth of the file."""
    package = ("sodaopt", *Path(file).parent.parts)
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            start = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def dotted(node: ast.AST) -> str:
    """The text of a name such as torch.nn.init, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def names(module: ast.Module, file: str) -> Iterator[str]:
    """Every name that is imported, written with dots, or a string without spaces."""
    yield from imports(module, file)
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            yield dotted(node)
        elif isinstance(node, ast.Constant) and " " not in str(node.value):
            yield str(node.value)


def own_attributes(module: ast.Module) -> Iterator[str]:
    """The names that classes of a module define, and the attributes that methods set in self."""
    for owner in (node for node in ast.walk(module) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(owner):
            if isinstance(node, ast.FunctionDef):
                yield node.name
            elif isinstance(node, ast.Attribute) and dotted(node.value) == "self":
                yield from [node.attr] * isinstance(node.ctx, ast.Store)
            yield from size.assigned(node)


def private_names(module: ast.Module, file: str) -> set[str]:
    """Attributes, strings and imports of other packages that are private, without `_foreach_`."""
    found = {name for name in imports(module, file) if not within(name, "sodaopt")}
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant):
            found.add(str(node.value))
    pattern = re.compile(r"([a-z]+\.)*_(?!foreach_)([a-z]\w+|C)(\.\w+)*")
    return set(filter(pattern.fullmatch, found))


@cache
def own_classes() -> set[str]:
    nodes = (node for file in FILES for node in ast.walk(tree(file)))
    return {node.name for node in nodes if isinstance(node, ast.ClassDef)}


def is_type_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func) == "type" and len(node.args) == 1


def class_comparisons(module: ast.Module) -> Iterator[str]:
    """Each `type(x) is C`, also with `is not`, ==, != and `in (C, D)`: the last part of C."""
    for node in ast.walk(module):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(is_type_call, sides)):
                inner = (n for side in sides if not is_type_call(side) for n in ast.walk(side))
                yield from filter(None, (dotted(n).rpartition(".")[2] for n in inner))


# -- the rules ------------------------------------------------------------------------------------


def test_no_module_answers_for_unknown_names() -> None:
    """A module with __getattr__ hides typos from type checkers."""
    for file in FILES:
        names = [n.name for n in tree(file).body if isinstance(n, ast.FunctionDef)]
        assert "__getattr__" not in names, file


def test_only_parallel_and_lab_import_torch_distributed() -> None:
    """ruff finds imports and attributes. A string could be the argument of import_module."""
    found = {file: names(tree(file), file) for file in FILES}
    users = {file for file in found if any(within(n, "torch.distributed") for n in found[file])}
    assert {file.split("/")[0] for file in users} == {"parallel", "lab"}


def test_our_classes_answer_for_themselves() -> None:
    """A class of the package answers by a method or by data. No caller compares its type."""
    for file in FILES:
        assert not own_classes() & set(class_comparisons(tree(file))), file


def test_private_names_of_other_packages() -> None:
    own = {name for file in FILES for name in own_attributes(tree(file))}
    found = {file: private_names(tree(file), file) - own - ALLOWED for file in FILES}
    assert {file: names for file, names in found.items() if names} == PRIVATE


def test_no_file_is_too_long() -> None:
    lengths = {file: len(path.read_text().splitlines()) for file, path in FILES.items()}
    assert not {file: n for file, n in lengths.items() if n > LONGEST}


def test_the_base_does_not_grow() -> None:
    """Version 0.1 had 4,760 lines. `LATER` of tools/size.py lists lines that are not counted."""
    assert size.base_size(size.sources()) <= 3900


def test_the_size_report_knows_its_files() -> None:
    """Every file and definition of the table of later capabilities exists, and has code."""
    for capability, by_file in size.later(size.sources()).items():
        assert all(by_file.values()), capability
    assert len(size.code_lines('def f():\n    """Text."""\n\n    # why\n    return 1\n')) == 2


def test_the_files_that_pages_name_exist() -> None:
    root = ROOT.parents[1]
    files = [f"/{f.relative_to(root)}" for d in FOLDERS for f in (root / d).rglob("*.py")]
    pages = [root / "README.md", root / "CONTRIBUTING.md", *root.glob("docs/**/*.md")]
    for page in pages:
        named = re.findall(r"[\w/]+\.py\b", page.read_text(encoding="utf-8"))
        unknown = {name for name in named if not any(f.endswith(f"/{name}") for f in files)}
        assert not unknown, page


# The public attributes of an optimizer, beyond torch's and the arguments of its constructor.
EVERY = {"diagnostics", "eval", "train", "watch"}
ATTRIBUTES = {"SODA": EVERY | {"methods"}} | dict.fromkeys(
    ["SODAWrapper", "ScheduleFree", "GPA", "Lookahead", "SNOO"], EVERY | {"of"}
)


def made(name: str, base: torch.optim.Optimizer) -> Any:
    if name == "SODA":
        return sodaopt.SODA(base.param_groups[0]["params"], 0.1, "adam")
    return getattr(sodaopt, name)(base)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_public_attributes(name: str) -> None:
    base = torch.optim.SGD([torch.ones(2, 2, requires_grad=True)], lr=0.1)
    opt = made(name, base)
    arguments = set(inspect.signature(type(opt).__init__).parameters)
    found = {a for a in dir(opt) if not a.startswith("_")} - set(dir(base)) - arguments
    assert found == ATTRIBUTES[name]


def test_every_optimizer_has_its_attributes_listed() -> None:
    public = {n: getattr(sodaopt, n) for n in sodaopt.__all__}
    optimizers = {
        n for n, v in public.items() if inspect.isclass(v) and issubclass(v, torch.optim.Optimizer)
    }
    assert optimizers == set(ATTRIBUTES)


def test_public_attributes_of_a_method() -> None:
    slots = {f.name for f in fields(sodaopt.Method)}
    found = {a for a in dir(sodaopt.zoo.adam()) if not a.startswith("_")}
    assert found == slots | {"advance", "coefs", "memory"}


# -- the rules find violations --------------------------------------------------------------------


WRONG = """
import torch
from torch._inductor import config

def f(x):
    import torch.distributed as dist
    from . import runs
    from ..zoo import adam
    from torch.nn import _reduction
    torch._foreach_add_([], 1)
    torch._C._anything()
    return type(x) is Method or Clone == type(x) or type(x) in (a.Ball, int)
"""


def test_the_rules_find_violations() -> None:
    module = ast.parse(WRONG)
    found = set(imports(module, "theory/wrong.py"))
    assert {"torch.distributed", "sodaopt.theory.runs", "sodaopt.zoo.adam"} < found
    private = private_names(module, "theory/wrong.py")
    assert private == {"torch._inductor.config", "torch.nn._reduction", "_C", "_anything"}
    assert own_classes() & set(class_comparisons(module)) == {"Method", "Clone", "Ball"}
    assert len(FILES) > 50


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_a_step_visits_few_files() -> None:
    """docs/design.md shows the walks."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.walk", "--json"], env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT.parents[1], capture_output=True, text=True, check=True,
    )  # fmt: skip
    walks = json.loads(done.stdout)
    assert all(len(files) <= most for files, most in zip(walks.values(), (5, 5, 9), strict=True))
    page = (ROOT.parents[1] / "docs" / "design.md").read_text()
    for name, files in walks.items():
        assert f"{name}, {len(files)} files: `{'` -> `'.join(files)}`." in page
