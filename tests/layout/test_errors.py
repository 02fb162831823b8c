import pickle

import pytest

from shardwise.layout import Axes, Layout, LayoutError, Shard


class SpecialError(LayoutError):
    pass


def test_the_message_states_what_why_and_fix():
    error = LayoutError("it failed.", why="the reason", fix="do this")
    assert str(error) == "it failed.\n  why: the reason\n  fix: do this"
    assert (error.what, error.why, error.fix) == ("it failed.", "the reason", "do this")


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_it_is_caught_as_either_of_torchs_error_types(kind):
    with pytest.raises(kind):
        raise LayoutError("a", why="b", fix="c")


@pytest.mark.parametrize("kind", [LayoutError, SpecialError])
def test_pickling_keeps_type_and_fields(kind):
    error = pickle.loads(pickle.dumps(kind("a", why="b", fix="c")))
    assert type(error) is kind
    assert (error.what, error.why, error.fix) == ("a", "b", "c")
    assert str(error) == "a\n  why: b\n  fix: c"


@pytest.mark.parametrize("kind", [LayoutError, IndexError, AssertionError, RuntimeError])
def test_a_dim_that_the_tensor_does_not_have_is_each_of_torchs_errors(kind):
    with pytest.raises(kind, match=r"Shard dim 1 is invalid for 1D tensor") as caught:
        Layout.of((16,), Axes((2,)), [Shard(1)])
    assert type(pickle.loads(pickle.dumps(caught.value))) is type(caught.value)
