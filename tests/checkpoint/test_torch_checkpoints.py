"""torch.distributed.checkpoint with our files, and its files through ours; nothing of a pickle is executed."""

from __future__ import annotations

import io
import os
import pickle
import random
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.checkpoint.test_save_and_load import drawn, mesh_of, state_on, whole
from tests.checkpoint.test_training_state import Net
from tests.values import dense_tensor, random_layout, same_bits, tensor
from torch import nn

import shardwise as sw
from shardwise import checkpoint
from shardwise.comm import axes_of

pytestmark = pytest.mark.filterwarnings("ignore")


def small_state():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    net(torch.arange(7)).sum().backward()
    optimizer.step()
    return net, optimizer


def test_torchs_checkpoint_of_one_process_loads(tmp_path):
    net, optimizer = small_state()
    state = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "n": {"step": 3, "list": [1, 2], "text": "a", "mixed": [torch.ones(2), 4]},
        "empty": torch.zeros(0, 3),
    }
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    found = checkpoint.load(tmp_path / "c")
    assert found["n"]["step"] == 3
    assert found["n"]["list"] == [1, 2]
    assert torch.equal(found["n"]["mixed"][0], torch.ones(2))
    with sw.simulate(3):
        other = Net()
        sw.parallel.parallelize_module(other, mesh_of((3,)), {"up": "colwise", "down": "rowwise"})
        again = torch.optim.AdamW(other.parameters(), lr=0.1)
        into = {"model": other, "optimizer": again, "n": {}, "empty": torch.ones(0, 3)}
        checkpoint.load(tmp_path / "c", into=into)
        for name, value in net.state_dict().items():
            assert torch.equal(whole(other.state_dict()[name]), value)
        assert again.param_groups[0]["lr"] == 0.5
        for a, b in zip(optimizer.param_groups[0]["params"], again.param_groups[0]["params"], strict=True):
            if a in optimizer.state:
                assert torch.equal(optimizer.state[a]["exp_avg"], whole(again.state[b]["exp_avg"]))


