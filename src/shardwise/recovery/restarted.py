"""Elastic runs under torchrun, whose agent ends all processes when one dies and starts new ones: what is committed outlives them.

It is kept as a checkpoint in memory of the machine, which belongs to no process.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.checkpoint import load, save
from shardwise.checkpoint.metadata import METADATA, resolve_path
from shardwise.faults.processes import process_state, start_time
from shardwise.recovery.errors import ElasticError
from shardwise.recovery.run import ElasticRun
from shardwise.torch_internals.connections import launch_token

__all__ = ["RestartedRun", "run_folder"]

_PREFIX = "shardwise-elastic-"


class RestartedRun(ElasticRun):
    """The run of an elastic training function in processes that a launcher replaces when one of them dies.

    Args:
        folder: where commits are kept; of this run alone.

    `generation` counts the restarts; `lost` is not known, since all processes are new.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(tuple(range(dist.get_world_size())), dist.get_rank())
        self.generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        self._folder, self._commit = folder, folder / "commit"

    def commit(self, state: Any) -> None:
        """Keep a state: if a rank dies later, all are started again, and go on from here.

        Args:
            state: as for `shardwise.checkpoint.save`.

        Raises:
            CheckpointStateError: a value cannot be kept, or the ranks have different keys or values; on all ranks.
            CheckpointWriteError: there is no room; on all ranks.

        Each rank writes its blocks, and of replicated ones its share, to memory of the machine. The commit before is removed when this one
        is complete.
        """
        save(state, self._commit)

    def restore(self, state: Any) -> bool:
        """Fill a state with the values of the last commit of the processes before, on any mesh.

        Args:
            state: like the one that was committed; tensors are filled in place.

        Returns:
            False, and nothing is changed, if there was no commit yet; True otherwise.

        Raises:
            CheckpointMismatchError: keys or shapes differ from those that were committed; on all ranks.
        """
        # the same on all ranks: a commit takes part of all of them, and those of the processes before are over
        if not (resolve_path(self._commit) / METADATA).exists():
            return False
        load(self._commit, into=state)
        return True

    def finish(self) -> None:
        """The run is over: remove what was committed when all ranks have ended well.

        A rank that dies before that is started again with all others, which need the last commit then.
        """
        count = dist.get_world_size()
        atexit.register(_leave, self._folder, f"ended-{self.generation}-", dist.get_rank(), count)


def _leave(folder: Path, prefix: str, rank: int, count: int) -> None:
    """Note that a rank has ended, and remove the folder of the run if it is the last one."""
    try:
        (folder / f"{prefix}{rank}").touch()
    except OSError:  # another one has removed it already, because all have ended
        return
    if len(list(folder.glob(f"{prefix}*"))) == count:
        shutil.rmtree(folder, ignore_errors=True)


def run_folder(shared: Path | None) -> Path:
    """The folder of this run, the same for all processes that torchrun starts for it, now and after they have died.

    Args:
        shared: a directory that all machines share. Without it the folder is in memory of this machine, and those of runs that were
            ended by force are removed.

    Raises:
        ElasticError: the ranks are on several machines, which share no directory.
    """
    if shared is not None:
        token = launch_token(uuid.uuid4().hex)
        mine = shared / f"{_PREFIX}{token or os.environ.get('TORCHELASTIC_RUN_ID')}"
        mine.mkdir(parents=True, exist_ok=True)
        return mine
    here, all_ranks = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    if here != all_ranks:
        raise ElasticError(
            f"elastic was called under torchrun on several machines: {here} of {all_ranks} ranks are on this one.",
            why="The agents end all processes when one dies, so that commits have to outlive them; the memory of a machine has those of its own ranks only.",
            fix='elastic(train, ..., folder="/a/directory/that/all/machines/share"), or load the last checkpoint after a restart.',
        )
    parent = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    agent = os.getppid()
    if dist.get_rank() == 0:
        _remove_left(parent)
    mine = parent / f"{_PREFIX}{os.getuid()}-{agent}-{start_time(agent)}"
    mine.mkdir(mode=0o700, exist_ok=True)
    return mine


def _remove_left(parent: Path) -> None:
    """Remove the folders of runs whose agents are gone."""
    for other in parent.glob(f"{_PREFIX}{os.getuid()}-*-*"):
        *_, process, started = other.name.split("-")
        is_numbered = process.isdecimal() and started.isdecimal()
        if is_numbered and process_state(int(process), int(started)) == "gone":
            shutil.rmtree(other, ignore_errors=True)
