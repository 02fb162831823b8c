"""What users of other libraries reported of checkpoints, by the numbers of the list of regressions: 111 to 114, 116 to 122, 124, 126."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.values import same_bits
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

import shardwise as sw
from shardwise import DTensor, Replicate, Shard, checkpoint
from shardwise.checkpoint.loading import Loading
from shardwise.comm import members_of
from shardwise.layout import block_shape
from shardwise.parallel import DataParallelMeshDims, fully_shard, parallelize_module

ROOT = Path(__file__).parents[2]


def line(size):
    return sw.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))


def square():
    return sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def whole(x):
    full = x.full_tensor() if isinstance(x, DTensor) else x
    return full.ranks[-1].clone() if isinstance(full, sw.PerRank) else full


def numbers(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


@pytest.mark.parametrize("shape", [(5,), (1,), (0,), (2, 3), (7, 5)], ids=str)
@pytest.mark.parametrize(
    "placements",
    [[Shard(0), Shard(0)], [Replicate(), Shard(0)], [Shard(0), Replicate()], [Shard(-1), Shard(0)]],
    ids=str,
)
def test_r111_offsets_of_uneven_empty_and_strided_blocks(tmp_path, shape, placements):
    if placements[0] == Shard(-1) and len(shape) == 1:
        placements = [Shard(0), Replicate()]
    with sw.simulate(4):
        x = sw.distribute_tensor(numbers(*shape), square(), placements)
        strided = x.redistribute(tp=Replicate()).redistribute(tp=Shard(0))  # the other order of axes
        checkpoint.save({"x": x, "y": strided}, tmp_path / "c")
    for size in (1, 3):
        with sw.simulate(size):
            into = {
                k: sw.distribute_tensor(torch.zeros(shape), line(size), [Shard(len(shape) - 1)]) for k in "xy"
            }
            checkpoint.load(tmp_path / "c", into=into)
            assert all(torch.equal(whole(x), numbers(*shape)) for x in into.values())


def test_r112_the_shape_is_the_global_one_and_optimizer_state_is_distributed(tmp_path):
    with sw.simulate(2):
        blocks = sw.per_rank(lambda rank: numbers(3 - rank) + 10 * rank)
        parameter = nn.Parameter(
            DTensor.from_local(blocks, line(2), [Shard(0)], shape=torch.Size([5]), stride=(1,))
        )
        optimizer = torch.optim.Adam([parameter])
        parameter.sum().backward()
        optimizer.step()
        checkpoint.save({"p": parameter, "o": optimizer}, tmp_path / "c")
    text = json.loads((tmp_path / "c" / "checkpoint.json").read_bytes())["content"]
    assert text["tensors"]["p"]["shape"] == [5]
    with sw.simulate(8):  # three ranks have no elements, and no state of their own
        parameter = nn.Parameter(sw.distribute_tensor(torch.zeros(5), line(8), [Shard(0)]))
        optimizer = torch.optim.Adam([parameter])
        checkpoint.load(tmp_path / "c", into={"p": parameter, "o": optimizer})
        state = optimizer.state[parameter]
        assert type(state["exp_avg"]) is DTensor
        assert state["exp_avg"].placements == (Shard(0),)
        assert torch.allclose(whole(state["exp_avg"]), torch.full((5,), 0.1))
        parameter.sum().backward()
        optimizer.step()


def test_r113_the_state_of_frozen_parameters_is_kept_and_missing_state_is_not_made_up(tmp_path):
    def build(size):
        torch.manual_seed(0)
        net = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=line(size))
        return net, torch.optim.AdamW(net.parameters(), lr=0.1)

    with sw.simulate(2):
        net, optimizer = build(2)
        net[0](sw.distribute_tensor(torch.ones(2, 4), line(2), [Shard(0)])).sum().backward()
        optimizer.step()  # the second layer has no state yet
        net[0].weight.requires_grad_(False)
        checkpoint.save({"net": net, "optimizer": optimizer}, tmp_path / "c")
        expected = {k: whole(v) for k, v in optimizer.state[net[0].weight].items()}
    with sw.simulate(3):
        net, optimizer = build(3)
        net[0].weight.requires_grad_(False)
        checkpoint.load(tmp_path / "c", into={"net": net, "optimizer": optimizer})
        assert {k: whole(v).tolist() for k, v in optimizer.state[net[0].weight].items()} == {
            k: v.tolist() for k, v in expected.items()
        }
        assert not optimizer.state.get(net[1].weight)
        net(sw.distribute_tensor(torch.ones(3, 4), line(3), [Shard(0)])).sum().backward()
        optimizer.step()


def test_r114_the_whole_state_of_fsdp_and_tp_is_whole(tmp_path):
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    expected = {k: v.clone() for k, v in dense.state_dict().items()}
    with sw.simulate(4):
        mesh = square()
        parallelize_module(dense, mesh["tp"], {"0": "colwise", "1": "rowwise"})
        fully_shard(dense, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        optimizer = torch.optim.Adam(dense.parameters())
        x = sw.distribute_tensor(torch.ones(2, 4), mesh, [Shard(0), Replicate()])
        checkpoint.save({"model": dense, "optimizer": optimizer}, tmp_path / "before")
        dense(x).sum().backward()
        optimizer.step()
        checkpoint.save({"model": dense, "optimizer": optimizer}, tmp_path / "after")
    before, after = (checkpoint.load(tmp_path / name) for name in ("before", "after"))
    assert all(torch.equal(before["model"][k], v) for k, v in expected.items())
    for name, value in expected.items():
        average = after["optimizer"]["state"][name]["exp_avg"]
        assert type(average) is torch.Tensor
        assert average.shape == value.shape


def test_r116_the_step_that_is_recorded_is_that_of_the_values(tmp_path):
    state = {"x": torch.zeros(1000), "step": 0}
    with checkpoint.CheckpointManager(tmp_path, keep=20, every=1) as manager:
        for step in range(1, 9):
            state["x"].fill_(step)
            state["step"] = step
            manager.save_if_due(state, step)
    for step in range(1, 9):
        found = checkpoint.load(tmp_path / f"step-{step:08d}")
        assert found["step"] == step
        assert (found["x"] == step).all()


FAILING = """
    import os, torch
    from shardwise import checkpoint

    os.fsync = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    checkpoint.async_save({"x": torch.ones(4)}, "c")
