"""Programs that torch's DTensor, styles and FSDP refuse or get wrong, run with torch's and with ours on 4 gloo processes.

Of the list of 32, programs 27 to 29, 31 and 32 (flex attention, pipelines, checkpoints) are not here.

python -m benchmarks.refusals            all
python -m benchmarks.refusals 7 8 15     some, by their number
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from tests.parallel.refusals import PROGRAMS, Program, outcome

from shardwise.comm.launch import LaunchError, Workers

SECONDS = 30.0
"""For one program; a rank that waits for the others for longer hangs."""


def quietly(number: int, library: str) -> str:
    """The outcome of a program, without the tracebacks that torch prints on the way."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    return outcome(number, library)


def run(programs: list[Program], library: str) -> dict[int, str]:
    """What each program gives with a library: "right", or what the first rank says on which it is not."""
    found = {}
    with ExitStack() as stack:
        shared = stack.enter_context(Workers(4, timeout=SECONDS))
        for p in track(programs, library):
            fresh = p.fresh and library == "torchs"
            workers = stack.enter_context(Workers(4, timeout=SECONDS)) if fresh else shared
            try:
                ranks = workers.run(quietly, p.number, library)
            except LaunchError as error:
                ranks = [f"error: {str(error).splitlines()[0]}"]
            found[p.number] = next((text for text in ranks if text != "right"), "right")
            if fresh:
                workers.close()
    return found


def main() -> int:
    """Print both results of each program; the exit code says whether ours are all right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("numbers", nargs="*", type=int, help="programs by their number; all if none is given")
    wanted = parser.parse_args().numbers or [p.number for p in PROGRAMS]
    chosen = [p for p in PROGRAMS if p.number in wanted]
    theirs, ours = (run(chosen, library) for library in ("torchs", "ours"))
    table = Table("#", "program", "torch", "shardwise", show_lines=True)
    for p in chosen:
        table.add_row(str(p.number), escape(p.title), _short(theirs[p.number]), _short(ours[p.number]))
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    right = [sum(found[p.number] == "right" for p in chosen) for found in (theirs, ours)]
    print(f"{len(chosen)} programs: torch {right[0]} right, shardwise {right[1]} right")
    return 0 if right[1] == len(chosen) else 1


def _short(text: str, limit: int = 90) -> str:
    return escape(text if len(text) <= limit else text[: limit - 1] + "…")


if __name__ == "__main__":
    raise SystemExit(main())
