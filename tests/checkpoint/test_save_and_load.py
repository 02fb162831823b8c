"""States saved from drawn layouts and loaded into others, in simulation and on processes, and what was read and written."""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from tests import strategies
from tests.values import dense_tensor, random_layout, same_bits, tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.grid import grid_of
from shardwise.checkpoint.loading import Loading
from shardwise.checkpoint.save_plan import Stored, plan_save
from shardwise.comm import axes_of, coord_of, counting, is_simulated, members_of
from shardwise.layout import Axes, Layout, Shard, block_shape, owned
from shardwise.torch_internals.connections import world_store

DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint8,
]
MESHES = [(1,), (2,), (3,), (4,), (2, 2), (2, 3), (1, 4), (2, 2, 2)]


def mesh_of(shape):
    return sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp", "cp")[: len(shape)])


def drawn(rng, count):
    """Shapes and dtypes of tensors."""
    sizes = [0, 1, 2, 3, 4, 5, 6, 8, 12, 13, 16]
    return [
        (tuple(rng.choice(sizes) for _ in range(rng.choice([0, 1, 2, 2, 3]))), rng.choice(DTYPES))
        for _ in range(count)
    ]


def state_on(mesh, tensors, rng, values=True):
    """Those tensors on a mesh in drawn layouts, with their values or with others."""
    out = {}
    for i, (shape, dtype) in enumerate(tensors):
        layout = random_layout(rng, axes_of(mesh), shape, ())
        out[f"t{i}"] = tensor(dense_tensor(shape, dtype, i if values else 1000 + i), layout, mesh)
    return out


def whole(x):
    full = x.full_tensor() if isinstance(x, sw.DTensor) else x
    return full.ranks[-1] if isinstance(full, sw.PerRank) else full


@given(strategies.layouts(partial=False))
def test_the_cells_of_a_layout_are_what_the_coords_own(layout):
    grid = grid_of(layout)
    for number in range(layout.axes.count):
        coord = layout.axes.coord(number)
        held = set()
        for cell in np.flatnonzero((grid.owners == number).any(axis=1)):
            offset, shape = grid.box(int(cell))
            held |= {tuple(o + i for o, i in zip(offset, at, strict=True)) for at in np.ndindex(*shape)}
        assert held == set(itertools.product(*owned(layout, coord)))


@pytest.mark.parametrize("seed", range(40 if DEEP else 8))
def test_any_layout_loads_into_any_other_and_reads_its_bytes(tmp_path, seed):
    rng = random.Random(seed)
    tensors = drawn(rng, 25)
    source, target = rng.choice(MESHES), rng.choice(MESHES)
    with sw.simulate(math.prod(source)):
        state = state_on(mesh_of(source), tensors, rng)
        checkpoint.save({"x": state, "n": seed}, tmp_path / "c")
    total = sum(math.prod(s) * d.itemsize for s, d in tensors)
    stored = sum(f.stat().st_size for f in tmp_path.glob("c/*.safetensors"))
    headers = sum(8 + int.from_bytes(f.read_bytes()[:8], "little") for f in tmp_path.glob("c/*.safetensors"))
    assert stored - headers == total  # what is replicated is written once
    with sw.simulate(math.prod(target)):
        mesh = mesh_of(target)
        into = {"x": state_on(mesh, tensors, rng, values=False), "n": -1}
        loading = Loading(tmp_path / "c")
        assert loading.run(into, random=True) is into
        assert into["n"] == seed
        for i, (shape, dtype) in enumerate(tensors):
            x = into["x"][f"t{i}"]
            for rank, coord in members_of(mesh).items():
                expected = dense_tensor(shape, dtype, i)
                for d, held in enumerate(owned(x.sharding, coord)):
                    expected = expected.index_select(d, torch.tensor(list(held), dtype=torch.long))
                assert same_bits(x.to_local().of_rank(rank), expected)
        blocks = sum(
            math.prod(block_shape(x.sharding, c)) * x.dtype.itemsize
            for x in into["x"].values()
            for c in members_of(mesh).values()
        )
        assert loading.reader.data_bytes == blocks
    full = checkpoint.load(tmp_path / "c")
    for i, (shape, dtype) in enumerate(tensors):
        assert same_bits(full["x"][f"t{i}"], dense_tensor(shape, dtype, i))


