"""Process groups: creating one under a given name, finding one by name, and a world without communication."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import distributed_c10d

__all__ = ["create_group", "fake_world", "resolve_group"]


def create_group(name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Create the group of these ranks in this order; called by its members alone, at the same time.

    `dist.new_group(use_local_synchronization=True)` derives the name from the number of groups of the process, which
    differs between ranks that are on different meshes: they would wait for each other under different names. In torch
    2.15 it also advances a counter on the members alone, after which groups of the whole world no longer match.
    """
    world = distributed_c10d._get_default_group()
    name_of_backend, store = distributed_c10d._world.pg_map[world]
    backend = distributed_c10d.Backend(name_of_backend)
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(world.rank()),
        list(ranks),
        backend,
        store,
        name,  # type: ignore[arg-type]
        timeout=distributed_c10d._get_default_timeout(backend),
        device_id=world.bound_device_id,
        group_desc="shardwise",
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group  # type: ignore[no-any-return]


def resolve_group(name: str) -> dist.ProcessGroup:
    """The group with this name, as functional collectives get it."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Be rank 0 of a world of this size whose collectives do nothing.

    `init_process_group` replaces `sys.excepthook`, and the first fake group makes "fake" the default backend of devices
    that have none; both are undone at once. The world is destroyed at the end, unless the caller has done so.
    """
    hook, defaults = sys.excepthook, dict(dist.Backend.default_device_backend_map)
    try:
        dist.init_process_group("fake", rank=0, world_size=size)
    finally:
        sys.excepthook = hook
        dist.Backend.default_device_backend_map = defaults
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
