"""Slices, splits, rolls, pads and the like along a split dim: dense results, and only needed ranges move."""

import pytest
import torch
from torch.nn.functional import pad

import shardwise as sw
from shardwise.alternatives import rearrange, slicing, unfold
from shardwise.comm import counting
from shardwise.experimental import implicit_replication

OPS = {
    "slice": lambda x: x[:, 1:6],
    "slice by steps": lambda x: x[:, 1::3],
    "slice of the end": lambda x: x[:, -3:],
    "slice of nothing": lambda x: x[:, 2:2],
    "narrow": lambda x: x.narrow(1, 2, 2),
    "diff": lambda x: x.diff(dim=1),
    "select": lambda x: x[:, 3],
    "select from the end": lambda x: x[:, -1],
    "split": lambda x: [p * (i + 1) for i, p in enumerate(x.split(3, 1))],
    "split with sizes": lambda x: list(x.split([1, 0, x.shape[1] - 1], 1)),
    "one of two chunks": lambda x: x.chunk(2, 1)[0],
    "chunk": lambda x: list(x.chunk(2, 1)),
    "roll": lambda x: x.roll(3, 1),
    "roll of two dims": lambda x: x.roll((-2, 1, 9), (1, 0, 1)),
    "flip": lambda x: x.flip(1),
    "flip of two dims": lambda x: x.flip(0, 1),
    "pad": lambda x: pad(x, (0, 0, 7, 1)),
    "pad by a number": lambda x: pad(x, (0, 0, 1, 2), value=1.5),
    "pad of all dims": lambda x: pad(x, (1, 2, -2, 9, 1, -1)),
    "pad by negative numbers": lambda x: pad(x, (0, 0, 4, -6)),
    "cat": lambda x: torch.cat([x, x * 2, x[:, :2]], 1),
    "cat with empty tensors": lambda x: torch.cat([x[:, :0], x, x[0, 0, :0], x], 1),
    "stack": lambda x: torch.stack([x, x * 2], 1),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "unfold with gaps": lambda x: x.unfold(1, 2, 3),
    "unfold all": lambda x: x.unfold(-2, x.shape[1], 1),
}
MESHES = {
    "tp": ((4,), [sw.Shard(1)]),
    "two axes": ((2, 2), [sw.Shard(1), sw.Shard(1)]),
    "two axes in reverse order": ((2, 2), [sw.Shard(1, order=1), sw.Shard(1, order=0)]),
    "two dims": ((2, 2), [sw.Shard(0), sw.Shard(1)]),
    "pending": ((2, 2), [sw.Shard(1), sw.Partial()]),
}


def as_list(result):
    return result if isinstance(result, list) else [result]


def distribute_like(t, g, mesh):
    """A tensor in the layout of another one, so that the gradient has it too."""
    placements = [sw.Replicate() if p.is_partial() else p for p in g.placements]
    return sw.distribute_tensor(t, mesh, placements)


ALTERNATIVES = rearrange.ALTERNATIVES | slicing.ALTERNATIVES | unfold.ALTERNATIVES


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("where", MESHES)
@pytest.mark.parametrize("name", OPS)
def test_result_and_gradient_equal_the_dense_ones(name, where, taken):
    shape, placements = MESHES[where]
    for size in (6, 7, 9):  # over 4 ranks the last block is short, or empty
        torch.manual_seed(size)
        dense = torch.randn(3, size, 2, dtype=torch.float64, requires_grad=True)
        want = as_list(OPS[name](dense))
        weights = [torch.randn_like(w) for w in want]
        sum((w * v).sum() for w, v in zip(want, weights, strict=True)).backward()
        with sw.simulate(4):
            mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
            x = sw.distribute_tensor(dense.detach(), mesh, placements).requires_grad_()
            got = as_list(OPS[name](x))
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g.full_tensor().ranks[1], w)
            sum((g * distribute_like(v, g, mesh)).sum() for g, v in zip(got, weights, strict=True)).backward()
            torch.testing.assert_close(x.grad.full_tensor().ranks[2], dense.grad)
    assert (
        set(taken) & ALTERNATIVES.keys() or name == "stack" or (name, where) == ("pad by a number", "pending")
    )


