"""Windows, against looking at each of them."""

from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.windows import Window

windows = st.builds(Window, st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3))
some = st.lists(st.integers(0, 9), min_size=2, max_size=2).map(sorted)


def ends(w, i):
    first = i * w.stride - w.padding
    return first, first + w.dilation * (w.size - 1) + 1


@given(windows, some)
def test_covered_is_from_the_first_position_to_the_last(w, several):
    low, high = w.covered(tuple(several))
    every = [ends(w, i) for i in range(*several)]
    assert high - low == (every[-1][1] - every[0][0] if every else 0)
    assert not every or low == every[0][0]


@given(windows, some, st.integers(0, 9))
def test_touching_are_all_that_reach_into_the_range_and_no_others(w, positions, count):
    low, high = positions
    found = [i for i in range(count) if high > low and ends(w, i)[0] < high and ends(w, i)[1] > low]
    assert list(range(*w.touching((low, high), count))) == found
