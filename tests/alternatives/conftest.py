"""Fixtures of the tests of alternatives."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.alternatives.forcing import force_alternatives


@pytest.fixture
def taken() -> Iterator[list[Any]]:
    """The ops that took an alternative so far, where small tensors take them too."""
    with force_alternatives() as ops:
        yield ops
