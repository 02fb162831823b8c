"""CommDebugMode: collectives under torch's names, and their bytes."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from shardwise.comm import counting
from shardwise.debug import CommDebugMode

R = Replicate()
FUNCOL = torch.ops.c10d_functional


@pytest.fixture
def line():
    with simulate(4):
        yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def moved(mesh, source, target, shape=(8, 8)):
    """The mode after one redistribution of float32 numbers."""
    if source.is_partial():
        x = DTensor.from_local(torch.ones(shape), mesh, [source])
    else:
        x = distribute_tensor(torch.ones(shape), mesh, [source])
    with CommDebugMode() as mode:
        x.redistribute(placements=[target])
    return mode


@pytest.mark.parametrize(
    ("source", "target", "op", "sent"),
    [
        (Shard(0), R, FUNCOL.all_gather_into_tensor, 4 * 3 * 16),
        (Shard(1), R, FUNCOL.all_gather_into_tensor, 4 * 3 * 16),
        (Partial(), R, FUNCOL.all_reduce, 4 * 2 * 3 * 16),
        (Partial("max"), R, FUNCOL.all_reduce, 4 * 2 * 3 * 16),
        (Partial(), Shard(0), FUNCOL.reduce_scatter_tensor, 4 * 3 * 16),
        (Shard(0), Shard(1), FUNCOL.all_to_all_single, 4 * 3 * 4),
    ],
)
def test_each_collective_is_counted_under_torchs_name(line, source, target, op, sent):
    mode = moved(line, source, target)
    assert mode.get_comm_counts() == {op: 1}
    assert mode.get_total_counts() == 1
    assert mode.get_total_bytes() == 4 * sent


def test_an_uneven_gather_is_a_gather(line):
    mode = moved(line, Shard(0), R, (5, 3))
    assert mode.get_comm_counts() == {FUNCOL.all_gather_into_tensor: 1}
    assert mode.get_total_bytes() == 4 * 3 * 15  # nothing is padded


@pytest.mark.parametrize(("source", "target"), [(R, Shard(0)), (R, R), (Shard(0), Shard(-2)), (R, Partial())])
def test_what_sends_nothing_counts_nothing(line, source, target):
    mode = moved(line, source, target)
    assert mode.get_comm_counts() == {}
    assert (mode.get_total_counts(), mode.get_total_bytes()) == (0, 0)
    assert mode.get_comm_counts()[FUNCOL.all_reduce] == 0  # as torch's do, it answers for ops it has not seen


def test_forward_and_backward(line):
    x = distribute_tensor(torch.ones(8, 8).requires_grad_(), line, [Shard(0)])
    with CommDebugMode() as mode:
        whole = x.redistribute(tp=R).to_local(grad_placements=[Partial()])
        assert mode.get_total_counts() == 1
        whole.sum().backward()
    assert mode.get_comm_counts() == {FUNCOL.all_gather_into_tensor: 1, FUNCOL.reduce_scatter_tensor: 1}


def test_distribute_tensor_scatters_and_broadcasts(line):
    for said, op in (([Shard(0)], torch.ops.c10d.scatter_), ([R], torch.ops.c10d.broadcast_)):
        with CommDebugMode() as mode:
            distribute_tensor(torch.ones(8), line, said)
            distribute_tensor(torch.ones(8), line, said, src_data_rank=None)
            sw.zeros(8, device_mesh=line, placements=said)
        assert mode.get_comm_counts() == {op: 1}


def test_it_counts_only_inside_and_anew_each_time(line):
    x = distribute_tensor(torch.ones(8), line, [Shard(0)])
    mode = CommDebugMode()
    assert mode.get_total_counts() == 0
    with mode:
        x.full_tensor()
        x.full_tensor()
    x.full_tensor()
    assert mode.get_total_counts() == 2
    with mode:
        x.full_tensor()
    assert mode.get_total_counts() == 1


def gather_and_fail(x, mode):
    with mode:
        x.full_tensor()
        x.full_tensor()
        raise ZeroDivisionError


def test_modes_nest_and_end_with_an_exception(line):
    x = distribute_tensor(torch.ones(8), line, [Shard(0)])
    outer, inner = CommDebugMode(), CommDebugMode()
    with outer:
        x.full_tensor()
        with pytest.raises(ZeroDivisionError):
            gather_and_fail(x, inner)
        x.full_tensor()
    x.full_tensor()
    assert (outer.get_total_counts(), inner.get_total_counts()) == (4, 2)


def test_a_ledger_tells_each_entry(line):
    x = distribute_tensor(torch.ones(6, 2), line, [Shard(0)])
    with counting() as ledger:
        x.redistribute(tp=R)
    (entry,) = ledger.entries
    assert (entry.step, entry.axes, entry.group_size, entry.bytes) == ("all-gather", ("tp",), 4, 4 * 3 * 12)


def counted():
    """On one rank: counts and bytes of an even and of an uneven gather, and of a reduction not waited for."""
    mesh = init_device_mesh("cpu", (4,))
    out = []
    for x in (
        distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)]),
        distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)]),
    ):
        with CommDebugMode() as mode:
            x.redistribute(placements=[R])
        out.append(
            (
                mode.get_comm_counts()[FUNCOL.all_gather_into_tensor],
                mode.get_total_counts(),
                mode.get_total_bytes(),
            )
        )
    with CommDebugMode() as mode:
        y = DTensor.from_local(torch.ones(8), mesh, [Partial()]).redistribute(placements=[R], async_op=True)
    out.append((mode.get_comm_counts()[FUNCOL.all_reduce], mode.get_total_counts(), mode.get_total_bytes()))
    return out, y.to_local().sum().item()


def test_on_real_processes_each_rank_counts_its_own(workers):
    found = workers.run(counted)
    assert [total for _, total in found] == [32.0] * 4
    # of the uneven tensor, ranks hold 2, 2, 1 and 0 rows, and send them to the three others
    for (counts, _), rows in zip(found, (2, 2, 1, 0), strict=True):
        assert counts == [(1, 1, 3 * 16), (1, 1, 3 * 8 * rows), (1, 1, 2 * 3 * 32 // 4)]
