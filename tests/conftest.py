"""How long Hypothesis looks (the same examples each time, or many new ones under SHARDWISE_DEEP=1), and real ranks."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from shardwise.comm.launch import Workers

# No deadline: the time of one example says more about the machine than about the code.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("deep", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("deep" if os.environ.get("SHARDWISE_DEEP") == "1" else "ci")

torch.set_num_threads(
    1
)  # tensors are small here, and threads that wait for each other take the time of others


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Four real processes that form a gloo group, started once; what they run must be at module level."""
    with Workers(4, timeout=120) as team:
        yield team
