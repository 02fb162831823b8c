"""Ranges of windows, compared with those of each window."""

from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.windows import Window

windows = st.builds(Window, st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3))
ranges = st.lists(st.integers(0, 9), min_size=2, max_size=2).map(sorted)


def ends(w, i):
    first = i * w.stride - w.padding
    return first, first + w.dilation * (w.size - 1) + 1


@given(windows, ranges)
def test_covered_is_from_the_first_position_to_the_last(w, window_range):
    low, high = w.covered(tuple(window_range))
    each = [ends(w, i) for i in range(*window_range)]
    assert high - low == (each[-1][1] - each[0][0] if each else 0)
    assert not each or low == each[0][0]


@given(windows, ranges, st.integers(0, 9))
def test_touching_are_the_windows_that_intersect_the_range(w, positions, count):
    low, high = positions
    found = [i for i in range(count) if high > low and ends(w, i)[0] < high and ends(w, i)[1] > low]
    assert list(range(*w.touching((low, high), count))) == found
