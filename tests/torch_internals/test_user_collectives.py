"""Collectives that the program calls itself reach the monitor, once each, and only while its world exists."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.faults import current_session, watch_world
from shardwise.torch_internals.user_collectives import note_user_collective, watch_user_collectives


def texts_of_own_collectives() -> tuple[list[str], bool]:
    watch_world()
    session = current_session()
    assert session is not None
    before = session.record.entries()[-1].number if session.record.entries() else 0
    t = torch.ones(3)
    dist.all_reduce(t)
    dist.all_reduce(t, async_op=True).wait()
    dist.broadcast(t, 0)
    dist.barrier()
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    sw.ones(4, device_mesh=mesh, placements=[sw.Shard(0)]).full_tensor()
    return [e.text for e in session.record.entries() if e.number > before], session.record.waits() == 0.0


@pytest.mark.processes
def test_each_is_recorded_once(workers):
    for texts, is_idle in workers.run(texts_of_own_collectives):
        assert texts == [
            "torch.distributed.all_reduce of 3 elements of float32",
            "torch.distributed.all_reduce of 3 elements of float32",
            "torch.distributed.broadcast of 3 elements of float32",
            "torch.distributed.barrier",
            "all-gather over tp: [4:tp] -> [4] f32",
        ]
        assert is_idle


def test_installing_twice_does_nothing():
    watch_user_collectives()
    first = dist.Work.wait, dist.ProcessGroup.allreduce
    watch_user_collectives()
    assert first == (dist.Work.wait, dist.ProcessGroup.allreduce)


def test_sizes_that_may_differ_are_not_compared():
    one, two = [torch.ones(1)], [torch.ones(2)]
    assert note_user_collective("allreduce", (one,)) != note_user_collective("allreduce", (two,))
    assert note_user_collective("allgather", ([one], one)) == note_user_collective("allgather", ([two], two))
    assert note_user_collective("scatter", (one, [one])) == note_user_collective("scatter", (one, []))


def errors_of_refused_collectives() -> list[str]:
    """What gloo does not do: it says so when the result is waited for, if it does the collective in two steps."""
    watch_world()
    found = []
    for call in (
        lambda: dist.all_reduce(torch.ones(4), op=dist.ReduceOp.BAND),
        lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * 4), op=dist.ReduceOp.BAND),
    ):
        with pytest.raises(RuntimeError) as error:
            call()
        found.append(str(error.value))
    return found


@pytest.mark.processes
def test_what_gloo_refuses_is_an_error_and_no_wait(workers):
    for errors in workers.run(errors_of_refused_collectives):
        assert all("Cannot use ReduceOp.BAND" in text for text in errors), errors
