"""DTensors inside torch's `LocalTensorMode`: it is a simulation, in which the program's own tensors are LocalTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.comm.local_mode import from_per_rank, in_local_mode, outside_local_mode, to_per_rank
from shardwise.random.stream import set_by_others
from shardwise.tensor.autograd import FromLocal, ToLocal
from shardwise.tensor.dtensor import DTensor, implementation, local_slot
from shardwise.tensor.redistribute import Redistribute
from shardwise.tensor.redistribute_many import RedistributeMany
from shardwise.torch_internals.local_tensor import is_active, local_modes, support_local_mode

__all__ = ["support_local_tensors"]


def support_local_tensors() -> None:
    """Let DTensors be used inside torch's `LocalTensorMode`. Until a program enters one, nothing changes."""
    support_local_mode(DTensor, _dispatch, _prepare)


def _dispatch(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on DTensors, beside which there may be LocalTensors."""
    kinds = [t for t in types if issubclass(t, DTensor)]
    kind = next(t for t in kinds if not any(u is not t and issubclass(u, t) for u in kinds))
    return from_per_rank(kind.__torch_dispatch__(func, types, to_per_rank(args), to_per_rank(kwargs)))


def _block(x: DTensor) -> Tensor:
    """What `x._local_tensor` is: inside a mode a LocalTensor for the program, and a PerRank for us."""
    block: Tensor = local_slot.__get__(x)
    return from_per_rank(block) if is_active() else block


def _for_programs(read: Any) -> Any:
    """A getter of blocks that gives programs LocalTensors."""
    return lambda x: from_per_rank(read(x)) if is_active() else read(x)


def _set_block(x: DTensor, block: Tensor) -> None:
    with torch.no_grad():
        local_slot.__set__(x, to_per_rank(block))


def _prepare() -> None:
    set_by_others.append(lambda: bool(local_modes))  # a mode sets torch's generator for each rank of each op
    for cls in DTensor.__subclasses__():
        own = vars(cls).get("_local_tensor")
        if isinstance(own, property):  # a class that computes its blocks
            cls._local_tensor = property(_for_programs(own.fget), own.fset)  # type: ignore[assignment]
    DTensor._local_tensor = property(_block, _set_block)  # type: ignore[assignment]
    for name in ("from_local", "to_local", "redistribute"):
        setattr(implementation, name, in_local_mode(getattr(implementation, name)))
    for function in (FromLocal, ToLocal, Redistribute, RedistributeMany):
        function.backward = staticmethod(outside_local_mode(function.backward))  # type: ignore[method-assign]
