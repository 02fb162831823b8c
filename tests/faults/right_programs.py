"""Right programs on processes, under `guard` and `sanitize`: none of them may raise an alarm."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.faults.forked_world import WorldOutcome
from tests.programs import templates_autograd, templates_ops  # noqa: F401  (they register templates)
from tests.programs.drawing import draw_program
from tests.programs.program import AXES, difference

import shardwise as sw

MESHES = ((4,), (2, 2), (4, 1))


def check_programs(seeds: Iterable[int], folder: str) -> None:
    """Run programs on this rank; differences from one device are counted as alarms, too."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    meshes: dict[tuple[int, ...], Any] = {}
    alarms = []
    for seed in seeds:
        program = draw_program(seed, MESHES[seed % len(MESHES)])
        if program.mesh not in meshes:
            names = AXES[: len(program.mesh)]
            meshes[program.mesh] = sw.init_device_mesh("cpu", program.mesh, mesh_dim_names=names)
        with sw.guard(timeout=60), sw.sanitize():
            found = difference(program, meshes[program.mesh])
        if found is not None:
            alarms.append(f"program {seed}: {found.kind}: {found.text}")
    Path(folder, f"rank{dist.get_rank()}").write_text(json.dumps(alarms))


def alarms_of(seeds: Iterable[int], run: Callable[..., WorldOutcome]) -> list[str]:
    """The alarms that these programs raise on four processes."""
    with tempfile.TemporaryDirectory() as folder:
        found = run(lambda injected: check_programs(seeds, folder), 4, 600.0)
        failed = [f"rank {r}: {o}" for r, o in found.ranks.items() if o.end != "returned"]
        listed = [alarm for file in Path(folder).iterdir() for alarm in json.loads(file.read_text())]
    return failed + listed
