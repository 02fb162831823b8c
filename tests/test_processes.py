"""Redistribution and gradients on real processes, compared with a simulation.

Each program runs on every rank of four gloo processes and once in a simulation of four. It takes the name of a mesh and
many random cases at once, since starting the processes takes long.
"""

import itertools
import os
import random
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from tests.tensor.test_redistribute import USES, bits_of, single_elements, wire_size
from tests.values import DTYPES, REDUCTIONS, dense_tensor, random_layout, same_bits, take, tensor, value, wide

import shardwise as sw
from shardwise import DTensor, Partial, PerRank, Replicate, Shard, plan_redistribute, simulate
from shardwise.comm import axes_of, coord_of, counting, is_simulated, members_of, siblings_of
from shardwise.comm.mesh import group_of, peers_of
from shardwise.layout import Axes, Layout, block_offset, owned
from shardwise.tensor.async_tensor import AsyncDTensor

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:ComplexHalf support")]

DEEP = os.environ.get("SHARDWISE_DEEP") == "1"


def _square(*ranks):
    return sw.DeviceMesh("cpu", torch.tensor(ranks or range(4)).view(2, 2), mesh_dim_names=("dp", "tp"))


MESHES = {
    "(4,)": lambda: sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)),
    "(2, 2)": _square,
    "(1, 4)": lambda: sw.init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp")),
    "permuted": lambda: _square(3, 1, 0, 2),
    "a permuted line": lambda: sw.DeviceMesh("cpu", [2, 0, 3, 1], mesh_dim_names=("tp",)),
    "2 of 4": lambda: sw.DeviceMesh("cpu", [3, 1], mesh_dim_names=("tp",)),
    "sub-mesh tp": lambda: _square()["tp"],
    "sub-mesh dp of permuted": lambda: _square(3, 1, 0, 2)["dp"],
    "flattened": lambda: _square()._flatten("dp_tp"),
}


def mesh_of(name):
    """The mesh of that name."""
    return MESHES[name]()


def describe(name):
    """The axes of a mesh, the coords of its ranks, and the ranks of each of its siblings."""
    with simulate(4):
        mesh = mesh_of(name)
        return axes_of(mesh), members_of(mesh), siblings_of(mesh)


def both(workers, program, *args):
    """The results of a program on each real rank, and on each simulated one."""
    real = workers.run(program, *args)
    with simulate(4):
        results = program(*args)
        return real, [_of_rank(results, rank) for rank in range(4)]


def _of_rank(result, rank):
    """A simulated result as one rank has it; None for a rank off the mesh."""
    match result:
        case PerRank():
            return result._blocks.get(rank)
        case list() | tuple():
            return [_of_rank(r, rank) for r in result]
    return result


def assert_equal(real, simulated):
    """Assert that blocks are bitwise equal; a rank off the mesh has an empty one, or one without dims."""
    if isinstance(simulated, list):
        assert len(real) == len(simulated)
        for r, p in zip(real, simulated, strict=True):
            assert_equal(r, p)
    elif simulated is None:
        assert real is None or real.numel() == 0 or real.dim() == 0
    elif isinstance(simulated, torch.Tensor):
        assert same_bits(real, simulated), (real, simulated)


@dataclass(frozen=True)
class Case:
    """A redistribution between two layouts, in a dtype."""

    source: Layout
    target: Layout
    dtype: torch.dtype
    seed: int

    def whole(self):
        return dense_tensor(self.source.shape, self.dtype, self.seed)

    def tensor(self, mesh):
        return tensor(self.whole(), self.source, mesh, self.seed)


def random_cases(on, count, seed, dtypes=tuple(REDUCTIONS)):
    """Random cases on a mesh of these axes, determined by the seed."""
    rng = random.Random(seed)
    out = []
    for number in range(count):
        shape = [
            rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 12, 13]) for _ in range(rng.choice([0, 1, 2, 2, 3]))
        ]
        dtype = rng.choice(dtypes)
        ops = sorted(REDUCTIONS[dtype])
        source, target = (random_layout(rng, on, shape, ops) for _ in range(2))
        out.append(Case(source, target, dtype, number))
    return out


# ---- redistribution


