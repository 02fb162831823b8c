"""CommDebugMode: every collective is counted, under torch's ops, with its bytes."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from shardwise.comm import Sent, counting
from shardwise.comm.ledger import record
from shardwise.debug import CommDebugMode
from shardwise.plan.step import Step

R = Replicate()
FUNCOL = torch.ops.c10d_functional


@pytest.fixture
def line():
    with simulate(4):
        yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def redistribution(mesh, source, target, shape=(8, 8)):
    """The mode after one redistribution of a float32 tensor."""
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
def test_collectives_are_counted_under_torchs_ops(line, source, target, op, sent):
    mode = redistribution(line, source, target)
    assert mode.get_comm_counts() == {op: 1}
    assert mode.get_total_counts() == 1
    assert mode.get_total_bytes() == 4 * sent


def test_an_uneven_all_gather_is_counted_as_all_gather(line):
    mode = redistribution(line, Shard(0), R, (5, 3))
    assert mode.get_comm_counts() == {FUNCOL.all_gather_into_tensor: 1}
    assert mode.get_total_bytes() == 4 * 3 * 15  # without padding


@pytest.mark.parametrize(("source", "target"), [(R, Shard(0)), (R, R), (Shard(0), Shard(-2)), (R, Partial())])
def test_local_steps_are_not_counted(line, source, target):
    mode = redistribution(line, source, target)
    assert mode.get_comm_counts() == {}
    assert (mode.get_total_counts(), mode.get_total_bytes()) == (0, 0)
    assert mode.get_comm_counts()[FUNCOL.all_reduce] == 0  # not a KeyError, as in torch


def test_exchanges_and_permutations_are_counted_as_all_to_all(line):
    x = distribute_tensor(torch.arange(8.0), line, [Shard(0)])
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    y = distribute_tensor(torch.ones(8), grid, [Shard(0), Shard(0)])
    with CommDebugMode() as mode:
        x.flip(0)
        y.redistribute(placements=[Shard(0, order=1), Shard(0, order=0)])
    assert [sent.step for sent in mode.ledger.entries] == ["exchange", "permute"]
    assert mode.get_comm_counts() == {FUNCOL.all_to_all_single: 2}


def test_every_entry_of_the_ledger_is_counted():
    steps = step_names(Step) | {"scatter", "broadcast", "agree on a seed"}
    assert {"all-gather", "exchange", "permute"} <= steps
    with CommDebugMode() as mode:
        for step in steps:
            record(Sent(step, "all_to_all", ("tp",), 4, Fraction(8)))
        record(Sent("a step of the future", "a call of the future", ("tp",), 4, Fraction(8)))
    counts = mode.get_comm_counts()
    assert sum(counts.values()) == mode.get_total_counts() == len(steps) + 1
    assert counts["a call of the future"] == 1


def step_names(base):
    """The names of all subclasses of a step."""
    return {cls.name for cls in base.__subclasses__()}.union(*map(step_names, base.__subclasses__()))


def test_counts_are_attributes_as_in_torch(line):
    mode = redistribution(line, Shard(0), R)
    assert mode.comm_counts == mode.get_comm_counts()
    assert mode.comm_counts[FUNCOL.all_gather_into_tensor] == 1
    assert repr(mode) == "CommDebugMode(get_total_counts()=1)"


def test_forward_and_backward(line):
    x = distribute_tensor(torch.ones(8, 8).requires_grad_(), line, [Shard(0)])
    with CommDebugMode() as mode:
        full = x.redistribute(tp=R).to_local(grad_placements=[Partial()])
        assert mode.get_total_counts() == 1
        full.sum().backward()
    assert mode.get_comm_counts() == {FUNCOL.all_gather_into_tensor: 1, FUNCOL.reduce_scatter_tensor: 1}


def test_distribute_tensor_scatters_and_broadcasts(line):
    for placements, op in (([Shard(0)], torch.ops.c10d.scatter_), ([R], torch.ops.c10d.broadcast_)):
        with CommDebugMode() as mode:
            distribute_tensor(torch.ones(8), line, placements)
            distribute_tensor(torch.ones(8), line, placements, src_data_rank=None)
            sw.zeros(8, device_mesh=line, placements=placements)
        assert mode.get_comm_counts() == {op: 1}


def test_counts_are_of_the_last_block_only(line):
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


def test_modes_nest_and_stop_counting_after_an_exception(line):
    x = distribute_tensor(torch.ones(8), line, [Shard(0)])
    outer, inner = CommDebugMode(), CommDebugMode()
    with outer:
        x.full_tensor()
        with pytest.raises(ZeroDivisionError):
            gather_and_fail(x, inner)
        x.full_tensor()
    x.full_tensor()
    assert (outer.get_total_counts(), inner.get_total_counts()) == (4, 2)


def test_entries_of_a_ledger(line):
    x = distribute_tensor(torch.ones(6, 2), line, [Shard(0)])
    with counting() as ledger:
        x.redistribute(tp=R)
    (entry,) = ledger.entries
    assert (entry.step, entry.axes, entry.group_size, entry.bytes) == ("all-gather", ("tp",), 4, 4 * 3 * 12)


def counts_of_one_rank():
    """Counts and bytes of an even and an uneven all-gather, an asynchronous all-reduce, and the first draw."""
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
    with torch.random.fork_rng(), CommDebugMode() as mode:
        torch.manual_seed(dist.get_rank())  # different seeds: the first draw broadcasts the first rank's
        sw.rand(4, device_mesh=mesh)
    seed = (dict(mode.get_comm_counts()) == {torch.ops.c10d.broadcast_: 1}, mode.get_total_bytes())
    return out, y.to_local().sum().item(), seed


def test_on_real_processes_each_rank_counts_what_it_sends(workers):
    found = workers.run(counts_of_one_rank)
    assert [total for _, total, _ in found] == [32.0] * 4
    # the ranks hold 2, 2, 1 and 0 rows of the uneven tensor and send them to three others
    for (counts, _, _), rows in zip(found, (2, 2, 1, 0), strict=True):
        assert counts == [(1, 1, 3 * 16), (1, 1, 3 * 8 * rows), (1, 1, 2 * 3 * 32 // 4)]
    assert [seed for _, _, seed in found] == [(True, 3 * 8), (True, 0), (True, 0), (True, 0)]


def test_counts_by_module_in_a_simulation_with_blocks_as_inputs(line):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).requires_grad_(False)
    with CommDebugMode() as mode:
        x = sw.per_rank(lambda rank: torch.full((2, 4), float(rank), requires_grad=True))
        y = DTensor.from_local(model(x), line, [Shard(0)]).redistribute(tp=R)
        y.sum().backward()
    assert mode.comm_module_counts["Global"]["forward"] == {FUNCOL.all_gather_into_tensor: 1}
    assert mode.get_parameter_info().keys() == {"Sequential.0"}
    assert "Sequential.1" in mode.generate_comm_debug_tracing_table()


def test_tables_name_the_parts_of_containers_that_are_never_called(line, tmp_path):
    class Stacked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False) for _ in range(2)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = sw.parallel.parallelize_module(
        Stacked(), line, {"layers.*": sw.parallel.RowwiseParallel(input_layouts=R)}
    )
    with CommDebugMode() as mode:
        model(torch.ones(2, 4)).sum().backward()
    names = ["Stacked.layers.0", "Stacked.layers.1"]
    assert list(mode.get_parameter_info()) == names
    assert mode.get_sharding_info() == {f"{n}.weight": (Shard(1),) for n in names}
    counted = {n: mode.comm_module_counts[n]["forward"][FUNCOL.all_reduce] for n in ("Stacked", *names)}
    assert counted == {"Stacked": 2, names[0]: 1, names[1]: 1}
    tables = [mode.generate_comm_debug_tracing_table(noise_level=level) for level in range(4)]
    for text in tables:
        assert "FORWARD PASS" in text
        assert "*c10d_functional.all_reduce: 1" in text
    assert "*module type: class 'torch.nn.modules.linear.Linear'" not in tables[0]
    assert " *weight: (Shard(dim=1),)" in tables[1]
    assert sorted(map(len, tables)) == list(map(len, tables))
    mode.log_comm_debug_tracing_table_to_file(str(tmp_path / "log.txt"), noise_level=2)
    assert (tmp_path / "log.txt").read_text() == tables[2]
    mode.generate_json_dump(str(tmp_path / "log.json"), noise_level=1)
    (found,) = json.loads((tmp_path / "log.json").read_text())["children"]
    assert [child["fqn"] for child in found["children"]] == names
    assert found["collectives_forward"] == [["c10d_functional.all_reduce", 2]]
