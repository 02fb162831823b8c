"""The laws of redistribution and of gradients on real processes, and that a simulation does just the same.

Each program runs on every rank of four gloo processes and once in a simulation of four; it takes a mesh by name
and hundreds of cases at once, drawn by a seed, so that the start of the processes is paid once.
"""

import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from tests.tensor.test_redistribute import USES, bits_of, single_elements, wire_size
from tests.values import DTYPES, REDUCTIONS, dense_tensor, random_layout, same_bits, take, tensor, value, wide

import shardwise as sw
from shardwise import DTensor, Partial, PerRank, Replicate, Shard, plan_redistribute, simulate
from shardwise.comm import axes_of, coord_of, counting, is_simulated, members_of, siblings_of
from shardwise.comm.mesh import group_of, peers_of
from shardwise.layout import Axes, Layout, block_offset, owned
from shardwise.tensor.async_tensor import AsyncDTensor

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:ComplexHalf support")]


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
_kept = {}


def mesh_of(name):
    """The mesh of that name; on real processes made once, for each makes process groups."""
    if is_simulated():
        return MESHES[name]()
    if name not in _kept:
        _kept[name] = MESHES[name]()
    return _kept[name]


def facts(name):
    """The axes of a mesh, its ranks' coords, and the ranks of each of its siblings."""
    with simulate(4):
        mesh = mesh_of(name)
        return axes_of(mesh), members_of(mesh), siblings_of(mesh)


def both(workers, program, *args):
    """What a program gives on each real rank, and on each simulated one."""
    real = workers.run(program, *args)
    with simulate(4):
        played = program(*args)
        return real, [_of_rank(played, rank) for rank in range(4)]


def _of_rank(result, rank):
    """A simulated result as one rank would have it; what a rank off the mesh holds is nothing."""
    match result:
        case PerRank():
            return result._blocks.get(rank)
        case list() | tuple():
            return [_of_rank(r, rank) for r in result]
    return result


def assert_alike(real, played):
    """Blocks are the same to the bit; a rank off the mesh holds an empty one."""
    if isinstance(played, list):
        assert len(real) == len(played)
        for r, p in zip(real, played, strict=True):
            assert_alike(r, p)
    elif played is None:
        assert real is None or real.numel() == 0
    elif isinstance(played, torch.Tensor):
        assert same_bits(real, played), (real, played)


@dataclass(frozen=True)
class Case:
    """Two layouts and a dtype to go between them with."""

    source: Layout
    target: Layout
    dtype: torch.dtype
    seed: int

    def whole(self):
        return dense_tensor(self.source.shape, self.dtype, self.seed)

    def tensor(self, mesh):
        return tensor(self.whole(), self.source, mesh, self.seed)


def drawn(on, count, seed, dtypes=tuple(REDUCTIONS)):
    """Cases on a mesh of these axes, the same for the same seed."""
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


def redistributed(name, cases):
    """For each case: the new block, the whole, and what was sent."""
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
    on, members, siblings = facts(name)
    cases = drawn(on, 120, seed=1)
    real, played = both(workers, redistributed, name, cases)
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
        assert sum(sent) == played[0][number][2]
        ops = {op for step in plan.steps for op in step.reduced.values()}
        if all(wire_size(case.dtype, op) == case.dtype.itemsize for op in ops):
            assert sum(sent) == len(siblings) * plan.bytes, case
    assert_alike([[r[:2] for r in rank] for rank in real], [[r[:2] for r in rank] for rank in played])


def moved_bits(name, cases):
    mesh, out = mesh_of(name), []
    for case in cases:
        x = tensor(bits_of(case.dtype, case.source.shape, case.seed), case.source, mesh)
        out.append(x.redistribute(placements=case.target.placements).to_local())
    return out