"""


def test_r116_a_write_that_fails_in_the_background_is_not_swallowed(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(FAILING))
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, program], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "CheckpointWriteError" in done.stderr
    assert "No space left on device" in done.stderr
    assert not (tmp_path / "c").exists()


def test_r117_the_last_good_one_is_there_until_the_next_is_durable(tmp_path, monkeypatch):
    with checkpoint.CheckpointManager(tmp_path, keep=1, background=False) as manager:
        manager.save({"x": torch.ones(2)}, 1)
        events = []
        real = {name: getattr(os, name) for name in ("fsync", "rename")}
        monkeypatch.setattr(os, "fsync", lambda f: (events.append("sync"), real["fsync"](f))[1])
        monkeypatch.setattr(os, "rename", lambda a, b: (events.append(Path(b).name), real["rename"](a, b))[1])
        manager.save({"x": torch.zeros(2)}, 2)
        monkeypatch.undo()
        new, removed = events.index("step-00000002"), events.index(".step-00000001.removed.partial")
        assert events[:new].count("sync") >= 2  # the data, and the metadata
        assert "sync" in events[new:removed]
        assert checkpoint.latest(tmp_path).name == "step-00000002"


def test_r118_experts_are_exported_whole_in_their_order_and_dtype(tmp_path):
    experts = {f"experts.{i}.w": numbers(2, 3) * (i + 1) for i in range(12)}
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        stacked = sw.distribute_tensor(torch.stack(list(experts.values())), mesh, [Replicate(), Shard(0)])
        state = {name: stacked[i] for i, name in enumerate(experts)} | {"stacked": stacked}
        checkpoint.export(state, tmp_path, dtype=torch.bfloat16)
    found = load_file(tmp_path / "model.safetensors")
    assert all(t.dtype == torch.bfloat16 for t in found.values())
    for i, (name, value) in enumerate(experts.items()):
        assert torch.equal(found[name].float(), value)
        assert torch.equal(found["stacked"][i].float(), value)


def draws(size, count):
    mesh = line(size)
    return [whole(F.dropout(sw.ones(12, device_mesh=mesh, placements=[Shard(0)]))) for _ in range(count)]


def test_r119_the_random_stream_goes_on_with_any_number_of_ranks(tmp_path):
    with sw.simulate(4):
        sw.manual_seed(3)
        draws(4, 2)
        checkpoint.save({}, tmp_path / "c")
        expected = draws(4, 3)
    for size in (1, 2, 3, 6):
        with sw.simulate(size):
            sw.manual_seed(99)
            checkpoint.load(tmp_path / "c", into={})
            assert all(same_bits(a, b) for a, b in zip(draws(size, 3), expected, strict=True))


class Sampler:
    """Batches of an epoch after the other."""

    def __init__(self):
        self.epoch, self.position = 0, 0

    def batch(self):
        found = (self.epoch, self.position)
        self.position += 1
        if self.position == 5:
            self.epoch, self.position = self.epoch + 1, 0
        return found

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state):
        vars(self).update(state)


def test_r120_the_position_in_the_data_after_several_resumes(tmp_path):
    seen = []
    for _ in range(4):  # lives
        state = {"sampler": Sampler(), "step": 0}
        with checkpoint.CheckpointManager(tmp_path, every=3) as manager:
            manager.load(state)
            for _ in range(4):
                del seen[state["step"] :]
                seen.append(state["sampler"].batch())
                state["step"] += 1
                manager.save_if_due(state, state["step"])
    assert seen == [divmod(i, 5) for i in range(len(seen))]
    assert len(seen) > 9


def losses(path, size, steps, resume):
    torch.manual_seed(0)
    net = fully_shard(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), mesh=line(size))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    state = {"net": net, "optimizer": optimizer}
    if resume:
        checkpoint.load(path, into=state)
    x = sw.distribute_tensor(numbers(12, 6).sin(), line(size), [Shard(0)])
    out = []
    for _ in range(steps):
        loss = (net(x) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(whole(loss).item())
    if not resume:
        checkpoint.save(state, path)
    return out


def test_r121_another_world_size_goes_on_with_the_same_loss(tmp_path):
    with sw.simulate(1):
        expected = losses(tmp_path / "all", 1, 8, resume=False)
    with sw.simulate(4):
        first = losses(tmp_path / "c", 4, 4, resume=False)
    for size in (1, 3, 6):
        with sw.simulate(size):
            rest = losses(tmp_path / "c", size, 4, resume=True)
        assert first + rest == pytest.approx(expected, rel=1e-5)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_r122_nothing_is_pickled_and_nothing_is_executed(tmp_path):
    checkpoint.save({"x": torch.ones(2), "step": 3, "name": "a"}, tmp_path / "c")
    for file in (tmp_path / "c").iterdir():
        with pytest.raises(ValueError):  # noqa: PT011 - it is no pickle, and that is all that matters
            list(pickletools.genops(io.BytesIO(file.read_bytes())))
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "executed")))
    with pytest.raises(checkpoint.CorruptCheckpointError, match=r"posix\.system"):
        checkpoint.load(tmp_path / "torch")
    assert not (tmp_path / "executed").exists()


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_r124_files_are_closed(tmp_path):
    state = {f"t{i}": torch.ones(3) for i in range(300)}
    before = open_files()
    for i in range(5):
        handle = checkpoint.async_save(state, tmp_path / f"c{i}")
        handle.wait()
        checkpoint.load(tmp_path / f"c{i}", into=state)
    assert open_files() <= before + 1


def test_r126_many_ranks_with_empty_blocks_read_their_shares(tmp_path):
    with sw.simulate(8):
        x = sw.distribute_tensor(numbers(10, 3), line(8), [Shard(0)])
        checkpoint.save({"x": x, "b": sw.distribute_tensor(numbers(5), line(8), [Shard(0)])}, tmp_path / "c")
    with sw.simulate(64):
        into = {
            "x": sw.distribute_tensor(torch.zeros(10, 3), line(64), [Shard(0)]),
            "b": sw.distribute_tensor(torch.zeros(5), line(64), [Shard(0)]),
        }
        loading = Loading(tmp_path / "c")
        loading.run(into, random=True)
        assert torch.equal(whole(into["x"]), numbers(10, 3))
        assert torch.equal(whole(into["b"]), numbers(5))
        shares = [block_shape(t.sharding, c) for t in into.values() for c in members_of(line(64)).values()]
        assert loading.reader.data_bytes == 4 * sum(torch.Size(s).numel() for s in shares) == 4 * 35
        checkpoint.save(into, tmp_path / "d")
    found = checkpoint.load(tmp_path / "d")
    assert torch.equal(found["x"], numbers(10, 3))
