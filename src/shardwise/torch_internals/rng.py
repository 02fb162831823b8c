"""Notification when torch's global generator is seeded, and when its state is read or set back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, random
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["announce_seed", "seeding_listeners", "unobserved", "watch_torch_seeding"]

seeding_listeners: list[Callable[[str], None]] = []
"""Called with "seed" when torch's global generator is seeded, and with "state" when its state is set; usually none."""

_unobserved: list[None] = []
_followers: list[Callable[[int], None]] = []


def announce_seed(seed: int) -> None:
    """Let random state that follows torch's generator follow this seed, as if the generator had been given it."""
    for follow in _followers:
        follow(seed)
    for listener in seeding_listeners:
        listener("seed")


def unobserved(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that, while it runs, `save` and `restore` are not called when it reads or sets the state of torch's generator."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        _unobserved.append(None)
        try:
            return fn(*args, **kwargs)
        finally:
            _unobserved.pop()

    return call


@functools.cache
def watch_torch_seeding(
    on_seed: Callable[[int], None], save: Callable[[], Any], restore: Callable[[Any], None]
) -> None:
    """Let other random state follow torch's generator, from now on; repeating the call has no effect.

    `on_seed(seed)` is called by `torch.manual_seed` and `torch.seed`, under whatever name they were imported. `save()`
    is called by `torch.get_rng_state`, and its result is passed to `restore` when `torch.set_rng_state` gets that same
    tensor, so `torch.random.fork_rng` and `torch.utils.checkpoint` restore the other state as well. `restore(None)` is
    called for tensors of another origin, such as a file. Methods of `torch.default_generator` call nothing.
    """
    # weak and outside the tensor, so that a state that is saved to a file is the same as without the patch
    saved: WeakIdKeyDictionary = WeakIdKeyDictionary()
    seed_devices, get_state, set_state = (
        random._seed_custom_device,
        random.get_rng_state,
        random.set_rng_state,
    )

    # manual_seed and seed look this one up when called; patching them would miss earlier imports of them
    @functools.wraps(seed_devices)
    def _seed_custom_device(seed: Any) -> None:
        seed_devices(seed)
        on_seed(int(seed))
        for listener in seeding_listeners:
            listener("seed")

    @functools.wraps(get_state)
    def get_rng_state() -> Tensor:
        state = get_state()
        if not _unobserved:
            saved[state] = save()
        return state

    @functools.wraps(set_state)
    def set_rng_state(new_state: Tensor) -> None:
        set_state(new_state)
        if _unobserved:
            return
        restore(saved.get(new_state))
        for listener in seeding_listeners:
            listener("state")

    _followers.append(on_seed)
    random._seed_custom_device = _seed_custom_device
    torch.get_rng_state = random.get_rng_state = get_rng_state
    torch.set_rng_state = random.set_rng_state = set_rng_state
