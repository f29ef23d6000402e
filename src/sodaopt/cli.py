"""The `sodaopt` command. Each subcommand is a dataclass with a `run` method.

    sodaopt compare muon "soda(muon)" --help

To add a subcommand, add a line to COMMANDS. Only the module of the chosen subcommand is imported,
so a subcommand works without the dependencies of the others.
"""

import os
import sys
from collections.abc import Sequence
from pkgutil import resolve_name

from sodaopt._errors import unknown
from sodaopt.lab.visible import visible

COMMANDS = {
    "train": ("sodaopt.lab.commands:Train", "train a small GPT"),
    "compare": ("sodaopt.lab.many:Compare", "compare several optimizers"),
    "sweep": ("sodaopt.lab.many:Sweep", "train a grid of settings"),
    "reproduce": ("sodaopt.lab.reproduce:Reproduce", "run the paper's experiments"),
    "report": ("sodaopt.lab.report.command:Report", "write a report page about runs"),
    "sample": ("sodaopt.lab.commands:Sample", "generate text with a trained model"),
    "track3": ("sodaopt.lab.track3:Track3", "judge runs by the rules of modded-nanogpt track 3"),
    "data": ("sodaopt.lab.data.command:Data", "prepare, download or inspect data"),
    "bench": ("sodaopt.lab.bench:Bench", "measure one step of optimizers"),
    "theory": ("sodaopt.theory.command:Theory", "check and plot the convex theory"),
    "env": ("sodaopt.lab.environment:report", "print versions and devices, for a bug report"),
}
"""The dataclass of each subcommand, or the function of "env", and a short description."""

UNIX = ("fcntl", "resource")
"""Modules of Python that Windows does not have."""


def usage() -> str:
    """Return the help text of the command, with a line for each subcommand."""
    lines = [f"  {name:10} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: sodaopt COMMAND [options]", "", *lines, "", "sodaopt COMMAND --help"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Return its exit code, which is 2 for wrong arguments."""
    try:
        try:
            return _main(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError as e:
        try:
            print(flush=True)  # a flush alone does not fail again if stdout has no buffer
        except BrokenPipeError:  # after `| head`: Python would fail again when it flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return _fail(str(e))
    except (ValueError, OSError) as e:  # wrong arguments or files, not a bug: no traceback
        return _fail(str(e))


def _main(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        print(resolve_name("sodaopt:__version__"))
        return 0
    if args[0] == "env":  # needs torch only, as the library does
        print(resolve_name(COMMANDS["env"][0])())
        return 0
    if args[0] not in COMMANDS:
        raise ValueError(unknown("command", args[0], COMMANDS))
    return _call(args[0], args[1:])


def _call(name: str, args: list[str]) -> int:
    try:
        import tyro

        from sodaopt.lab.labels import parser_rules

        config = resolve_name(COMMANDS[name][0])
        made = tyro.cli(config, prog=f"sodaopt {name}", args=args, registry=parser_rules())
        return int(made.run())
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("sodaopt"):  # a bug here, not a missing package
            raise
        if e.name in UNIX:
            return _fail(f"sodaopt {name} needs Linux or macOS ({e.name}): on Windows, use WSL. "
                         "The optimizers themselves run on Windows too")  # fmt: skip
        return _fail(f"sodaopt {name} needs {e.name}: pip install 'sodaopt[lab]'")


def _fail(message: str) -> int:
    print(f"sodaopt: {visible(message)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
