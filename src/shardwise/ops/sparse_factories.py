"""Functions that create sparse tensors, whose C++ code reads values before any op runs, or writes to plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.call.fallback import gather
from shardwise.call.operands import has_dtensor
from shardwise.comm import first_rank, map_ranks
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.patches import KernelPatch

__all__ = ["sparse_patches"]

aten = torch.ops.aten


def _values(func: Any, x: Any) -> Any:
    """The values of a tensor on every rank."""
    detached: Any = x.detach()
    return gather(func, detached) if isinstance(x, DTensor) else detached


def _coo_of_any_size(indices: Tensor, values: Tensor, **kwargs: Any) -> Any:
    """A sparse tensor whose size follows from its indices."""
    rows = first_rank(_values(aten.sparse_coo_tensor.indices, indices)).tolist()
    if any(n < 0 for row in rows for n in row):
        raise RuntimeError(
            "sparse_coo_tensor found a negative index.\n"
            "  why: Indices count from 0 in each dim.\n"
            "  fix: sparse_coo_tensor(indices % size, values, size)"
        )
    size = [max(row, default=-1) + 1 for row in rows] + list(values.shape[1:])
    return aten.sparse_coo_tensor.indices_size(indices, values, size, **kwargs)


def _checks_invariants(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the program wants indices to be validated."""
    return has_dtensor(args, kwargs) and bool(torch.sparse.check_sparse_tensor_invariants.is_enabled())


def _checked(func: Any) -> Callable[..., Any]:
    """A sparse tensor whose indices are validated first."""

    def run(indices: Tensor, values: Tensor, size: Any, **kwargs: Any) -> Any:
        check = aten._validate_sparse_coo_tensor_args.default
        map_ranks(check, _values(func, indices), _values(func, values), size, kwargs.get("is_coalesced"))
        with torch.sparse.check_sparse_tensor_invariants(False):
            return func(indices, values, size, **kwargs)

    return run


class _NoDerivative(torch.autograd.Function):
    """`apply(op, keyword arguments, *arguments)`: an op that torch cannot differentiate."""

    @staticmethod
    def forward(ctx: Any, func: Any, kwargs: dict[str, Any], *args: Any) -> Any:
        ctx.func = func
        return DTensor.__torch_dispatch__(func, (), args, kwargs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"The derivative of {ctx.func} is not implemented.\n"
            "  why: torch has no derivative for this op.\n"
            "  fix: Use torch.sparse.mm and +, or x.detach() before it."
        )


def _without_derivative(func: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _NoDerivative.apply(func, kwargs, *args)  # type: ignore[no-untyped-call]


def sparse_patches() -> list[KernelPatch]:
    """The patches of functions that create sparse tensors."""
    reads = "torch reads the values of the indices before any op runs"
    writes = "torch writes the result to a plain tensor"
    return [
        KernelPatch(aten.sparse_coo_tensor.indices, _coo_of_any_size, reads, has_dtensor),
        *(
            KernelPatch(func, _checked(func), reads, _checks_invariants)
            for func in (aten.sparse_coo_tensor.indices_size, aten._sparse_coo_tensor_unsafe.default)
        ),
        *(
            KernelPatch(func, _without_derivative(func), writes, has_dtensor)
            for func in (aten.smm.default, aten.sspaddmm.default)
        ),
    ]
