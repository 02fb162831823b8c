"""Data-parallel modules: the class that a module gets, its calls, and its methods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.comm import axes_of
from shardwise.parallel.data.group import Group, forget_interrupted_passes
from shardwise.parallel.data.passes import Order, backward_was_interrupted, current_pass, new_pass
from shardwise.parallel.data.policy import MixedPrecisionPolicy
from shardwise.parallel.data.saved import packing
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.autograd import in_backward
from shardwise.torch_internals.pytree import flatten

__all__ = [
    "FSDPModule",
    "State",
    "UnshardHandle",
    "make_data_parallel",
    "register_fsdp_forward_method",
    "state_of",
    "watch_recomputation",
]


class State:
    """What a data-parallel module knows: its group, and the modules that share it.

    Attributes:
        group: the group of its parameters; None if all of them are in groups of submodules.
        policy: the dtypes of its computation.
        reshard: whether to free gathered blocks after the forward pass; None for all but the outermost module.
        modules: how many modules share the group.
    """

    def __init__(
        self, name: str, group: Group | None, policy: MixedPrecisionPolicy, reshard: bool | None
    ) -> None:
        self.name, self.group, self.policy, self.reshard = name, group, policy, reshard
        self.modules = 1
        self._left = 0
        self.forward_order: Order[Group] = Order()
        self.backward_order: Order[Group] = Order()

    @contextmanager
    def _pass(self, args: Any) -> Iterator[None]:
        """A new pass if this is the outermost call."""
        if current_pass() is not None:
            yield
            return
        backward = in_backward()
        if backward_was_interrupted():
            forget_interrupted_passes()
        with ExitStack() as stack:
            stack.enter_context(new_pass(self, self._is_on_whole_mesh(args)))
            if (
                not backward
            ):  # otherwise activation checkpointing runs the forward pass again, with hooks of its own
                self.forward_order.start()
                stack.callback(self.forward_order.drop_unused)
                if torch.is_grad_enabled():
                    stack.enter_context(packing())
            yield

    def _is_on_whole_mesh(self, args: Any) -> bool:
        """Whether the arguments are DTensors on a mesh that has the data axes, rather than each rank's own data."""
        group = self.group
        if group is None:
            return False
        data = {n for slot in group.slots for n in axes_of(slot.layout.mesh).names_of(slot.layout.data)}
        leaves, _ = flatten(args)
        return any(isinstance(t, DTensor) and data & set(axes_of(t.device_mesh).names) for t in leaves)

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the module with gathered parameters."""
        group = self.group
        with self._pass((args, kwargs)):
            if group is not None:
                group.enter()
            try:
                if self.policy.cast_forward_inputs and self.policy.param_dtype is not None:
                    args, kwargs = _cast((args, kwargs), self.policy.param_dtype)
                out = fn(*args, **kwargs)
            except BaseException:
                if group is not None:
                    group.leave(free=True)
                raise
            if group is not None:
                group.leave(free=self._frees())
        return out if self.policy.output_dtype is None else _cast(out, self.policy.output_dtype)

    def _frees(self) -> bool:
        """Whether to free gathered blocks after this call: after those of all modules that share the group."""
        self._left = (self._left + 1) % self.modules
        now = current_pass()
        is_root = now is not None and now.root is self
        reshard = not is_root if self.reshard is None else self.reshard
        return reshard and self._left == 0


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    leaves, rebuild = flatten(tree)
    return rebuild([_cast_tensor(x, dtype) if isinstance(x, Tensor) else x for x in leaves])


def _cast_tensor(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() and x.dtype is not dtype else x


_STATE = "_shardwise_data_parallel"


def state_of(module: nn.Module) -> State | None:
    """The state of a data-parallel module; None for other modules."""
    return vars(module).get(_STATE)


class UnshardHandle:
    """The handle of `unshard(async_op=True)`."""

    def __init__(self, group: Group | None) -> None:
        self._group = group

    def wait(self) -> None:
        """Let the module have the gathered parameters."""
        if self._group is not None:
            self._group.pin()
            self._group = None


class FSDPModule:
    """The class of data-parallel modules, beside their own.

    Calls of the module gather its parameters, and its backward pass reduces their gradients.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = _state(self)
        return state.call(super().__call__, args, kwargs)  # type: ignore[misc]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module's group, and keep them until `reshard()`.

        Args:
            async_op: return at once; the parameters are gathered after `wait()` of the handle.

        It sends the group's all-gather.
        """
        group = _state(self).group
        if group is not None:
            group.start_gathering()
        handle = UnshardHandle(group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the gathered parameters of this module's group."""
        group = _state(self).group
        if group is not None:
            group.unpin()

    def reset_iter_state(self) -> None:
        """Drop gathered parameters and unreduced gradients, as after a step that ended by an exception."""
        for group in _groups_in(self, recurse=True):
            group.forget()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward passes reduce gradients; if not, they accumulate on each rank until one does."""
        for group in _groups_in(self, recurse):
            group.sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether gradients are reduced over the axes that replicate parameters, or partial sums are kept until then."""
        for group in _groups_in(self, recurse):
            group.reduction.all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether gathered parameters are freed after the forward pass."""
        for module in _modules_in(self, recurse):
            _state(module).reshard = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether gathered parameters are freed after the backward pass."""
        for group in _groups_in(self, recurse):
            group.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules when this one is called, instead of the one that came next in the previous pass."""
        self._set_prefetch("forward", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules when the backward pass needs this one."""
        self._set_prefetch("backward", modules)

    def _set_prefetch(self, direction: str, modules: Sequence[FSDPModule]) -> None:
        groups = [g for module in modules if (g := _state(module).group) is not None]
        for group in _groups_in(self, recurse=False):
            group.ahead[direction] = groups

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by this number instead of the number of ranks with data of their own."""
        for group in _groups_in(self, recurse=False):
            group.reduction.divisor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The same as `set_gradient_divide_factor`, under its older name."""
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether a parameter without a gradient on this rank counts as zero, as programs need that differ between ranks."""
        for group in _groups_in(self, recurse):
            group.reduce_unused = reduce_scatter_unused_params

    def set_custom_all_gather(self, comm: Any) -> None:
        """Accepted: gathers run the collectives of their plans."""

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Accepted: reductions run the collectives of their plans."""

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Refuse: a hook that is not called would leave gradients unreduced.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "set_all_reduce_hook is not supported.\n"
            "  why: The all-reduce is a step of the plan that reduces gradients, not a call of its own.\n"
            "  fix: Use a mesh with an axis that replicates parameters, or p.register_post_accumulate_grad_hook."
        )

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted: every backward pass leaves the module ready for the next."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Accepted: a backward pass gathers parameters only if it needs them."""

    def set_post_optim_event(self, event: Any) -> None:
        """Accepted: gathers are ordered after the optimizer by the values they read."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted: gradients are always summed and then divided."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepted: buffers are allocated by torch."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Accepted: buffers are allocated by torch."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Accepted: collectives of one mesh axis run over one group."""

    def set_reduce_scatter_max_input_buffers(self, count: int, *, recurse: bool = True) -> None:
        """Accepted: at most two reductions hold unreduced gradients at the same time."""


