"""`save`, `async_save`, `load` and `latest`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.checkpoint.background import SaveHandle, finish_pending, start
from shardwise.checkpoint.loading import Loading
from shardwise.checkpoint.metadata import checkpoint_path, complete_in
from shardwise.checkpoint.saving import TIMEOUT, Saving

__all__ = ["async_save", "latest", "load", "save"]


def save(state: Any, path: str | Path, *, timeout: float = TIMEOUT) -> None:
    """Save a state, from all ranks: a checkpoint that any mesh and any number of ranks can load.

    Args:
        state: a dict of modules, optimizers, schedulers, tensors, plain values, and other objects with `state_dict()` and
            `load_state_dict()`; the same keys on all ranks.
        path: the directory of the checkpoint, on a file system that all ranks share. One that is there is replaced.
        timeout: seconds to wait for the other ranks.

    Raises:
        CheckpointStateError: a value cannot be saved, or the ranks have different keys.
        CheckpointWriteError: a rank could not write. What was at the path before is unchanged.

    Each rank writes its blocks, and of replicated ones its share. The position of the random stream is saved too. Ranks tell each
    other the outcome through the store of the process group; there are no collectives.
    """
    finish_pending()
    Saving(state, checkpoint_path(path), timeout).run()


def async_save(state: Any, path: str | Path, *, timeout: float = TIMEOUT) -> SaveHandle:
    """Save a state in the background: returns when this rank's part is copied, and the program may change it.

    Args:
        state: as for `save`.
        path: as for `save`.
        timeout: seconds to wait for the other ranks.

    Returns:
        A handle, whose `wait()` returns when the checkpoint is there and raises if it could not be written.

    Raises:
        CheckpointStateError: a value cannot be saved.
        CheckpointWriteError: the save before this one failed. The next call of `save`, `async_save` or `load` raises it, on all
            ranks; a program that ends without such a call ends with exit code 1.

    One save runs at a time: the call waits for the one before. The copy is as large as what this rank writes; its memory is kept for
    the next save, until `release_memory()`.
    """
    finish_pending()
    saving = Saving(state, checkpoint_path(path), timeout)
    saving.stage()
    return start(saving.run)


def load(
    path: str | Path, into: Any = None, *, strict: bool = True, random: bool = True, timeout: float = TIMEOUT
) -> Any:
    """Load a checkpoint, on all ranks: into tensors of any layout, on any mesh.

    Args:
        path: the directory of the checkpoint.
        into: a state like the one that was saved: tensors are filled in place, objects get their state by `load_state_dict`, and
            plain values are replaced. None returns new plain values and full tensors.
        strict: refuse keys that only the checkpoint or only the state has.
        random: continue the random stream where it was.
        timeout: seconds to wait for the other ranks.

    Returns:
        `into`, or the new state.

    Raises:
        NoCheckpointError: there is none at the path.
        CheckpointMismatchError: keys or shapes differ. Nothing has changed on the ranks where they do.
        CorruptCheckpointError: files are damaged; the error names what and offers the checkpoint before. Tensors may have been
            overwritten.

    Each rank reads the bytes of its blocks and no others, and nothing is executed. There are no collectives.
    """
    finish_pending()
    return Loading(checkpoint_path(path), strict, timeout).run(into, random)


def latest(path: str | Path) -> Path | None:
    """The newest complete checkpoint in a directory, by the number at the end of its name; None if there is none.

    A checkpoint gets its name when all of it is on the disk, so what has a name is complete. A save in the background is not
    waited for: call `wait()` of its handle first, so that all ranks find the same one.
    """
    found = complete_in(Path(path))
    return found[-1] if found else None
