"""Groups are created by their members alone, under the name given; a fake world leaves no trace."""

import sys
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from shardwise.torch_internals.process_groups import create_group, fake_world, resolve_group


def members_alone():
    """On one of four ranks: the sums over two groups, after some ranks have created more groups than others."""
    rank = dist.get_rank()
    extra = create_group("extra", (1, 2)) if rank in (1, 2) else None
    mine = (2, 0) if rank in (0, 2) else (3, 1)
    before = len(dist.distributed_c10d._world.pg_names)
    group = create_group(f"of {mine}", mine)
    assert resolve_group(f"of {mine}") is group
    assert (group.group_name, group.rank(), group.size()) == (f"of {mine}", mine.index(rank), 2)
    assert dist.get_process_group_ranks(group) == list(mine)
    assert len(dist.distributed_c10d._world.pg_names) == before + 1
    total = torch.tensor([10.0**rank])
    dist.all_reduce(total, group=group)
    # groups of the whole world still have the same names on all ranks
    everyone = dist.new_group([0, 1, 2, 3])
    count = torch.ones(1)
    dist.all_reduce(count, group=everyone)
    for created in (everyone, group, *([extra] if extra else [])):
        dist.destroy_process_group(created)
    return total.item(), count.item()


@pytest.mark.processes
def test_members_create_a_group_alone(workers):
    assert workers.run(members_alone) == [(101, 4), (1010, 4), (101, 4), (1010, 4)]


def two_groups_at_once():
    """On one of four ranks: the sums over two groups that two threads create, in opposite orders on the ranks."""
    rank, groups = dist.get_rank(), {}

    def create(name):
        groups[name] = create_group(name, range(4))

    names = ["first", "second"] if rank % 2 else ["second", "first"]
    threads = [threading.Thread(target=create, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out = []
    for name in ("first", "second"):
        total = torch.tensor([10.0**rank])
        dist.all_reduce(total, group=groups[name])
        out.append((groups[name].group_name, total.item()))
        dist.destroy_process_group(groups[name])
    return out


@pytest.mark.processes
def test_threads_create_groups_at_the_same_time(workers):
    assert workers.run(two_groups_at_once) == [[("first", 1111), ("second", 1111)]] * 4


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_fake_world_is_destroyed(error):
    before = sys.excepthook, dict(dist.Backend.default_device_backend_map)
    with pytest.raises(error) if error else nullcontext(), fake_world(1000):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1000)
        assert sys.excepthook is before[0]
        dist.all_reduce(torch.ones(3))
        if error:
            raise error
    assert not dist.is_initialized()
    assert (sys.excepthook, dict(dist.Backend.default_device_backend_map)) == before


def test_a_fake_world_may_be_destroyed_inside():
    with fake_world(2):
        dist.destroy_process_group()
    assert not dist.is_initialized()
