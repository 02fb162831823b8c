"""torch's state dict and checkpoint code, which looks for torch's DTensor class: its modules, and what their names become.

`get_*` and `set_*_state_dict` ask `isinstance(x, DTensor)` of the class that their modules have imported, and take every other
tensor for a whole one: nothing is gathered, and a broadcast waits for ranks that do not take part. In those modules the
names are replaced by ones that know both classes; torch's own DTensors take the way they had.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

from torch import Tensor

from shardwise.torch_internals.rank_queries import process_rank

__all__ = ["STATE_DICT_MODULES", "OurTensors", "know_both_classes"]

_UTILITIES = "torch.distributed._state_dict_utils"
STATE_DICT_MODULES = (
    _UTILITIES,
    "torch.distributed.checkpoint._pg_transport",
    "torch.distributed.checkpoint.default_planner",
    "torch.distributed.checkpoint.planner_helpers",
)
"""The modules of torch that tell DTensors from whole tensors in state dicts."""


@dataclass(frozen=True)
class OurTensors:
    """Our tensor class and functions, under the names that torch's modules have for theirs."""

    tensor: Any
    placement: type
    distribute_tensor: Callable[..., Any]
    compute_local_shape_and_global_offset: Callable[..., Any]

    def is_ours(self, placements: Any) -> bool:
        return any(isinstance(p, self.placement) for p in placements)


def know_both_classes(module: ModuleType, ours: OurTensors) -> None:
    """Let a module of `STATE_DICT_MODULES` treat our tensors as torch's; applying it twice does nothing."""
    theirs = module.DTensor
    if isinstance(theirs, _BothClasses):
        return
    if theirs is not ours.tensor:
        module.DTensor = _both_classes(theirs, ours)  # type: ignore[attr-defined]
        for name in ("distribute_tensor", "compute_local_shape_and_global_offset"):
            if hasattr(module, name):
                setattr(module, name, _by_placements(getattr(module, name), getattr(ours, name), ours))
    if module.__name__ == _UTILITIES:
        _replace(module, "_distribute_tensors", _distribute(module, ours))
        if theirs is not ours.tensor:
            _replace(module, "_gather_state_dict", _gather(module, ours))


class _BothClasses(type):
    """The class of a name for two tensor classes."""

    known: tuple[Any, Any]
    is_ours: Callable[[Any], bool]

    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, cls.known)

    def __call__(cls, local: Tensor, spec: Any, **kwargs: Any) -> Any:
        """A tensor of the class that the placements of its spec are of."""
        theirs, ours = cls.known
        return (ours if cls.is_ours(spec.placements) else theirs)(local, spec, **kwargs)


def _both_classes(theirs: Any, ours: OurTensors) -> _BothClasses:
    class DTensor(metaclass=_BothClasses):
        known = (theirs, ours.tensor)
        is_ours = staticmethod(ours.is_ours)
        from_local = staticmethod(_by_placements(theirs.from_local, ours.tensor.from_local, ours))

    return DTensor


def _by_placements(
    theirs: Callable[..., Any], function: Callable[..., Any], ours: OurTensors
) -> Callable[..., Any]:
    """A function of (tensor or shape, mesh, placements): ours if the placements are."""

    @wraps(theirs)
    def either(what: Any, device_mesh: Any, placements: Any, **kwargs: Any) -> Any:
        chosen = function if ours.is_ours(placements) else theirs
        return chosen(what, device_mesh, placements, **kwargs)

    return either


def _replace(module: ModuleType, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a function in its module and in the modules of torch that have imported it."""
    original = getattr(module, name)
    for known in [m for n, m in sys.modules.items() if n.startswith("torch.")]:
        if getattr(known, "__dict__", {}).get(name) is original:
            setattr(known, name, replacement)


def _gather(module: ModuleType, ours: OurTensors) -> Callable[..., Any]:
    original = module._gather_state_dict

    @wraps(original)
    def gather(
        state_dict: Any, *, pg: Any = None, cpu_offload: bool = False, ranks_only: Any = (), **kwargs: Any
    ) -> Any:
        is_wanted = not ranks_only or process_rank(pg) in ranks_only

        def whole(x: Any) -> Any:
            mesh = x.device_mesh
            x = x.detach()
            full = (x if x.device.type == mesh.device_type else x.to(mesh.device_type)).full_tensor()
            if not is_wanted:
                return None  # what torch returns on these ranks
            return full.cpu() if cpu_offload else full

        gathered = _map(state_dict, ours.tensor, whole)
        return original(gathered, pg=pg, cpu_offload=cpu_offload, ranks_only=ranks_only, **kwargs)

    return gather


def _map(value: Any, cls: type, function: Callable[[Any], Any]) -> Any:
    """The tensors of one class in a state dict replaced, in its order."""
    match value:
        case Tensor():
            return function(value) if isinstance(value, cls) else value
        case dict():
            return {key: _map(item, cls, function) for key, item in value.items()}
        case list():
            return [_map(item, cls, function) for item in value]
        case tuple():
            return tuple(_map(item, cls, function) for item in value)
    return value


def _distribute(module: ModuleType, ours: OurTensors) -> Callable[..., Any]:
    """`_distribute_tensors` for blocks in any layout; torch's takes a block for a rectangle of the whole."""
    original = module._distribute_tensors

    @wraps(original)
    def distribute(local_state_dict: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
        for key in keys:
            pair = local_state_dict.get(key)
            if not isinstance(pair, tuple) or not isinstance(pair[0], ours.tensor):
                continue
            local, full = pair
            block = ours.distribute_tensor(full, local.device_mesh, local.placements, src_data_rank=None)
            if local.is_meta:
                local = block.clone()
            else:
                local.to_local().copy_(block.to_local())
            local_state_dict[key] = local
        original(local_state_dict, keys, *args, **kwargs)

    return distribute
