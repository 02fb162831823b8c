"""Pictures of layouts: which ranks hold which part."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import textwrap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import axes, coords, layouts, shapes

import shardwise as sw
from shardwise import LayoutError, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from shardwise.debug import picture, visualize_sharding
from shardwise.layout import Axes, owned, parse_layout

R = Replicate()
DP_TP = Axes((2, 2), ("dp", "tp"))

PICTURES = {
    "[5:dp]": """
           0:3   3:5
         ┌─────┬─────┐
         │ 0,1 │ 2,3 │
         └─────┴─────┘
    """,
    "[5]": """
             0:5
         ┌─────────┐
         │ 0,1,2,3 │
         └─────────┘
    """,
    "[5] P(dp,sum)": """
             0:5
         ┌─────────┐
         │ 0+2,1+3 │
         └─────────┘
    """,
    "[5:dp] P(tp,max)": """
           0:3   3:5
         ┌─────┬─────┐
         │ 0^1 │ 2^3 │
         └─────┴─────┘
    """,
    "[2:dp,tp]": """
           0:1   1:2
         ┌─────┬─────┐
         │  0  │  2  │
         └─────┴─────┘
    """,
    "[3 4:tp]": """
           0:2   2:4   4:6   6:8   8:10   10:12
         ┌─────┬─────┬─────┬─────┬──────┬───────┐
         │ 0,2 │ 1,3 │ 0,2 │ 1,3 │ 0,2  │  1,3  │
         └─────┴─────┴─────┴─────┴──────┴───────┘
    """,
    "[4, 6]": """
                0:6
            ┌─────────┐
        0:4 │ 0,1,2,3 │
            └─────────┘
    """,
    "[5:dp, 3:tp]": """
              0:2   2:3
            ┌─────┬─────┐
        0:3 │  0  │  1  │
            ├─────┼─────┤
        3:5 │  2  │  3  │
            └─────┴─────┘
    """,
    "[4:tp, 6] P(dp,min)": """
              0:6
            ┌─────┐
        0:2 │ 0_2 │
            ├─────┤
        2:4 │ 1_3 │
            └─────┘
    """,
    "[8:tp,dp, 6]": """
              0:6
            ┌─────┐
        0:2 │  0  │
            ├─────┤
        2:4 │  2  │
            ├─────┤
        4:6 │  1  │
            ├─────┤
        6:8 │  3  │
            └─────┘
    """,
    "[2 3:dp, 4:tp]": """
              0:2   2:4
            ┌─────┬─────┐
        0:2 │  0  │  1  │
            ├─────┼─────┤
        2:3 │  2  │  3  │
            ├─────┼─────┤
        3:5 │  0  │  1  │
            ├─────┼─────┤
        5:6 │  2  │  3  │
            └─────┴─────┘
    """,
    "[0:dp, 3]": "(empty)",
    "[0]": "(empty)",
}


def dedented(text):
    """A picture without its indentation."""
    return textwrap.dedent("\n".join(line.rstrip() for line in text.strip("\n").splitlines())).rstrip()


@pytest.mark.parametrize("text", PICTURES)
def test_pictures(text):
    layout, _ = parse_layout(text, DP_TP)
    assert dedented(picture(layout)) == dedented(PICTURES[text])


def stripes(text):
    """The ranges `start:end` in a text."""
    return [(int(start), int(end)) for start, end in re.findall(r"(\d+):(\d+)", text)]


def covers(ranges, size):
    """Whether ranges follow each other from 0 to a size."""
    edges = [0, *(end for _, end in ranges)]
    return [start for start, _ in ranges] == edges[:-1] and edges[-1] == size


@given(axes(max_count=12), shapes(max_dims=2, min_size=1, max_size=7), st.data())
def test_each_cell_lists_the_ranks_that_own_it(on, shape, data):
    if not shape:
        shape = (3,)
    layout = data.draw(layouts(on, shape))
    lines = picture(layout).splitlines()
    columns = stripes(lines[0])
    rows = [line.rstrip("│").split("│") for line in lines if "│" in line]
    sides = [stripe for side, *_ in rows for stripe in stripes(side)]
    assert covers(columns, shape[-1])
    assert covers(sides, shape[0]) if len(shape) == 2 else (sides == [] and len(rows) == 1)
    for (_, *cells), side in zip(rows, sides or [(0, 1)], strict=True):
        for column, cell in zip(columns, cells, strict=True):
            named = {int(n) for n in re.findall(r"\d+", cell)}
            for at in itertools.product(*(range(*stripe) for stripe in (side, column)[-len(shape) :])):
                expected = {
                    number
                    for number, c in enumerate(coords(on))
                    if all(x in mine for x, mine in zip(at, owned(layout, c), strict=True))
                }
                assert named == expected


def test_ranks_can_be_given():
    layout, _ = parse_layout("[4:dp, 4:tp]", DP_TP)
    assert re.findall(r"  (\d)  ", picture(layout, [7, 5, 6, 4])) == ["7", "5", "6", "4"]


@pytest.mark.parametrize("text", ["[]", "[2, 3, 4]", "[2, 3:tp, 4, 5]"])
def test_only_one_or_two_dims_can_be_drawn(text):
    with pytest.raises(LayoutError, match=r"(?s)a picture has one or two.*\n  why: .*\n  fix: "):
        picture(parse_layout(text, DP_TP)[0])


def test_too_many_columns_are_an_error():
    with pytest.raises(LayoutError, match=r"(?s)too wide.*\n  why: .*\n  fix: "):
        picture(parse_layout("[100 4:tp]", DP_TP)[0])


def test_header_layout_and_picture_are_printed_once(capsys):
    with simulate(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0), Shard(1)])
        assert visualize_sharding(x, header="weights") is None
        head, spec, *lines = capsys.readouterr().out.splitlines()
        assert (head, spec) == ("weights", "f32[5:dp, 3:tp]")
        assert "\n".join(lines) == picture(x.sharding)
        visualize_sharding(x, use_rich=True)
        assert capsys.readouterr().out.startswith("f32[5:dp, 3:tp]\n")


def test_printed_ranks_are_global_ranks(capsys):
    with simulate(5):
        mesh = sw.DeviceMesh("cpu", [[3, 1], [4, 2]], mesh_dim_names=("x", "y"))
        visualize_sharding(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)]))
        assert re.findall(r" (\d) ", capsys.readouterr().out) == ["3", "1", "4", "2"]


def test_nothing_is_printed_for_an_empty_tensor(capsys):
    with simulate(2):
        visualize_sharding(
            distribute_tensor(torch.ones(0, 3), init_device_mesh("cpu", (2,)), [Shard(0)]), "head"
        )
    assert capsys.readouterr().out == ""


def ranks_printed():
    """The ranks in the pictures that one rank prints: for a mesh of all ranks, its sub-mesh, and a mesh of two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    out = []
    for where, placements in (
        (mesh, [Shard(0), Shard(1)]),
        (mesh["tp"], [Shard(0)]),
        (sw.DeviceMesh("cpu", [3, 1]), [R]),
    ):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            visualize_sharding(distribute_tensor(torch.ones(4, 4), where, placements))
        out.append(re.findall(r"[ ,](\d(?:,\d)*) ", printed.getvalue()))
    return out


def test_on_real_processes_the_first_rank_of_each_mesh_prints(workers):
    full, sub, other = zip(*workers.run(ranks_printed), strict=True)
    assert full == (["0", "1", "2", "3"], [], [], [])
    assert sub == (["0", "1"], [], ["2", "3"], [])
    assert other == ([], [], [], ["3,1"])
