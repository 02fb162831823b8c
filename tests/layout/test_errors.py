import pickle

import pytest

from shardwise.layout import LayoutError


def test_an_error_says_what_why_and_fix():
    error = LayoutError("it is so.", why="of this", fix="do that")
    assert str(error) == "it is so.\n  why: of this\n  fix: do that"
    assert (error.what, error.why, error.fix) == ("it is so.", "of this", "do that")


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_programs_that_catch_either_of_torchs_errors_catch_it(kind):
    with pytest.raises(kind):
        raise LayoutError("a", why="b", fix="c")


def test_it_comes_back_whole_from_another_process():
    error = pickle.loads(pickle.dumps(LayoutError("a", why="b", fix="c")))
    assert type(error) is LayoutError
    assert (error.what, error.why, error.fix) == ("a", "b", "c")
    assert str(error) == "a\n  why: b\n  fix: c"
