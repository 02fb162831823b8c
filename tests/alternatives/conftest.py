"""Fixtures of the tests of alternatives."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.alternatives.forcing import force_alternatives

from shardwise.call.trace import trace_calls


@pytest.fixture
def taken() -> Iterator[list[Any]]:
    """The ops that took an alternative so far, where small tensors take them too."""
    with force_alternatives() as ops:
        yield ops


@pytest.fixture
def no_fallback() -> Iterator[None]:
    """Fail if a call of the test takes the fallback, or if no call is traced."""
    routes: list[tuple[str, str]] = []
    with trace_calls(lambda call: routes.append((str(call.op), call.route))):
        yield
    assert routes
    assert [op for op, route in routes if route == "fallback"] == []
