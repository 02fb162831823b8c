"""Programs that users write, run on one device and on simulated meshes in drawn layouts: uneven, split by two axes, pending.

A program calls `put(tensor, requires_grad)` where a user would call `distribute_tensor`, and returns values by name.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from tests.values import random_layout, tensor
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm import PerRank, axes_of

__all__ = ["MESHES", "PROGRAMS", "check", "initialized", "integers", "placed", "randn", "user_program"]

Put = Callable[..., Any]
Program = Callable[[Put], dict[str, Any]]
PROGRAMS: dict[str, Program] = {}
MESHES = ((1,), (2,), (3,), (4,), (2, 2))
_PENDING = 0.3
_SEED = 3


def user_program(fn: Program) -> Program:
    """Register a program."""
    PROGRAMS[fn.__name__] = fn
    return fn


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Integers from 0 to `high`."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def initialized(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module in float64, with parameters that depend on the seed alone."""
    module, generator = module.double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.4)
    return module


def placed(module: nn.Module, put: Put) -> nn.Module:
    """The module with its parameters and buffers distributed."""
    for part in module.modules():
        for name, p in list(part._parameters.items()):
            if p is not None:
                part._parameters[name] = nn.Parameter(put(p.detach()))
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = put(buffer)
    return module


def check(program: Program, mesh: tuple[int, ...], seed: int, tol: float = 1e-8) -> None:
    """Run a program on one device and on a simulated mesh; values, dtypes, shapes and flags are the same."""
    sw.manual_seed(_SEED)
    dense = program(lambda t, grad=False: t.clone().requires_grad_(grad))
    rng = random.Random(seed)
    with sw.simulate(math.prod(mesh)):
        on = sw.init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "tp")[: len(mesh)])

        def put(t: Tensor, grad: bool = False) -> Any:
            pending = ["sum"] if rng.random() < _PENDING and t.dtype != torch.bool else []
            layout = random_layout(rng, axes_of(on), tuple(t.shape), pending)
            return tensor(t, layout, on, seed).detach().requires_grad_(grad)

        sw.manual_seed(_SEED)
        _compare("result", program(put), dense, tol)


def _compare(name: str, got: Any, want: Any, tol: float) -> None:
    if isinstance(want, dict):
        assert got.keys() == want.keys(), name
        for key in want:
            _compare(f"{name}[{key!r}]", got[key], want[key], tol)
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), name
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            _compare(f"{name}[{i}]", g, w, tol)
    elif isinstance(want, Tensor):
        _compare_tensors(name, got, want, tol)
    elif isinstance(want, float):
        assert math.isclose(got, want, rel_tol=tol, abs_tol=tol), f"{name}: {got}, not {want}"
    else:
        assert got == want, f"{name}: {got}, not {want}"


def _compare_tensors(name: str, got: Any, want: Tensor, tol: float) -> None:
    facts = [(t.dtype, tuple(t.shape), _strides(t), t.requires_grad, t.is_leaf) for t in (got, want)]
    assert facts[0] == facts[1], f"{name}: {facts[0]}, not {facts[1]}"
    full = got.detach().full_tensor() if isinstance(got, sw.DTensor) else got.detach()
    for rank in full.ranks if isinstance(full, PerRank) else [full]:
        torch.testing.assert_close(
            rank.resolve_conj().resolve_neg(),
            want.detach().resolve_conj().resolve_neg(),
            rtol=tol,
            atol=tol,
            equal_nan=True,
            msg=lambda m: f"{name}: {m}",
        )


def _strides(t: Tensor) -> list[int]:
    """The strides of dims with several elements."""
    return [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] if t.numel() else []
