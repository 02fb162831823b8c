"""Meshes: axes, coords of ranks, groups; in a simulation and on real processes."""

from __future__ import annotations

import gc
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import axes

import shardwise as sw
from shardwise import (
    DTensor,
    LayoutError,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    per_rank,
    simulate,
)
from shardwise.comm import axes_of, coord_of, current_mesh, members_of, siblings_of
from shardwise.comm.mesh import PerMesh, peers_of
from shardwise.layout import Axes

R = Replicate()


def grid(*shape):
    return torch.arange(float(math.prod(shape))).view(shape)


# ---- coords


@given(axes(), st.randoms(use_true_random=False), st.integers(0, 3))
def test_each_rank_has_its_coord(on, rng, more):
    ranks = rng.sample(range(on.count + more), on.count)
    with simulate(on.count + more):
        mesh = sw.DeviceMesh("cpu", torch.tensor(ranks).view(on.sizes), mesh_dim_names=on.names)
        assert axes_of(mesh) == on
        assert siblings_of(mesh) == [ranks]
        members = members_of(mesh)
        assert list(members) == sorted(ranks)
        assert all(mesh.mesh[coord].item() == rank for rank, coord in members.items())
        assert coord_of(mesh) == members.get(0)


def test_axes_without_names_are_numbered():
    with simulate(4):
        mesh = init_device_mesh("cpu", (2, 2))
        assert axes_of(mesh) == Axes((2, 2), ("0", "1"))
        with pytest.raises(LayoutError, match=r"(?s)no axis 'tp'.*0=2, 1=2"):
            distribute_tensor(grid(4), mesh).redistribute(tp=Shard(0))


@given(axes(), st.data())
def test_peers_differ_only_on_the_given_axes(on, data):
    coord = tuple(data.draw(st.integers(0, n - 1)) for n in on.sizes)
    chosen = tuple(sorted(data.draw(st.sets(st.integers(0, len(on) - 1)))))
    peers = peers_of(coord, chosen, on.sizes)
    assert coord in peers
    assert len(set(peers)) == len(peers) == math.prod(on.sizes_of(chosen))
    assert list(peers) == sorted(peers)
    assert all(p[a] == coord[a] for p in peers for a in range(len(on)) if a not in chosen)


def test_a_sub_mesh_has_siblings():
    with simulate(6):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        assert siblings_of(mesh["tp"]) == [[0, 1, 2], [3, 4, 5]]
        assert siblings_of(mesh["dp"]) == [[0, 3], [1, 4], [2, 5]]
        assert members_of(mesh["dp"]) == {0: (0,), 1: (0,), 2: (0,), 3: (1,), 4: (1,), 5: (1,)}
        assert axes_of(mesh["tp"]) == Axes((3,), ("tp",))
        assert siblings_of(mesh) == [[0, 1, 2, 3, 4, 5]]


def test_siblings_of_a_permuted_mesh():
    with simulate(4):
        mesh = sw.DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("x", "y"))
        assert sorted(siblings_of(mesh["x"])) == [[1, 2], [3, 0]]
        assert sorted(siblings_of(mesh["y"])) == [[0, 2], [3, 1]]
        x = DTensor.from_local(per_rank(lambda rank: torch.tensor([10.0**rank])), mesh["x"], [Partial()])
        assert [t.item() for t in x.full_tensor().ranks] == [1001, 110, 110, 1001]


# ---- the current mesh


def test_the_current_mesh_is_the_one_given_or_the_innermost():
    with simulate(4):
        a, b = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        with a:
            assert current_mesh(None, "f") is a
            assert current_mesh(b, "f") is b
            with b:
                assert current_mesh(None, "f") is b
            assert current_mesh(None, "f") is a
        with pytest.raises(LayoutError, match=r"(?s)^f has no mesh.*\n  why: .*\n  fix: "):
            current_mesh(None, "f")
        with pytest.raises(TypeError, match=r"(?s)^f got int.*\n  why: .*\n  fix: "):
            current_mesh(4, "f")


