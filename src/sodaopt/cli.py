"""The `sodaopt` command. Each subcommand is a dataclass with a `run` method, in its own module.

    sodaopt compare muon "soda(muon)" --help

A new one is a line in COMMANDS. Only the module of the chosen one is imported, so that each needs
no more than it uses, and `import sodaopt` nothing of this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from sodaopt._errors import unknown


@dataclass(frozen=True)
class Command:
    """Where the dataclass of a subcommand is, and what it does in a line."""

    module: str
    name: str
    about: str


COMMANDS = {
    "train": Command("sodaopt.lab.commands", "Train", "train a small GPT"),
    "compare": Command("sodaopt.lab.commands", "Compare", "several optimizers, table and report"),
    "sweep": Command("sodaopt.lab.commands", "Sweep", "a grid of settings, as rows that are kept"),
    "reproduce": Command("sodaopt.lab.reproduce", "Reproduce", "the paper's figures and tables"),
    "report": Command("sodaopt.lab.report.command", "Report", "a page from runs"),
    "sample": Command("sodaopt.lab.commands", "Sample", "text from a trained model"),
    "data": Command("sodaopt.lab.data.command", "Data", "prepare, download or look at data"),
    "theory": Command("sodaopt.theory.command", "Theory", "check the convex theory, draw it"),
}


def usage() -> str:
    lines = [f"  {name:10} {command.about}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: sodaopt COMMAND [options]", "", *lines, "", "sodaopt COMMAND --help"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit code, 2 where it was called wrongly."""
    try:
        try:
            return _main(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError as e:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # `| head`: nobody reads on, also not at the end of the process
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return _fail(str(e))


def _main(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        print(import_module("sodaopt").__version__)
        return 0
    if args[0] not in COMMANDS:
        return _fail(unknown("command", args[0], COMMANDS))
    return _call(args[0], args[1:])


def _call(name: str, args: list[str]) -> int:
    command = COMMANDS[name]
    try:
        import tyro

        config = getattr(import_module(command.module), command.name)
        return int(tyro.cli(config, prog=f"sodaopt {name}", args=args, registry=_rules()).run())
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("sodaopt"):  # not the user's to install
            raise
        return _fail(f"sodaopt {name} needs {e.name}: pip install 'sodaopt[lab]'")
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as e:  # what was asked for cannot be; the message says why
        return _fail(str(e))


def _rules() -> Any:
    """How arguments are read: a number may be written as 2^-11."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    from sodaopt.lab.labels import number

    rules = ConstructorRegistry()

    @rules.primitive_rule
    def _(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[float] | None:
        if info.type is not float:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="FLOAT",
            instance_from_str=lambda words: number(words[0]),
            is_instance=lambda x: isinstance(x, float | int),
            str_from_instance=lambda x: [str(x)],
        )

    return rules


def _fail(message: str) -> int:
    print(f"sodaopt: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
