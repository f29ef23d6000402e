"""Every public name explains its arguments, and has an example that runs, in its docstring."""

from __future__ import annotations

import doctest
import inspect
import re
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import sodaopt
from sodaopt.geometry import polar

MODULES: list[ModuleType] = [
    sodaopt,
    *(m for name in sodaopt.__all__ if inspect.ismodule(m := getattr(sodaopt, name))),
    polar,
]


def public() -> dict[str, Any]:
    """Public functions and classes by their first name. Aliases and constants have no docstring."""
    found: dict[str, Any] = {}
    for module in MODULES:
        for name in module.__all__:
            thing = getattr(module, name)
            ours = getattr(thing, "__module__", "").startswith("sodaopt")
            if ours and (inspect.isroutine(thing) or inspect.isclass(thing)):
                found.setdefault(f"{module.__name__}.{name}", thing)
    first = {id(thing): name for name, thing in reversed(found.items())}
    return {name: thing for name, thing in found.items() if first[id(thing)] == name}


PUBLIC = public()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_runs(name: str) -> None:
    names = {n: getattr(sodaopt, n) for n in sodaopt.__all__}
    names |= {"sodaopt": sodaopt, "torch": torch, "nn": nn, "model": network()}
    finder = doctest.DocTestFinder(recurse=False)
    (test,) = finder.find(PUBLIC[name], name, globs=names) or [None]
    assert test is not None, f"{name} has no docstring"
    assert test.examples, f"{name} has no example: add a line with >>> to its docstring"
    said: list[str] = []
    with mock.patch.dict(sodaopt.zoo.ROWS):  # an example adds a row
        failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not failed, "".join(said)


PROTOCOL = {"args", "kwargs"}
"""The parameters that Python shows for the constructor of a Protocol, which is never called."""


def explained(docstring: str | None) -> set[str]:
    """The arguments that have a line `name: meaning`, or `name, name: meaning`, in a docstring."""
    lines = re.findall(r"^ *(\w+(?:, \w+)*): ", docstring or "", re.M)
    return {name for line in lines for name in line.split(", ")}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_is_explained(name: str) -> None:
    """In the docstring, or once for all in that of the public module."""
    thing, short = PUBLIC[name], name.rpartition(".")[2]
    modules = [m for m in MODULES if getattr(m, short, None) is thing]
    found = set().union(*(explained(owner.__doc__) for owner in (thing, *modules)))
    missing = {*inspect.signature(thing).parameters} - found - PROTOCOL
    assert not missing, f"{name} does not explain {sorted(missing)}: add a line `name: meaning`"


def test_an_argument_without_a_line_is_found() -> None:
    assert explained("f(a) of x.\n\n    lam, gamma: two.\n    >>> {b: 1}\n") == {"lam", "gamma"}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_module_lists_its_names(module: ModuleType) -> None:
    assert all(hasattr(module, name) for name in module.__all__)
    assert len(module.__all__) == len(set(module.__all__))
    assert not [name for name in module.__all__ if name.startswith("_") and name != "__version__"]
