"""The stream: a seed, and a position that each call moves on by one. Nothing here communicates."""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.random.philox import Draw

__all__ = [
    "EVERYONE",
    "State",
    "Stream",
    "begin",
    "follow_torch",
    "own_stream",
    "restore",
    "snapshot",
    "stream_of",
]

_BELOW = 2**64
_APART = 2**63
_one_at_a_time = threading.Lock()  # threads that draw at once must not have one place


class Stream:
    """Where the next numbers come from.

    `by_torch` says that the seed is that of torch's own generator, which may differ from process to process; `met`
    has the meshes whose ranks have made sure of it since.
    """

    __slots__ = ("by_torch", "met", "position", "seed")

    def __init__(
        self, seed: int, position: int = 0, by_torch: bool = False, met: frozenset[Hashable] = frozenset()
    ) -> None:
        self.seed, self.position, self.by_torch, self.met = seed % _BELOW, position, by_torch, met

    def next(self) -> Draw:
        """The place of one call; the next one has another.

        >>> stream = Stream(7)
        >>> stream.next(), stream.next()
        (Draw(seed=7, position=0), Draw(seed=7, position=1))
        """
        with _one_at_a_time:
            draw = Draw(self.seed, self.position)
            self.position += 1
        return draw

    def to_bytes(self) -> Tensor:
        """The state as torch has states: a tensor of bytes, which checkpoints can save.

        The highest bit says that ranks may have different seeds and have not all met yet.
        """
        apart = self.by_torch and EVERYONE not in self.met
        position = self.position | apart * _APART
        data = self.seed.to_bytes(8, "little") + position.to_bytes(8, "little")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def set_bytes(self, state: Tensor) -> None:
        """Go on from a state that was saved."""
        if state.dtype != torch.uint8 or state.numel() != 16:
            raise ValueError(
                f"a tensor of {state.numel()} x {state.dtype} is no state of shardwise's stream.\n"
                "  why: a state is 16 bytes, the seed and the position\n"
                "  fix: pass what shardwise.get_rng_state() returned; for torch's own use torch.set_rng_state"
            )
        data = bytes(state.tolist())
        self.seed, position = (int.from_bytes(data[i : i + 8], "little") for i in (0, 8))
        self.position, self.by_torch, self.met = position & ~_APART, bool(position & _APART), frozenset()


class State(NamedTuple):
    """All there is to remember: the streams, and the seed of torch's generator that was last heeded."""

    streams: tuple[tuple[Hashable, int, int, bool, frozenset[Hashable]], ...]
    heeded: int


EVERYONE = ()
# torch may have been seeded before this was imported, and not alike everywhere
_streams: dict[Hashable, Stream] = {EVERYONE: Stream(torch.initial_seed(), by_torch=True)}
_heeded = torch.initial_seed()


def stream_of(key: Hashable = EVERYONE) -> Stream:
    """The stream of a mesh that was given one of its own, or everyone's."""
    global _heeded
    if len(_streams) > 1 and key in _streams:
        return _streams[key]
    everyone = _streams[EVERYONE]
    if (seed := torch.initial_seed()) != _heeded:
        # torch's generator was seeded where `follow_torch` does not look: by a method
        _heeded = seed
        everyone = _streams[EVERYONE] = Stream(seed, by_torch=True)
    return everyone


def own_stream(key: Hashable) -> Stream:
    """The stream of a mesh alone, a new one if it had none."""
    return stream_of() if key == EVERYONE else _streams.setdefault(key, Stream(0))


def begin(key: Hashable, seed: int) -> None:
    """Begin a stream, for a mesh alone or for everyone."""
    global _heeded
    _streams[key] = Stream(seed)
    if key == EVERYONE:
        _heeded = torch.initial_seed()


def snapshot() -> State:
    """All streams as they are now."""
    return State(tuple((k, s.seed, s.position, s.by_torch, s.met) for k, s in _streams.items()), _heeded)


def restore(state: State) -> None:
    """All streams as they were then."""
    global _heeded, _streams
    # others all at once: a thread that draws meanwhile must not find none
    _streams = {k: Stream(seed, at, by_torch, met) for k, seed, at, by_torch, met in state.streams}
    _heeded = state.heeded


@functools.cache  # once, however often it is imported
def follow_torch() -> None:
    """Do with the streams what programs do with torch's generator: seed it, and bring back an earlier state.

    `torch.manual_seed` and `torch.seed` both tell custom devices, whoever holds them by another name. What
    `torch.get_rng_state` returns remembers our state too, and so `torch.random.fork_rng` and
    `torch.utils.checkpoint`, which set it again, bring ours back with theirs.
    """
    from torch import random as torchs

    # beside the tensor and not in it: a saved state is then what it is without us
    kept: WeakIdKeyDictionary = WeakIdKeyDictionary()
    tell_devices, get, put = torchs._seed_custom_device, torchs.get_rng_state, torchs.set_rng_state

    @functools.wraps(tell_devices)
    def _seed_custom_device(seed: Any) -> None:
        global _heeded
        tell_devices(seed)
        _heeded = int(seed) % _BELOW
        _streams[EVERYONE] = Stream(_heeded, by_torch=True)

    @functools.wraps(get)
    def get_rng_state() -> Tensor:
        state = get()
        kept[state] = snapshot()
        return state

    @functools.wraps(put)
    def set_rng_state(new_state: Tensor) -> None:
        global _heeded
        put(new_state)
        if (ours := kept.get(new_state)) is not None:
            restore(ours)
        else:
            _heeded = torch.initial_seed()  # a state from elsewhere knows nothing of the streams: they go on

    torchs._seed_custom_device = _seed_custom_device
    torch.get_rng_state = torchs.get_rng_state = get_rng_state
    torch.set_rng_state = torchs.set_rng_state = set_rng_state
