"""Streams of random numbers: a seed, and a position that each call advances by one. Nothing here communicates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.random.philox import Draw

__all__ = [
    "WORLD",
    "State",
    "Stream",
    "follow_torch_seed",
    "follow_torch_state",
    "own_stream",
    "restore",
    "set_by_others",
    "snapshot",
    "start_stream",
    "stream_of",
]

_MODULUS = 2**64
_UNAGREED = 2**63
_lock = threading.Lock()  # two threads must not draw at the same position


@dataclass(slots=True)
class Stream:
    """The seed and the position of the next draw.

    `from_torch`: the seed is that of torch's generator, which may differ between processes. `agreed_meshes`: the meshes whose
    ranks have agreed on the seed since.
    """

    seed: int
    position: int = 0
    from_torch: bool = False
    agreed_meshes: frozenset[Hashable] = frozenset()

    def next(self) -> Draw:
        """The draw of one call; advances the stream.

        >>> stream = Stream(7)
        >>> stream.next(), stream.next()
        (Draw(seed=7, position=0), Draw(seed=7, position=1))
        """
        with _lock:
            draw = Draw(self.seed, self.position)
            self.position += 1
        return draw

    def to_bytes(self) -> Tensor:
        """The state as a tensor of 16 bytes, like torch's generator states.

        The highest bit states that the ranks may have different seeds, on which they have not all agreed yet.
        """
        unagreed = self.from_torch and WORLD not in self.agreed_meshes
        position = self.position | unagreed * _UNAGREED
        data = self.seed.to_bytes(8, "little") + position.to_bytes(8, "little")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def set_bytes(self, state: Tensor) -> None:
        """Continue from a state of `to_bytes`."""
        if state.dtype != torch.uint8 or state.numel() != 16:
            raise ValueError(
                f"A tensor of {state.numel()} elements of {state.dtype} is no state of shardwise's stream.\n"
                "  why: A state is 16 bytes of torch.uint8, the seed and the position.\n"
                "  fix: Pass a result of shardwise.get_rng_state(), or call torch.set_rng_state for a state of torch."
            )
        data = bytes(state.tolist())
        self.seed, position = (int.from_bytes(data[i : i + 8], "little") for i in (0, 8))
        self.position, self.from_torch = position & ~_UNAGREED, bool(position & _UNAGREED)
        self.agreed_meshes = frozenset()


class State(NamedTuple):
    """A copy of all streams, and the seed of torch's generator that they have taken into account."""

    streams: dict[Hashable, Stream]
    torch_seed: int


WORLD = ()
# torch may have been seeded before this import, with different seeds on different ranks
_streams: dict[Hashable, Stream] = {WORLD: Stream(torch.initial_seed(), from_torch=True)}
_torch_seed = torch.initial_seed()

set_by_others: list[Callable[[], bool]] = []
"""Whether the state of torch's generator is now set by something else than the program, so that its seed says nothing."""


def stream_of(key: Hashable = WORLD) -> Stream:
    """The stream of a mesh that was given its own, or else the common stream."""
    if key != WORLD and key in _streams:
        return _streams[key]
    if (seed := torch.initial_seed()) != _torch_seed and not any(is_set() for is_set in set_by_others):
        follow_torch_seed(seed)  # by a method of torch's generator, which calls no hook
    return _streams[WORLD]


def own_stream(key: Hashable) -> Stream:
    """The stream of this mesh alone, a new one if it has none; the common stream for WORLD."""
    return stream_of() if key == WORLD else _streams.setdefault(key, Stream(0))


def start_stream(key: Hashable, seed: int) -> None:
    """Start the stream of a mesh, or the common stream for WORLD, from a seed that all ranks have given."""
    global _torch_seed
    _streams[key] = Stream(seed % _MODULUS)
    if key == WORLD:
        _torch_seed = torch.initial_seed()


def follow_torch_seed(seed: int) -> None:
    """Start the common stream from the seed that torch's generator was given."""
    global _torch_seed
    _torch_seed = seed % _MODULUS
    _streams[WORLD] = Stream(_torch_seed, from_torch=True)


def snapshot() -> State:
    """A copy of all streams."""
    return State({key: copy(stream) for key, stream in _streams.items()}, _torch_seed)


def restore(state: State) -> None:
    """Set all streams back to a snapshot."""
    global _torch_seed, _streams
    # one assignment, because other threads may be drawing
    _streams = {key: copy(stream) for key, stream in state.streams.items()}
    _torch_seed = state.torch_seed


def follow_torch_state(state: State | None) -> None:
    """Follow torch's generator back to an earlier state.

    `state` is the snapshot from when torch's state was read. Without one, the streams continue where they are.
    """
    global _torch_seed
    if state is None:
        # not torch.initial_seed, which a mode may have replaced by one that sets the state
        _torch_seed = torch.default_generator.initial_seed()
    else:
        restore(state)
