import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.strategies import axes, block_of, coords, counting, every_writing, layouts, many, shapes

from shardwise.layout import Axes, Factor, Layout, block_shape, cut, owned, parse_layout, refine


def _range(size, axes, sizes, coord):
    return cut(size, [sizes[a] for a in axes], [coord[a] for a in axes])


def _meet(pieces, sizes, sender, receiver):
    """The intersection of two blocks within each of them: per dim and piece, the block's length and the slice."""
    ours, theirs = [], []
    for dim in pieces:
        pairs = [
            (_range(p.size, p.source, sizes, sender), _range(p.size, p.target, sizes, receiver)) for p in dim
        ]
        for out, mine in ((ours, 0), (theirs, 1)):
            box = []
            for pair in pairs:
                low, high = max(pair[0][0], pair[1][0]), min(pair[0][1], pair[1][1])
                start, end = pair[mine]
                box.append((end - start, slice(low - start, high - start) if low < high else slice(0, 0)))
            out.append(box)
    return ours, theirs


def _lengths(box):
    return [length for dim in box for length, _ in dim]


def _part(box):
    return (*(part for dim in box for _, part in dim), ...)


def _check_that_blocks_meet(source, target):
    """Every receiver gets each element of its block once, from the senders that differ on axes that split the source."""
    pieces, on = refine(source, target), source.axes
    dense = counting(source.shape)
    for receiver in coords(on):
        block = np.full(block_shape(target, receiver), -1)
        for sender in coords(on):
            if any(
                s != r
                for a, (s, r) in enumerate(zip(sender, receiver, strict=True))
                if a not in source.sharded
            ):
                continue
            ours, theirs = _meet(pieces, on.sizes, sender, receiver)
            assert tuple(math.prod(n for n, _ in dim) for dim in ours) == block_shape(source, sender)
            assert tuple(math.prod(n for n, _ in dim) for dim in theirs) == block.shape
            sent = block_of(dense, owned(source, sender)).reshape(_lengths(ours))[_part(ours)]
            room = block.reshape(_lengths(theirs))[_part(theirs)]
            assert room.shape == sent.shape
            assert (room == -1).all()
            room[...] = sent
        assert np.array_equal(block, block_of(dense, owned(target, receiver)))


@given(st.data())
def test_the_boxes_of_all_senders_fill_each_block_once(data):
    on, shape = data.draw(axes(max_count=12)), data.draw(shapes(max_dims=3))
    source, target = data.draw(layouts(on, shape)), data.draw(layouts(on, shape))
    assume(refine(source, target) is not None)
    _check_that_blocks_meet(source, target)


@pytest.mark.parametrize("sizes", [(2, 3), (4, 2), (7,)])
def test_boxes_fill_blocks_for_layouts_in_every_way_to_write_them(sizes):
    on = Axes(sizes)
    every = sorted({Layout(on, writing) for writing in every_writing(on, (12,))}, key=repr)
    pairs = [pair for pair in itertools.product(every, repeat=2) if refine(*pair) is not None]
    assert len(pairs) > len(every)
    for source, target in pairs[::37]:
        _check_that_blocks_meet(source, target)


@given(layouts())
def test_a_layout_refines_with_itself(layout):
    pieces = refine(layout, layout)
    assert pieces is not None
    assert all(source == target for dim in pieces for _, source, target in dim)


@given(st.data())
def test_plain_layouts_always_have_common_factors(data):
    on, shape = data.draw(axes(max_count=12)), data.draw(shapes(max_dims=3))
    source, target = (data.draw(layouts(on, shape, plain=True)) for _ in range(2))
    assert refine(source, target) is not None
    _check_that_blocks_meet(source, target)


@many
@given(st.data())
def test_the_pieces_are_both_layouts_in_the_same_factors(data):
    on, shape = data.draw(axes()), data.draw(shapes(min_size=1, max_size=24))
    source, target = (
        data.draw(layouts(on, shape, partial=False)),
        data.draw(layouts(on, shape, partial=False)),
    )
    pieces = refine(source, target)
    assert (pieces is None) == (refine(target, source) is None)
    if pieces is not None:
        assert source.with_dims([[Factor(p.size, p.source) for p in dim] for dim in pieces]) is source
        assert target.with_dims([[Factor(p.size, p.target) for p in dim] for dim in pieces]) is target


@pytest.mark.parametrize(("sizes", "n"), [((2, 2), 12), ((3, 2), 12), ((3,), 60), ((2, 3), 30), ((7,), 72)])
def test_common_factors_are_found_wherever_they_exist(sizes, n):
    on = Axes(sizes)
    ways = defaultdict(set)
    for (dim,) in every_writing(on, (n,)):
        ways[Layout(on, [dim])].add(tuple(f.size for f in dim if f.size > 1))
    assert len(ways) > 10
    for source, target in itertools.product(ways, repeat=2):
        assert (refine(source, target) is None) == ways[source].isdisjoint(ways[target]), (source, target)


def test_there_are_no_common_factors_if_blocks_overlap_irregularly():
    on = Axes((2, 3), ("a", "b"))
    source, target = (parse_layout(text, on)[0] for text in ("[2 3:b]", "[3 2:a]"))
    assert refine(source, target) is None
