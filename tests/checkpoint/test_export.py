"""Whole tensors in files that Hugging Face reads, and its files in sharded models, without a rank that holds all of it."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.checkpoint.test_save_and_load import drawn, mesh_of, state_on
from tests.checkpoint.test_training_state import Net
from tests.values import dense_tensor, same_bits
from torch import nn

import shardwise as sw
from shardwise import checkpoint
from shardwise.parallel import fully_shard, parallelize_module

SAFE = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]


@pytest.mark.parametrize(("shape", "seed"), [((4,), 0), ((2, 3), 1), ((2, 2), 2), ((1,), 3)])
def test_whole_tensors_from_any_layout(tmp_path, shape, seed):
    rng = random.Random(seed)
    tensors = [(s, SAFE[i % len(SAFE)]) for i, (s, _) in enumerate(drawn(rng, 20))]
    with sw.simulate(torch.Size(shape).numel()):
        state = state_on(mesh_of(shape), tensors, rng)
        (one,) = checkpoint.export(state, tmp_path / "one")
        many = checkpoint.export(state, tmp_path / "many", shard_bytes=200)
    assert one.name == "model.safetensors"
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["model.safetensors"]
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {p.name for p in many}
    assert len(many) > 1
    for i, (size, dtype) in enumerate(tensors):
        expected = dense_tensor(size, dtype, i)
        assert same_bits(load_file(one)[f"t{i}"], expected)
        assert same_bits(load_file(tmp_path / "many" / index[f"t{i}"])[f"t{i}"], expected)


def test_models_are_read_by_load_file_and_come_back(tmp_path):
    torch.manual_seed(0)
    net = Net()
    expected = {k: v.clone() for k, v in net.state_dict().items()}
    with sw.simulate(3):
        fully_shard(net, mesh=mesh_of((3,)))
        checkpoint.export(net, tmp_path / "a", dtype=torch.bfloat16)
        checkpoint.export(net, tmp_path / "b")
        checkpoint.export(net, tmp_path / "b")  # replaced
    found = load_file(tmp_path / "a" / "model.safetensors")
    assert set(expected) - set(found) == {"head.weight"}  # tied
    assert all(
        torch.equal(found[k], v.bfloat16() if v.is_floating_point() else v)
        for k, v in expected.items()
        if k in found
    )
    with sw.simulate(2):
        other = parallelize_module(Net(), mesh_of((2,)), {"up": "colwise", "down": "rowwise"})
        sw.load_sharded(other, tmp_path / "b")
        back = other.state_dict()
        for k, v in expected.items():
            full = back[k].full_tensor().ranks[1] if isinstance(back[k], sw.DTensor) else back[k]
            assert torch.equal(full, v)


def test_what_cannot_be_exported_is_said(tmp_path, monkeypatch):
    with pytest.raises(checkpoint.CheckpointStateError, match="step"):
        checkpoint.export({"x": torch.ones(2), "step": 3}, tmp_path / "c")
    checkpoint.export({"x": torch.ones(2)}, tmp_path / "c")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(checkpoint.CheckpointWriteError, match="No space left"):
        checkpoint.export({"x": torch.zeros(2)}, tmp_path / "c")
    assert torch.equal(load_file(tmp_path / "c" / "model.safetensors")["x"], torch.ones(2))


# ---- on processes: memory


class Peak:
    """The most memory of its own (not of mapped files) that this process has above what it had before."""

    def __enter__(self) -> Peak:
        self._begin, self.bytes, self._end = self._now(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _now(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    def _watch(self) -> None:
        while not self._end.wait(0.001):
            self.bytes = max(self.bytes, self._now() - self._begin)

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def through_files(path: Path, layers: int, width: int):
    """Load a model that nobody holds whole from files of Hugging Face's form, and export it again; peaks in bytes."""
    mesh = sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = {str(i): "colwise" if i % 2 else "rowwise" for i in range(layers)}
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    parallelize_module(model, mesh, plan)
    with Peak() as loading:
        sw.load_sharded(model, path / "in")
    with Peak() as exporting:
        checkpoint.export(model, path / "out", shard_bytes=3 * width * width * 4)
    return loading.bytes, exporting.bytes


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_no_rank_holds_a_model_whole(workers, tmp_path):
    layers, width = 8, 1024  # 32 MB
    size = layers * width * width * 4
    weights = {f"{i}.weight": torch.randn(width, width) for i in range(layers)}
    with sw.simulate(1):
        checkpoint.export(weights, tmp_path / "in", shard_bytes=3 * width * width * 4)
    assert len(list((tmp_path / "in").glob("*.safetensors"))) == 3
    for loading, exporting in workers.run(through_files, tmp_path, layers, width):
        assert loading < 0.25 * size + (5 << 20)  # its blocks, and one block on the way
        assert exporting < 5 << 20
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    for name, value in weights.items():
        assert torch.equal(load_file(tmp_path / "out" / index[name])[name], value)


def test_transformers_reads_what_was_exported(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=32, tie_word_embeddings=True
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.arange(6)[None]
    expected = model(tokens).logits.detach()
    config.save_pretrained(tmp_path / "c")
    with sw.simulate(2):
        fully_shard(model, mesh=mesh_of((2,)))
        checkpoint.export(model, tmp_path / "c", shard_bytes=4000)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "c")
    assert torch.equal(again(tokens).logits, expected)