def test_a_plan_for_1024_ranks_and_1000_tensors_takes_less_than_a_second():
    axes = Axes((32, 32), ("dp", "tp"))
    ranks = np.arange(1024)[None]
    choices = [
        (Shard(0), Shard(1)),
        (Shard(0), sw.Replicate()),
        (Shard(0), Shard(0)),
        (sw.Replicate(), sw.Replicate()),
    ]
    stored = {
        f"w{i}": Stored(Layout.of((1000 + i, 2000 - i), axes, choices[i % 4]), ranks, torch.float32)
        for i in range(1000)
    }
    plan_save({"w": stored["w0"]}, 1024)
    start = time.process_time()
    plan = plan_save(stored, 1024)
    items = plan.items_of(517)
    took = time.process_time() - start
    assert took < 1
    assert len(items) > 500
    loads = [plan.bytes_of(r) for r in (0, 1, 500, 1023)]
    assert sum(math.prod(s.layout.shape) * 4 for s in stored.values()) / 1024 == pytest.approx(
        sum(loads) / 4, rel=0.2
    )


def test_replicated_tensors_are_spread_over_the_ranks(tmp_path):
    with sw.simulate(4):
        mesh = mesh_of((4,))
        state = {str(i): sw.distribute_tensor(torch.ones(100), mesh, [sw.Replicate()]) for i in range(8)}
        checkpoint.save(state, tmp_path / "c")
    sizes = [f.stat().st_size for f in sorted((tmp_path / "c").glob("*.safetensors"))]
    assert len(sizes) == 4
    assert max(sizes) == min(sizes)


# ---- values


class Position:
    """An object with a state of its own."""

    def __init__(self, at=0):
        self.at = at

    def state_dict(self):
        return {"at": self.at, "seen": torch.arange(self.at), "sizes": Counter({3: 2})}

    def load_state_dict(self, state):
        assert torch.equal(state["seen"], torch.arange(state["at"]))
        assert state["sizes"] == Counter({3: 2})
        self.at = state["at"]


def test_plain_values_come_back_as_they_were(tmp_path):
    values = {
        "none": None, "nan": float("inf"), "big": 2**80, "text": "ä\0", "bytes": b"\0\xff", "tuple": (1, [2, (3,)]),
        "map": {1: "a", None: "b", (1, 2): "c"}, "$": {"$": 1}, "dtype": torch.bfloat16, "numpy": np.float64(0.5),
        "empty": {}, "flag": True,
    }  # fmt: skip
    state = {"v": values, "position": Position(5), "list": [torch.ones(2), 3]}
    checkpoint.save(state, tmp_path / "c")
    into = {"v": {}, "position": Position(), "list": [torch.zeros(2), 0]}
    first = into["list"][0]
    checkpoint.load(tmp_path / "c", into=into)
    assert into["v"] == values
    assert type(into["v"]["flag"]) is bool
    assert into["position"].at == 5
    assert into["list"][0] is first
    assert torch.equal(first, torch.ones(2))
    assert into["list"][1] == 3


