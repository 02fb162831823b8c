import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import layouts, many

from shardwise.layout import Axes, Layout, LayoutError, Partial, Replicate, Shard, parse_layout
from shardwise.layout.text import block_sizes_text

ON = Axes((2, 3), ("dp", "tp"))


@many
@given(layouts())
def test_the_text_of_a_layout_parses_back(layout):
    assert parse_layout(repr(layout), layout.axes) == (layout, "")
    assert parse_layout(repr(layout), layout.axes)[0] is layout


@given(layouts(), st.sampled_from(["f32", "bf16", "i64", "bool", "f8_e4m3fn", "c64"]))
def test_the_text_with_a_dtype_parses_back(layout, dtype):
    text = layout.text(dtype)
    assert text == dtype + repr(layout)
    assert parse_layout(text, layout.axes) == (layout, dtype)


@pytest.mark.parametrize(
    ("text", "shape", "placements"),
    [
        ("[]", (), (Replicate(), Replicate())),
        ("[8, 6]", (8, 6), (Replicate(), Replicate())),
        ("[8:dp, 6]", (8, 6), (Shard(0), Replicate())),
        ("[1:dp, 6:tp]", (1, 6), (Shard(0), Shard(1))),
        ("[1, 0:tp]", (1, 0), (Replicate(), Shard(1))),
        ("[8:dp,tp]", (8,), (Shard(0), Shard(0))),
        ("[8:tp,dp]", (8,), (Shard(0, order=1), Shard(0, order=0))),
        ("[4 6:tp]", (24,), (Replicate(), Shard(0, factors=(4, 6), factor=1))),
        ("[8:tp] P(dp,sum)", (8,), (Partial(), Shard(0))),
        ("[8] P(dp,sum) P(tp,avg)", (8,), (Partial("sum"), Partial("avg"))),
    ],
)
def test_the_notation(text, shape, placements):
    layout = Layout.of(shape, ON, placements)
    assert repr(layout) == text
    assert parse_layout(text, ON)[0] is layout


@pytest.mark.parametrize("text", ["[8:dp,  6]", " [ 8:dp, 6 ] ", "[2:dp 4, 6]", "[8:dp, 1 6]"])
def test_other_spellings_parse_to_the_same_layout(text):
    assert parse_layout(text, ON)[0] is Layout.of((8, 6), ON, (Shard(0), Replicate()))


def test_a_space_after_the_axis_of_a_partial_is_allowed():
    assert parse_layout("[8] P(tp, max)", ON) == parse_layout("[8] P(tp,max)", ON)


@pytest.mark.parametrize(
    "text",
    [
        *("", "8", "[8", "8]", "[8]]", "[[8]]", "F32[8]", "[8] f32", "[8]f32"),
        *("[a]", "[-3]", "[8.5]", "[²]", "[:dp]", "[8,6]", "[, 8]", "[8, ]", "[8, , 6]", "[8;6]"),
        *("[8:]", "[8:xx]", "[8:dp,]", "[8:dp,,tp]", "[8:dp:tp]", "[8:dp/tp]"),
        *("[8:dp,dp]", "[8:dp 2:dp]", "[8:dp, 6:dp]", "[8:dp] P(dp,sum)", "[8] P(dp,sum) P(dp,sum)"),
        *("[8]P(dp,sum)", "[8] P", "[8] P()", "[8] P(dp)", "[8] P(sum)", "[8] P(dp,)", "[8] P(dp,sum"),
        *("[8] P(xx,sum)", "[8] P(dp,mean)", "[8] P(dp,SUM)", "[8] P(dp,sum,tp)", "[8] P(dp,sum) and"),
        "[8] P(dp,sum) P(tp,max)",
    ],
)
def test_invalid_text_is_an_error(text):
    with pytest.raises(LayoutError, match=r"(?s)\n  why: .+\n  fix: .+"):
        parse_layout(text, ON)


def test_an_unknown_reduction_is_an_error_also_on_an_axis_of_size_1():
    with pytest.raises(LayoutError):
        parse_layout("[8] P(dp,mean)", Axes((1,), ("dp",)))


@given(st.data())
def test_any_text_parses_or_raises_a_layout_error(data):
    layout = data.draw(layouts())
    text = data.draw(st.text("[]():,. 0123abcdptP²", max_size=12) | st.just(repr(layout)))
    at = data.draw(st.integers(0, len(text)))
    text = (
        text[:at]
        + data.draw(st.text("[]():, 0248dtpP", max_size=2))
        + text[at + data.draw(st.integers(0, 2)) :]
    )
    try:
        parsed, dtype = parse_layout(text, layout.axes)
    except LayoutError:
        return
    assert parse_layout(parsed.text(dtype), layout.axes) == (parsed, dtype)


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ((3, 3, 3, 1), "(3, 3, 3, 1)"),
        ((2,) * 7, "(2, 2, 2, … 2)"),
        ((2,) * 99 + (1,), "(2, 2, 2, … 1)"),
        ((1,) * 5 + (0,) * 3, "(1, 1, 1, 1, 1, 0, 0, 0)"),
        ((1,) * 5 + (0,) * 30, "(1, 1, 1, … 0)"),
    ],
)
def test_block_sizes_are_abbreviated(blocks, text):
    assert block_sizes_text(blocks) == text
