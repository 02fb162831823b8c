import pickle

import pytest
from hypothesis import given
from tests.strategies import axes, coords

from shardwise.layout import Axes, LayoutError


@given(axes())
def test_coords_are_numbered_in_row_major_order(on):
    every = list(coords(on))
    assert [on.coord(i) for i in range(on.count)] == every
    assert [on.number(coord) for coord in every] == list(range(on.count))


@given(axes())
def test_an_axis_is_found_by_name_and_by_index_from_either_end(on):
    for i, name in enumerate(on.names):
        assert on.index(name) == on.index(i) == on.index(i - len(on)) == i
    assert on.sizes_of(reversed(range(len(on)))) == on.sizes[::-1]
    assert on.names_of(reversed(range(len(on)))) == on.names[::-1]


def test_axes_without_names_are_named_by_index():
    assert Axes((2, 4)) == Axes((2, 4), ("0", "1"))
    assert str(Axes((2, 4))) == "0=2, 1=4"


def test_equal_axes_are_equal_values():
    assert Axes((2, 4), ("a", "b")) == Axes((2, 4), ("a", "b"))
    assert hash(Axes((2, 4), ("a", "b"))) == hash(Axes((2, 4), ("a", "b")))
    assert Axes((2, 4), ("a", "b")) != Axes((2, 4), ("b", "a"))
    assert Axes((2, 4)) != Axes((4, 2))
    assert pickle.loads(pickle.dumps(Axes((2, 4), ("a", "b")))) == Axes((2, 4), ("a", "b"))


def test_axes_are_frozen():
    with pytest.raises(AttributeError):
        Axes((2,)).sizes = (3,)


@pytest.mark.parametrize("axis", ["tp", "", 1, -2])
def test_the_error_for_an_unknown_axis_lists_the_known_ones(axis):
    with pytest.raises(LayoutError, match=r"(?s)no axis.*why: .*dp=2.*fix: .*dp"):
        Axes((2,), ("dp",)).index(axis)


@pytest.mark.parametrize(("sizes", "names"), [((2, 2), ("a",)), ((2,), ("a", "b")), ((2, 2), ("a", "a"))])
def test_each_axis_has_one_size_and_a_unique_name(sizes, names):
    with pytest.raises(LayoutError, match=r"(?s)why: .*fix: "):
        Axes(sizes, names)
