"""Comparison of a function on DTensors in given layouts with the same function on dense tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.values import tensor
from torch import Tensor

import shardwise as sw
from shardwise.comm import axes_of, counting
from shardwise.layout import Layout, Partial, Placement, Replicate, Shard

AXES = ("dp", "tp")


def parse_placements(text: str) -> tuple[Placement, ...]:
    """Parse placements: `0` is Shard(0), `R` is Replicate, `P` is a pending sum.

    >>> parse_placements("0 P")
    (Shard(dim=0), Partial(sum))
    """
    short = {"R": Replicate(), "P": Partial()}
    return tuple(short[w] if w in short else Shard(int(w)) for w in text.split())


def compare(
    fn: Callable[..., Any],
    inputs: Sequence[Tensor | None],
    placements: Sequence[str],
    mesh: Sequence[int] = (4,),
    *,
    grad: bool = True,
    tol: float = 1e-9,
) -> Any:
    """Compare results and gradients with the dense ones, and return the ledger of what was sent."""
    dense = [_leaf(t, grad) for t in inputs]
    want = _flat(fn(*dense))
    wanted = _gradients(want, dense, lambda w, _: w) if grad else []
    world = 1
    for n in mesh:
        world *= n
    with sw.simulate(world):
        on = sw.init_device_mesh("cpu", tuple(mesh), mesh_dim_names=AXES[: len(mesh)])
        distributed = []
        for i, (t, text) in enumerate(zip(inputs, placements, strict=True)):
            if t is None:
                distributed.append(None)
                continue
            layout = Layout.of(t.shape, axes_of(on), parse_placements(text))
            x = tensor(t.detach(), layout, on, seed=i)
            distributed.append(x.requires_grad_(grad and t.dtype.is_floating_point))
        with counting() as ledger:
            got = _flat(fn(*distributed))
            grads = (
                _gradients(got, distributed, lambda w, x: tensor(w, x.sharding.with_partial({}), on))
                if grad
                else []
            )
        for g, w in zip([*got, *grads], [*want, *wanted], strict=True):
            assert (g is None) == (w is None)
            if g is not None:
                _close(g, w, tol)
    return ledger


def _leaf(t: Tensor | None, grad: bool) -> Tensor | None:
    return None if t is None else t.detach().clone().requires_grad_(grad and t.dtype.is_floating_point)


def _flat(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _gradients(
    results: list[Any], inputs: list[Any], distribute: Callable[..., Tensor]
) -> Sequence[Tensor | None]:
    """The gradients of the inputs; every element of the results has another weight."""
    found = [r for r in results if r.requires_grad]
    weights = [distribute((torch.arange(r.numel()) + 1).cos().view(r.shape).to(r.dtype), r) for r in found]
    leaves = [t for t in inputs if t is not None and t.requires_grad]
    return torch.autograd.grad(found, leaves, weights, allow_unused=True)


def _close(got: Any, want: Tensor, tol: float) -> None:
    assert isinstance(got, sw.DTensor)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    for r in got.full_tensor().ranks:
        torch.testing.assert_close(r, want.detach(), rtol=tol, atol=tol, equal_nan=True)
    blocks = got.to_local()
    assert all(b.dtype == want.dtype for b in blocks.ranks), "the dtype of a block differs from its spec"


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normally distributed values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