@pytest.mark.parametrize("name", ["(2, 2)", "permuted"])
def test_every_dtype_moves_bit_by_bit(workers, name):
    on, members, _ = facts(name)
    rng = random.Random(2)
    pairs = [[random_layout(rng, on, (5, 7)) for _ in range(2)] for _ in range(8)]
    cases = [Case(a, b, dtype, i) for i, (a, b) in enumerate(pairs) for dtype in DTYPES]
    real = workers.run(moved_bits, name, cases)
    for number, case in enumerate(cases):
        whole = bits_of(case.dtype, (5, 7), case.seed)
        for rank, coord in members.items():
            assert same_bits(real[rank][number], take(whole, owned(case.target, coord))), case


def moved_singles():
    return [single_elements(mesh_of("(4,)"), dtype) for dtype in DTYPES]


def test_single_elements_keep_every_bit_whatever_their_stride(workers):
    for rank in workers.run(moved_singles):
        for whole, *moved in rank:
            assert all(same_bits(f, whole) for f in moved), whole.dtype


NAN, INF = float("nan"), float("inf")
ROWS = torch.tensor(
    [[NAN, 1, -INF, INF, 0], [2, NAN, -INF, -1, -INF], [INF, -INF, -INF, NAN, 7], [0, 1, -INF, 3, 4]]
)


def extremes(name):
    """NaN and infinities on one rank or another, through even and uneven blocks."""
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
    real, played = both(workers, extremes, "(4,)")
    for rank in range(4):
        assert len(real[rank]) == 60
        for (op, size, found), (*_, simulated), (*_, first) in zip(
            real[rank], played[rank], real[0], strict=True
        ):
            rows = ROWS[:, :size]
            expected = {"max": rows.amax(0), "min": rows.amin(0), "sum": rows.sum(0)}[op]
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(simulated, expected, rtol=0, atol=0, equal_nan=True)
            assert same_bits(found, first)


def sums(name, cases):
    """What becomes of pending sums of numbers whose order of adding shows."""
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
def test_r48_copies_are_the_same_in_every_bit(workers, name):
    on, members, _ = facts(name)
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
        value(found, target)  # which asserts that copies are the same


def eight_copies():
    """Sums over four ranks in two columns, which hold the same but whose ranks come in other orders."""
    mesh = sw.DeviceMesh("cpu", [[0, 7], [1, 5], [2, 3], [6, 4]], mesh_dim_names=("dp", "tp"))
    out = []
    for size in (64, 63):
        rng = torch.Generator().manual_seed(coord_of(mesh)[0])
        part = torch.randn(size, generator=rng)
        x = DTensor.from_local(part, mesh, [Partial(), Replicate()])
        out += [x.redistribute(dp=Replicate()).to_local(), x.redistribute(dp=Shard(0)).full_tensor()]
    return out


def test_r48_also_where_the_ranks_of_copies_come_in_another_order():
    first, *others = sw.launch(lambda: eight_copies(), 8, timeout=120)  # a lambda forks, which is quick
    for other in others:
        assert all(same_bits(a, b) for a, b in zip(first, other, strict=True))


def orders(name):
    mesh = mesh_of(name)
    subsets = [c for n in range(1, mesh.ndim + 1) for c in itertools.combinations(range(mesh.ndim), n)]
    me, sizes = coord_of(mesh), axes_of(mesh).sizes
    return me is None or all(group_of(mesh, axes).peers == peers_of(me, axes, sizes) for axes in subsets)


@pytest.mark.parametrize("name", MESHES)
def test_groups_are_in_the_order_of_coords(workers, name):
    assert workers.run(orders, name) == [True] * 4


# ---- waiting


def waited_for(name, use, count):
    """Several at once on their way, used one after the other from the last to the first."""
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
        out.append((used.full_tensor() if isinstance(used, DTensor) else used).float())
    return out


@pytest.mark.parametrize("use", USES)
def test_async_results_are_there_when_they_are_used(workers, use):
    for rank in workers.run(waited_for, "(4,)", use, 6):
        assert all(torch.equal(found, torch.arange(15.0).view(5, 3)) for found in rank)


