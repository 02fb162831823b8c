"""Recipes give each rank its block, exactly, with a number of ops that does not depend on the number of peers."""

import itertools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.strategies import axes, coords, layouts, many, shapes
from tests.values import parts, same_bits, take, value, wide
from torch.fx.experimental.proxy_tensor import make_fx

import shardwise as sw
from shardwise.comm import PerRank, counting, members_of
from shardwise.comm.mesh import peers_of
from shardwise.comm.recipe import recipe_for
from shardwise.comm.run import run
from shardwise.comm.tile_grid import tile_grid
from shardwise.layout import Axes, Factor, Layout, block_shape, owned, parse_layout, refine
from shardwise.plan import AllGather, plan_redistribute
from shardwise.torch_internals.process_groups import fake_world

# ---- layouts that are split evenly


@st.composite
def even_pairs(draw, partial=True):
    """Two layouts of one shape, on 1 to 3 axes, with all splits even: factors in any order, split by any axes."""
    on = draw(axes(max_count=16))
    sizes = [on.count * draw(st.sampled_from([1, 2])) for _ in range(draw(st.integers(1, 3)))]
    dims = draw(st.integers(1, len(sizes)))
    bounds = [0, *sorted(draw(st.permutations(range(1, len(sizes))))[: dims - 1]), len(sizes)]
    out = []
    for _ in range(2):
        split = [[] for _ in sizes]
        pending = {}
        for a in draw(st.permutations(range(len(on)))):
            kind = draw(st.integers(0, 5))
            if kind == 0 and partial:
                pending[a] = "sum"
            elif kind > 1:
                draw(st.sampled_from(split)).append(a)
        factors = [Factor(n, tuple(s)) for n, s in zip(sizes, split, strict=True)]
        writing = [factors[i:j] for i, j in itertools.pairwise(bounds)]
        out.append(Layout(on, writing, pending))
    return tuple(out)


@st.composite
def any_pairs(draw):
    on, shape = draw(axes(max_count=12)), draw(shapes(max_dims=3))
    source = draw(layouts(on, shape, partial=False))
    waiting = {a: "sum" for a in range(len(on)) if a not in source.sharded and draw(st.booleans())}
    return source.with_partial(waiting), draw(layouts(on, shape, partial=False))


def check(source, target):
    """Run the plan between two layouts on all ranks; blocks are those that `owned` cuts out of the full tensor."""
    whole = torch.arange(math.prod(source.shape), dtype=torch.int64).view(source.shape)
    before = parts(whole, source, seed=1)
    plan = plan_redistribute(source, target, 8)
    on = source.axes
    with sw.simulate(on.count):
        mesh = sw.init_device_mesh("cpu", on.sizes, mesh_dim_names=on.names)
        blocks = PerRank({r: before[c].clone() for r, c in members_of(mesh).items()})
        with counting() as ledger:
            got = run(plan, blocks, mesh)
        assert ledger.bytes == plan.bytes
        after = {c: got.of_rank(r) for r, c in members_of(mesh).items()}
    assert all(block.is_contiguous() for block in after.values())
    if target.partial:
        assert torch.equal(value(after, target), wide(whole))
    else:
        assert all(same_bits(block, take(whole, owned(target, c))) for c, block in after.items())


@many
@given(even_pairs())
def test_even_splits_give_each_rank_its_block(pair):
    check(*pair)


@many
@given(any_pairs())
def test_any_splits_give_each_rank_its_block(pair):
    check(*pair)


@pytest.mark.parametrize(
    ("sizes", "source", "target"),
    [
        ((4, 2), "[12:dp, 3]", "[12:tp, 3]"),  # an axis of four meets an axis of two
        ((2, 4), "[24:dp, 3]", "[24:tp, 3]"),
        ((4, 2), "[24:dp,tp, 3]", "[24:tp,dp, 3]"),
        ((2, 2, 3), "[12:dp,tp, 6:cp]", "[12:cp, 6:tp]"),
        ((2, 3, 2), "[4:dp 6, 6:tp]", "[4 6:tp, 6:dp]"),
        ((2, 2, 2), "[4 4:dp, 6]", "[4:tp 4, 6:dp]"),
        ((3, 2), "[6:dp, 6] P(tp,sum)", "[6:dp,tp, 6]"),
        ((3, 2), "[6, 6] P(tp,sum)", "[6:dp,tp, 6]"),  # dp slices what is sent over tp
    ],
)
def test_digits_of_axes(sizes, source, target):
    on = Axes(sizes, ("dp", "tp", "cp")[: len(sizes)])
    check(*(parse_layout(text, on)[0] for text in (source, target)))


@given(even_pairs(partial=False))
def test_even_pairs_are_tile_grids(pair):
    """Otherwise the tests above would not test what they say."""
    for step in plan_redistribute(*pair).steps:
        pieces = refine(step.source, step.target)
        if isinstance(step, AllGather):
            assert tile_grid(pieces, step.source.axes.sizes, step.axes, (0,) * len(step.source.axes))


