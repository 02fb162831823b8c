"""`OwnerOptimizer`: each parameter is updated as a whole by one rank, while it is stored split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.comm import PerRank, members_of, per_rank
from shardwise.layout import Factor, Layout, Spec, block_offset, block_shape, contiguous_stride
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.redistribute_many import redistribute_many
from shardwise.torch_internals.subclass import version

__all__ = ["OwnerOptimizer"]

_Params = Iterable[Tensor] | Iterable[dict[str, Any]]


class OwnerOptimizer(torch.optim.Optimizer):
    """Run an optimizer on whole parameters, each on one of the ranks that store a part of it.

    Some optimizers need the whole matrix: Muon orthogonalizes the update of a matrix. Gathering every gradient everywhere would
    send n times as much and compute everything n times. Here gradients go to the owners of their parameters and updated
    parameters come back, by one all-to-all each: 2/n of the bytes of gathering everywhere, and 1/n of the computation. Owners keep
    the parameters and the optimizer state whole; in sum that is as much memory as if they were split.

    The numbers are those of the optimizer on one device, bit for bit, given the same gradients.

    Args:
        params: DTensors, or groups of them with options of their own.
        optimizer_class: the optimizer, such as `torch.optim.Muon`.
        **defaults: its options.

    Parameters of one shape and layout are dealt out in order. A parameter that no axis splits is owned by one rank of its mesh.
    Axes that replicate a split parameter (HSDP) have owners of their own, so nothing is sent over them.

    Raises:
        TypeError: a parameter is not a DTensor.

    >>> import shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    ...     w = torch.nn.Parameter(sw.distribute_tensor(torch.ones(4, 3), mesh, [sw.Shard(0)]))
    ...     optimizer = OwnerOptimizer([w], torch.optim.Muon, lr=0.1, weight_decay=0.0)
    ...     w.grad = sw.distribute_tensor(torch.eye(4, 3), mesh, [sw.Shard(0)])
    ...     optimizer.step()
    ...     print(w.sharding, [tuple(b.shape) for b in w.to_local().ranks])
    [4:dp, 3] [(2, 3), (2, 3)]
    """

    def __init__(
        self, params: _Params, optimizer_class: type[torch.optim.Optimizer], **defaults: Any
    ) -> None:
        make: Any = optimizer_class
        self._make: Callable[..., torch.optim.Optimizer] = lambda groups: make(groups, **defaults)
        options = self._make([nn.Parameter(torch.zeros(2, 2))]).defaults
        super().__init__(params, options)
        self._families = _families(self.param_groups)
        self._is_ready = True
        self._inner: dict[int, _Inner] = {}  # by rank: a simulation has all of them
        self._stamps: list[tuple[int, ...]] = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups after the first ones: owners are chosen once, for all parameters.

        Raises:
            RuntimeError: the optimizer has been made.
        """
        if getattr(self, "_is_ready", False):
            raise RuntimeError(
                "OwnerOptimizer got another group of parameters.\n"
                "  why: The owners of all parameters were chosen when it was made.\n"
                "  fix: Pass all groups at first, or make another OwnerOptimizer for the new parameters."
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: computes the loss again, as for any optimizer.

        It sends the gradients to the owners and the updated parameters back: one all-to-all each for all parameters of a mesh.
        Parameters that were written to since the last step are sent to their owners, too.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        families, owned = self._families, [f.owned for f in self._families]
        stamps = [_stamp(p) for f in families for p in f.params]
        if not any(p.grad is not None for f in families for p in f.params):
            return loss
        sources: list[Any] = [torch.stack([_gradient(p) for p in f.params]) for f in families]
        fresh = stamps != self._stamps
        if fresh:
            sources += [torch.stack([p.detach() for p in f.params]) for f in families]
        moved = redistribute_many(sources, owned * (2 if fresh else 1))
        grads, values = moved[: len(families)], moved[len(families) :]
        given = [[p.grad is not None for p in f.params] for f in families]
        blocks = [x._local_tensor for x in (*grads, *values)]
        updated = per_rank(lambda rank, *some: self._update(rank, given, some), *blocks)
        whole = [DTensor(block, x._spec) for block, x in zip(updated, grads, strict=True)]
        for family, stack in zip(
            families, redistribute_many(whole, [f.stored for f in families]), strict=True
        ):
            for p, value in zip(family.params, stack.unbind(0), strict=True):
                if p.grad is not None:
                    p.copy_(value)
        self._stamps = [_stamp(p) for f in families for p in f.params]
        return loss

    def _update(self, rank: int, given: Sequence[Sequence[bool]], blocks: Sequence[Tensor]) -> list[Tensor]:
        """The updated parameters that a rank owns, given the blocks of gradients and, if they changed, of parameters."""
        count = len(self._families)
        inner = self._inner.get(rank)
        if inner is None:
            inner = self._inner[rank] = _Inner(self, rank)
        inner.set_options(self.param_groups)
        for f, params in enumerate(inner.params):
            for k, (n, p) in enumerate(params.items()):
                p.grad = blocks[f][k] if given[f][n] else None
                if len(blocks) > count:
                    p.copy_(blocks[count + f][k])
        inner.optimizer.step()
        return [
            torch.stack(list(params.values())) if params else blocks[f].new_empty(blocks[f].shape)
            for f, params in enumerate(inner.params)
        ]

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """The state of the owners: for each family of parameters DTensors of the stacked state, and the options of the groups.

        Nothing is communicated.
        """
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        state = []
        for f, family in enumerate(self._families):
            found = {}
            for key, whole in self._kinds(family).items():
                layout = family.owned if whole else family.numbers
                block = per_rank(
                    lambda rank, f=f, key=key, layout=layout: self._state_of(rank, f, key, layout)
                )
                shape = torch.Size(layout.shape)
                spec = Spec(family.mesh, layout, block.dtype, shape, contiguous_stride(shape))
                found[key] = DTensor(block, spec)
            state.append(found if self._inner else {})
        return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the state that `state_dict` returned, on the same parameters; its DTensors may be in any layout.

        It sends what is not where its owner is.
        """
        for group, options in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(options)
        for f, (family, found) in enumerate(zip(self._families, state_dict["state"], strict=True)):
            for key, value in found.items():
                layout = family.owned if value.dim() > 1 else family.numbers
                (moved,) = redistribute_many([value], [layout])
                per_rank(
                    lambda rank, block, f=f, key=key: self._set_state(rank, f, key, block),
                    moved._local_tensor,
                )
        self._stamps = []  # the parameters are sent to their owners again

    def _kinds(self, family: _Family) -> dict[str, bool]:
        """The names of the state of a parameter, each with whether it has the parameter's shape, found by a step."""
        p = nn.Parameter(torch.zeros([2] * len(family.shape)))
        p.grad = torch.zeros_like(p)
        probe = self._make([p])
        probe.step()
        return {k: v.dim() > 0 for k, v in probe.state[p].items() if isinstance(v, Tensor)}

    def _state_of(self, rank: int, f: int, key: str, layout: Layout) -> Tensor:
        inner, family = self._inner[rank], self._families[f]
        values = [
            inner.optimizer.state[p][key] for p in inner.params[f].values() if key in inner.optimizer.state[p]
        ]
        if len(values) < len(inner.params[f]) or not values:
            like = values[0] if values else torch.empty((), dtype=family.params[0].dtype)
            return like.new_zeros(block_shape(layout, members_of(family.mesh)[rank]))
        return torch.stack(values)

    def _set_state(self, rank: int, f: int, key: str, block: Tensor) -> Tensor:
        if rank not in self._inner:
            self._inner[rank] = _Inner(self, rank)
        inner = self._inner[rank]
        for value, p in zip(block, inner.params[f].values(), strict=True):
            inner.optimizer.state[p][key] = value.clone()
        return block


class _Family(NamedTuple):
    """Parameters of one group with the same shape, dtype and layout, which are moved as one stack."""

    group: int
    params: list[Any]
    mesh: Any
    shape: tuple[int, ...]
    stored: Layout  # of the stack
    owned: Layout  # of the stack, at the owners
    numbers: Layout  # of one number per parameter, at the owners


def _families(groups: Sequence[Mapping[str, Any]]) -> list[_Family]:
    found: dict[Any, list[Any]] = {}
    for g, group in enumerate(groups):
        for p in group["params"]:
            if not isinstance(p, DTensor):
                raise TypeError(
                    f"OwnerOptimizer got a {type(p).__name__} of shape {tuple(p.shape)}.\n"
                    "  why: It moves parameters between the ranks that store parts of them, which are DTensors.\n"
                    "  fix: fully_shard(model) first, and pass model.parameters(); give plain parameters to an optimizer of their own."
                )
            found.setdefault((g, id(p.device_mesh), p.sharding, p.dtype), []).append(p)
    return [_family(g, params) for (g, *_), params in found.items()]


def _family(group: int, params: list[Any]) -> _Family:
    layout, count = params[0].sharding, len(params)
    used = tuple(a for dim in layout.dims for factor in dim for a in factor.axes)
    owners = used or tuple(range(len(layout.axes)))
    whole = [[Factor(n)] for n in layout.shape]
    stored = Layout(layout.axes, [[Factor(count)], *layout.dims])
    owned = Layout(layout.axes, [[Factor(count, owners)], *whole])
    numbers = Layout(layout.axes, [[Factor(count, owners)]])
    return _Family(group, params, params[0].device_mesh, layout.shape, stored, owned, numbers)


class _Inner:
    """The optimizer of one rank, and the whole parameters that it owns: for each family, by their number in it."""

    def __init__(self, outer: OwnerOptimizer, rank: int) -> None:
        self.params: list[dict[int, nn.Parameter]] = []
        lists: list[list[nn.Parameter]] = [[] for _ in outer.param_groups]
        for family in outer._families:
            coord = members_of(family.mesh)[rank]
            mine = _owned_numbers(family.numbers, coord)
            device, dtype = family.mesh.device_type, family.params[0].dtype
            owned = {n: nn.Parameter(torch.empty(family.shape, dtype=dtype, device=device)) for n in mine}
            self.params.append(owned)
            lists[family.group] += owned.values()
        self.optimizer = outer._make(
            [{**_options(g), "params": some} for g, some in zip(outer.param_groups, lists, strict=True)]
        )

    def set_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take the options of the groups, which schedulers change."""
        for mine, group in zip(self.optimizer.param_groups, groups, strict=True):
            mine.update(_options(group))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k != "params"}


def _owned_numbers(numbers: Layout, coord: Sequence[int]) -> range:
    (start,), (count,) = block_offset(numbers, tuple(coord)), block_shape(numbers, tuple(coord))
    return range(start, start + count)


def _gradient(p: Any) -> Any:
    if p.grad is None:
        return torch.zeros_like(p)
    return p.grad if p.grad.sharding is p.sharding else p.grad.redistribute(placements=p.placements)


def _stamp(p: Any) -> tuple[int, ...]:
    block = p._local_tensor
    writes = sum(map(version, block.ranks)) if isinstance(block, PerRank) else version(block)
    return id(p), version(p), writes, id(block)
