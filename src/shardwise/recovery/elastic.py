"""`elastic`: training that goes on when processes die."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from shardwise.checkpoint.background import abandon_pending
from shardwise.checkpoint.exchange import restart_numbers
from shardwise.comm import is_simulated
from shardwise.comm.launch import launch_survivors
from shardwise.comm.simulate import forget_world
from shardwise.faults import PeerError, guard
from shardwise.recovery.errors import ElasticError
from shardwise.recovery.rendezvous import Rendezvous
from shardwise.recovery.restarted import RestartedRun, run_folder
from shardwise.recovery.run import ElasticRun
from shardwise.recovery.transfer import agree_on
from shardwise.torch_internals.connections import (
    break_connections,
    init_from_environment,
    reset_collective_timeout,
    world_store,
)

__all__ = ["elastic"]

T = TypeVar("T")
_log = logging.getLogger("shardwise.recovery")
_SURVIVABLE = ("died", "lost", "timeout")
"""The faults after which a run goes on. An error that a rank raises, or ranks that diverge, are errors of the program."""


class _Options(NamedTuple):
    min_ranks: int
    folder: Path | None
    timeout: float
    copies: int


def elastic(
    train: Callable[..., T],
    nprocs: int,
    *args: object,
    min_ranks: int = 1,
    folder: str | Path | None = None,
    timeout: float = 60.0,
    copies: int = 1,
) -> list[T | None]:
    """Run `train(run, *args)` on `nprocs` processes; when some of them die, the others go on from copies in memory.

        def train(run):
            mesh = init_device_mesh("cpu", shape_for(dist.get_world_size()), mesh_dim_names=("pod", "dp"))
            state = {"model": fully_shard(Net(), mesh=mesh), ...}
            run.restore(state)
            while state["step"] < 1000:
                ...
                state["step"] += 1
                run.commit(state)

    The ranks that are left form a new world and call `train` again: it builds the model on the mesh it chooses for their number,
    and `run.restore` fills it with the values of the last commit, from the blocks that they hold.

    Args:
        train: the function, which gets an `ElasticRun` and the arguments.
        nprocs: the number of processes to start. Where there are processes already (a process group, or a launcher that has set
            RANK and WORLD_SIZE), it is their number, and `train` runs in them.
        *args: arguments of `train`, the same on every rank.
        min_ranks: give up when fewer are left.
        folder: a directory in which the ranks that are left find each other; needed if they are on several machines.
        timeout: seconds to wait for ranks that are alive but have not noticed that another one is gone.
        copies: with 2, a block that only one rank holds, as under FSDP, is also sent to another rank at each commit, so that any
            layout survives the loss of a rank. Blocks that two ranks hold, as under HSDP, are not sent.

    Returns:
        What `train` returned on each rank, by its rank in the first world; None for those that were lost.

    Raises:
        LaunchError: `train` raised on a rank, or all ranks are gone. In processes that were there already, the error itself.
        ElasticError: fewer than `min_ranks` are left, or the arguments are wrong.

    The agent of torchrun ends all processes when one dies, and starts new ones as often as `--max-restarts` says. Under torchrun,
    therefore, `run.commit` keeps the state in memory of the machine (/dev/shm), which outlives the processes, or in `folder`, which must
    be given if the ranks are on several machines; the new processes go on from there. `min_ranks` and `copies` have no effect then.
    """
    if is_simulated() or not 1 <= min_ranks <= nprocs or not timeout > 0 or copies not in (1, 2):
        raise ElasticError(
            f"elastic got nprocs={nprocs}, min_ranks={min_ranks}, timeout={timeout}, copies={copies}"
            f"{', inside simulate' if is_simulated() else ''}.",
            why="It needs real processes, at least one of which is left, a time to wait for them, and one or two copies.",
            fix="elastic(train, 4, min_ranks=2), outside of simulate",
        )
    options = _Options(min_ranks, None if folder is None else Path(folder).absolute(), float(timeout), copies)
    if dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return _run_here(train, nprocs, args, options)
    found: dict[int, T] = launch_survivors(_run_member, nprocs, train, args, options)
    return [found.get(rank) for rank in range(nprocs)]


def _run_here(
    train: Callable[..., T], nprocs: int, args: tuple[object, ...], options: _Options
) -> list[T | None]:
    """`elastic` in a process that has been started already."""
    own = not dist.is_initialized()
    if own:
        init_from_environment("gloo")
    try:
        if dist.get_world_size() != nprocs:
            raise ElasticError(
                f"elastic got nprocs={nprocs} in a world of {dist.get_world_size()}.",
                why="The processes are there already, so none are started.",
                fix=f"elastic(train, {dist.get_world_size()})",
            )
        if dist.is_torchelastic_launched():
            return _run_restarted(train, args, options)
        me = dist.get_rank()
        members, value = _run_member(train, args, options)
        out: list[T | None] = [None] * nprocs
        out[me] = value
        if not dist.is_initialized():  # the others had finished when one was lost
            return out
        values: list[Any] = [None] * len(members)
        dist.all_gather_object(values, value)
        for member, found in zip(members, values, strict=True):
            out[member] = found
        return out
    finally:
        if own and dist.is_initialized():
            dist.destroy_process_group()


def _run_restarted(train: Callable[..., T], args: tuple[object, ...], options: _Options) -> list[T | None]:
    """`elastic` in a process that the agent of torchrun has started, perhaps after another one died."""
    run = RestartedRun(run_folder(options.folder))
    with guard():
        value = train(run, *args)
        values: list[T | None] = [None] * len(run.members)
        dist.all_gather_object(values, value)
    run.finish()
    return values


def _run_member(
    train: Callable[..., T], args: tuple[object, ...], options: _Options
) -> tuple[tuple[int, ...], T]:
    """Run the function on this process until it returns on all members that are left; they, and its value."""
    rank, size = dist.get_rank(), dist.get_world_size()
    backend = dist.get_backend()
    meeting = Rendezvous.join(world_store(), rank, size, options.folder, options.timeout)
    run = ElasticRun(tuple(range(size)), rank, options.copies)
    returned: list[T] = []
    try:
        while True:
            try:
                with guard():
                    returned = []
                    returned.append(train(run, *args))
                    agree_on(0)  # a rank that leaves before the others have finished could not help them
                meeting.finish()
                return run.members, returned[0]
            except PeerError as error:
                if error.kind not in _SURVIVABLE:
                    raise
                reason = str(error)
            # outside of the except block, so that the traceback does not keep the model
            if not _continue(run, meeting, backend, options, reason):
                return run.members, returned[0]
    finally:
        meeting.leave()


def _continue(run: ElasticRun, meeting: Rendezvous, backend: str, options: _Options, reason: str) -> bool:
    """Form a new world with the members that are left; false if they have all finished."""
    attempt = run.generation
    before = run.members
    while True:
        _leave_world()
        attempt += 1
        found = meeting.meet(attempt, before, run.report())
        if found is None:
            return False
        if len(found.members) < options.min_ranks:
            raise ElasticError(
                f"{len(found.members)} of {len(before)} ranks are left, fewer than min_ranks={options.min_ranks}.",
                why=reason,
                fix="Start the run again from its last checkpoint.",
            )
        try:
            _join_world(meeting.world_file(attempt), found.members, meeting.member, backend, options.timeout)
        except (RuntimeError, dist.DistError):  # another one is gone meanwhile
            before = found.members
            continue
        run.continue_with(found.members, found.reports)
        run.generation = attempt
        _log.warning(
            "rank %d goes on as rank %d of %d without %s: %s",
            meeting.member,
            dist.get_rank(),
            len(found.members),
            list(run.lost),
            reason.partition("\n")[0],
        )
        return True


def _leave_world() -> None:
    """Give up the process groups, whose connections are broken, and what belongs to them."""
    break_connections()
    with contextlib.suppress(RuntimeError, ValueError):
        dist.destroy_process_group()
    abandon_pending()
    forget_world()


def _join_world(file: str, members: tuple[int, ...], member: int, backend: str, timeout: float) -> None:
    store = dist.FileStore(file, len(members))  # type: ignore[attr-defined]
    dist.init_process_group(
        backend,
        store=store,
        rank=members.index(member),
        world_size=len(members),
        timeout=timedelta(seconds=timeout),
    )
    reset_collective_timeout()
    restart_numbers()
