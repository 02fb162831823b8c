"""Hypothesis profiles (fixed examples, or many new ones if SHARDWISE_DEEP=1), and worker processes."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from shardwise.comm.launch import Workers

# No deadline: the time of one example depends more on the machine than on the code.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("deep", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("deep" if os.environ.get("SHARDWISE_DEEP") == "1" else "ci")

torch.set_num_threads(1)  # tensors are small: more threads would only wait for each other


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Four processes in one gloo group, started once per session; they run functions at module level."""
    with Workers(4, timeout=120) as team:
        yield team