# ---- caches


def test_a_cached_value_is_computed_once_and_lives_as_long_as_the_mesh():
    store, calls = PerMesh(), []
    with simulate(2):
        a, b = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2,))
        assert a == b
        for mesh in (a, a, b, b):
            store.get(mesh, "key", lambda: calls.append(1))
        assert len(calls) == 2  # equal meshes do not share
        del a, b, mesh
    gc.collect()
    assert not store._kept


def test_a_cache_can_be_bounded():
    store = PerMesh(most=3)
    with simulate(1):
        mesh = init_device_mesh("cpu", (1,))
        for key in range(10):
            store.get(mesh, key, lambda key=key: key)
        assert list(store._kept[id(mesh)]) == [7, 8, 9]


def test_meshes_of_earlier_simulations_do_not_interfere():
    for n in (2, 4, 2, 4):
        with simulate(n):
            mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
            x = distribute_tensor(grid(5), mesh, [Shard(0)]).redistribute(tp=R)
            assert len(x.to_local().ranks) == n


# ---- real processes

MESHES = {
    "a line": ([0, 1, 2, 3], ("a",)),
    "a square": ([[0, 1], [2, 3]], ("a", "b")),
    "a permuted square": ([[3, 1], [0, 2]], ("a", "b")),
    "three of four": ([1, 3, 2], ("a",)),
    "two of four, on two axes": ([[3], [1]], ("a", "b")),
    "one": ([2], ("a",)),
    "a column": ([[0], [1], [2], [3]], ("a", "b")),
}


def every_redistribution(ranks, names):
    """On one rank: whether it is on the mesh, and the redistributions whose full tensor is wrong."""
    mesh = sw.DeviceMesh("cpu", ranks, mesh_dim_names=names)
    some = (Shard(0), Shard(1), R)
    on = mesh.get_coordinate() is not None
    wrong = []
    for a in itertools.product(some, repeat=mesh.ndim):
        x = distribute_tensor(grid(5, 3) + 100 * dist.get_rank(), mesh, a)
        for b in itertools.product((*some, Partial()), repeat=mesh.ndim):
            y = x.redistribute(placements=b)
            whole = y.full_tensor()
            expected = grid(5, 3) + 100 * int(mesh.mesh.flatten()[0])
            if (y.shape != (5, 3)) or not (torch.equal(whole, expected) if on else whole.numel() == 0):
                wrong.append((a, b, whole))
    return on, [str(w) for w in wrong]


@pytest.mark.parametrize("name", MESHES)
def test_redistributions_on_real_meshes(workers, name):
    ranks, names = MESHES[name]
    found = workers.run(every_redistribution, ranks, names)
    assert [wrong for _, wrong in found] == [[]] * 4
    assert [on for on, _ in found] == [r in torch.tensor(ranks).flatten().tolist() for r in range(4)]


def on_two_meshes():
    """On one of five ranks: a tensor on four of them, two of which are on another mesh, too."""
    sw.DeviceMesh("cpu", [0, 1])
    mesh = sw.DeviceMesh("cpu", [[0, 1], [2, 3]])
    return distribute_tensor(grid(8), mesh, [Shard(0), Shard(0)]).full_tensor().tolist()


def test_ranks_with_different_numbers_of_groups_find_each_other():
    # torch derives the names of groups that only their members create from the number of groups of a process
    found = sw.launch(lambda: on_two_meshes(), 5, timeout=60)
    assert found == [list(range(8))] * 4 + [[]]


def off_the_mesh():
    """On each rank, some of which are not on the mesh: create and redistribute tensors."""
    mesh = sw.DeviceMesh("cpu", [0, 2])
    x = distribute_tensor(grid(4).requires_grad_(), mesh, [Shard(0)])
    y = x.redistribute(placements=[R]).redistribute(placements=[Shard(0)])
    z = DTensor.from_local(grid(2) + dist.get_rank(), mesh, [Partial()], run_check=True)
    seen = [x, y, z, sw.zeros(5, device_mesh=mesh, placements=[Shard(0)]), z.redistribute(placements=[R])]
    dist.barrier()
    return [(tuple(t.shape), tuple(t.to_local().shape), repr(t)) for t in seen], x.requires_grad


