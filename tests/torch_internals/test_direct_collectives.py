"""Collectives of gloo whose works are known: every way to wait for one waits, and few are kept that nobody waits for."""

import time

import pytest
import torch
import torch.distributed as dist

from shardwise.faults import watch_world
from shardwise.torch_internals import direct_collectives
from shardwise.torch_internals.collectives import all_reduce, monitors, wait, waiting


def _late_sum(group):
    """A collective that ends only after the last rank has slept."""
    dist.barrier()
    if dist.get_rank() == 3:
        time.sleep(0.3)
    return all_reduce(torch.full((1000,), float(dist.get_rank())), "sum", group)


def waits():
    """On one of four ranks: what each way to wait gives, and the number of works that are left."""
    watch_world()
    group, found = dist.group.WORLD.group_name, []
    found.append(wait(_late_sum(group))[7].item())
    coming = _late_sum(group)
    kept, monitors[:] = list(monitors), []
    found.append(wait(coming)[7].item())  # the monitor that started it is gone
    monitors[:] = kept
    found.append((waiting(_late_sum(group)) + 0)[7].item())  # torch's own tensor waits
    both = _late_sum(group)
    found.append((waiting(both) + 0)[7].item())
    found.append(wait(both)[7].item())
    found.append(wait(both)[7].item())
    several = [_late_sum(group) for _ in range(3)]
    found += [wait(t)[7].item() for t in reversed(several)]
    many = [all_reduce(torch.ones(2), "sum", group) for _ in range(80)]
    dist.barrier()
    found.append(sum(wait(t)[1].item() for t in many) / 80 + 2)
    return found, len(direct_collectives._works)


@pytest.mark.processes
def test_every_wait_waits(workers):
    for found, left in workers.run(waits):
        assert found == [6.0] * 10
        assert left <= 8
