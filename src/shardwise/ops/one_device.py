"""The reference of a distributed run: the same random numbers on plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.call.fallback import draws_random
from shardwise.ops.random_ops import random_program
from shardwise.random import BlockIndices, integers, normal, permutation, uniform
from shardwise.random.seeded_generator import with_seeded_generator
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.seeding import draw_from
from shardwise.torch_internals.dispatcher import is_composite
from shardwise.torch_internals.lazy_bits import resolving_lazy_bits
from shardwise.torch_internals.tracing import TorchDispatchMode

__all__ = ["one_device"]

aten = torch.ops.aten


@contextmanager
def one_device() -> Iterator[None]:
    """Inside the block random ops on plain tensors draw from shardwise's stream, as those on DTensors always do.

    A program for one device then draws the numbers that it draws on any mesh: `torch.rand` and its like, `x.normal_()`, the
    initialisation of modules, dropout. torch's own generator is neither read nor advanced.

    Nothing is communicated.

    >>> import shardwise as sw
    >>> sw.manual_seed(3)
    >>> with one_device():
    ...     alone = torch.nn.Linear(2, 2).weight
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     weight = sw.empty(2, 2, device_mesh=mesh, placements=[sw.Shard(0)])
    ...     sw.manual_seed(3)
    ...     torch.nn.init.kaiming_uniform_(weight, a=5**0.5)  # doctest: +ELLIPSIS
    ...     torch.equal(alone, weight.full_tensor().ranks[0])
    DTensor(...)
    True
    """
    with _Drawing():  # type: ignore[no-untyped-call]
        yield


class _Drawing(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return func(*args, **kwargs)
        program = _FACTORIES.get(func) or random_program(func)
        if program is not None:
            return program(*args, **kwargs)
        if is_composite(func):  # inference mode passes composite ops on as they are
            with self:
                return func.decompose(*args, **kwargs)
        if draws_random(func, args, kwargs) and kwargs.get("generator") is None:
            func = with_seeded_generator(func, draw_from(None))
        return resolving_lazy_bits(lambda args, kwargs: func(*args, **kwargs))(args, kwargs)


def _new(distribution: Callable[..., Tensor], size: Any, kwargs: dict[str, Any]) -> Tensor:
    """A new tensor of random numbers, with the dtype, device and other properties asked for."""
    generator = kwargs.pop("generator", None)
    out = torch.empty(size, **kwargs)
    if out.device.type == "meta":
        return out
    draw = draw_from(generator)
    return out.copy_(distribution(draw, BlockIndices(out.shape), out.dtype, out.device))


def _from(distribution: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda size, **kwargs: _new(distribution, size, kwargs)


def _normal(mean: float, std: float, size: Any, **kwargs: Any) -> Tensor:
    return _new(partial(normal, mean=mean, std=std), size, kwargs)


def _randint(*args: Any, **kwargs: Any) -> Tensor:
    *bounds, size = args
    low, high = (0, *bounds)[-2:]
    dtype = kwargs.pop("dtype", None) or torch.int64
    torch.randint(low, high, (1,), dtype=dtype, generator=torch.Generator())  # for its errors
    return _new(partial(integers, low=low, high=high), size, {**kwargs, "dtype": dtype})


def _randperm(n: int, **kwargs: Any) -> Tensor:
    dtype = kwargs.pop("dtype", None) or torch.int64
    torch.randperm(n, dtype=dtype, device="meta")  # for its errors
    return _new(permutation, (n,), {**kwargs, "dtype": dtype})


_FACTORIES: dict[Any, Callable[..., Tensor]] = {
    **{getattr(aten.rand, o): _from(uniform) for o in ("default", "generator")},
    **{getattr(aten.randn, o): _from(normal) for o in ("default", "generator")},
    **{getattr(aten.randint, o): _randint for o in ("default", "generator", "low", "low_generator")},
    **{getattr(aten.randperm, o): _randperm for o in ("default", "generator")},
    aten.normal.float_float: _normal,
}
"""Ops that create a tensor from numbers only, and so have no mesh."""