@pytest.mark.parametrize("value", [lambda: 1, object(), np.zeros(3), {1, 2}, {Position: 1}])
def test_other_values_are_refused_with_a_way_out(tmp_path, value):
    with pytest.raises(checkpoint.CheckpointStateError, match="fix:"):
        checkpoint.save({"a": {"b": value}}, tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_nested_tensors_are_refused(tmp_path):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    with pytest.raises(checkpoint.CheckpointStateError, match="nested"):
        checkpoint.save({"x": nested}, tmp_path / "c")


def test_threads_that_save_to_one_path_do_not_mix_their_files(tmp_path):
    def save(value):
        for _ in range(4):
            checkpoint.save({"x": torch.full((50,), value)}, tmp_path / "c")

    with ThreadPoolExecutor() as threads:
        list(threads.map(save, [0.0, 1.0, 2.0]))
    assert len(checkpoint.load(tmp_path / "c")["x"].unique()) == 1


def test_pending_and_simulated_values_are_refused(tmp_path):
    with sw.simulate(2):
        x = sw.DTensor.from_local(torch.ones(2), mesh_of((2,)), [sw.Partial()])
        with pytest.raises(checkpoint.CheckpointStateError, match="pending"):
            checkpoint.save({"x": x}, tmp_path / "c")
        with pytest.raises(checkpoint.CheckpointStateError, match="each simulated rank"):
            checkpoint.save({"x": x.to_local() + sw.per_rank(torch.tensor)}, tmp_path / "c")


def test_keys_and_shapes_that_do_not_fit_are_all_named(tmp_path):
    checkpoint.save({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(2), "n": 1}, tmp_path / "c")
    into = {
        "a": torch.zeros(2),
        "b": torch.zeros(4),
        "d": torch.zeros(1),
        "n": 0,
        "c": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(checkpoint.CheckpointMismatchError) as error:
        checkpoint.load(tmp_path / "c", into=into)
    for text in ("b has shape (3,) in the checkpoint, not (4,)", "d is missing", "c has dtype"):
        assert text in str(error.value)
    assert into["n"] == 0
    assert not into["a"].any()
    del into["b"], into["c"]
    checkpoint.load(tmp_path / "c", into=into, strict=False)
    assert into["n"] == 1
    assert into["a"].all()


def test_floats_are_converted(tmp_path):
    checkpoint.save({"x": torch.randn(5)}, tmp_path / "c")
    x = checkpoint.load(tmp_path / "c", into={"x": torch.zeros(5, dtype=torch.bfloat16)})["x"]
    assert torch.equal(x, checkpoint.load(tmp_path / "c")["x"].bfloat16())


# ---- on processes


def save_here(path, seed, shape):
    rng = random.Random(seed)
    mesh = mesh_of(shape)
    checkpoint.save({"x": state_on(mesh, drawn(rng, 12), rng), "n": seed}, path)


def load_here(path, seed, shape):
    rng = random.Random(seed)
    tensors = drawn(rng, 12)
    mesh = mesh_of(shape)
    into = {"x": state_on(mesh, tensors, random.Random(seed + 1), values=False), "n": -1}
    loading = Loading(path)
    loading.run(into, random=True)
    coord = coord_of(mesh)
    for i, (shape_i, dtype) in enumerate(tensors):
        x = into["x"][f"t{i}"]
        expected = dense_tensor(shape_i, dtype, i)
        for d, held in enumerate(owned(x.sharding, coord)):
            expected = expected.index_select(d, torch.tensor(list(held), dtype=torch.long))
        assert same_bits(x.to_local(), expected)
    blocks = sum(math.prod(block_shape(x.sharding, coord)) * x.dtype.itemsize for x in into["x"].values())
    assert loading.reader.data_bytes == blocks
    return into["n"], is_simulated()


def count_collectives(path):
    """The collectives of saving and loading in other layouts, by torch's own mode of counting and by ours."""
    rng = random.Random(3)
    tensors, seen = drawn(rng, 8), []
    state = {"x": state_on(mesh_of((2, 2)), tensors, rng)}
    into = {"x": state_on(mesh_of((4,)), tensors, rng, values=False)}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.extend([str(func)] if "c10d" in str(func) else [])
            return func(*args, **(kwargs or {}))

    with Count(), counting() as ledger:
        checkpoint.save(state, path)
        checkpoint.load(path, into=into)
        checkpoint.async_save(state, path).wait()
        during = len(seen), ledger.collectives
        torch.distributed.all_reduce(torch.ones(1))  # the mode sees collectives
    return during, len(seen)


@pytest.mark.processes
def test_nothing_is_communicated(workers, tmp_path):
    assert workers.run(count_collectives, tmp_path / "c") == [((0, 0), 1)] * 4


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_named(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(checkpoint.CheckpointWriteError, match="Permission denied"):
            checkpoint.save({"x": torch.ones(2)}, tmp_path / "c")
    finally:
        tmp_path.chmod(0o700)


def test_a_file_system_that_refuses_to_write_is_named(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(checkpoint.CheckpointWriteError, match="Permission denied"):
        checkpoint.save({"x": torch.ones(2)}, tmp_path / "c")


def error_of(fn, *args):
    try:
        fn(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def save_different_keys(path):
    rank = torch.distributed.get_rank()
    x = sw.distribute_tensor(torch.ones(4), mesh_of((4,)), [sw.Shard(0)])
    state = {"x": x, "y" if rank != 2 else "z": torch.ones(2)}
    return error_of(checkpoint.save, state, path), error_of(checkpoint.save, {"x": x, "rank": rank}, path)


class Unreadable:
    def state_dict(self):
        raise KeyError("step")


def save_unreadable(path, rank):
    """The first save of a world, whose state one rank cannot read."""
    if torch.distributed.get_rank() == 0:
        world_store().delete_key("shardwise/checkpoint/token")
    torch.distributed.barrier()
    return error_of(checkpoint.save, {"x": Unreadable() if torch.distributed.get_rank() == rank else 1}, path)


def save_on_a_full_disk(path):
    """Rank 2 cannot write; the checkpoint from before stays."""
    x = sw.distribute_tensor(torch.arange(4.0), mesh_of((4,)), [sw.Shard(0)])
    checkpoint.save({"x": x}, path)
    other = x + 1
    write = os.write

    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    if torch.distributed.get_rank() == 2:
        os.write = full
    try:
        first = error_of(checkpoint.save, {"x": other}, path)
    finally:
        os.write = write
    into = {"x": torch.zeros_like(x)}
    checkpoint.load(path, into=into)
    assert torch.equal(into["x"].to_local(), x.to_local())
    checkpoint.save({"x": x + 2}, path)
    checkpoint.load(path, into=into)
    assert torch.equal(into["x"].to_local(), x.to_local() + 2)
    return first


@pytest.mark.processes
def test_on_processes(workers, tmp_path):
    for seed, (source, target) in enumerate([((4,), (2, 2)), ((2, 2), (4,)), ((1, 4), (2, 2))]):
        workers.run(save_here, tmp_path / str(seed), seed, source)
        assert workers.run(load_here, tmp_path / str(seed), seed, target) == [(seed, False)] * 4
    with sw.simulate(6):
        save_here(tmp_path / "six", 9, (2, 3))
    workers.run(load_here, tmp_path / "six", 9, (2, 2))


@pytest.mark.processes
def test_errors_are_the_same_on_all_ranks(workers, tmp_path):
    found = workers.run(save_different_keys, tmp_path / "c")
    assert len(set(found)) == 1
    (kind, text), (_, values) = found[0]
    assert kind == "CheckpointStateError"
    assert "y: torch.float32 [2] on rank 0, not on rank 2" in text
    assert "different values on rank 0 and rank 1" in values
    for rank in (0, 3):
        (found,) = set(workers.run(save_unreadable, tmp_path / "c", rank))
        assert f"[rank {rank}] The state could not be read: KeyError: 'step'" in found[1]
    found = workers.run(save_on_a_full_disk, tmp_path / "c")
    assert len(set(found)) == 1
    assert found[0][0] == "CheckpointWriteError"
    assert "[rank 2]" in found[0][1]
    assert "No space left" in found[0][1]
