"""Every configuration of transformers that carries a tensor parallel plan, tiny, against dense.

Logits, loss, gradients and parameters after AdamW steps of two accumulated micro-batches, in float64 to 1e-9, on simulated
meshes: tp of 2 and 3, dp x tp, and experts split where there is an expert parallel plan.

python -m benchmarks.models                      all, on all cores (about 10 minutes of CPU)
python -m benchmarks.models --only qwen3 --steps 5 --mesh "tp 3"
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import warnings
from collections import Counter
from functools import partial

from rich.console import Console
from rich.progress import track
from rich.table import Table
from tests.clients.sweep import MESHES, Case, sweep_configuration
from tests.clients.tiny_configs import configurations_with_plans

_MARKS = {"right": "right", "wrong": "[bold red]WRONG[/]", "error": "[yellow]error[/]"}


def _silence() -> None:
    warnings.filterwarnings("ignore")
    for name in ("shardwise", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def run(names: list[str], steps: int, meshes: list[str], processes: int) -> list[Case]:
    """The results of all configurations."""
    work = partial(sweep_configuration, steps=steps, meshes=tuple(meshes))
    with multiprocessing.get_context("spawn").Pool(processes, _silence) as pool:
        found = pool.imap(work, names)
        return [case for cases in track(found, "models", len(names)) for case in cases]


def report(cases: list[Case], meshes: list[str], console: Console) -> Counter[str]:
    """Print a line for each family and the summary; returns how many cases have each status."""
    table = Table("configuration", *meshes)
    built = {c.name for c in cases if c.status != "not built"}
    for name in sorted(built):
        by_mesh = {c.mesh: _MARKS[c.status] for c in cases if c.name == name}
        table.add_row(name, *(by_mesh.get(m, "") for m in meshes))
    console.print(table)
    for case in cases:
        if case.status in ("wrong", "error"):
            console.print(f"{case.name} on {case.mesh}: {case.status}: {case.detail}", markup=False)
    for case in cases:
        if case.status == "not built":
            console.print(f"{case.name} was not built: {case.detail}", markup=False)
    counts = Counter(c.status for c in cases if c.status != "not built")
    total = counts.total()
    shown = ", ".join(f"{counts[s]} {s}" for s in ("right", "error", "wrong"))
    console.print(
        f"{len(built)} configurations, {total} cases: {shown}; {100 * counts['right'] / max(total, 1):.1f} % right"
    )
    return counts


def main() -> int:
    """Run the sweep; the exit code says whether a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="*", help="parts of the names of configurations, such as qwen3 or LlamaConfig"
    )
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps")
    parser.add_argument("--mesh", nargs="*", choices=list(MESHES), default=list(MESHES))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    _silence()
    names = [
        n for n in configurations_with_plans() if not options.only or any(part in n for part in options.only)
    ]
    cases = run(names, options.steps, options.mesh, options.processes)
    counts = report(cases, options.mesh, Console(width=None if sys.stdout.isatty() else 110))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
