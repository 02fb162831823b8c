"""Programs that a user would write give the numbers of one device, in several layouts and on several meshes."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from tests.programs.training import PROGRAMS
from tests.programs.worlds import CASES, MESHES, SCHEMES, Mesh, World, check, compare, full

import shardwise as sw

DEEP = os.environ.get("SHARDWISE_DEEP") == "1"


@pytest.mark.parametrize(("mesh", "scheme"), list(itertools.product(MESHES, SCHEMES)) if DEEP else CASES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, mesh, scheme):
    compare(PROGRAMS[name], mesh, scheme)


def on_processes(names):
    """The results of some programs on a mesh of all ranks."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.set_num_threads(1)
    return [{k: full(v) for k, v in PROGRAMS[name](Mesh(mesh, "mixed")).items()} for name in names]


@pytest.mark.processes
def test_programs_on_processes(workers):
    names = list(PROGRAMS) if DEEP else ["gan", "k_means", "experts"]
    for found in workers.run(on_processes, names):
        for name, results in zip(names, found, strict=True):
            check(results, {k: full(v) for k, v in PROGRAMS[name](World()).items()})
