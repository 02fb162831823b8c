"""Exchanges give each rank the positions it wants, and send exactly the bytes of the plan."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.test_exchange import halos
from tests.values import take

import shardwise as sw
from shardwise.comm import PerRank, counting, is_simulated, members_of, on_mesh
from shardwise.comm.run import run
from shardwise.layout import Axes, Factor, Layout, owned
from shardwise.plan import Move, plan_exchanges
from shardwise.plan.exchange import chunked, place_of


def wanted_block(whole, layout, moves, coord):
    """The block that a coord wants, taken from the full tensor."""
    indices = [list(i) for i in owned(layout, coord)]
    for dim, axes, _, wanted in moves:
        ranges = wanted[place_of(coord, axes, layout.axes)]
        indices[dim] = [i for low, high in ranges for i in range(low, high)]
    return take(whole, indices)


@given(halos(), st.sampled_from([torch.float32, torch.bool, torch.complex128, torch.bfloat16]))
def test_each_rank_gets_what_it_wants_and_the_bytes_are_those_of_the_plan(case, dtype):
    layout, moves = case
    whole = torch.randint(0, 50, layout.shape).to(dtype)
    plan = plan_exchanges(layout, moves, dtype.itemsize)
    with sw.simulate(layout.axes.count):
        mesh = sw.init_device_mesh("cpu", layout.axes.sizes, mesh_dim_names=layout.axes.names)
        block = PerRank({r: take(whole, owned(layout, c)) for r, c in members_of(mesh).items()})
        with counting() as ledger:
            got = run(plan, block, mesh)
        assert ledger.bytes == plan.bytes
        assert ledger.collectives == plan.collectives
        for r, c in members_of(mesh).items():
            assert torch.equal(got.of_rank(r), wanted_block(whole, layout, moves, c))
        meta = PerRank({r: torch.empty_like(b, device="meta") for r, b in block._blocks.items()})
        with counting() as ledger:
            shapes = run(plan, meta, mesh)
        assert ledger.bytes == plan.bytes
        for r in members_of(mesh):
            assert shapes.of_rank(r).shape == got.of_rank(r).shape


def test_wanting_a_position_that_no_rank_owns_is_an_error():
    layout = Layout(Axes((2,)), [(Factor(4, (0,)),)])
    move = Move(0, (0,), (((0, 2),), ((2, 4),)), (((0, 5),), ((2, 4),)))
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        block = PerRank({0: torch.zeros(2), 1: torch.zeros(2)})
        with pytest.raises(RuntimeError, match="no rank owns"):
            run(plan_exchanges(layout, [move], 4), block, mesh)


def halo_program(sizes, cutting, rows, halo):
    """Whether the block of this rank is right after a halo exchange along dim 0, and the bytes counted and planned."""
    mesh = sw.init_device_mesh("cpu", sizes)
    on = Axes(sizes)
    layout = Layout(on, [(Factor(rows, cutting),), (Factor(3),)])
    ranges = chunked(rows, layout.dims[0][0].axes, on)
    wanted = tuple(((max(a - halo, 0), min(b + halo, rows)),) for a, b in ranges)
    plan = plan_exchanges(layout, [Move(0, layout.dims[0][0].axes, tuple((r,) for r in ranges), wanted)], 4)
    whole = torch.arange(rows * 3.0).view(rows, 3)
    block = on_mesh(mesh, lambda c: take(whole, owned(layout, c)))
    with counting() as ledger:
        got = run(plan, block, mesh)
    right = on_mesh(
        mesh,
        lambda c, b: torch.tensor(
            torch.equal(b, wanted_block(whole, layout, [Move(0, layout.dims[0][0].axes, (), wanted)], c))
        ),
        got,
    )
    return right, ledger.bytes, plan.bytes


@pytest.mark.processes
@pytest.mark.parametrize(
    ("sizes", "cutting", "rows", "halo"),
    [((4,), (0,), 10, 1), ((4,), (0,), 5, 3), ((2, 2), (1, 0), 9, 2), ((2, 2), (1,), 7, 1)],
)
def test_real_processes_do_the_same(workers, sizes, cutting, rows, halo):
    assert not is_simulated()
    real = workers.run(halo_program, sizes, cutting, rows, halo)
    assert all(bool(right) for right, _, _ in real)
    assert sum(sent for _, sent, _ in real) == real[0][2]
