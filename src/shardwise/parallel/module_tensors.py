"""The parameters and buffers of a module: by name, by owner, and how they are replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.modules import own_parameters

__all__ = ["Slot", "device_problems", "group_ties", "owned_tensors", "replace", "slots_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One place of a module tree that holds a parameter or a buffer; tied tensors have several."""

    owner: nn.Module
    path: str
    name: str
    tensor: Tensor

    @property
    def full_name(self) -> str:
        """The dotted name from the root of the tree."""
        return f"{self.path}.{self.name}" if self.path else self.name


def owned_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that a module holds itself, not in a submodule."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def slots_of(module: nn.Module) -> list[Slot]:
    """All places in a module tree that hold a parameter or a buffer, tied ones repeated."""
    return [
        Slot(owner, path, name, tensor)
        for path, owner in module.named_modules()
        for name, tensor in owned_tensors(owner)
    ]


def device_problems(tensors: Iterable[tuple[str, Tensor]], mesh: DeviceMesh) -> list[str]:
    """What is wrong with named tensors that are not on devices of a mesh; on the meta device they may be."""
    foreign = [f"{n} on {t.device}" for n, t in tensors if t.device.type not in (mesh.device_type, "meta")]
    if not foreign:
        return []
    more = f" and {len(foreign) - 4} more" if len(foreign) > 4 else ""
    return [
        f"{', '.join(foreign[:4])}{more}, and the mesh has {mesh.device_type} devices; module.to({mesh.device_type!r}) first"
    ]


def group_ties(slots: list[Slot]) -> list[list[Slot]]:
    """The places grouped by the tensor that they hold, in the order of first appearance."""
    groups: dict[int, list[Slot]] = {}
    for slot in slots:
        groups.setdefault(id(slot.tensor), []).append(slot)
    return list(groups.values())


def replace(slots: list[Slot], new: DTensor) -> None:
    """Put one distributed tensor into places that held one plain tensor; parameters stay parameters."""
    old, owner = slots[0].tensor, slots[0].owner
    # by the module: a copy of a parameter that is a tensor subclass may have forgotten that it is one
    if slots[0].name in own_parameters(owner):
        new = nn.Parameter(new, requires_grad=old.requires_grad)  # type: ignore[assignment]
    for name, value in vars(old).items():
        if name != "_is_param":
            setattr(new, name, value)
    for slot in slots:
        # by attribute, because recurrent modules keep a list of their weights up to date there
        setattr(slot.owner, slot.name, new)