def test_our_writer_and_reader_on_one_process(tmp_path):
    net, _ = small_state()
    state = {
        "model": net.state_dict(),
        "n": {"step": 3, "list": [1, 2]},
        "empty": torch.zeros(0, 3),
        "c": torch.ones(2, dtype=torch.complex128),
    }
    dcp.save(state, storage_writer=checkpoint.StorageWriter(tmp_path / "c"), no_dist=True)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["checkpoint.json", "data-00000.safetensors"]
    found = checkpoint.load(tmp_path / "c")
    assert found["n"] == {"step": 3, "list": [1, 2]}
    assert all(torch.equal(found["model"][k], v) for k, v in net.state_dict().items())
    into = {
        "model": Net().state_dict(),
        "n": {"step": 0, "list": []},
        "empty": torch.zeros(0, 3),
        "c": torch.zeros(2, dtype=torch.complex128),
    }
    dcp.load(into, storage_reader=checkpoint.StorageReader(tmp_path / "c"), no_dist=True)
    assert into["n"] == {"step": 3, "list": [1, 2]}
    assert all(torch.equal(into["model"][k], v) for k, v in net.state_dict().items())
    assert torch.equal(into["c"], state["c"])
    checkpoint.save(
        {"model": net, "n": {"step": 4, "list": [5]}, "empty": torch.zeros(0, 3), "c": state["c"]},
        tmp_path / "d",
    )
    dcp.load(into, storage_reader=checkpoint.StorageReader(tmp_path / "d"), no_dist=True)
    assert into["n"] == {"step": 4, "list": [5]}
    data = (tmp_path / "d" / "data-00000.safetensors").read_bytes()
    (tmp_path / "d" / "data-00000.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(BaseException, match="do not match their checksum"):
        dcp.load(into, storage_reader=checkpoint.StorageReader(tmp_path / "d"), no_dist=True)


def on_ranks(path):
    """torch's writer and ours, read by torch's interface and by ours, in other layouts."""
    warnings.simplefilter("ignore")
    rng = random.Random(4)
    tensors = drawn(rng, 10)
    mesh = mesh_of((2, 2))
    state = {"x": state_on(mesh, tensors, rng), "n": 5}
    dcp.save(state, storage_writer=checkpoint.StorageWriter(path / "ours"))
    dcp.save(state, checkpoint_id=path / "torch")
    target = mesh_of((4,))
    for name in ("ours", "torch"):
        into = {"x": state_on(target, tensors, rng, values=False), "n": 0}
        checkpoint.load(path / name, into=into)
        assert into["n"] == 5
        check(into["x"], tensors)
    into = {"x": state_on(target, tensors, rng, values=False), "n": 0}
    dcp.load(into, storage_reader=checkpoint.StorageReader(path / "ours"))
    check(into["x"], tensors)
    checkpoint.save(state, path / "plain")
    into = {"x": state_on(target, tensors, rng, values=False), "n": 0}
    dcp.load(into, storage_reader=checkpoint.StorageReader(path / "plain"))
    check(into["x"], tensors)
    assert into["n"] == 5


def check(found, tensors):
    for i, (shape, dtype) in enumerate(tensors):
        assert same_bits(found[f"t{i}"].full_tensor(), dense_tensor(shape, dtype, i)), i


@pytest.mark.processes
def test_on_processes(workers, tmp_path):
    workers.run(on_ranks, tmp_path)


SIZES = [(5, 3), (7,), (3, 5), (2, 2), (0, 4), (13, 6)]


def save_by_torch(path):
    """torch's own DTensors, uneven and with empty blocks, saved by torch."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements = [
        (Shard(0), Replicate()),
        (Replicate(), Shard(0)),
        (Shard(0), Shard(1)),
        (Shard(0), Shard(0)),
    ]
    state = {}
    for i, size in enumerate(SIZES):
        for j, (a, b) in enumerate(placements):
            if len(size) > 1 or b != Shard(1):
                full = torch.arange(float(torch.Size(size).numel())).view(size) + i
                state[f"x{i}.{j}"] = distribute_tensor(full, mesh, [a, b])
    dcp.save({"model": state, "step": 7}, checkpoint_id=path)
    return sorted(state)


def load_ours(path, names):
    mesh = mesh_of((4,))
    into = {}
    for name in names:
        i = int(name[1 : name.index(".")])
        dim = i % len(SIZES[i])
        into[name] = sw.distribute_tensor(torch.full(SIZES[i], -1.0), mesh, [sw.Shard(dim)])
    state = {"model": into, "step": 0}
    checkpoint.load(path, into=state)
    for name, x in into.items():
        i = int(name[1 : name.index(".")])
        full = torch.arange(float(torch.Size(SIZES[i]).numel())).view(SIZES[i]) + i
        assert torch.equal(x.full_tensor(), full), name
    return state["step"]


@pytest.mark.processes
def test_uneven_tensors_of_torch_load(workers, tmp_path):
    names = workers.run(save_by_torch, tmp_path / "c")[0]
    assert len(names) > 20
    assert workers.run(load_ours, tmp_path / "c", names) == [7] * 4


# ---- pickles


class Evil:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    "evil",
    [
        Evil(os.system, "touch /tmp/shardwise-executed"),
        Evil(eval, "1"),
        Evil(getattr, torch.Size, "mro"),
        Evil(torch.load, "x"),
        Evil(nn.Linear, 2, 2),
    ],
    ids=["system", "eval", "getattr", "load", "class"],
)
def test_nothing_in_a_pickle_is_executed(tmp_path, evil):
    dcp.save({"a": torch.ones(3), "n": 1}, checkpoint_id=tmp_path / "c", no_dist=True)
    path = tmp_path / "c" / ".metadata"
    original = path.read_bytes()
    path.write_bytes(pickle.dumps(evil))
    with pytest.raises(checkpoint.CorruptCheckpointError, match="which no metadata has"):
        checkpoint.load(tmp_path / "c")
    path.write_bytes(original)
    metadata = pickle.loads(original)
    info = next(v for k, v in metadata.storage_data.items() if k.fqn == "n")
    data = io.BytesIO()
    torch.save(evil, data)
    file = tmp_path / "c" / info.relative_path
    info.offset, info.length = file.stat().st_size, len(data.getvalue())
    file.write_bytes(file.read_bytes() + data.getvalue())
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(checkpoint.CorruptCheckpointError):
        checkpoint.load(tmp_path / "c")
    assert not os.path.exists("/tmp/shardwise-executed")


def test_fuzzed_torch_checkpoints_give_an_error_or_what_was_saved(tmp_path):
    state = {"a": torch.arange(6.0).view(2, 3), "n": {"step": 3}}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    rng, files = random.Random(0), [p for p in (tmp_path / "c").iterdir() if p.is_file()]
    contents = {p: p.read_bytes() for p in files}
    errors = 0
    for _ in range(int(os.environ.get("SHARDWISE_FUZZ", "20000")) // 50):
        file = rng.choice([p for p in files if p.name == ".metadata"] * 2 + files)
        changed = bytearray(contents[file])
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        file.write_bytes(changed[: rng.choice([len(changed)] * 3 + [rng.randrange(len(changed))])])
        try:
            checkpoint.load(tmp_path / "c")
        except checkpoint.CheckpointError:
            errors += 1
        file.write_bytes(contents[file])
    assert errors > 100
    assert checkpoint.load(tmp_path / "c")["n"] == {"step": 3}


def test_a_layout_that_torch_cannot_write_down_goes_through_its_interface(tmp_path):
    with sw.simulate(2):
        mesh = mesh_of((2,))
        layout = random_layout(random.Random(1), axes_of(mesh), (12, 4), ())
        x = tensor(torch.arange(48.0).view(12, 4), layout, mesh)
        checkpoint.save({"x": x}, tmp_path / "c")
    into = {"x": torch.zeros(12, 4)}
    dcp.load(into, storage_reader=checkpoint.StorageReader(tmp_path / "c"), no_dist=True)
    assert torch.equal(into["x"], torch.arange(48.0).view(12, 4))
