"""Every configuration of transformers that carries a plan, on several meshes: right, wrong, an error, or not built."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tests.clients.float64 import Float64
from tests.clients.inputs import batches_for
from tests.clients.tiny_configs import build, configurations_with_plans, shrink
from tests.clients.training import Batch, Record, compare, train
from transformers import PreTrainedModel

from shardwise.parallel import parallelize_module

__all__ = ["MESHES", "Case", "sweep_configuration"]

TOLERANCE = 1e-9
MESHES: dict[str, Mapping[str, int]] = {
    "tp 2": {"tp": 2},
    "tp 3": {"tp": 3},
    "dp 2 x tp 2": {"dp": 2, "tp": 2},
    "ep 2": {"tp": 2},
}
"""On "ep" meshes the expert parallel plan replaces the entries of experts; only for configurations that have one."""


@dataclass(frozen=True)
class Case:
    """The result of one configuration on one mesh."""

    name: str
    mesh: str
    status: str
    """`right`, `wrong`, `error`, or `not built` if the dense model does not run."""
    detail: str = ""


def sweep_configuration(name: str, steps: int = 2, meshes: Sequence[str] = tuple(MESHES)) -> list[Case]:
    """Train a tiny model of a configuration, given as `family.Class`, on each mesh and compare it with dense."""
    try:
        model = build(shrink(configurations_with_plans()[name])).eval()
        batches = batches_for(model)
        with Float64():
            dense = train(copy.deepcopy(model), batches, steps)
    except Exception as error:
        return [Case(name, "", "not built", _shown(error))]
    used = [m for m in meshes if not m.startswith("ep") or model.ep_plan]
    return [_compare(name, mesh, model, batches, dense, steps) for mesh in used]


def _compare(
    name: str, mesh: str, model: PreTrainedModel, batches: list[Batch], dense: Record, steps: int
) -> Case:
    plan = {**model.tp_plan, **(model.ep_plan if mesh.startswith("ep") else {})}

    def parallelize(copied: Any, device_mesh: Any) -> None:
        parallelize_module(copied, device_mesh, plan)

    try:
        beyond = compare(model, batches, parallelize, MESHES[mesh], steps, dense).beyond(TOLERANCE)
    except Exception as error:
        return Case(name, mesh, "error", _shown(error))
    if not beyond:
        return Case(name, mesh, "right")
    worst = ", ".join(f"{kind} {value:.1e} ({where})" for kind, (value, where) in beyond.items())
    return Case(name, mesh, "wrong", worst)


def _shown(error: Exception) -> str:
    """An error in one line, with the line of the model that raised it."""
    lines = [f for f in traceback.extract_tb(error.__traceback__) if "/transformers/" in f.filename]
    at = f" at {lines[-1].filename.rpartition('/')[2]}:{lines[-1].lineno}" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{at}"


torch.set_num_threads(1)
