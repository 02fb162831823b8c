"""`python -m shardwise run train.py ...`: a program as it is, on shardwise."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwise.drop_in.install import install
from shardwise.faults import guard

__all__ = ["USAGE", "main"]

USAGE = """\
usage: python -m shardwise run [-m] program [arguments ...]

Run a program that was written for torch.distributed.tensor on shardwise. `-m`: the program is a module.
With torchrun: torchrun --nproc-per-node 4 -m shardwise run train.py ..."""


def main(arguments: Sequence[str]) -> int:
    """Run the command line; the arguments are those after `python -m shardwise`."""
    match list(arguments):
        case ["run", "-m", module, *rest] if not module.startswith("-"):
            _run(module, rest, is_module=True)
            return 0
        case ["run", program, *rest] if not program.startswith("-"):
            _run(program, rest, is_module=False)
            return 0
    is_help = list(arguments) in (["-h"], ["--help"], ["run", "-h"], ["run", "--help"])
    (sys.stdout if is_help else sys.stderr).write(USAGE + "\n")
    return 0 if is_help else 2


def _run(program: str, arguments: list[str], *, is_module: bool) -> None:
    """Run a file or a module as `python` does: its directory is the first of `sys.path`, its name is `__main__`."""
    install()
    with guard():
        _run_program(program, arguments, is_module=is_module)


def _run_program(program: str, arguments: list[str], *, is_module: bool) -> None:
    if is_module:
        sys.argv = [program, *arguments]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    if not Path(program).is_file():
        raise SystemExit(f"python -m shardwise run: there is no file {program!r}")
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")