# the rows that a [64, 10] tensor on 4 ranks sends, and the layout of the result
SENT = {
    "slice": (lambda x: x[2:], 2 * 3, "[62:tp, 10]"),
    "select": (lambda x: x[40], 3, "[10]"),
    "flip": (lambda x: x.flip(0), 64, "[64:tp, 10]"),
    "roll": (lambda x: x.roll(1, 0), 4, "[64:tp, 10]"),
    "pad": (lambda x: pad(x, (0, 0, 0, 4)), 1 + 2 + 3, "[68:tp, 10]"),
    "unfold": (lambda x: x.unfold(0, 3, 1), 2 * 3, "[62:tp, 10, 3]"),
}


@pytest.mark.parametrize("name", SENT)
def test_only_the_needed_rows_are_sent(name):
    run, rows, layout = SENT[name]
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = sw.ones(64, 10, device_mesh=mesh, placements=[sw.Shard(0)])
        with counting() as ledger:
            y = run(x)
    assert str(y.sharding) == layout
    assert ledger.collectives == 1
    assert ledger.bytes == 4 * 10 * rows  # an all-gather sends 192 rows


@pytest.mark.parametrize("size", [7, 9])
def test_writes_to_a_view_reach_its_base(size):
    def writes(x):
        x[1:4].mul_(2)
        x[3] = 5
        first, rest = x.split([2, x.shape[0] - 2])
        rest.add_(first[0])
        x[::2].zero_()
        x.split(4)[1].mul_(3)
        x.unbind()[1].add_(7)
        x[:, 1].sub_(1)
        middle = x[2:6]
        x.add_(1)
        return middle * 3  # which sees writes to its base

    dense = torch.arange(size * 2.0).view(size, 2)
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(dense, mesh, [sw.Shard(0)])
        assert str(x[1:4].sharding) == "[3:tp, 2]"  # not gathered
        seen = writes(x)
        want = writes(dense)
        assert torch.equal(x.full_tensor().ranks[3], dense)
        assert torch.equal(seen.full_tensor().ranks[3], want)


def test_writes_to_a_view_send_only_the_needed_rows():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(torch.zeros(64, 10), mesh, [sw.Shard(0)])
        row = sw.distribute_tensor(torch.ones(10), mesh, [sw.Replicate()])
        with counting() as ledger:
            x[40] = row
        assert ledger.bytes <= 4 * 3 * 10  # the old row, which all ranks select before it is written
        with counting() as ledger:
            x[2:] = row
        assert ledger.bytes <= 4 * 2 * 6 * 10  # two rows over each border, in both directions
        want = torch.ones(64, 10)
        want[:2] = 0
        assert torch.equal(x.full_tensor().ranks[2], want)


def test_the_policy_refuses_a_write_to_a_view_before_anything_is_written():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(torch.zeros(9), mesh, [sw.Shard(0)])
        view = x[1:]
        with sw.policy(implicit="error"), pytest.raises(sw.CommunicationError, match="writes to a view"):
            view.fill_(2)
        assert not x.full_tensor().ranks[0].any()
        assert not view.full_tensor().ranks[0].any()
        view.fill_(2)
        assert torch.equal(x.full_tensor().ranks[0], torch.tensor([0.0] + [2] * 8))


def test_scatters_into_a_split_dim():
    torch.manual_seed(0)
    dense, part, row = torch.randn(9, 4), torch.randn(3, 4), torch.randn(4)
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for placements in (
            [sw.Shard(0), sw.Shard(0)],
            [sw.Shard(1), sw.Shard(0)],
            [sw.Shard(0), sw.Partial()],
        ):
            x = sw.distribute_tensor(dense, mesh, placements)
            for other in ([sw.Replicate(), sw.Replicate()], [sw.Shard(0), sw.Partial()]):
                p, r = (sw.distribute_tensor(t, mesh, other) for t in (part, row))
                got = x.slice_scatter(p, 0, 1, 8, 3), x.select_scatter(r, 0, -2)
                assert got[0].sharding is x.sharding or p.sharding.partial
                for g, want in zip(
                    got,
                    (dense.slice_scatter(part, 0, 1, 8, 3), dense.select_scatter(row, 0, -2)),
                    strict=True,
                ):
                    torch.testing.assert_close(g.full_tensor().ranks[3], want)