def redistribute_all(name, cases):
    """For each case: the new block, the full tensor, and what was sent."""
    mesh, out = mesh_of(name), []
    for case in cases:
        x = case.tensor(mesh)
        with counting() as ledger:
            y = x.redistribute(placements=case.target.placements)
        assert y.sharding is case.target
        out.append((y.to_local(), y.full_tensor(), ledger.bytes, ledger.collectives))
    return out


@pytest.mark.parametrize("name", MESHES)
def test_redistribution(workers, name):
    on, members, siblings = describe(name)
    cases = random_cases(on, 120 if DEEP else 48, seed=1)
    real, simulated = both(workers, redistribute_all, name, cases)
    for number, case in enumerate(cases):
        blocks, wholes, sent, calls = zip(*(rank[number] for rank in real), strict=True)
        plan = plan_redistribute(case.source, case.target, case.dtype.itemsize)
        for ranks in siblings:
            found = {members[r]: blocks[r] for r in ranks}
            assert torch.equal(value(found, case.target), wide(case.whole())), case
            assert all(block.is_contiguous() for block in found.values())
        for rank in range(4):
            if rank in members:
                assert torch.equal(wide(wholes[rank]), wide(case.whole())), case
                assert same_bits(wholes[rank], wholes[siblings[0][0]])
                assert calls[rank] == plan.collectives
            else:
                assert (wholes[rank].numel(), sent[rank], calls[rank]) == (0, 0, 0)
        assert sum(sent) == simulated[0][number][2]
        ops = {op for step in plan.steps for op in step.reduced.values()}
        if all(wire_size(case.dtype, op) == case.dtype.itemsize for op in ops):
            assert sum(sent) == len(siblings) * plan.bytes, case
    assert_equal([[r[:2] for r in rank] for rank in real], [[r[:2] for r in rank] for rank in simulated])


def redistribute_bits(name, cases):
    mesh, out = mesh_of(name), []
    for case in cases:
        x = tensor(bits_of(case.dtype, case.source.shape, case.seed), case.source, mesh)
        out.append(x.redistribute(placements=case.target.placements).to_local())
    return out


@pytest.mark.parametrize("name", ["(2, 2)", "permuted"])
def test_redistribution_keeps_every_bit_of_every_dtype(workers, name):
    on, members, _ = describe(name)
    rng = random.Random(2)
    pairs = [[random_layout(rng, on, (5, 7)) for _ in range(2)] for _ in range(8)]
    cases = [Case(a, b, dtype, i) for i, (a, b) in enumerate(pairs) for dtype in DTYPES]
    real = workers.run(redistribute_bits, name, cases)
    for number, case in enumerate(cases):
        whole = bits_of(case.dtype, (5, 7), case.seed)
        for rank, coord in members.items():
            assert same_bits(real[rank][number], take(whole, owned(case.target, coord))), case


def redistribute_single_elements():
    return [single_elements(mesh_of("(4,)"), dtype) for dtype in DTYPES]


def test_single_elements_of_any_stride_keep_every_bit(workers):
    for rank in workers.run(redistribute_single_elements):
        for whole, *moved in rank:
            assert all(same_bits(f, whole) for f in moved), whole.dtype


NAN, INF = float("nan"), float("inf")
ROWS = torch.tensor(
    [[NAN, 1, -INF, INF, 0], [2, NAN, -INF, -1, -INF], [INF, -INF, -INF, NAN, 7], [0, 1, -INF, 3, 4]]
)


def extremes(name):
    """Reductions of NaN and infinities on different ranks, with even and uneven blocks."""
    mesh, out = mesh_of(name), []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2):
        for op in ("max", "min", "sum"):
            for size in (4, 5):
                local = sw.per_rank(lambda rank, n=size, t=dtype: ROWS[rank, :n].to(t))
                for target in (Replicate(), Shard(0)):
                    x = DTensor.from_local(local, mesh, [Partial(op)])
                    out.append((op, size, x.redistribute(placements=[target]).full_tensor().float()))
    return out


def test_nan_and_infinities(workers):
    real, simulated = both(workers, extremes, "(4,)")
    for rank in range(4):
        assert len(real[rank]) == 60
        for (op, size, found), (*_, in_simulation), (*_, first) in zip(
            real[rank], simulated[rank], real[0], strict=True
        ):
            rows = ROWS[:, :size]
            expected = {"max": rows.amax(0), "min": rows.amin(0), "sum": rows.sum(0)}[op]
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(in_simulation, expected, rtol=0, atol=0, equal_nan=True)
            assert same_bits(found, first)


