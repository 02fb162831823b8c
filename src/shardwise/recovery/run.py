"""What the training function of an elastic run gets: it commits the state after steps, and restores it in a new world."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.errors import CheckpointStateError
from shardwise.checkpoint.random_state import set_random_position
from shardwise.checkpoint.restore import plan_restore
from shardwise.checkpoint.save_plan import stored_of
from shardwise.checkpoint.state_digest import state_digest
from shardwise.faults import PeerError, uninterrupted
from shardwise.recovery.errors import ElasticError, StateLostError
from shardwise.recovery.snapshot import Snapshot, describe
from shardwise.recovery.transfer import PeerReader, agree_on, exchange, fill

__all__ = ["ElasticRun"]


class ElasticRun:
    """The run of an elastic training function, on one process.

    Attributes:
        generation: how many times the run has lost ranks.
        members: the processes that are left, by their ranks in the first world, in the order of their ranks now.
        lost: the processes that the run lost last, by their ranks in the first world.
        received_bytes: what this process received in the last `restore`.
    """

    def __init__(self, members: tuple[int, ...], me: int, copies: int = 1) -> None:
        self.generation, self.members = 0, members
        self.lost: tuple[int, ...] = ()
        self._me, self._copies = me, copies
        self._kept: Snapshot | None = None
        self._arrived: Snapshot | None = (
            None  # of a commit that this process reached and did not see completed
        )
        self.received_bytes = 0

    def commit(self, state: Any) -> None:
        """Keep a state: if a rank is lost later, the others go on from here.

        Args:
            state: as for `shardwise.checkpoint.save`: a dict of modules, optimizers, schedulers, tensors and plain values. It has
                everything that a step changes, such as the number of the step and the position in the data.

        Raises:
            CheckpointStateError: a value cannot be kept, or the ranks have different keys or values; on all ranks.
            PeerError: a rank was lost; the run goes on from this commit if any rank has completed it.

        Each rank copies its blocks into memory that it uses again for the next commit. One all-reduce of a few numbers tells
        all ranks that all have arrived. With `copies=2`, blocks that one rank alone holds are sent to another one, too.
        """
        number = 1 + (0 if self._kept is None else self._kept.number)
        found, tensors = describe(state, number, self.members, dist.get_rank(), self._copies)
        try:
            # The copy of before is overwritten only when all ranks are here, and thus have this state. A rank that does not
            # get to know that keeps both.
            alike = agree_on(number, found.digest())
            if alike and any(map(found.needs_partner, found.stored)):
                self._send_to_partner(found, tensors)
        except PeerError:
            found.copy_blocks(tensors)
            self._arrived = found
            raise
        if not alike:
            raise CheckpointStateError(
                "commit got different keys, layouts or values on different ranks.",
                why="Every rank computes who holds what from the state, which must be the same on all ranks.",
                fix="Commit after the same steps on all ranks; values that differ as a DTensor that is split over the ranks.",
            )
        with uninterrupted():  # what was kept before is overwritten
            found.copy_blocks(tensors, self._kept)
            self._kept, self._arrived = found, None

    def _send_to_partner(self, found: Snapshot, tensors: Mapping[str, Tensor]) -> None:
        """Send blocks that no other rank holds to the rank that keeps a copy, and return when all ranks have theirs."""
        parts = [np.empty(0, np.uint8) for _ in self.members]
        parts[found.partner_of(found.rank)] = found.for_partner(tensors)
        found.keep_for_guest(exchange(parts)[found.guest])
        agree_on(found.number)

    def restore(self, state: Any) -> bool:
        """Fill a state, on the mesh of the ranks that are left, with the values of the last commit.

        Args:
            state: like the one that was committed, on any mesh and in any layout; tensors are filled in place.

        Returns:
            False, and nothing is changed, if there was no commit yet; True otherwise.

        Raises:
            StateLostError: no rank that is left holds some of the values; on all ranks. Load a checkpoint then.
            CheckpointMismatchError: keys or shapes differ from those that were committed; on all ranks.

        Each rank receives the parts of its blocks that it does not hold, and no others. The random stream goes on from the commit.
        The restored state is committed.
        """
        kept = self._kept
        if kept is None:
            return False
        if lost := kept.lost_without(self.members):
            raise lost_error(kept, lost, self.members)
        plan, _ = plan_restore(state, kept.content["state"], kept.tensor, True, "of the last commit")
        keys = {name: str(stored_of(target).layout) for name, target in plan.tensors}
        if not agree_on(int(state_digest(keys, None)["keys"][:14], 16)):
            raise CheckpointStateError(
                "restore got different tensors or layouts on different ranks.",
                why="Every rank must restore the same state.",
                fix="Build the same model and optimizer on all ranks.",
            )
        reader = PeerReader(kept, self.members, self._me)
        fill(reader, plan.tensors)
        for setter in plan.setters:
            setter()
        set_random_position(kept.content["random"])
        self.received_bytes = reader.received_bytes
        self.commit(state)
        return True

    # what the driver of the run uses

    def report(self) -> dict[str, Any]:
        """What the others must know to agree on a commit: the number and the random stream of those that this process has.

        The first has been completed, the second was reached without seeing it completed; each may be None.
        """
        return {
            "commits": [
                None if c is None else [c.number, c.content["random"]] for c in (self._kept, self._arrived)
            ]
        }

    def continue_with(self, members: tuple[int, ...], reports: Mapping[int, Mapping[str, Any]]) -> None:
        """Go on with these members, from the newest commit that one of them has completed."""
        of = {m: [c or [0, None] for c in reports[m]["commits"]] for m in members}
        newest = max(kept[0] for kept, _ in of.values())
        if not all(newest in (kept[0], arrived[0]) for kept, arrived in of.values()):
            raise ElasticError(
                f"The ranks that are left have no commit in common: {of}.",
                why="Only some of them have called commit.",
                fix="Call run.commit(state) on all ranks, after the same steps.",
            )
        if self._arrived is not None and self._arrived.number == newest:
            self._kept = self._arrived
        self._arrived = None
        if self._kept is not None:
            # the same on all: before ranks have agreed on a seed, each has its own
            random = next(random for number, random in of[members[0]] if number == newest)
            self._kept.content = {**self._kept.content, "random": random}
        self.lost = tuple(m for m in self.members if m not in members)
        self.members = members


def lost_error(kept: Snapshot, lost: list[str], members: tuple[int, ...]) -> StateLostError:
    """The error for tensors of which some part was held by lost ranks only."""
    listed = "".join(f"\n    - {name} {kept.stored[name].layout}" for name in lost[:10])
    more = f"\n    ... and {len(lost) - 10} more" if len(lost) > 10 else ""
    gone = [m for m in kept.members if m not in members]
    return StateLostError(
        f"With rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))} these tensors were lost, in whole or in part:{listed}{more}",
        why="The ranks that are left hold no copy of some of their blocks.",
        fix="Load the last checkpoint: shardwise.checkpoint.load(shardwise.checkpoint.latest(path), into=state). "
        "With a replicated mesh axis (HSDP), or elastic(..., copies=2), each block has two holders.",
        names=lost,
    )
