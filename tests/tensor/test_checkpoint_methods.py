"""`torch.distributed.checkpoint` saves and loads DTensors in any layout, and hooks refuse pending placements."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.comm.launch import Workers
from shardwise.layout import Axes, Layout, Partial, Replicate, Shard, owned
from shardwise.placement_types import _StridedShard

_R = Replicate()
_CASES: list[tuple[tuple[int, ...], list[list[sw.Placement]]]] = [
    ((8, 6), [[Shard(0), Shard(1)], [Shard(0, order=1), Shard(0, order=0)], [_R, Shard(1)]]),
    ((5, 2), [[Shard(0), Shard(0)], [Shard(1), _R]]),
    ((1, 3), [[Shard(0), Shard(1)], [_R, Shard(0)]]),
    ((12, 3), [[_R, Shard(0, factors=(3, 4), factor=1)], [_StridedShard(0, split_factor=2), Shard(0)]]),
    ((6, 4), [[_R, _StridedShard(0, split_factor=3)], [Shard(1), _R], [Shard(1), Shard(0)]]),
    ((), [[_R, _R]]),
    ((0, 3), [[Shard(0), _R], [_R, _R]]),
]


def _full(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def _follows_protocol(x: sw.DTensor) -> bool:
    """Whether the fields of torch's `CheckpointableTensor` (2.15) map the parts of the block into the full tensor."""
    full, block = x.full_tensor(), x.to_local()
    places = zip(x.global_offsets, x.local_offsets, x.local_sizes, strict=True)
    equal = all(
        torch.equal(
            *(
                t[tuple(map(slice, at, map(sum, zip(at, size, strict=True))))]
                for t, at in ((full, a), (block, b))
            )
        )
        for a, b, size in places
    )
    whole = sum(torch.Size(size).numel() for size in x.local_sizes) == block.numel()
    try:
        from torch.distributed.checkpoint.protocol import (
            CheckpointableTensor,
            _get_checkpointable_tensor_chunks,
        )
    except ImportError:  # before 2.15
        return equal and whole and x.global_shape == full.shape
    chunks = _get_checkpointable_tensor_chunks(x)
    return equal and whole and isinstance(x, CheckpointableTensor) and chunks == x.__create_chunk_list__()


def save_and_load(folder: str) -> list[str]:
    """Save each case in each layout and load it in each other; the names of those that differ."""
    import torch.distributed.checkpoint as dcp

    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = sw.init_device_mesh("cpu", (4,))
    state, wrong = {}, []
    for i, (shape, layouts) in enumerate(_CASES):
        for j, placements in enumerate(layouts):
            dtype = torch.bfloat16 if j else torch.float32
            state[f"{i}.{j}"] = sw.distribute_tensor(_full(shape, dtype), mesh, placements)
    dcp.save(state, checkpoint_id=folder)
    wrong += [name for name, x in state.items() if not _follows_protocol(x)]
    for name in state:
        i, j = map(int, name.split("."))
        shape, layouts = _CASES[i]
        dtype = torch.bfloat16 if j else torch.float32
        for on, placements in [(mesh, p) for p in layouts] + [(line, [Shard(0)] if shape else [_R])]:
            target = sw.zeros(shape, dtype=dtype, device_mesh=on, placements=placements)
            dcp.load({name: target}, checkpoint_id=folder)
            if not torch.equal(target.full_tensor(), _full(shape, dtype)):
                wrong.append(f"{name} {placements}")
    dist.barrier()
    return wrong


@pytest.mark.processes
def test_every_layout_is_saved_and_loaded_in_every_other(workers: Workers):
    with tempfile.TemporaryDirectory() as folder:
        assert workers.run(save_and_load, str(Path(folder) / "a")) == [[]] * 4


def test_chunks_are_the_rectangular_runs_of_the_block():
    from shardwise.tensor.checkpoint_methods import _runs

    layout = Layout.of((12, 4), Axes((2,)), (Shard(0, factors=(3, 4), factor=1),))
    assert [_runs(i) for i in owned(layout, (1,))] == [[(2, 0, 2), (6, 2, 2), (10, 4, 2)], [(0, 0, 4)]]


@pytest.mark.parametrize(
    "method", ["__create_chunk_list__", "__create_write_items__", "__get_tensor_shard__"]
)
def test_pending_placements_are_refused(method: str):
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.DTensor.from_local(torch.ones(2), mesh, [Partial()])
        arguments = {"__create_write_items__": ("x", x), "__get_tensor_shard__": (None,)}.get(method, ())
        with pytest.raises(ValueError, match="not supported for DTensor with partial placements"):
            getattr(x, method)(*arguments)