def test_the_policy_refuses_an_exchange():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = sw.ones(8, device_mesh=mesh, placements=[sw.Shard(0)])
        with sw.policy(implicit="error"):
            assert x[:4:2].sharding.shape == (2,)  # nothing is sent
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = sw.ones(8, device_mesh=mesh, placements=[sw.Shard(0)])
        with (
            sw.policy(implicit="error"),
            pytest.raises(sw.CommunicationError, match="exchange over tp along dim 0"),
        ):
            x.flip(0)


def test_cat_of_different_layouts_and_dtypes():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        full = torch.arange(30.0).view(5, 6)
        x = sw.distribute_tensor(full, mesh, [sw.Shard(0), sw.Replicate()])
        for other in (
            sw.distribute_tensor(full, mesh, [sw.Replicate(), sw.Shard(0)]),
            sw.distribute_tensor(full.double(), mesh, [sw.Shard(0), sw.Replicate()]),
            sw.distribute_tensor(full, mesh, [sw.Shard(0), sw.Shard(1)]),
            sw.distribute_tensor(full, mesh, [sw.Shard(0), sw.Partial()]),
            sw.distribute_tensor(full, mesh, [sw.Shard(0), sw.Partial("max")]),
        ):
            got = torch.cat([x, other, x])
            assert got.dtype == other.dtype
            assert torch.equal(got.full_tensor().ranks[1], torch.cat([full] * 3).to(other.dtype))


def test_a_factored_dim_is_left_to_the_rule():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        full = torch.arange(12.0).view(3, 4)
        x = sw.distribute_tensor(full, mesh, [sw.Shard(1)]).flatten()
        assert str(x.sharding) == "[3 4:tp]"
        assert torch.equal(x[2:9].full_tensor().ranks[0], full.flatten()[2:9])


def test_cat_of_a_plain_tensor_and_partial_sums():
    x, plain = torch.randn(6, 4), torch.randn(3, 4)
    with sw.simulate(4), implicit_replication():
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for placements in ([sw.Shard(0), sw.Partial()], [sw.Shard(0), sw.Shard(1)]):
            got = torch.cat([sw.distribute_tensor(x, mesh, placements), plain])
            torch.testing.assert_close(got.full_tensor().ranks[2], torch.cat([x, plain]))


def program(ranks):
    """Results, layouts and writes on real ranks; a rank off the mesh knows the layouts too."""
    mesh = sw.DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("tp",))
    x = sw.distribute_tensor(torch.arange(18.0).view(9, 2), mesh, [sw.Shard(0)])
    results = [
        x[1:],
        x[::2],
        x[4],
        x.flip(0),
        x.roll(2, 0),
        torch.cat([x, x[:3]]),
        pad(x, (0, 0, 1, 1)),
        *x.split(4),
    ]
    x[3:7].mul_(2)
    x[0] = 5
    layouts = [str(t.sharding) for t in results]
    on = mesh.get_coordinate() is not None
    return layouts, [t.full_tensor() for t in (*results, x)] if on else []


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [3, 1]])
def test_the_dense_result_on_real_processes(workers, ranks):
    dense = torch.arange(18.0).view(9, 2)
    first = dense.clone()
    dense[3:7] *= 2
    dense[0] = 5
    want = [
        dense[1:], dense[::2], dense[4], first.flip(0), first.roll(2, 0), torch.cat([first, first[:3]]),
        pad(first, (0, 0, 1, 1)), *dense.split(4), dense,
    ]  # fmt: skip
    results = workers.run(program, ranks)
    assert all(layouts == results[0][0] for layouts, _ in results)
    for rank, (_, got) in enumerate(results):
        assert bool(got) == (rank in ranks)
        for g, w in zip(got, want if got else [], strict=True):
            assert torch.equal(g, w)