def sums(name, cases):
    """Redistributions of pending sums whose result depends on the order of addition."""
    mesh, out = mesh_of(name), []
    for source, target, dtype in cases:
        pending = [a for a, _ in source.partial]

        def part(rank, source=source, dtype=dtype, pending=pending):
            whole = torch.empty(source.shape)
            at = members_of(mesh).get(rank)
            if at is None:
                return torch.empty(0, dtype=dtype)
            # the same along replicated axes, different along pending ones
            number = sum((at[a] + 1) * 10**a for a in pending)
            whole.normal_(generator=torch.Generator().manual_seed(number)).mul_(1000)
            return take(whole.to(dtype), owned(source, at))

        x = DTensor.from_local(sw.per_rank(part), mesh, source.placements, shape=source.shape)
        out.append(x.redistribute(placements=target.placements).to_local())
    return out


@pytest.mark.parametrize("name", ["(4,)", "(2, 2)", "permuted", "a permuted line"])
def test_r48_replicas_are_bitwise_equal(workers, name):
    on, members, _ = describe(name)
    rng = random.Random(4)
    cases = []
    while len(cases) < 60:
        shape = rng.choice([(64,), (13, 7), (5, 3), (8, 8)])
        source, target = random_layout(rng, on, shape, ["sum", "avg"]), random_layout(rng, on, shape)
        if source.partial:
            cases.append((source, target, rng.choice([torch.float32, torch.bfloat16, torch.float16])))
    real = workers.run(sums, name, cases)
    for number, (_, target, _) in enumerate(cases):
        found = {members[r]: real[r][number] for r in members}
        value(found, target)  # asserts that replicas are equal


def sums_on_eight_ranks():
    """Sums over four ranks in two replicas, in which the ranks have different orders."""
    mesh = sw.DeviceMesh("cpu", [[0, 7], [1, 5], [2, 3], [6, 4]], mesh_dim_names=("dp", "tp"))
    out = []
    for size in (64, 63):
        rng = torch.Generator().manual_seed(coord_of(mesh)[0])
        part = torch.randn(size, generator=rng)
        x = DTensor.from_local(part, mesh, [Partial(), Replicate()])
        out += [x.redistribute(dp=Replicate()).to_local(), x.redistribute(dp=Shard(0)).full_tensor()]
    return out


def test_r48_replicas_with_ranks_in_another_order_are_bitwise_equal():
    first, *others = sw.launch(
        lambda: sums_on_eight_ranks(), 8, timeout=120
    )  # a lambda forks, which is faster
    for other in others:
        assert all(same_bits(a, b) for a, b in zip(first, other, strict=True))


def groups_are_ordered(name):
    mesh = mesh_of(name)
    subsets = [c for n in range(1, mesh.ndim + 1) for c in itertools.combinations(range(mesh.ndim), n)]
    me, sizes = coord_of(mesh), axes_of(mesh).sizes
    return me is None or all(group_of(mesh, axes).peers == peers_of(me, axes, sizes) for axes in subsets)


@pytest.mark.parametrize("name", MESHES)
def test_groups_are_in_the_order_of_coords(workers, name):
    assert workers.run(groups_are_ordered, name) == [True] * 4


# ---- asynchronous redistribution


def use_async_results(name, use, count):
    """Start several redistributions, then use their results from the last to the first."""
    mesh, cases = mesh_of(name), []
    for number in range(count):
        whole = torch.arange(15.0).view(5, 3)
        source = [[Shard(0)], [Shard(1)], [Partial()]][number % 3]
        x = tensor(whole, Layout.of((5, 3), axes_of(mesh), source), mesh, number)
        y = x.redistribute(placements=[Replicate()], async_op=True)
        if coord_of(mesh) is not None and not is_simulated():
            assert isinstance(y, AsyncDTensor)
        cases.append(y)
    out = []
    for y in reversed(cases):
        used = USES[use](y)
        # a copy: torch would send a block that is being written to another process as it is
        out.append((used.full_tensor() if isinstance(used, DTensor) else used).clone().float())
    return out


@pytest.mark.parametrize("use", USES)
def test_using_an_async_result_waits_for_it(workers, use):
    for rank in workers.run(use_async_results, "(4,)", use, 6):
        assert all(torch.equal(found, torch.arange(15.0).view(5, 3)) for found in rank)


