"""What data-parallel modules share: the groups of their parameters, and how calls gather them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm import PerRank, axes_of
from shardwise.parallel.data.group import Group
from shardwise.parallel.data.passes import (
    BeginBackward,
    Order,
    Pass,
    backward_was_interrupted,
    current_pass,
    engine,
    forget_interrupted_passes,
)
from shardwise.parallel.data.policy import MixedPrecisionPolicy
from shardwise.parallel.data.saved import packing
from shardwise.parallel.plain import plain_as_replicated
from shardwise.parallel.tree import map_tensors, tensors_in
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.autograd import in_backward

__all__ = ["STATE", "State", "cast_tensors", "groups_in", "modules_in", "required_state", "state_of"]


class State:
    """What a data-parallel module knows: the groups of its parameters, and the modules that share them.

    Attributes:
        made_by: the function that was called for the module.
        groups: one for the parameters of each mesh; none if all parameters are in groups of submodules.
        policy: the dtypes of its computation.
        reshard: whether to free gathered blocks after the forward pass; None for all but the outermost module.
        modules: how many modules share the groups.
        axes: the names of the data axes of all parameters, here and in submodules.
        packs: whether tensors that autograd saves may be gathered ones, here or in submodules.
    """

    def __init__(
        self, name: str, made_by: str, groups: Sequence[Group], policy: MixedPrecisionPolicy
    ) -> None:
        self.name, self.made_by, self.groups, self.policy = name, made_by, tuple(groups), policy
        self.reshard: bool | None = None
        self.modules = 1
        self.axes: frozenset[str] = frozenset()
        self.packs = True
        self._called = 0  # of the modules, in this pass
        self._is_materialized = False
        self.forward_order: Order[Group] = Order()
        self.backward_order: Order[Group] = Order()

    def _outermost_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call of a method in a new pass."""
        backward = in_backward()
        if backward_was_interrupted():
            forget_interrupted_passes()
        now = Pass(self, self._is_on_whole_mesh((args, kwargs)))
        with now:
            if backward:  # activation checkpointing runs the forward pass again, with hooks of its own
                with _plain_tensors(now):
                    return self._call(fn, args, kwargs)
            self.forward_order.start()
            grad = torch.is_grad_enabled()
            try:
                with packing() if self.packs and grad else nullcontext(), _plain_tensors(now):
                    out = self._call(fn, args, kwargs)
            finally:
                self.forward_order.drop_unused()
                for state in now.partly_called.values():
                    state._end_of_pass()
                for group in now.groups:
                    group.restore()
            if grad:
                begin = BeginBackward(now.groups)
                results = _differentiable(out)
                for t in results:
                    t.register_hook(begin)
                if not results:  # they may be in an object of another kind
                    engine().watch_recomputation()
            return out

    def _is_on_whole_mesh(self, args: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
        """Whether the arguments are DTensors on a mesh that has the data axes, rather than each rank's own data."""
        positional, named = args
        if not named and all(type(x) is Tensor for x in positional):
            return False
        given = [t for t in tensors_in(args) if isinstance(t, DTensor)]
        return any(self.axes.intersection(axes_of(t.device_mesh).names) for t in given)

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the module with gathered parameters."""
        if not self._is_materialized:
            self._check_materialized((args, kwargs))
        if current_pass() is None:
            return self._outermost_call(fn, args, kwargs)
        return self._call(fn, args, kwargs)

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entered: list[Group] = []
        try:
            for group in self.groups:
                group.enter()
                entered.append(group)
            if self.policy.cast_forward_inputs and self.policy.param_dtype is not None:
                args, kwargs = cast_tensors((args, kwargs), self.policy.param_dtype)
            out = fn(*args, **kwargs)
        except BaseException:
            self._called = 0
            for group in entered:
                group.leave(free=True)
            raise
        frees = self._frees()
        for group in entered:
            group.leave(free=frees)
        return out if self.policy.output_dtype is None else cast_tensors(out, self.policy.output_dtype)

    def _check_materialized(self, args: Any) -> None:
        """Raise if a parameter is on the meta device and an argument is not."""
        meta = [(g.path, slot.name) for g in self.groups for slot in g.slots if slot.param.is_meta]
        names = [".".join((*path.split(".")[1:], name)) for path, name in meta]
        self._is_materialized = not meta
        if meta and any(not t.is_meta for t in tensors_in(args)):
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the following were still on "
                f"meta device: {names} of {self.name}.\n"
                "  why: A tensor on the meta device has no values to gather.\n"
                "  fix: module.to_empty(device=...), then initialize the parameters; or materialize(module)"
            )

    def set_reshard(self, reshard: bool | int | None, what: str) -> None:
        """Set whether to free gathered blocks after the forward pass; a number is the size of groups that keep them."""
        if reshard is not None and not isinstance(reshard, int):
            raise ValueError(
                f"{what} got reshard_after_forward={reshard!r}.\n"
                "  why: reshard_after_forward should be a bool or an int, the size of the groups that keep parameters gathered.\n"
                "  fix: Pass True, False, or a divisor of the number of ranks."
            )
        smaller = isinstance(reshard, int) and not isinstance(reshard, bool)
        for group in self.groups:
            group.smaller = None
            if smaller and reshard is not None and reshard != 1:
                group.use_smaller_groups(reshard, what)
        self.reshard = reshard != 1 if smaller else None if reshard is None else bool(reshard)

    def _frees(self) -> bool:
        """Whether to free gathered blocks after this call: after those of all modules that share the groups."""
        now = current_pass()
        is_root = now is not None and now.root is self
        reshard = not is_root if self.reshard is None else self.reshard
        if self.modules > 1 and not in_backward():  # where activation checkpointing calls some of them again
            self._called = (self._called + 1) % self.modules
            if now is not None and reshard:
                now.partly_called[id(self)] = self
        return reshard and self._called == 0

    def _end_of_pass(self) -> None:
        """Free gathered blocks if only some of the modules that share the groups were called."""
        if self._called:
            self._called = 0
            for group in self.groups:
                group.release()


def _plain_tensors(now: Pass) -> AbstractContextManager[object]:
    """If the data are DTensors, plain tensors count as replicated, as in a parallelized module; a simulation compares them."""
    if not now.on_whole_mesh:
        return nullcontext()
    return plain_as_replicated()


def _differentiable(tree: Any) -> list[Tensor]:
    """The tensors of a tree that have a graph, those of each rank in a simulation."""
    found = [tree] if type(tree) is Tensor else tensors_in(tree)
    plain = [t for x in found for t in (x.ranks if isinstance(x, PerRank) else (x,))]
    return [t for t in plain if t.grad_fn is not None]


def cast_tensors(tree: Any, dtype: torch.dtype) -> Any:
    """A tree with its floating-point tensors in a dtype."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t, tree)


STATE = "_shardwise_data_parallel"


def state_of(module: nn.Module) -> State | None:
    """The state of a data-parallel module; None for other modules."""
    return vars(module).get(STATE)


def required_state(module: Any) -> State:
    """The state of a data-parallel module."""
    found = state_of(module)
    if found is None:
        raise RuntimeError(
            f"{type(module).__name__} is not data-parallel.\n"
            "  why: fully_shard, replicate or zero was not applied to it.\n"
            "  fix: fully_shard(module, mesh=mesh) first"
        )
    return found


def modules_in(module: Any, recurse: bool) -> list[Any]:
    """The data-parallel modules in a module, or only itself."""
    found = module.modules() if recurse else [module]
    return [m for m in found if state_of(m) is not None]


def groups_in(module: Any, recurse: bool) -> list[Group]:
    """The groups of the data-parallel modules in a module, or only its own."""
    groups = [g for m in modules_in(module, recurse) for g in required_state(m).groups]
    return list({id(g): g for g in groups}.values())
