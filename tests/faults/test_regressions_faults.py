"""What users of other libraries reported of faults, by the numbers of the list of regressions: 114, 115, 117, 123, 125, 129, 130."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from tests.faults.forked_world import run_world
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import shardwise as sw
from shardwise import DTensor, Replicate, Shard, checkpoint
from shardwise.parallel import DataParallelMeshDims, fully_shard, parallelize_module

pytestmark = pytest.mark.processes


def line():
    return sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def attempt(program, timeout=60.0):
    """The type and the text of what a program raises under a guard, and how long that took."""
    start = time.monotonic()
    try:
        with sw.guard(timeout=timeout):
            program()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def on_forks(program):
    """What a program returns on four forks of this process: after a fault, new workers would take longer to start."""
    return sw.launch(lambda: program(), 4, timeout=120)


def same_error(found, kind, *ranks):
    """The text of the error that these ranks raise, which is the same on all of them."""
    assert {found[rank][0] for rank in ranks} == {kind}
    (text,) = {found[rank][1] for rank in ranks}
    assert "  why: " in text
    assert "  fix: " in text
    return text


def full_states():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    expected = {k: v.clone() for k, v in net.state_dict().items()}
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"0": "colwise", "1": "rowwise"})
    fully_shard(net, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    optimizer = torch.optim.Adam(net.parameters())
    options = StateDictOptions(full_state_dict=True)
    model = get_model_state_dict(net, options=options)
    right = all(torch.equal(model[k], v) for k, v in expected.items())
    net(sw.distribute_tensor(torch.ones(2, 4), mesh, [Shard(0), Replicate()])).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(net, optimizer, options=options)["state"]
    shapes = {k: (type(s["exp_avg"]).__name__, tuple(s["exp_avg"].shape)) for k, s in state.items()}
    return right, shapes


def test_r114_full_state_dicts_of_fsdp_and_tp(workers):
    for right, shapes in workers.run(full_states):
        assert right
        assert shapes == {
            "0.weight": ("Tensor", (6, 4)),
            "0.bias": ("Tensor", (6,)),
            "1.weight": ("Tensor", (4, 6)),
            "1.bias": ("Tensor", (4,)),
        }


def without_rank_0(path):
    """A model on ranks 1 and 3, saved by all ranks; then loaded onto ranks 0, 2 and 3."""
    source, target = sw.DeviceMesh("cpu", [1, 3]), sw.DeviceMesh("cpu", [0, 2, 3])
    state = {"w": sw.distribute_tensor(torch.arange(10.0).view(5, 2), source, [Shard(0)]), "n": 7}
    checkpoint.save(state, path)
    into = {"w": sw.distribute_tensor(torch.zeros(5, 2), target, [Shard(1)]), "n": 0}
    checkpoint.load(path, into=into)
    return into["n"], into["w"].to_local().tolist(), checkpoint.load(path)["w"].tolist()


def test_r115_r117_values_that_rank_0_does_not_hold(workers, tmp_path):
    whole = torch.arange(10.0).view(5, 2)
    for rank, (number, block, found) in enumerate(workers.run(without_rank_0, str(tmp_path / "c"))):
        assert number == 7
        assert found == whole.tolist()
        if rank in (0, 2):
            assert block == whole[:, [rank // 2]].tolist()


def full_tensor_on_rank_0():
    x = sw.distribute_tensor(torch.arange(8.0), line(), [Shard(0)])

    def program():
        if dist.get_rank() == 0:
            x.full_tensor()
        dist.barrier()

    return attempt(program)


def test_r115_full_tensor_on_one_rank_is_a_named_error():
    text = same_error(on_forks(full_tensor_on_rank_0), "PeerError", 0, 1, 2, 3)
    assert re.match(r"ranks \d and \d of 4 call different collectives", text)
    assert "rank 0: all-gather over dp: [8:dp] -> [8] f32 at" in text
    assert "torch.distributed.barrier at" in text


def long_timeout(injected):
    """A rank dies; the others know at once, though their timeout is half an hour."""
    x = sw.distribute_tensor(torch.arange(8.0), line(), [Shard(0)])
    with sw.guard(timeout=1800):
        x.sum().item()
        if dist.get_rank() == 2:
            injected()
            os.kill(os.getpid(), signal.SIGKILL)
        x.sum().item()


def test_r123_a_death_that_is_known_is_not_waited_for():
    found = run_world(long_timeout, 4, 60.0, frozenset({2})).ranks
    for rank in (0, 1, 3):
        assert found[rank].error == "PeerError"
        assert found[rank].text.startswith("rank 2 of 4 died")
        assert found[rank].seconds < 30  # on a machine that does other things


def different_keys(path):
    state = {"a": torch.ones(2), f"only on rank {dist.get_rank()}": torch.ones(2)}
    saved = attempt(lambda: checkpoint.save(state, path))
    checkpoint.save({"a": torch.ones(2)}, path)
    into = {"a": torch.zeros(2)} if dist.get_rank() else {"b": torch.zeros(2)}
    return saved, attempt(lambda: checkpoint.load(path, into=into))


def test_r125_ranks_that_disagree_on_the_keys_raise_alike(workers, tmp_path):
    found = workers.run(different_keys, str(tmp_path / "c"))
    text = same_error([saved for saved, _ in found], "CheckpointStateError", 0, 1, 2, 3)
    assert "only on rank 0: torch.float32 [2] on rank 0, not on rank 1" in text
    text = same_error([loaded for _, loaded in found], "CheckpointMismatchError", 0, 1, 2, 3)
    assert "[rank 0]" in text
    assert "b is missing in the checkpoint" in text


def other_dtypes():
    x = sw.distribute_tensor(torch.ones(8, 4), line(), [Shard(0)])
    return attempt(lambda: x.to(torch.float64 if dist.get_rank() == 3 else torch.float32).full_tensor())


def barriers():
    """Barriers among other collectives, on ranks that arrive at other times."""
    x = sw.distribute_tensor(torch.ones(8), line(), [Shard(0)])

    def program():
        for i in range(4):
            dist.barrier()
            x.sum().item()
            time.sleep(0.05 * (dist.get_rank() == i))
            dist.barrier()

    return attempt(program)


def test_r129_a_mismatch_shows_both_sides_and_barriers_are_none(workers):
    text = same_error(on_forks(other_dtypes), "PeerError", 0, 1, 2, 3)
    assert "[8:dp, 4] -> [8, 4] f64 at" in text
    assert "[8:dp, 4] -> [8, 4] f32 at" in text
    assert [kind for kind, *_ in workers.run(barriers)] == [""] * 4


def data_of_one_rank():
    rows = 3 if dist.get_rank() == 1 else 4

    def program():
        batch = DTensor.from_local(torch.ones(rows, 6), line(), [Shard(0)], run_check=False)
        batch.full_tensor()

    return attempt(program)


def keys_of_one_rank():
    batch = {"text": torch.ones(4, 6), "image": torch.ones(4, 2)}
    if dist.get_rank() == 1:
        del batch["image"]

    def program():
        for value in batch.values():
            DTensor.from_local(value, line(), [Shard(0)], run_check=False).full_tensor()
        torch.ones(1).sum()
        sw.ones(4, device_mesh=line(), placements=[Shard(0)]).sum().item()

    return attempt(program)


def test_r130_data_that_differs_between_ranks_is_named():
    text = same_error(on_forks(data_of_one_rank), "PeerError", 0, 1, 2, 3)
    assert re.match(r"ranks \d and \d of 4 call different collectives", text)
    assert "[12:dp, 6] -> [12, 6] f32 at" in text
    assert "[16:dp, 6] -> [16, 6] f32 at" in text
    assert text.count("test_regressions_faults.py:") >= 2
    text = same_error(on_forks(keys_of_one_rank), "PeerError", 0, 1, 2, 3)
    assert "[16:dp, 2] -> [16, 2] f32 at" in text
    assert "all-reduce over dp: [] P(dp,sum) -> [] f32 at" in text