def in_flight(name):
    """Two redistributions of one tensor at a time, finished in the other order, while its blocks are written to."""
    mesh, out = mesh_of(name), []
    for shape in ((8, 4), (5, 3)):
        whole = torch.arange(float(shape[0] * shape[1])).view(shape)
        for source in ([Shard(0)], [Shard(1)], [Partial()]):
            for target in ([Shard(0)], [Shard(1)]):
                x = tensor(whole, Layout.of(shape, axes_of(mesh), source), mesh)
                y = x.redistribute(placements=[Replicate()], async_op=True)
                z = x.redistribute(placements=target, async_op=True)
                if source != target:
                    x.to_local().fill_(-1.0)
                out.append(torch.equal(z.full_tensor(), whole) and torch.equal(y.to_local(), whole))
    return out


def test_collectives_overlap_each_other_and_other_work(workers):
    assert workers.run(in_flight, "(4,)") == [[True] * 12] * 4


def written_while_it_is_sent(name, placements, at_once):
    """The redistributions that a write to the source changes; one rank comes late, so that nothing can have been sent before."""
    mesh, wrong = mesh_of(name), []
    whole = torch.arange(512.0 * 2048).remainder_(1021).view(512, 2048)  # more than a socket takes
    for source, target in itertools.permutations(placements, 2):
        x = tensor(whole, Layout.of(whole.shape, axes_of(mesh), source), mesh)
        dist.barrier()
        if dist.get_rank() == 0:
            time.sleep(0.1)
        if at_once:
            (y,) = sw.redistribute_many([x], [target], async_op=True)
        else:
            y = x.redistribute(placements=target, async_op=True)
        if dist.get_rank():
            x.to_local().fill_(-1.0)
        if not torch.equal(y.full_tensor(), whole):
            wrong.append((source, target))
    return wrong


ON_A_LINE = ([Shard(0)], [Shard(1)], [Replicate()])
ON_A_SQUARE = ([Shard(0), Replicate()], [Replicate(), Shard(1)], [Shard(1), Shard(1)])


@pytest.mark.parametrize("at_once", [False, True], ids=["redistribute", "redistribute_many"])
@pytest.mark.parametrize(("name", "placements"), [("(4,)", ON_A_LINE), ("(2, 2)", ON_A_SQUARE)])
def test_a_block_may_be_written_to_while_it_is_sent(workers, name, placements, at_once):
    assert workers.run(written_while_it_is_sent, name, placements, at_once) == [[]] * 4


# ---- gradients


def gradients(name, cases):
    """For each case: the first and second gradients of a leaf, and the gradient of a block."""
    mesh, out = mesh_of(name), []
    here = is_simulated() or coord_of(mesh) is not None
    for case in cases:
        w = dense_tensor(case.source.shape, torch.float64, case.seed + 1) + 0.5 if here else 1.0
        x = case.tensor(mesh).requires_grad_()
        y = x.redistribute(placements=case.target.placements, async_op=bool(case.seed % 2))
        (grad,) = torch.autograd.grad((y.full_tensor() ** 3 * w).sum(), x, create_graph=True)
        (grad.full_tensor() ** 2).sum().backward()
        assert grad.sharding is x.grad.sharding is case.source.with_partial({})
        local = case.tensor(mesh).to_local()
        leaf = sw.per_rank(lambda rank, b: b.detach().clone().requires_grad_(), local)
        z = DTensor.from_local(leaf, mesh, case.source.placements, shape=case.source.shape)
        (z.redistribute(placements=case.target.placements).full_tensor() * w).sum().backward()
        out.append([grad.detach().to_local(), x.grad.to_local(), leaf.grad])
    return out


