"""The random stream as a checkpoint has it: one seed and one position, for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.random.stream import stream_of

__all__ = ["random_position", "set_random_position"]


def random_position() -> dict[str, int]:
    """The seed and the position of the random stream."""
    stream = stream_of()
    agreed = not stream.from_torch or bool(stream.agreed_meshes)
    return {"seed": stream.seed, "position": stream.position, "agreed": int(agreed)}


def set_random_position(random: Mapping[str, int]) -> None:
    """Continue the random stream from a seed and a position."""
    stream = stream_of()
    stream.seed, stream.position = random["seed"], random["position"]
    stream.from_torch, stream.agreed_meshes = False, frozenset()