def test_a_rank_off_the_mesh_has_empty_blocks_and_does_not_hang(workers):
    for rank, (seen, requires_grad) in enumerate(workers.run(off_the_mesh)):
        assert [shape for shape, _, _ in seen] == [(4,), (4,), (2,), (5,), (2,)]
        blocks = [(2,), (2,), (2,), (3 - rank // 2,), (2,)]
        assert [block for _, block, _ in seen] == (blocks if rank in (0, 2) else [(0,)] * 5)
        assert requires_grad


def checked(kind):
    """On one rank: the error of `run_check`, or the shape and the full tensor."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    try:
        match kind:
            case "differs on one rank":
                x = DTensor.from_local(grid(2, 3) + (rank == 3), mesh, [R, Shard(0)], run_check=True)
            case "not chunks":
                x = DTensor.from_local(torch.ones(1 + rank // 2, 3), mesh, [Shard(0), R], run_check=True)
            case "another dtype":
                x = DTensor.from_local(
                    torch.ones(2).to([torch.int64, torch.float32][rank % 2]), mesh, [R, R], run_check=True
                )
            case "uneven":
                x = DTensor.from_local(
                    torch.full((3 - rank // 2, 3), float(rank // 2)), mesh, [Shard(0), R], run_check=True
                )
            case "valid":
                x = DTensor.from_local(grid(2, 3) + rank % 2, mesh, [R, Shard(1)], run_check=True)
    except LayoutError as error:
        return str(error)
    return tuple(x.shape), x.full_tensor()


@pytest.mark.parametrize("kind", ["differs on one rank", "not chunks", "another dtype"])
def test_a_failing_check_raises_the_same_error_on_all_ranks(workers, kind):
    first, *others = workers.run(checked, kind)
    assert isinstance(first, str)
    assert "\n  why: " in first
    assert "\n  fix: " in first
    assert others == [first] * 3


def test_a_passing_check_finds_the_global_shape(workers):
    for shape, whole in workers.run(checked, "uneven"):
        assert shape == (5, 3)
        assert whole[:, 0].tolist() == [0, 0, 0, 1, 1]
    for shape, whole in workers.run(checked, "valid"):
        assert shape == (2, 6)
        assert torch.equal(whole, torch.cat([grid(2, 3), grid(2, 3) + 1], 1))


def answers():
    """On one rank: values of tensors whose blocks alone have other values."""
    mesh = init_device_mesh("cpu", (4,))
    rank = dist.get_rank()
    x, y = (distribute_tensor(grid(5, 3), mesh, [Shard(0)]) for _ in range(2))
    other = grid(5, 3)
    other[4, 2] += 1
    z = distribute_tensor(other, mesh, [Shard(0)])
    pending = DTensor.from_local(torch.tensor(float(rank)), mesh, [Partial()])
    largest = DTensor.from_local(torch.tensor(float(rank)), mesh, [Partial("max")])
    return [
        torch.equal(x, y),
        torch.equal(x, z),
        torch.allclose(x, y),
        torch.allclose(x, z),
        x.sum().item(),
        float(x.mean()),
        bool((x == y).all()),
        bool((x == z).all()),
        int(x.argmax()),
        pending.item(),
        largest.item(),
        (pending + 10).item(),
        (pending * 2).item(),
        bool(pending > 5),
    ]


def test_all_real_ranks_return_the_value_of_the_full_tensor(workers):
    expected = [True, False, True, False, 105.0, 7.0, True, False, 14, 6.0, 3.0, 16.0, 12.0, True]
    assert workers.run(answers) == [expected] * 4