@pytest.mark.parametrize("name", ["(4,)", "(2, 2)", "permuted", "2 of 4", "sub-mesh tp"])
def test_gradients(workers, name):
    on, members, siblings = describe(name)
    cases = []
    for case in random_cases(on, 60 if DEEP else 36, seed=5, dtypes=(torch.float64,)):
        ops = {op for _, op in case.source.partial}
        if ops <= {"sum", "avg"}:
            cases.append(case)
    real, simulated = both(workers, gradients, name, cases)
    assert len(cases) > (30 if DEEP else 18)
    for number, case in enumerate(cases):
        whole = case.whole().requires_grad_()
        w = dense_tensor(whole.shape, torch.float64, case.seed + 1) + 0.5
        (grad,) = torch.autograd.grad((whole**3 * w).sum(), whole, create_graph=True)
        (grad**2).sum().backward()
        layout = case.source.with_partial({})
        mean = 1
        for a, op in case.source.partial:
            mean *= on.sizes[a] if op == "avg" else 1
        for ranks in siblings:
            first, second, block = ({members[r]: real[r][number][i] for r in ranks} for i in range(3))
            torch.testing.assert_close(value(first, layout), grad.detach())
            torch.testing.assert_close(value(second, layout), whole.grad)
            for coord, found in block.items():
                torch.testing.assert_close(found, take(w, owned(layout, coord)) / mean)
    assert_equal(real, simulated)


def gradients_of_max_and_min(name):
    mesh = mesh_of(name)
    rows = torch.tensor([[3.0, 1.0, 2.0], [3.0, 4.0, 2.0], [0.0, 4.0, 2.0], [-1.0, 5.0, 2.0]])
    out = []
    for sign, op in ((1, "max"), (-1, "min")):
        leaf = sw.per_rank(lambda rank, s=sign: (s * rows[rank]).clone().requires_grad_())
        x = DTensor.from_local(leaf, mesh, [Partial(op)])
        (x.full_tensor() * torch.tensor([2.0, 3.0, 4.0])).sum().backward()
        out.append(leaf.grad)
    return out


def test_the_gradient_of_a_pending_max_or_min_goes_to_the_ranks_that_hold_it(workers):
    expected = [[1.0, 0.0, 1.0], [1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 3.0, 1.0]]
    real, simulated = both(workers, gradients_of_max_and_min, "(4,)")
    assert [[g.tolist() for g in rank] for rank in real] == [[row, row] for row in expected]
    assert_equal(real, simulated)


def different_uses(name):
    """Gradients of a replicated block that each rank uses differently, and of a pending one through to_local and from_local."""
    mesh = mesh_of(name)
    x = sw.distribute_tensor(torch.arange(6.0), mesh, [Replicate()]).requires_grad_()
    local = x.to_local(grad_placements=[Partial()])
    sw.per_rank(lambda rank, b: (b * (rank + 1)).sum(), local).backward()
    y = tensor(torch.arange(6.0), Layout.of((6,), axes_of(mesh), [Partial()]), mesh).requires_grad_()
    z = DTensor.from_local(y.to_local(), mesh, [Partial()])
    (z.full_tensor() * torch.arange(6.0)).sum().backward()
    return [x.grad.full_tensor(), y.grad.full_tensor()]


def test_r37_r38_gradients_through_to_local_and_from_local(workers):
    real, simulated = both(workers, different_uses, "(4,)")
    assert_equal(real, simulated)
    for replicated, pending in real:
        assert torch.equal(replicated, torch.full((6,), 10.0))
        assert torch.equal(pending, torch.arange(6.0))


# ---- creating tensors


def distribute_all(name, cases):
    """Distribute a tensor that only the source rank has, and one that each rank slices itself."""
    mesh, out = mesh_of(name), []
    source = min(mesh.shape) - 1
    for case in cases:
        whole = case.whole()
        roots = {row[axes_of(mesh).number([source] * mesh.ndim)] for row in siblings_of(mesh)}
        mine = sw.per_rank(lambda rank, w=whole, r=roots: w if rank in r else torch.zeros_like(w))
        x = sw.distribute_tensor(mine, mesh, case.target.placements, src_data_rank=source)
        with counting() as ledger:
            y = sw.distribute_tensor(whole, mesh, case.target.placements, src_data_rank=None)
        assert ledger.collectives == 0
        out.append([x.to_local(), y.to_local(), x.full_tensor()])
    return out


@pytest.mark.parametrize("name", MESHES)
def test_distribute_tensor(workers, name):
    on, members, siblings = describe(name)
    cases = random_cases(on, 40, seed=6)
    real, simulated = both(workers, distribute_all, name, cases)
    for number, case in enumerate(cases):
        for ranks in siblings:
            for way in (0, 1):
                found = {members[r]: real[r][number][way] for r in ranks}
                assert torch.equal(value(found, case.target), wide(case.whole())), case
    assert_equal(real, simulated)


