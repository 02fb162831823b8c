"""The tensors that a program knows by name: where to find them in a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.tensor.dtensor import DTensor

__all__ = [
    "Find",
    "Input",
    "Owners",
    "always",
    "block_of_tensor",
    "find_by_name",
    "module_tensors",
    "owners_of",
]

Find = Callable[[Sequence[Any]], Tensor]
"""How to find a tensor in a run, given the leaves of its arguments."""


class Input(NamedTuple):
    """An input of a graph: its name for people, and how to find the tensor whose block it is."""

    name: str
    find: Find
    is_written: bool = False

    def read(self, leaves: Sequence[Any]) -> Tensor:
        """The block, given the leaves of a run's arguments."""
        return block_of_tensor(self.find(leaves))


def block_of_tensor(x: Tensor) -> Tensor:
    """The block of a DTensor; a plain tensor without its graph."""
    return x._local_tensor if isinstance(x, DTensor) else x.detach()


class Owners:
    """The tensors that a program knows by name, and the inputs that their blocks become."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.inputs: dict[int, Input] = {}
        self.finds: dict[int, tuple[str, Find]] = {}
        """By id of the tensor, its name, and how to find the one in its place in a run."""

    def add(self, name: str, tensor: Any, find: Find) -> None:
        """Add a tensor, if it is one."""
        if not isinstance(tensor, Tensor):
            return
        self.tensors.append(tensor)
        block = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        self.inputs.setdefault(id(block), Input(name, find))
        self.finds.setdefault(id(tensor), (name, find))


def always(value: Tensor) -> Find:
    """Find the same tensor in every run."""
    return lambda leaves: value


def _gradient_of(find: Find) -> Find:
    return lambda leaves: find(leaves).grad  # type: ignore[return-value]


def _state_of(optimizer: Optimizer, p: Tensor, key: str) -> Find:
    return lambda leaves: optimizer.state[p][key]


def owners_of(leaves: Sequence[Any], optimizer: Optimizer | None, modules: Sequence[nn.Module]) -> Owners:
    """The tensors of a step: those of the modules, the optimizer's, with gradients and states, and the arguments."""
    owners = Owners()
    for name, t in module_tensors(modules).items():
        owners.add(name, t, always(t))
        owners.add(f"{name}.grad", t.grad, _gradient_of(always(t)))
    if optimizer is not None:
        _add_optimizer(owners, optimizer)
    for i, leaf in enumerate(leaves):
        owners.add(f"argument {i}", leaf, itemgetter(i))
        if isinstance(leaf, Tensor) and leaf.is_leaf:
            owners.add(f"argument {i}.grad", leaf.grad, _gradient_of(itemgetter(i)))
    return owners


def _add_optimizer(owners: Owners, optimizer: Optimizer) -> None:
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            name = f"parameter {g}.{i}"
            owners.add(name, p, always(p))
            owners.add(f"{name}.grad", p.grad, _gradient_of(always(p)))
            for key, value in optimizer.state.get(p, {}).items():
                owners.add(f"{name}.{key}", value, _state_of(optimizer, p, key))


def find_by_name(name: str, optimizer: Optimizer | None, modules: Sequence[nn.Module]) -> Find | None:
    """How to find the tensor that has this name in `owners_of`; None if there is no such tensor."""
    if name.endswith(".grad"):
        find = find_by_name(name.removesuffix(".grad"), optimizer, modules)
        return None if find is None else _gradient_of(find)
    kind, _, rest = name.partition(" ")
    if kind == "argument" and rest.isdigit():
        return itemgetter(int(rest))
    if kind == "parameter" and optimizer is not None:
        group, number, *key = rest.split(".", 2)
        p = optimizer.param_groups[int(group)]["params"][int(number)]
        return _state_of(optimizer, p, key[0]) if key else always(p)
    tensor = module_tensors(modules).get(name)
    return None if tensor is None else always(tensor)


def module_tensors(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The parameters and buffers of modules, by name; with several modules, the number of the module comes first."""
    found: dict[str, Tensor] = {}
    for i, m in enumerate(modules):
        start = f"{i}." if len(modules) > 1 else ""
        for name, t in (*m.named_parameters(remove_duplicate=False), *m.named_buffers()):
            found[start + name] = t
    return found
