"""Deferred initialisation: memory and initial values for a module that was built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from shardwise.layout import LayoutError
from shardwise.ops.one_device import one_device
from shardwise.parallel.module_tensors import owned_tensors, slots_of
from shardwise.plan.settings import override_settings
from shardwise.tensor.dtensor import DTensor

__all__ = ["materialize"]

_RESETS = ("reset_parameters", "_reset_parameters")  # the second in torch's attention and transformer modules


def materialize(module: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Give the tensors of a module that are on the meta device memory and initial values, in place.

    The values are those that the module has on one device with the same seed, bit for bit, whatever its layouts: build it
    there with `with one_device():`, or on the meta device and with this function. A tied tensor has the value that the first
    of its modules gives it.

    Args:
        module: the module, distributed or not. Each submodule with tensors on the meta device must have `reset_parameters`, or
            the module itself `_init_weights(submodule)`, as those of Hugging Face have. Children come before their parents.
        device: the device; by default that of the mesh, or the CPU.

    Returns:
        The module; its parameters are the same objects.

    Raises:
        LayoutError: a submodule has tensors on the meta device and nothing that initialises them.

    Nothing is communicated.

    >>> import shardwise as sw
    >>> sw.manual_seed(3)
    >>> with sw.one_device():
    ...     alone = nn.Linear(4, 6)
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     layer = sw.parallel.parallelize_module(nn.Linear(4, 6, device="meta"), mesh, {"": "colwise"})
    ...     sw.manual_seed(3)
    ...     _ = sw.materialize(layer)
    ...     torch.equal(layer.weight.full_tensor().ranks[1], alone.weight)
    True
    """
    waiting = [m for m in _children_first(module) if any(s.tensor.is_meta for s in slots_of(m))]
    resets = {m: _reset_of(m, module) for m in waiting}
    _check_all_known(module, resets)
    if device is None:
        meshes = [s.tensor.device_mesh for s in slots_of(module) if isinstance(s.tensor, DTensor)]
        device = meshes[0].device_type if meshes else "cpu"
    for m in waiting:
        if any(t.is_meta for _, t in owned_tensors(m)):
            m.to_empty(device=device, recurse=False)
    # what the methods create as plain tensors is the same on every rank
    with torch.no_grad(), one_device(), override_settings(plain="replicate"):
        given: dict[int, Tensor] = {}
        for m, reset in resets.items():
            if reset is not None:
                _reset(m, reset, given)
    return module


def _reset(m: nn.Module, reset: Callable[[], object], given: dict[int, Tensor]) -> None:
    """Initialise the tensors of a module, except tied ones that another module has initialised.

    The method runs in full, because it draws in full when the module is built; the value of a tied tensor is restored.

    Args:
        given: the tensors that were initialised before, by id; those of this module are added.
    """
    kept = [(t, t.clone()) for t in m.parameters(recurse=False) if id(t) in given]
    reset()
    for t, value in kept:
        t.copy_(value)
    given.update((id(t), t) for t in m.parameters())


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a tree in the order in which constructors finish."""
    seen: set[nn.Module] = set()

    def walk(m: nn.Module) -> Iterator[nn.Module]:
        if m in seen:
            return
        seen.add(m)
        for child in m.children():
            yield from walk(child)
        yield m

    return walk(module)


def _reset_of(m: nn.Module, root: nn.Module) -> Callable[[], object] | None:
    """What initialises the tensors that a module holds itself."""
    holds_tensors = any(True for _ in owned_tensors(m))
    # a module that only holds others: the constructors of torch run the second method after them, and not the first
    names = _RESETS if holds_tensors else _RESETS[1:]
    own = next((getattr(m, name) for name in names if callable(getattr(m, name, None))), None)
    if own is not None:
        return own  # type: ignore[no-any-return]
    by_root = getattr(root, "_init_weights", None)
    return (lambda: by_root(m)) if callable(by_root) and holds_tensors else None


def _check_all_known(root: nn.Module, resets: dict[nn.Module, Callable[[], object] | None]) -> None:
    unknown = [
        f"{s.full_name} of {type(s.owner).__name__}"
        for s in slots_of(root)
        if s.tensor.is_meta and resets[s.owner] is None
    ]
    if unknown:
        raise LayoutError(
            f"materialize cannot initialise {', '.join(unknown[:6])}{' and others' if len(unknown) > 6 else ''}.",
            why="They are on the meta device, and their modules have no reset_parameters.",
            fix="Define reset_parameters(self) in these modules, or load the values: load_sharded(module, files).",
        )
