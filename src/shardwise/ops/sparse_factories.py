"""Functions that make sparse tensors, whose C++ code reads values before any op runs or makes plain tensors to write to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import map_ranks
from shardwise.dispatch.router import dispatch
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.override import instead_of

__all__ = ["make_sparse"]

aten = torch.ops.aten


def _values_of(x: Any) -> Any:
    alone: Any = x.detach()
    return alone.full_tensor() if isinstance(x, DTensor) else alone


def _coo_of_any_size(indices: Tensor, values: Tensor, **kwargs: Any) -> Any:
    """A sparse tensor as large as its indices say."""
    rows = _values_of(indices).tolist()
    if any(n < 0 for row in rows for n in row):
        raise RuntimeError(
            "sparse_coo_tensor found a negative index.\n"
            "  why: indices count from 0, in each dim\n"
            "  fix: indices % size first"
        )
    size = [max(row, default=-1) + 1 for row in rows] + list(values.shape[1:])
    return aten.sparse_coo_tensor.indices_size(indices, values, size, **kwargs)


def _looks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the program wants indices to be looked at."""
    return bool(torch.sparse.check_sparse_tensor_invariants.is_enabled())


def _checked(func: Any) -> Callable[..., Any]:
    """A sparse tensor whose indices are looked at first."""

    def run(indices: Tensor, values: Tensor, size: Any, **kwargs: Any) -> Any:
        check = aten._validate_sparse_coo_tensor_args.default
        map_ranks(check, _values_of(indices), _values_of(values), size, kwargs.get("is_coalesced"))
        with torch.sparse.check_sparse_tensor_invariants(False):
            return func(indices, values, size, **kwargs)

    return run


class _NoDerivative(torch.autograd.Function):
    """`apply(op, named arguments, *arguments)`: an op of torch's that has none."""

    @staticmethod
    def forward(ctx: Any, func: Any, kwargs: dict[str, Any], *args: Any) -> Any:
        ctx.func = func
        return dispatch(func, (), args, kwargs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"the derivative of {ctx.func} is not implemented.\n"
            "  why: torch has none\n"
            "  fix: torch.sparse.mm and +, or x.detach() before it"
        )


def _on_whole(func: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _NoDerivative.apply(func, kwargs, *args)  # type: ignore[no-untyped-call]


def make_sparse() -> None:
    """Put our way before torch's for DTensors."""
    instead_of(aten.sparse_coo_tensor.indices, _coo_of_any_size)
    for made in (aten.sparse_coo_tensor.indices_size, aten._sparse_coo_tensor_unsafe.default):
        instead_of(made, _checked(made), _looks)
    for written in (aten.smm.default, aten.sspaddmm.default):
        instead_of(written, _on_whole(written))
