"""Hypothesis profiles (fixed examples, or many new ones if SHARDWISE_DEEP=1), and worker processes."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from shardwise.comm.launch import Workers
from shardwise.comm.simulate import forget_world
from shardwise.tensor.inference import inference_tensors

# No deadline: the time of one example depends more on the machine than on the code.
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("deep", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("deep" if os.environ.get("SHARDWISE_DEEP") == "1" else "ci")

torch.set_num_threads(1)  # tensors are small: more threads would only wait for each other


def pytest_collection_finish() -> None:
    """Exclude what is imported from garbage collection: with op_db and transformers a full one takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_inference_tensors() -> None:
    """Begin each test on the shortest path of `dispatch`, which a process leaves when it uses inference mode."""
    inference_tensors.clear()


@pytest.fixture(scope="session")
def team() -> Iterator[Workers]:
    with Workers(4, timeout=120) as team:
        yield team


@pytest.fixture
def workers(team: Workers) -> Iterator[Workers]:
    """Four processes in one gloo group, started once per session; they run functions at module level."""
    yield team
    team.run(destroy_groups)


def destroy_groups() -> None:
    """Destroy the process groups of meshes: each has threads that poll, about 0.1 % of a core each, for ever.

    Where many remain, because something refers to them, the world is destroyed as well: the next run starts new processes.
    """
    forget_world()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD and not group.group_name.startswith("shardwise_"):
            dist.destroy_process_group(group)
    gc.collect()
    threads = Path("/proc/self/task")
    if threads.exists() and len(list(threads.iterdir())) > 64:
        dist.destroy_process_group()
