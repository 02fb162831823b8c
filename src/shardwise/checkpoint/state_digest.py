"""What must be the same on all ranks: the keys, the layouts, the values, and the place of the checkpoint."""

from __future__ import annotations

import hashlib
import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.checkpoint.errors import CheckpointStateError
from shardwise.checkpoint.exchange import Report

__all__ = ["compare_digests", "state_digest"]


def state_digest(keys: Mapping[str, str], values: Any, path: object = "") -> Report:
    """The part of a rank's report by which the ranks are compared."""
    names = json.dumps(keys, sort_keys=True).encode()
    return {
        "values": hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest(),
        "keys": hashlib.sha256(names).hexdigest(),
        "path": str(path),
        "names": b64encode(zlib.compress(names)).decode(),
    }


def compare_digests(reports: Sequence[Report], what: str) -> None:
    """Refuse states that differ between ranks."""
    for rank, report in enumerate(reports):
        if report["path"] != reports[0]["path"]:
            raise CheckpointStateError(
                f"{what} got {reports[0]['path']} on rank 0 and {report['path']} on rank {rank}.",
                why="All ranks take part in one checkpoint.",
                fix="Pass the same path on all ranks; where it is drawn or has the time in it, take that of rank 0.",
            )
        if report["keys"] != reports[0]["keys"]:
            first, other = (json.loads(zlib.decompress(b64decode(r["names"]))) for r in (reports[0], report))
            differing = sorted(k for k in {*first, *other} if first.get(k) != other.get(k))
            shown = "".join(
                f"\n    - {k}: {first.get(k, 'not')} on rank 0, {other.get(k, 'not')} on rank {rank}"
                for k in differing[:10]
            )
            raise CheckpointStateError(
                f"{what} got different tensors on rank 0 and rank {rank}:{shown}",
                why="Every rank computes what all ranks write and read from the keys and layouts, which must be the same.",
                fix="Pass the same keys on all ranks; tensors that only some ranks hold as DTensors on a mesh of those ranks.",
            )
        if report["values"] != reports[0]["values"]:
            raise CheckpointStateError(
                f"{what} got different values on rank 0 and rank {rank}.",
                why="Plain values are saved once, so they must be the same on all ranks; random streams too.",
                fix="Make them the same, or a tensor that is split over the ranks.",
            )
