"""Comparing what the ranks are about to communicate, for programs that may differ between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import is_simulated, ranks_of
from shardwise.layout import Shard
from shardwise.tensor.dtensor import DTensor

__all__ = ["check_ranks", "compare_ranks"]

_checking: ContextVar[bool] = ContextVar("shardwise_check_ranks", default=False)
_LENGTH = 120  # bytes of a description


@contextmanager
def check_ranks() -> Iterator[None]:
    """Compare the ranks before each collective of data-parallel modules: a rank that skips a module is an error on all ranks.

    Without it such a rank waits for the others until the process group times out, or takes their blocks for those of another
    module. It sends 120 bytes per rank before each gather and each reduction: for finding a fault, not for training.

    Raises:
        RuntimeError: at the first collective in which ranks differ, on all ranks, with what each of them is about to do.
    """
    token = _checking.set(True)
    try:
        yield
    finally:
        _checking.reset(token)


def compare_ranks(mesh: DeviceMesh, what: str) -> None:
    """Raise on all ranks of the mesh if they are about to do different things; without effect outside of `check_ranks`."""
    if not _checking.get() or is_simulated():  # which runs one program for all ranks
        return
    text = what.encode()[:_LENGTH]
    row = torch.tensor([[*text, *bytes(_LENGTH - len(text))]], dtype=torch.uint8)
    with torch.no_grad():
        mine = DTensor.from_local(row.to(mesh.device_type), mesh, [Shard(0)] * mesh.ndim)
        every = mine.full_tensor().cpu()
    found = [bytes(text.tolist()).rstrip(b"\0").decode(errors="replace") for text in every]
    if len(set(found)) > 1:
        ranks = ranks_of(mesh)
        shown = "\n".join(f"    rank {rank}: {text}" for rank, text in zip(ranks, found, strict=True))
        raise RuntimeError(
            f"The ranks of a data-parallel model are about to communicate for different modules:\n{shown}\n"
            "  why: A rank called other modules than the others, or in another order, or has no gradients for some of them.\n"
            "  fix: Call the same modules on all ranks; for parameters that some ranks do not use, "
            "model.set_reduce_scatter_unused_params(True)."
        )