def in_flight(name):
    """Two of one tensor on their way at once, ended in the other order, while its blocks are written to."""
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


# ---- gradients


def gradients(name, cases):
    """For each case: the gradients of a leaf and of a block, first and second ones."""
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
    on, members, siblings = facts(name)
    cases = []
    for case in drawn(on, 60, seed=5, dtypes=(torch.float64,)):
        ops = {op for _, op in case.source.partial}
        if ops <= {"sum", "avg"}:
            cases.append(case)
    real, played = both(workers, gradients, name, cases)
    assert len(cases) > 30
    for number, case in enumerate(cases):
        whole = case.whole().requires_grad_()
        w = dense_tensor(whole.shape, torch.float64, case.seed + 1) + 0.5
        (grad,) = torch.autograd.grad((whole**3 * w).sum(), whole, create_graph=True)
        (grad**2).sum().backward()
        lie = case.source.with_partial({})
        mean = 1
        for a, op in case.source.partial:
            mean *= on.sizes[a] if op == "avg" else 1
        for ranks in siblings:
            first, second, block = ({members[r]: real[r][number][i] for r in ranks} for i in range(3))
            torch.testing.assert_close(value(first, lie), grad.detach())
            torch.testing.assert_close(value(second, lie), whole.grad)
            for coord, found in block.items():
                torch.testing.assert_close(found, take(w, owned(lie, coord)) / mean)
    assert_alike(real, played)


def extreme_gradients(name):
    mesh = mesh_of(name)
    rows = torch.tensor([[3.0, 1.0, 2.0], [3.0, 4.0, 2.0], [0.0, 4.0, 2.0], [-1.0, 5.0, 2.0]])
    out = []
    for sign, op in ((1, "max"), (-1, "min")):
        leaf = sw.per_rank(lambda rank, s=sign: (s * rows[rank]).clone().requires_grad_())
        x = DTensor.from_local(leaf, mesh, [Partial(op)])
        (x.full_tensor() * torch.tensor([2.0, 3.0, 4.0])).sum().backward()
        out.append(leaf.grad)
    return out


def test_the_gradient_of_an_extreme_goes_to_those_that_hold_it(workers):
    expected = [[1.0, 0.0, 1.0], [1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 3.0, 1.0]]
    real, played = both(workers, extreme_gradients, "(4,)")
    assert [[g.tolist() for g in rank] for rank in real] == [[row, row] for row in expected]
    assert_alike(real, played)


def different_uses(name):
    """A replicated block that each rank uses in its own way, and a pending one that goes out and in again."""
    mesh = mesh_of(name)
    x = sw.distribute_tensor(torch.arange(6.0), mesh, [Replicate()]).requires_grad_()
    local = x.to_local(grad_placements=[Partial()])
    sw.per_rank(lambda rank, b: (b * (rank + 1)).sum(), local).backward()
    y = tensor(torch.arange(6.0), Layout.of((6,), axes_of(mesh), [Partial()]), mesh).requires_grad_()
    z = DTensor.from_local(y.to_local(), mesh, [Partial()])
    (z.full_tensor() * torch.arange(6.0)).sum().backward()
    return [x.grad.full_tensor(), y.grad.full_tensor()]


def test_r37_r38_blocks_out_and_in_again(workers):
    real, played = both(workers, different_uses, "(4,)")
    assert_alike(real, played)
    for used, back in real:
        assert torch.equal(used, torch.full((6,), 10.0))
        assert torch.equal(back, torch.arange(6.0))


# ---- making tensors


def distributed(name, cases):
    """Spread from one rank, of whose tensor the others know nothing; and cut from each rank's own."""
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
    on, members, siblings = facts(name)
    cases = drawn(on, 40, seed=6)
    real, played = both(workers, distributed, name, cases)
    for number, case in enumerate(cases):
        for ranks in siblings:
            for made in (0, 1):
                found = {members[r]: real[r][number][made] for r in ranks}
                assert torch.equal(value(found, case.target), wide(case.whole())), case
    assert_alike(real, played)