def _state(module: Any) -> State:
    found = state_of(module)
    if found is None:
        raise RuntimeError(
            f"{type(module).__name__} is not data-parallel.\n"
            "  why: fully_shard, replicate or zero was not applied to it.\n"
            "  fix: fully_shard(module, mesh=mesh) first"
        )
    return found


def _modules_in(module: Any, recurse: bool) -> list[Any]:
    found = module.modules() if recurse else [module]
    return [m for m in found if state_of(m) is not None]


def _groups_in(module: Any, recurse: bool) -> list[Group]:
    groups = [_state(m).group for m in _modules_in(module, recurse)]
    return list({id(g): g for g in groups if g is not None}.values())


@functools.cache
def _data_parallel_class(cls: Any, prefix: str) -> Any:
    return type(f"{prefix}{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


class _Recompute:
    """A hook of submodules: activation checkpointing may call them in a backward pass, without their data-parallel module."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, module: nn.Module, args: Any) -> None:
        if in_backward():
            self._group.enter_recomputation()


def watch_recomputation(modules: Sequence[nn.Module], group: Group) -> None:
    """Gather a group when its submodules are called in a backward pass."""
    hook = _Recompute(group)
    for module in modules:
        for child in module.children():
            if state_of(child) is None:  # otherwise its calls gather its own group
                child.register_forward_pre_hook(hook)
                watch_recomputation([child], group)


def make_data_parallel(module: nn.Module, state: State, prefix: str) -> None:
    """Change the class of a module to one whose calls gather its parameters."""
    module.__class__ = _data_parallel_class(cast("Any", type(module)), prefix)
    vars(module)[_STATE] = state


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method gather the module's parameters as `forward` does; without effect on modules that are not data-parallel.

    Args:
        module: a module.
        method_name: the name of one of its methods, such as "generate".

    Raises:
        ValueError: the module has no such method.

    Nothing is communicated before the method is called.
    """
    if state_of(module) is None:
        return
    if not hasattr(module, method_name):
        raise ValueError(
            f"register_fsdp_forward_method got {method_name!r}, which {type(module).__name__} does not have.\n"
            "  why: A method of this name is to gather the parameters when it is called.\n"
            "  fix: Pass the name of one of its methods."
        )
    cls = type(module)
    original: Callable[..., Any] = getattr(cls, method_name)

    @functools.wraps(original)
    def gathered(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = state_of(self)
        bound = functools.partial(original, self)
        return bound(*args, **kwargs) if state is None else state.call(bound, args, kwargs)

    # a class of its own: other instances of the module's class keep their method, and copies have the same
    methods: Mapping[str, Any] = {method_name: gathered, "__module__": cls.__module__}
    module.__class__ = type(cls.__name__, (cls,), dict(methods))
