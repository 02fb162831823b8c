"""One parameter of a group: where it is registered, its layouts, and its tensors in computations."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import PerRank, axes_of, is_simulated, lifted, members_of
from shardwise.layout import Layout, Spec, contiguous_stride
from shardwise.parallel.data.layouts import ParameterLayout
from shardwise.parallel.data.policy import MixedPrecisionPolicy
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.modules import own_parameters, set_parameter
from shardwise.torch_internals.subclass import new_dtensor, version

__all__ = ["Slot", "joined"]


def joined(raw: Sequence[Tensor], mesh: DeviceMesh) -> Tensor:
    """The tensor that a module computes with, of what `Slot.raw` returned."""
    if len(raw) == 1 and (type(raw[0]) is DTensor or not is_simulated()):
        return raw[0]
    return PerRank(dict(zip(members_of(mesh), raw, strict=True)))


class Slot:
    """A parameter of a group.

    Attributes:
        name: its name in the module that was sharded.
        places: the modules that have it, each with its name there; several for tied parameters.
        is_plain: whether those modules know their parameters by these names only.
        layout: how it is stored and computed with.
        mesh: the mesh of the group's collectives, which has the axes of all its parameters.
        stored, computed: the layouts on that mesh.
        data: the data axes of that mesh.
        replicate: those along which the stored parameter is replicated.
        stride: the strides of the whole parameter.
        is_cast: whether it may be computed with in another dtype than its own.
        index: its place among the slots of its group.
        held: a list with one entry, which the slots of a group share: their stored parameters while the modules have the
            gathered tensors, otherwise None.
    """

    def __init__(
        self,
        name: str,
        places: list[tuple[nn.Module, str]],
        layout: ParameterLayout,
        policy: MixedPrecisionPolicy,
        override: torch.dtype | None,
    ) -> None:
        """`override`: the dtype to compute with, if it is not that of the policy."""
        self.name, self.places, self.layout = name, places, layout
        self._policy, self._override = policy, override
        self._is_distributed = not layout.stored_plain
        self.is_cast = policy.param_dtype is not None or override is not None
        self.stride = contiguous_stride(layout.stored.shape)
        self.index, self.held = 0, list[Sequence[Tensor] | None]([None])
        # other modules, such as nn.LSTM, keep further references to their parameters
        self.is_plain = all(type(module).__setattr__ is nn.Module.__setattr__ for module, _ in places)
        self._specs: dict[torch.dtype, Spec] = {}
        self.use_mesh(layout.mesh)

    def use_mesh(self, mesh: DeviceMesh) -> None:
        """Set the mesh of the group's collectives."""
        self.mesh = mesh
        self.stored = lifted(self.layout.stored, self.layout.mesh, mesh)
        self.computed = lifted(self.layout.computed, self.layout.mesh, mesh)
        own, names = axes_of(mesh), axes_of(self.layout.mesh)
        data = (
            {own.index(n) for n in names.names_of(self.layout.data)}
            if mesh is not self.layout.mesh
            else self.layout.data
        )
        self.data = frozenset(data)
        self.replicate = self.data - self.stored.sharded
        self._pending: dict[tuple[Layout, str], Layout] = {}

    def pending_gradient(self, layout: Layout, op: str) -> Layout:
        """The layout, on the group's mesh, of a gradient that differs along the data axes."""
        found = self._pending.get((layout, op))
        if found is None:
            over = lifted(self.layout.pending_gradient(self.layout.computed, op), self.layout.mesh, self.mesh)
            found = layout.with_partial(dict(layout.partial) | dict(over.partial))
            self._pending[layout, op] = found
        return found

    def stored_spec(self, dtype: torch.dtype) -> Spec:
        """The spec of the stored parameter, or of its gradient."""
        found = self._specs.get(dtype)
        if found is None:
            shape = torch.Size(self.layout.stored.shape)
            found = Spec(self.layout.mesh, self.layout.stored, dtype, shape, self.stride)
            self._specs[dtype] = found
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Slot:
        places = [(copy.deepcopy(module, memo), name) for module, name in self.places]
        out = Slot(self.name, places, self.layout, self._policy, self._override)
        out.use_mesh(self.mesh)
        return out

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it is computed with."""
        own = self.param.dtype
        if not self.is_cast:
            return own
        return self._override or (self._policy.param_dtype if own.is_floating_point else None) or own

    @cached_property
    def homes(self) -> list[tuple[dict[str, Any], str]]:
        """The parameters of the modules that have it, each with its name there."""
        return [(own_parameters(module), name) for module, name in self.places]

    @property
    def param(self) -> Tensor:
        """The stored parameter, as the modules have it between calls."""
        if (held := self.held[0]) is not None:
            return held[self.index]
        params, name = self.homes[0]
        found: Any = params.get(name)
        is_distributed, stored = isinstance(found, DTensor), self.layout.stored
        if self._is_distributed:
            fits = is_distributed and found._spec.layout is stored
        else:
            fits = not is_distributed and found is not None and found.shape == stored.shape
        if not fits:
            what = (
                "missing"
                if found is None
                else f"a {found.sharding if is_distributed else type(found).__name__}"
            )
            expected = stored if self._is_distributed else f"plain tensor of {stored}"
            raise RuntimeError(
                f"The parameter {self.name} of a data-parallel module is {what}, and was a {expected}.\n"
                "  why: It was replaced, redistributed or deleted after the module was made data-parallel.\n"
                "  fix: Write into it (p.copy_(…), load_state_dict), or replace it before fully_shard or replicate."
            )
        return found  # type: ignore[no-any-return]

    def block(self, param: Any) -> Tensor:
        """The block of the stored parameter; of a plain one, itself without its graph."""
        if self._is_distributed:
            return param._local_tensor  # type: ignore[no-any-return]
        plain: Tensor = param.detach()
        return PerRank(dict.fromkeys(members_of(self.mesh), plain)) if is_simulated() else plain

    def wrap(self, block: Tensor, dtype: torch.dtype) -> Tensor:
        """A block in the form of the stored parameter, as its gradient."""
        if self._is_distributed:
            return new_dtensor(DTensor, block, self.stored_spec(dtype), False)  # type: ignore[no-any-return]
        return block.ranks[0] if isinstance(block, PerRank) else block

    @property
    def is_moved(self) -> bool:
        """Whether it is computed with in another layout than it is stored in."""
        return self.layout.stored is not self.layout.computed

    def stamp(self) -> tuple[int, ...]:
        """Numbers that change when the stored parameter is written to or replaced."""
        param: Any = self.param
        if not self._is_distributed:
            return id(param), version(param), param.data_ptr()
        block = param._local_tensor
        writes = sum(map(version, block.ranks)) if isinstance(block, PerRank) else version(block)
        return id(param), version(param), writes, id(block)

    def register(self, tensor: Tensor) -> None:
        """Let the modules have this tensor."""
        if self.is_plain:
            for params, name in self.homes:
                params[name] = tensor
        else:
            for module, name in self.places:
                set_parameter(module, name, tensor)

    def raw(self, block: Tensor, on_whole_mesh: bool) -> list[Tensor]:
        """New tensors for autograd with the memory of a gathered block: a DTensor, or a plain tensor for each rank."""
        target = (self.layout.mesh, self.layout.computed) if on_whole_mesh else self.layout.inner
        if target is not None:
            mesh, layout = target
            shape = torch.Size(layout.shape)
            return [DTensor(block, Spec(mesh, layout, block.dtype, shape, self.stride))]
        return [b.detach() for b in block.ranks] if isinstance(block, PerRank) else [block.detach()]