@given(any_pairs())
def test_what_one_rank_sends_is_what_the_other_receives(pair):
    for step in plan_redistribute(*pair).steps:
        if not step.is_collective:
            continue
        on = step.source.axes
        recipes = {c: recipe_for(step, c, torch.int64) for c in coords(on)}
        for c, recipe in recipes.items():
            peers = peers_of(c, step.axes, on.sizes)
            assert {recipes[p].call for p in peers} == {recipe.call}
            if recipe.call == "all_to_all":
                mine = peers.index(c)
                assert recipe.receive == tuple(recipes[p].send[mine] for p in peers)
                assert recipe.sent == sum(n for i, n in enumerate(recipe.send) if i != mine)


# ---- graphs


def graph_of(source, target):
    """The ops of a redistribution on rank 0, as torch traces them."""
    on = source.axes
    plan = plan_redistribute(source, target, 4)
    with fake_world(on.count):
        mesh = sw.init_device_mesh("cpu", on.sizes, mesh_dim_names=on.names)
        block = torch.zeros(block_shape(source, (0,) * len(on)), device="meta")
        graph = make_fx(lambda x: run(plan, x, mesh), tracing_mode="fake")(block).graph
    return [step.name for step in plan.steps], [str(node.target) for node in graph.nodes]


@st.composite
def templates(draw):
    """Factors of dims, with a list of axes that split each in the source and in the target; sizes come later."""
    count = draw(st.integers(1, 2))
    factors = draw(st.integers(1, 3))
    dims = draw(st.integers(1, factors))
    ends = [0, *sorted(draw(st.permutations(range(1, factors)))[: dims - 1]), factors]
    sides = []
    for _ in range(2):
        split, pending = [[] for _ in range(factors)], {}
        for a in draw(st.permutations(range(count))):
            kind = draw(st.integers(0, 5))
            if kind == 0:
                pending[a] = draw(st.sampled_from(["sum", "avg"]))
            elif kind > 1:
                draw(st.sampled_from(split)).append(a)
        sides.append((split, pending))
    return count, ends, sides


def filled(template, peers):
    """The two layouts of a template for so many peers on each axis."""
    count, ends, sides = template
    on = Axes((peers,) * count)
    out = []
    for split, pending in sides:
        factors = [Factor(3 * peers**count, tuple(axes)) for axes in split]
        out.append(Layout(on, [factors[i:j] for i, j in itertools.pairwise(ends)], pending))
    return out


@given(templates())
def test_the_graph_of_an_even_redistribution_does_not_grow_with_the_number_of_peers(template):
    names, ops = zip(*(graph_of(*filled(template, peers)) for peers in (2, 4, 8)), strict=True)
    assume(names[0] == names[1] == names[2])  # costs may make another plan the cheaper one
    assert ops[0] == ops[1] == ops[2]


@pytest.mark.parametrize(
    ("source", "target", "ops"),
    [
        ("[{n}:tp, 4]", "[{n}, 4]", 2),  # the collective, and waiting for it
        ("[{n}, 4] P(tp,sum)", "[{n}:tp, 4]", 2),
        ("[{n}, 4] P(tp,sum)", "[{n}, 4]", 2),
        ("[4, {n}:tp]", "[4, {n}]", 6),
        ("[4, {n}] P(tp,sum)", "[4, {n}:tp]", 7),
        ("[{n}:tp, {n}]", "[{n}, {n}:tp]", 7),
        ("[{n}, {n}:tp]", "[{n}:tp, {n}]", 7),
        ("[{odd}:tp, 4]", "[{odd}, 4]", 6),  # uneven ones, too, where one axis splits
        ("[{odd}:tp, {n}]", "[{odd}, {n}:tp]", 15),
        ("[{n}, {odd}] P(tp,sum)", "[{n}, {odd}:tp]", 17),
    ],
)
@pytest.mark.parametrize("peers", [4, 64])
def test_graphs_have_this_many_ops(source, target, ops, peers):
    on = Axes((peers,), ("tp",))
    pair = [parse_layout(t.format(n=3 * peers, odd=3 * peers - 1), on)[0] for t in (source, target)]
    _, nodes = graph_of(*pair)
    assert len(nodes) - 2 <= ops, nodes  # without the input and the output


@pytest.mark.parametrize("target", [sw.Replicate(), sw.Shard(0), sw.Shard(1)])
@pytest.mark.parametrize("together", [False, True])
def test_a_mean_of_half_precision_is_finite_if_its_terms_are(target, together):
    """The sum of three blocks is not; dim 0 is split evenly, dim 1 is not."""
    with sw.simulate(3):
        mesh = sw.init_device_mesh("cpu", (3,))
        blocks = [torch.full((3, 4), value, dtype=torch.float16) for value in (60000.0, 30000.0, 60000.0)]
        x = sw.DTensor.from_local(sw.per_rank(lambda rank: blocks[rank]), mesh, [sw.Partial("avg")])
        moved = sw.redistribute_many([x, x], [target])[1] if together else x.redistribute(placements=[target])
        for full in moved.full_tensor().ranks:
            torch.testing.assert_close(full, torch.full((3, 4), 50000.0, dtype=torch.float16))
