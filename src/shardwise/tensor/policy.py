"""Policy: whether ops may communicate implicitly, and what a plain tensor beside a DTensor counts as."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

from shardwise.plan.settings import Implicit, Plain, override_settings

__all__ = ["implicit_replication", "policy"]


@contextmanager
def policy(
    *, implicit: Implicit | None = None, plain: Plain | None = None, reuse: int | None = None
) -> Iterator[None]:
    """Set whether ops inside the block may communicate implicitly, and how they treat plain tensors.

    What is not given keeps the setting outside the block.

    Args:
        implicit: what happens when an op would communicate although the program did not ask for it: `"allow"` (the default
            outside any block), `"warn"`, or `"error"`, which raises before anything is sent; `"strict"` also refuses moves that
            send nothing, such as taking a slice. `redistribute`, `full_tensor`, `item()`, `bool()`, `equal` and the like are
            requests and always run.
        plain: what a plain tensor beside a DTensor counts as: `"error"` (the default outside any block) refuses it, `"replicate"`
            takes it to be the same on every rank, `"check"` compares its values on all ranks first, at the price of one small
            all-gather per call. Numbers and tensors with one element always count as replicated.
        reuse: the most bytes on a rank of operands that ops had to move and that are kept for the next ops that need the same
            tensor in the same layout, as q, k and v do; 256 MiB outside any block. Each is kept until its tensor is
            written to or freed, or others need the room. 0 keeps none. All ranks must use the same number.

    Raises:
        ValueError: a value is none of the above.

    The block itself communicates nothing.

    >>> import torch, shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     x = sw.distribute_tensor(torch.eye(4), mesh, [sw.Shard(0)])
    ...     with sw.policy(implicit="error"):
    ...         y = x + x                       # sends nothing
    ...         x.cumsum(0)
    Traceback (most recent call last):
    shardwise.tensor.errors.CommunicationError: Implicit redistribution: aten.cumsum.default would communicate 64 B.
      why: It runs on [4, 4], so [4:tp, 4] must move: all-gather over tp: [4:tp, 4] -> [4, 4].
      fix: Redistribute the operands first, or allow it: with policy(implicit="allow"): ...
    """
    _check("implicit", implicit, get_args(Implicit))
    _check("plain", plain, get_args(Plain))
    if reuse is not None and (not isinstance(reuse, int) or reuse < 0):
        raise ValueError(
            f"policy() got reuse={reuse!r}.\n  why: It is a number of bytes.\n  fix: policy(reuse=0), or policy(reuse=1 << 28)."
        )
    with override_settings(implicit=implicit, plain=plain, reuse=reuse):
        yield


def _check(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        listed = ", ".join(f'"{a}"' for a in allowed)
        raise ValueError(
            f"policy() got {name}={value!r}.\n  why: {name} is one of {listed}.\n  fix: policy({name}={allowed[-1]!r})."
        )


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Take plain tensors beside DTensors to be the same on every rank inside the block: `policy(plain="replicate")`."""
    with override_settings(plain="replicate"):
        yield
