"""Where a program runs: on one device, or with tensors that are distributed over a mesh by hand.

A program takes a world and returns tensors by name. It calls `world.model(module)` and `world.data(tensor)` where a user
would call `distribute_tensor`; the rest of it is ordinary PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise import DTensor, PerRank, Placement, Replicate, Shard

Program = Callable[["World"], dict[str, Any]]
R = Replicate()

SCHEMES: dict[str, list[Placement]] = {
    "rows": [Shard(0)],
    "columns": [Shard(-1)],
    "mixed": [Shard(0), R, Shard(-1), Shard(0), Shard(-1)],
}
"""Placements of the parameters, which are used in turn for each mesh axis."""
MESHES = {"2": (2,), "3": (3,), "2x2": (2, 2)}
CASES = [("2", "columns"), ("3", "rows"), ("2x2", "mixed")]
"""Meshes and schemes that each program runs on."""


class World:
    """One device: everything stays as it is."""

    def model(self, module: nn.Module) -> nn.Module:
        """The module with its parameters and buffers distributed."""
        return module

    def data(self, tensor: Tensor) -> Any:
        """A batch, split along its first dim."""
        return tensor.clone()

    def replicated(self, tensor: Tensor) -> Any:
        """A tensor that every rank has."""
        return tensor.clone()


class Mesh(World):
    """A mesh of devices."""

    def __init__(self, mesh: sw.DeviceMesh, scheme: str) -> None:
        self.mesh, self.scheme, self.count = mesh, SCHEMES[scheme], 0

    def _distribute(self, tensor: Tensor) -> DTensor:
        placements = []
        for axis in range(self.mesh.ndim):
            placement = self.scheme[(self.count + axis) % len(self.scheme)]
            placements.append(placement if tensor.dim() else R)
        self.count += 1
        return sw.distribute_tensor(tensor.detach().clone(), self.mesh, placements)

    def model(self, module: nn.Module) -> nn.Module:
        done: dict[int, nn.Parameter] = {}  # tied parameters stay tied
        for part in module.modules():
            for name, p in list(part._parameters.items()):
                if p is not None and not isinstance(p, DTensor):
                    done.setdefault(id(p), nn.Parameter(self._distribute(p), requires_grad=p.requires_grad))
                    setattr(part, name, done[id(p)])
            for name, buffer in list(part._buffers.items()):
                if buffer is not None and not isinstance(buffer, DTensor):
                    part._buffers[name] = sw.distribute_tensor(buffer, self.mesh, [R] * self.mesh.ndim)
        return module

    def data(self, tensor: Tensor) -> DTensor:
        return sw.distribute_tensor(tensor.clone(), self.mesh, [Shard(0)] + [R] * (self.mesh.ndim - 1))

    def replicated(self, tensor: Tensor) -> DTensor:
        return sw.distribute_tensor(tensor.clone(), self.mesh, [R] * self.mesh.ndim)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def initialized(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module in float64, with parameters that depend on the seed alone."""
    module = module.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / math.sqrt(max(p.shape[-1], 1)))
    return module


def state(module: nn.Module, name: str = "model") -> dict[str, Any]:
    """The parameters of a module and their gradients, by name."""
    found: dict[str, Any] = {f"{name}.{n}": p.detach() for n, p in module.named_parameters()}
    return found | {f"{name}.{n}.grad": p.grad for n, p in module.named_parameters()}


def full(value: Any) -> Any:
    """The value on one device, of which all simulated ranks have the same copy."""
    if not isinstance(value, DTensor):
        return value.detach() if isinstance(value, Tensor) else value
    whole = value.detach().full_tensor()
    if isinstance(whole, PerRank):
        first, *others = whole.ranks
        assert all(torch.equal(first, other) or first.isnan().any() for other in others)
        return first
    return whole


def compare(program: Program, mesh: str, scheme: str, tol: float = 1e-9) -> None:
    """Run a program on one device and on a simulated mesh, and compare everything that it returns."""
    want = {name: full(value) for name, value in program(World()).items()}
    sizes = MESHES[mesh]
    with sw.simulate(math.prod(sizes)):
        on = sw.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
        found = {name: full(value) for name, value in program(Mesh(on, scheme)).items()}
    check(found, want, tol)


def check(found: dict[str, Any], want: dict[str, Any], tol: float = 1e-9) -> None:
    """Compare the results of a program with those on one device."""
    assert found.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(
                found[name], value, rtol=tol, atol=tol, msg=lambda m, name=name: f"{name}: {m}"
            )
        else:
            assert found[name] == value, name
