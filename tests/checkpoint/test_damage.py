"""Damaged checkpoints: what is wrong is found, named, and the checkpoint before is offered; fuzzed files do nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.aside import aside_path
from shardwise.checkpoint.metadata import METADATA, metadata_bytes

FUZZED = int(os.environ.get("SHARDWISE_FUZZ", "20000"))


def mesh_of(*shape):
    return sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def small_state(mesh, fill=None):
    x = torch.arange(24.0).view(6, 4) if fill is None else torch.full((6, 4), fill)
    return {
        "x": sw.distribute_tensor(x, mesh, [sw.Shard(0)]),
        "b": sw.distribute_tensor(torch.arange(5, dtype=torch.int16), mesh, [sw.Replicate()]),
        "n": {"step": 3, "names": ["a", (1, None)]},
    }


@pytest.fixture
def run(tmp_path):
    with sw.simulate(2):
        for step in (1, 2):
            checkpoint.save(small_state(mesh_of(2)), tmp_path / f"step-{step}")
    return tmp_path


def column_target():
    mesh = mesh_of(4)
    return {
        "x": sw.distribute_tensor(torch.zeros(6, 4), mesh, [sw.Shard(1)]),
        "b": torch.zeros(5, dtype=torch.int16),
        "n": None,
    }


def load_both(path):
    """Load as a whole, and resharded into columns so that no rank reads a cell alone."""
    for into in (lambda: None, column_target):
        with sw.simulate(4), pytest.raises(checkpoint.CheckpointError) as error:
            checkpoint.load(path, into=into())
    return error.value


def test_every_changed_bit_is_found(run):
    rng = random.Random(0)
    for file in sorted((run / "step-2").iterdir()):
        data = file.read_bytes()
        for _ in range(25):
            at = rng.randrange(len(data))
            changed = bytearray(data)
            changed[at] ^= 1 << rng.randrange(8)
            file.write_bytes(changed)
            error = load_both(run / "step-2")
            assert isinstance(error, checkpoint.CorruptCheckpointError), (file, at)
            assert file.name in str(error)
            assert f"load({str(run / 'step-1')!r})" in str(error)
        file.write_bytes(data)
    with sw.simulate(4):
        checkpoint.load(run / "step-2", into=column_target())


@pytest.mark.parametrize("length", [0, 5, 50, -1])
def test_truncated_and_missing_files_are_named(run, length):
    for file in sorted((run / "step-2").iterdir()):
        data = file.read_bytes()
        file.write_bytes(data[:length] if length else data + b"\0")
        assert file.name in str(load_both(run / "step-2"))
        file.unlink()
        error = load_both(run / "step-2")
        assert isinstance(error, checkpoint.CorruptCheckpointError)
        assert f"{file.name} is missing" in str(error)
        file.write_bytes(data)


def test_no_checkpoint_is_said_so_and_the_newest_is_offered(run):
    with pytest.raises(checkpoint.NoCheckpointError, match="step-2"):
        checkpoint.load(run)
    with pytest.raises(checkpoint.NoCheckpointError, match="another path"):
        checkpoint.load(run / "step-1" / "nothing" / "there")


# ---- complete or not at all


def error_of(call):
    """What a call says that fails as checkpoints may fail; None if it does not fail."""
    try:
        call()
    except checkpoint.CheckpointError as error:
        return str(error)
    return None


def failing(name, after, error):
    """A function of os that fails after some calls."""
    real, calls = getattr(os, name), [0]

    def call(*args, **kwargs):
        calls[0] += 1
        if calls[0] > after:
            raise error
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize("name", ["write", "fsync", "pwrite", "rename"])
def test_a_save_that_fails_anywhere_leaves_the_checkpoint_from_before(run, monkeypatch, name):
    path = run / "step-2"
    for after in range(12):
        with sw.simulate(2), monkeypatch.context() as patch:
            patch.setattr(os, name, failing(name, after, OSError(28, "No space left on device")))
            said = error_of(lambda: checkpoint.save(small_state(mesh_of(2), 7.0), path))
        if said is None:
            break
        assert "No space left" in said
        found = checkpoint.load(path)["x"]
        assert torch.equal(found, torch.arange(24.0).view(6, 4)) or bool((found == 7).all())
        assert checkpoint.latest(run) is not None
    assert after > 0
    with sw.simulate(3):  # what was left behind is no obstacle
        checkpoint.save(small_state(mesh_of(3), 9.0), path)
    assert bool((checkpoint.load(path)["x"] == 9).all())
    assert sorted(p.name for p in run.iterdir()) == ["step-1", "step-2"]


def test_a_directory_with_other_files_is_not_replaced(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text").write_text("mine")
    with pytest.raises(checkpoint.CheckpointWriteError, match="other files"):
        checkpoint.save({"x": torch.ones(2)}, tmp_path / "notes")
    assert (tmp_path / "notes" / "text").read_text() == "mine"


def test_a_partial_checkpoint_is_not_the_latest(run):
    shutil.copytree(run / "step-2", aside_path(run / "step-3", "0-0"))
    (run / "step-4").mkdir()
    assert checkpoint.latest(run) == run / "step-2"
    assert checkpoint.latest(run / "nowhere") is None
    os.rename(run / "step-2", run / ".step-2.old")  # killed while it was being replaced
    assert checkpoint.load(run / "step-2")["n"]["step"] == 3


# ---- fuzzing


def mutate(rng, value):
    """A JSON value with one part replaced by another value."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.08:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.14:
            return {**value, rng.choice(["$", "x", key + "2"]): rng.choice(["tuple", "tensor", 1, [], {}])}
        return {**value, key: mutate(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.1:
            return value[:at] + value[at + 1 :]
        if kind < 0.15:
            return [*value, value[at]]
        return [*value[:at], mutate(rng, value[at]), *value[at + 1 :]]
    return rng.choice(
        [None, True, -1, 0, 1, 2**31, 2**63, 2**70, 1e308, float("nan"), "", "F32", "../x", "__reduce__", "os.system", [], {}, [[]]]
        + ([value + 1, value - 1] if isinstance(value, int) else [])
    )  # fmt: skip


def fuzzed_metadata(rng, data):
    """Metadata with drawn changes; most have a checksum that fits, so that they get past it."""
    if rng.random() < 0.15:
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed[: rng.choice([len(changed), rng.randrange(len(changed))])])
    content = json.loads(data)["content"]
    if rng.random() < 0.002:
        text = b'{"format":"shardwise","version":1,"state":' + b"[" * 20_000
        return b'{"sha256":"' + hashlib.sha256(text).hexdigest().encode() + b'","content":' + text + b"}\n"
    for _ in range(rng.randrange(1, 4)):
        content = mutate(rng, content)
    return metadata_bytes(content if isinstance(content, dict) else {"content": content})


def fuzzed_data(rng, data):
    """A data file with a drawn header of the same checksum, or drawn bytes."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.5:
        header = json.loads(data[8 : 8 + length])
        for _ in range(rng.randrange(1, 4)):
            header = mutate(rng, header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]
    if rng.random() < 0.3:
        return rng.choice([2**64 - 1, 2**63, 10**9, length + 1, 0]).to_bytes(8, "little") + data[8:]
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


@pytest.fixture
def in_memory(run):
    """The same files where writing them costs no time of a disk."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield run
        return
    with tempfile.TemporaryDirectory(dir=memory) as path:
        shutil.copytree(run, path, dirs_exist_ok=True)
        yield Path(path)


def test_fuzzed_files_give_an_error_or_what_was_saved(in_memory, monkeypatch):
    rng = random.Random(int(os.environ.get("SHARDWISE_FUZZ_SEED", "0")))
    path = in_memory / "step-2"
    metadata, first = path / METADATA, path / "data-00000.safetensors"
    original, data = metadata.read_bytes(), first.read_bytes()
    content = json.loads(original)["content"]
    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("executed"))
    errors = 0
    for number in range(FUZZED):
        into = (
            {"x": torch.zeros(6, 4), "b": torch.zeros(5, dtype=torch.int16), "n": None}
            if number % 2
            else None
        )
        if number % 4 < 2:
            metadata.write_bytes(fuzzed_metadata(rng, original))
        else:
            changed = fuzzed_data(rng, data)
            first.write_bytes(changed)
            header = changed[: 8 + int.from_bytes(changed[:8], "little")]
            files = [dict(f) for f in content["files"]]
            if rng.random() < 0.9:  # a checksum and a size that fit
                files[0].update(bytes=len(changed), header=hashlib.sha256(header).hexdigest())
            metadata.write_bytes(metadata_bytes({**content, "files": files}))
        said = error_of(lambda into=into: checkpoint.load(path, into=into))
        errors += said is not None
        assert said is None or "why:" in said
        if number % 4 >= 2:
            first.write_bytes(data)
    assert errors > FUZZED * 0.5
