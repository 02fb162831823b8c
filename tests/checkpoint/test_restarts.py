"""Ranks that torchrun has restarted: its store has what their predecessors wrote, which must not be taken for theirs."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import checkpoint

pytestmark = pytest.mark.processes


def attempt(rank: int, number: int, port: int, work: Path) -> None:
    """One life of a rank: the first ends by SIGKILL after a save, in the second rank 1 cannot write."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(number),
        TORCHELASTIC_RUN_ID="none",
    )
    try:
        found = sw.launch(save_once, 2, number, work)
    except sw.LaunchError as error:
        found = [str(error)]
    (work / f"out-{rank}").write_text(str(found))
    os._exit(0)


def save_once(number: int, work: Path) -> str:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.arange(4.0) + number, mesh, [sw.Shard(0)], src_data_rank=None)
    if number and dist.get_rank() == 1:
        os.write = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # type: ignore[assignment]
    try:
        checkpoint.save({"x": x}, work / "c")
    except checkpoint.CheckpointWriteError as error:
        return error.what.partition(":")[0]
    if number == 0:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    return "saved"


def test_a_restarted_rank_does_not_read_the_verdict_of_its_predecessor(tmp_path):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fork = multiprocessing.get_context("fork")
    for number in (0, 1):
        ranks = [fork.Process(target=attempt, args=(r, number, server.port, tmp_path)) for r in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
        assert [p.exitcode for p in ranks] == [(-signal.SIGKILL, 0)[number]] * 2
    what = f"[rank 1] The checkpoint {tmp_path / 'c'} was not written"
    assert (tmp_path / "out-0").read_text() == str([what] * 2)
    assert checkpoint.load(tmp_path / "c")["x"].tolist() == [0.0, 1.0, 2.0, 3.0]
