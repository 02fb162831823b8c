"""Pictures of layouts: which rank holds what."""

from __future__ import annotations

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


def shape_of(text):
    """A picture without what stands left of it."""
    return textwrap.dedent("\n".join(line.rstrip() for line in text.strip("\n").splitlines())).rstrip()


@pytest.mark.parametrize("text", PICTURES)
def test_pictures(text):
    layout, _ = parse_layout(text, DP_TP)
    assert shape_of(picture(layout)) == shape_of(PICTURES[text])


@given(axes(max_count=12), shapes(max_dims=2, min_size=1, max_size=7), st.data())
def test_each_cell_names_the_ranks_that_own_it(on, shape, data):
    if not shape:
        shape = (3,)
    layout = data.draw(layouts(on, shape))
    drawn = picture(layout).splitlines()
    cols = [tuple(map(int, c)) for c in re.findall(r"(\d+):(\d+)", drawn[0])]
    rows = [line for line in drawn if "│" in line]
    assert cols[0][0] == 0
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cols))
    assert cols[-1][1] == layout.shape[-1]
    for row in rows:
        side, *cells = row.rstrip("│").split("│")
        lo = int(side.split(":")[0]) if len(shape) == 2 else 0
        for (start, end), cell in zip(cols, cells, strict=True):
            named = {int(n) for n in re.findall(r"\d+", cell)}
            for i in range(start, end):
                at = (lo, i) if len(shape) == 2 else (i,)
                expected = {
                    number
                    for number, c in enumerate(coords(on))
                    if all(x in mine for x, mine in zip(at, owned(layout, c), strict=True))
                }
                assert named == expected


def test_ranks_can_be_named_and_cells_painted():
    layout, _ = parse_layout("[4:dp, 4:tp]", DP_TP)
    drawn = picture(layout, [7, 5, 6, 4], paint=lambda text, owner: f"<{owner}>{text.strip()}")
    assert re.findall(r"<\d>\d", drawn) == ["<0>7", "<1>5", "<2>6", "<3>4"]


@pytest.mark.parametrize("text", ["[]", "[2, 3, 4]", "[2, 3:tp, 4, 5]"])
def test_only_one_or_two_dims_can_be_drawn(text):
    with pytest.raises(LayoutError, match=r"(?s)a picture has one or two.*\n  why: .*\n  fix: "):
        picture(parse_layout(text, DP_TP)[0])


def test_what_is_too_wide_is_not_drawn():
    with pytest.raises(LayoutError, match=r"(?s)too wide.*\n  why: .*\n  fix: "):
        picture(parse_layout("[100 4:tp]", DP_TP)[0])


# ---- visualize_sharding


def test_it_prints_header_layout_and_picture_once(capsys):
    with simulate(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0), Shard(1)])
        assert visualize_sharding(x, header="weights") is None
        head, spec, *drawn = capsys.readouterr().out.splitlines()
        assert (head, spec) == ("weights", "f32[5:dp, 3:tp]")
        assert "\n".join(drawn) == picture(x.sharding)
        visualize_sharding(x, use_rich=True)
        assert capsys.readouterr().out.startswith("f32[5:dp, 3:tp]\n")


def test_ranks_are_those_of_the_world(capsys):
    with simulate(5):
        mesh = sw.DeviceMesh("cpu", [[3, 1], [4, 2]], mesh_dim_names=("x", "y"))
        visualize_sharding(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)]))
        assert re.findall(r" (\d) ", capsys.readouterr().out) == ["3", "1", "4", "2"]


def test_of_an_empty_tensor_nothing_is_printed(capsys):
    with simulate(2):
        visualize_sharding(
            distribute_tensor(torch.ones(0, 3), init_device_mesh("cpu", (2,)), [Shard(0)]), "head"
        )
    assert capsys.readouterr().out == ""


def drawn_here():
    """On one rank: what it prints of tensors on the whole mesh, on its sub-mesh, and on a mesh it may be off."""
    import contextlib
    import io

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    out = []
    for where, said in (
        (mesh, [Shard(0), Shard(1)]),
        (mesh["tp"], [Shard(0)]),
        (sw.DeviceMesh("cpu", [3, 1]), [R]),
    ):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            visualize_sharding(distribute_tensor(torch.ones(4, 4), where, said))
        out.append(re.findall(r"[ ,](\d(?:,\d)*) ", printed.getvalue()))
    return out


def test_on_real_processes_the_first_rank_of_each_mesh_prints(workers):
    whole, sub, other = zip(*workers.run(drawn_here), strict=True)
    assert whole == (["0", "1", "2", "3"], [], [], [])
    assert sub == (["0", "1"], [], ["2", "3"], [])
    assert other == ([], [], [], ["3,1"])
