"""Notification when torch's global generator is seeded, and when its state is read or set back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["watch_torch_seeding"]


class _Watcher(NamedTuple):
    on_seed: Callable[[int], None]
    save: Callable[[], Any]
    restore: Callable[[Any], None]


_watchers: list[_Watcher] = []


def watch_torch_seeding(
    on_seed: Callable[[int], None], save: Callable[[], Any], restore: Callable[[Any], None]
) -> None:
    """Let other random state follow torch's generator, from now on; repeating the call has no effect.

    `on_seed(seed)` is called by `torch.manual_seed` and `torch.seed`, under whatever name they were imported. `save()`
    is called by `torch.get_rng_state`, and its result is passed to `restore` when `torch.set_rng_state` gets that same
    tensor, so `torch.random.fork_rng` and `torch.utils.checkpoint` restore the other state as well. `restore(None)` is
    called for tensors of another origin, such as a file. Methods of `torch.default_generator` notify nobody.
    """
    if (watcher := _Watcher(on_seed, save, restore)) not in _watchers:
        _watchers.append(watcher)
    _patch_torch()


@functools.cache  # patch once
def _patch_torch() -> None:
    torch_random = torch.random
    # weak and outside the tensor, so that a state that is saved to a file is the same as without the patch
    saved: WeakIdKeyDictionary = WeakIdKeyDictionary()
    seed_devices = torch_random._seed_custom_device
    get_state, set_state = torch_random.get_rng_state, torch_random.set_rng_state

    # manual_seed and seed call this one by its global name; patching them would miss earlier imports of them
    @functools.wraps(seed_devices)
    def _seed_custom_device(seed: Any) -> None:
        seed_devices(seed)
        for watcher in _watchers:
            watcher.on_seed(int(seed))

    @functools.wraps(get_state)
    def get_rng_state() -> Tensor:
        state = get_state()
        saved[state] = [(watcher.restore, watcher.save()) for watcher in _watchers]
        return state

    @functools.wraps(set_state)
    def set_rng_state(new_state: Tensor) -> None:
        set_state(new_state)
        for restore, state in saved.get(new_state) or [(watcher.restore, None) for watcher in _watchers]:
            restore(state)

    torch_random._seed_custom_device = _seed_custom_device
    torch.get_rng_state = torch_random.get_rng_state = get_rng_state
    torch.set_rng_state = torch_random.set_rng_state = set_rng_state
