"""Compare an op on tensors in given layouts with the dense op: values, gradients and communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.values import tensor
from torch import Tensor

import shardwise as sw
from shardwise.comm import axes_of, counting
from shardwise.layout import parse_layout


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Distinct numbers of both signs."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)


def below(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Indices from 0 up to `high`."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for v in value for t in flat(v)]


def weights(t: Tensor) -> Tensor:
    return torch.arange(1, t.numel() + 1, dtype=torch.float64).cos().view(t.shape).to(t.dtype)


def check(
    fn: Callable[..., Any],
    values: Sequence[Tensor],
    layouts: Sequence[str],
    *,
    mesh: Sequence[int] = (4,),
    expect: str | None = None,
    free: bool = True,
    grad: bool = True,
) -> None:
    """Compare `fn` and its gradient with the dense ones.

    `expect` is the layout of the first result. `free`: neither `fn` nor its backward communicates. `grad=False` is for
    functions without a gradient, and for those whose backward is not checked.
    """

    def has_grad(t: Tensor) -> bool:
        return grad and (t.dtype.is_floating_point or t.dtype.is_complex)

    dense = [v.clone().requires_grad_(has_grad(v)) for v in values]
    want = flat(fn(*dense))
    with sw.simulate(4):
        on = sw.init_device_mesh("cpu", tuple(mesh), mesh_dim_names=("tp", "dp")[: len(mesh)])
        inputs = []
        for n, (v, text) in enumerate(zip(values, layouts, strict=True)):
            x = tensor(v, parse_layout(text, axes_of(on))[0], on, seed=n)
            inputs.append(x.detach().requires_grad_(has_grad(v)))
        with counting() as ledger:
            got = flat(fn(*inputs))
        assert not free or ledger.bytes == 0, [str(e) for e in ledger.entries]
        assert expect is None or str(got[0].sharding) == expect
        for g, w in zip(got, want, strict=True):
            for rank in g.full_tensor().ranks:
                torch.testing.assert_close(rank, w.detach(), equal_nan=True)
        if not grad:
            return
        smooth = [i for i, w in enumerate(want) if w.requires_grad]
        assert smooth, "no result requires a gradient: pass grad=False"
        full = [
            sw.distribute_tensor(weights(want[i].detach()), on, [sw.Replicate()] * len(mesh)) for i in smooth
        ]
        leaves = [i for i, t in enumerate(dense) if t.requires_grad]
        expected = torch.autograd.grad(
            [want[i] for i in smooth],
            [dense[i] for i in leaves],
            [weights(want[i].detach()) for i in smooth],
            materialize_grads=True,
        )
        with counting() as ledger:
            grads = torch.autograd.grad(
                [got[i] for i in smooth], [inputs[i] for i in leaves], full, allow_unused=True
            )
        assert not free or ledger.bytes == 0, [str(e) for e in ledger.entries]
        for g, w in zip(grads, expected, strict=True):
            if g is None:
                assert not w.any()
                continue
            for rank in g.full_tensor().ranks:
                torch.testing.assert_close(rank, w)