def offsets(name):
    mesh = mesh_of(name)
    place = [Shard(0)] * mesh.ndim
    x = sw.distribute_tensor(torch.arange(2.0), mesh, place)
    return sw.compute_local_shape_and_global_offset((2,), mesh, place), x.full_tensor().tolist()


def test_r26_offsets_of_empty_blocks(workers):
    on, members, _ = facts("(2, 2)")
    layout = Layout.of((2,), on, [Shard(0), Shard(0)])
    found = workers.run(offsets, "(2, 2)")
    assert [place for place, _ in found] == [((1,), (0,)), ((0,), (2,)), ((1,), (1,)), ((0,), (2,))]
    assert [place[1] for place, _ in found] == [block_offset(layout, c) for c in members.values()]
    assert all(whole == [0.0, 1.0] for _, whole in found)


# ---- ranks that are not on the mesh


def beside(name):
    """Ranks off the mesh run the same program, hold nothing, and wait for nobody."""
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


def test_ranks_beside_the_mesh_do_not_hang(workers):
    found = workers.run(beside, "2 of 4")
    assert [coord for coord, *_ in found] == [None, (1,), None, (0,)]
    assert all(shape == (3, 2) for _, shape, *_ in found)
    assert found[3][2:] == ([[[0, 1], [2, 3]], [[0, 1], [2, 3], [4, 5]], [[0], [2], [4]]], [[1, 1], [1, 1]])
    assert found[1][2:] == ([[[4, 5]], [[0, 1], [2, 3], [4, 5]], [[1], [3], [5]]], [[1, 1]])
    assert found[0][2:] == found[2][2:] == ([[], [], []], [])


# ---- the meshes themselves


def test_axes_of_the_meshes():
    found = {name: facts(name)[0] for name in MESHES}
    assert found["flattened"] == Axes((4,), ("dp_tp",))
    assert found["sub-mesh tp"] == Axes((2,), ("tp",))
    assert found["permuted"] == Axes((2, 2), ("dp", "tp"))
    assert facts("permuted")[1] == {0: (1, 0), 1: (0, 1), 2: (1, 1), 3: (0, 0)}
    assert facts("sub-mesh dp of permuted")[2] == [[3, 0], [1, 2]]


def in_compiled_code() -> tuple[bool, bool]:
    """A result still on its way goes into a compiled function, and one is made inside of another."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    dense = torch.arange(30.0).view(5, 6)
    x = sw.distribute_tensor(dense, mesh, [sw.Shard(0)])
    late = x.redistribute(tp=sw.Replicate(), async_op=True)
    doubled = torch.compile(lambda t: t + t, backend="aot_eager", fullgraph=True)(late)
    moved = torch.compile(
        lambda t: t.redistribute(placements=[sw.Shard(1)], async_op=True) * 3,
        backend="aot_eager",
        fullgraph=True,
    )(x)
    return torch.equal(doubled.full_tensor(), dense * 2), torch.equal(moved.full_tensor(), dense * 3)


def test_async_results_are_there_in_compiled_code(workers):
    assert workers.run(in_compiled_code) == [(True, True)] * 4


def a_gradient_that_compiled_code_did_not_expect() -> str:
    mesh = sw.init_device_mesh("cpu", (4,))
    plain = torch.ones(4, requires_grad=True)
    doubled = torch.compile(lambda t: t + t, backend="aot_eager", fullgraph=True)(plain)
    try:
        doubled.backward(sw.ones(4, device_mesh=mesh))
    except RuntimeError as error:
        return str(error)
    return "none"


@pytest.mark.processes
def test_a_gradient_of_another_kind_has_torchs_own_error(workers):
    said = workers.run(a_gradient_that_compiled_code_did_not_expect)
    assert all("guessed its\nmetadata incorrectly" in s for s in said), said