def offsets(name):
    mesh = mesh_of(name)
    placements = [Shard(0)] * mesh.ndim
    x = sw.distribute_tensor(torch.arange(2.0), mesh, placements)
    return sw.compute_local_shape_and_global_offset((2,), mesh, placements), x.full_tensor().tolist()


def test_r26_offsets_of_empty_blocks(workers):
    on, members, _ = describe("(2, 2)")
    layout = Layout.of((2,), on, [Shard(0), Shard(0)])
    found = workers.run(offsets, "(2, 2)")
    assert [block for block, _ in found] == [((1,), (0,)), ((0,), (2,)), ((1,), (1,)), ((0,), (2,))]
    assert [block[1] for block, _ in found] == [block_offset(layout, c) for c in members.values()]
    assert all(whole == [0.0, 1.0] for _, whole in found)


# ---- ranks that are not on the mesh


def off_the_mesh(name):
    """A program on a mesh of two ranks, run by all ranks."""
    mesh = mesh_of(name)
    x = sw.distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)]).requires_grad_()
    y = x.redistribute(placements=[Replicate()])
    z = y.redistribute(placements=[Shard(1)], async_op=True)
    z.to_local().sum().backward()
    return (
        coord_of(mesh),
        tuple(x.shape),
        [t.to_local().tolist() for t in (x, y, z)],
        x.grad.to_local().tolist(),
    )


def test_ranks_off_the_mesh_have_empty_blocks_and_do_not_hang(workers):
    found = workers.run(off_the_mesh, "2 of 4")
    assert [coord for coord, *_ in found] == [None, (1,), None, (0,)]
    assert all(shape == (3, 2) for _, shape, *_ in found)
    assert found[3][2:] == ([[[0, 1], [2, 3]], [[0, 1], [2, 3], [4, 5]], [[0], [2], [4]]], [[1, 1], [1, 1]])
    assert found[1][2:] == ([[[4, 5]], [[0, 1], [2, 3], [4, 5]], [[1], [3], [5]]], [[1, 1]])
    assert found[0][2:] == found[2][2:] == ([[], [], []], [])


# ---- meshes and compiled code


def test_axes_of_the_meshes():
    found = {name: describe(name)[0] for name in MESHES}
    assert found["flattened"] == Axes((4,), ("dp_tp",))
    assert found["sub-mesh tp"] == Axes((2,), ("tp",))
    assert found["permuted"] == Axes((2, 2), ("dp", "tp"))
    assert describe("permuted")[1] == {0: (1, 0), 1: (0, 1), 2: (1, 1), 3: (0, 0)}
    assert describe("sub-mesh dp of permuted")[2] == [[3, 0], [1, 2]]


def in_compiled_code() -> tuple[bool, bool]:
    """Pass an asynchronous result to a compiled function, and create one inside another."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    dense = torch.arange(30.0).view(5, 6)
    x = sw.distribute_tensor(dense, mesh, [sw.Shard(0)])
    pending = x.redistribute(tp=sw.Replicate(), async_op=True)
    doubled = torch.compile(lambda t: t + t, backend="aot_eager", fullgraph=True)(pending)
    moved = torch.compile(
        lambda t: t.redistribute(placements=[sw.Shard(1)], async_op=True) * 3,
        backend="aot_eager",
        fullgraph=True,
    )(x)
    return torch.equal(doubled.full_tensor(), dense * 2), torch.equal(moved.full_tensor(), dense * 3)


def test_async_results_in_compiled_code(workers):
    assert workers.run(in_compiled_code) == [(True, True)] * 4


def unexpected_gradient_of_compiled_code() -> str:
    mesh = sw.init_device_mesh("cpu", (4,))
    plain = torch.ones(4, requires_grad=True)
    doubled = torch.compile(lambda t: t + t, backend="aot_eager", fullgraph=True)(plain)
    try:
        doubled.backward(sw.ones(4, device_mesh=mesh))
    except RuntimeError as error:
        return str(error)
    return "none"


@pytest.mark.processes
def test_an_unexpected_gradient_of_compiled_code_raises_torchs_error(workers):
    messages = workers.run(unexpected_gradient_of_compiled_code)
    assert all("guessed its\nmetadata incorrectly" in message for message in messages), messages
