"""Data-parallel modules: the class that a module gets, its calls, and its methods."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.parallel.data.group import Group
from shardwise.parallel.data.passes import GROUPS
from shardwise.parallel.data.state import STATE, State, groups_in, modules_in, required_state, state_of
from shardwise.parallel.data.traced import call_traced

__all__ = [
    "FSDPModule",
    "GradientReductionHandle",
    "UnshardHandle",
    "make_data_parallel",
    "mark_recomputed",
    "register_fsdp_forward_method",
]


class UnshardHandle:
    """The handle of `unshard(async_op=True)`."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = tuple(groups)

    def wait(self) -> None:
        """Let the module have the gathered parameters."""
        groups, self._groups = self._groups, ()
        for group in groups:
            group.pin()


class GradientReductionHandle:
    """The handle of `finalize_backward(async_op=True)`."""

    def wait(self) -> None:
        """Return: the gradients were complete when the handle was made."""


class FSDPModule:
    """The class of data-parallel modules, beside their own.

    Calls of the module gather its parameters, and its backward pass reduces their gradients.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = required_state(self)
        if torch.compiler.is_dynamo_compiling():
            return call_traced(state, super().__call__, args, kwargs)  # type: ignore[misc]
        return state.call(super().__call__, args, kwargs)  # type: ignore[misc]

    # what is done to parameters is done to the stored ones, also after unshard()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def requires_grad_(self, *args: Any, **kwargs: Any) -> Any:
        for group in groups_in(self, recurse=True):
            group.unpin()
        return super().requires_grad_(*args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        with _stored_parameters(self):
            super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own = getattr(super(), "__deepcopy__", None)
        with _stored_parameters(self):
            if own is not None:
                return own(memo)
            out = memo[id(self)] = object.__new__(type(self))
            vars(out).update(copy.deepcopy(vars(self), memo))
        return out

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module's group, and let the module have them.

        They stay until `reshard()`, or until a call or a backward pass of the module frees them as it does without `unshard`.

        Args:
            async_op: return at once; the parameters are gathered after `wait()` of the handle.

        It sends the group's all-gather.
        """
        groups = required_state(self).groups
        for group in groups:
            group.start_gathering()
        handle = UnshardHandle(groups)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the gathered parameters of this module's group."""
        for group in required_state(self).groups:
            group.unpin()

    def reset_iter_state(self) -> None:
        """Drop gathered parameters and unreduced gradients, as after a step that ended by an exception."""
        for group in groups_in(self, recurse=True):
            group.forget()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward passes reduce gradients; if not, they accumulate on each rank until one does."""
        for group in groups_in(self, recurse):
            group.reduction.sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether gradients are reduced over the axes that replicate parameters, or partial sums are kept until then."""
        for group in groups_in(self, recurse):
            group.reduction.all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether gathered parameters are freed after the forward pass; a number as in `fully_shard`."""
        for module in modules_in(self, recurse):
            required_state(module).set_reshard(reshard_after_forward, "set_reshard_after_forward")

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether gathered parameters are freed after the backward pass."""
        for group in groups_in(self, recurse):
            group.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules when this one is called, instead of the one that came next in the previous pass."""
        self._set_prefetch("forward", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules when the backward pass needs this one."""
        self._set_prefetch("backward", modules)

    def _set_prefetch(self, direction: str, modules: Sequence[FSDPModule]) -> None:
        if other := [m for m in modules if not isinstance(m, FSDPModule)]:
            raise ValueError(
                f"Expects FSDPModule but got {type(other[0])} in set_modules_to_{direction}_prefetch.\n"
                "  why: Only data-parallel modules have parameters to gather ahead.\n"
                "  fix: fully_shard(module, mesh=mesh) first"
            )
        groups = [g for module in modules for g in required_state(module).groups]
        for group in groups_in(self, recurse=False):
            group.ahead[direction] = groups

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by this number instead of the number of ranks with data of their own."""
        if not factor:
            raise ValueError(
                f"set_gradient_divide_factor got {factor!r}.\n"
                "  why: The sum of gradients is divided by it.\n"
                "  fix: Pass a number other than 0; 1.0 for the sum itself."
            )
        for group in groups_in(self, recurse=False):
            group.reduction.divisor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The same as `set_gradient_divide_factor`, under its older name."""
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether a parameter without a gradient on this rank counts as zero, as programs need that differ between ranks."""
        for group in groups_in(self, recurse):
            group.reduction.reduce_unused = reduce_scatter_unused_params

    def set_custom_all_gather(self, comm: Any) -> None:
        """Raise: gathers run the collectives of their plans."""
        _refuse_custom(
            "set_custom_all_gather",
            comm,
            "fully_shard(…, reshard_after_forward=…) decides what is gathered and when",
        )

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raise: reductions run the collectives of their plans."""
        _refuse_custom(
            "set_custom_reduce_scatter", comm, "module.set_all_reduce_hook(hook) changes reduced gradients"
        )

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call a function with the reduced gradients of this module's group, which it may change in place.

        Args:
            hook: gets one flat tensor with the gradients of this rank's blocks, in the order of the parameters, after they are
                reduced over all data axes and divided. It may communicate: all ranks call it in the same order.
            stream: accepted; the hook runs in the current stream.

        Raises:
            ValueError: a stream is given, and parameters are replicated over an axis of the mesh.
        """
        for group in groups_in(self, recurse=False):
            if stream is not None and any(slot.replicate for slot in group.slots):
                raise ValueError(
                    f"stream cannot be set when using native HSDP: set_all_reduce_hook got {stream!r}.\n"
                    "  why: The all-reduce over the axis that replicates parameters and the hook run in one stream.\n"
                    "  fix: Leave stream out, or shard over a mesh of one axis."
                )
            group.reduction.hook = hook

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

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Let the gradients of at most so many groups be reduced at the same time; one by default.

        Raises:
            TypeError: it is not an int.
            ValueError: the number is less than 1.
        """
        if not isinstance(max_input_buffers, int) or isinstance(max_input_buffers, bool):
            raise TypeError(
                f"set_reduce_scatter_max_input_buffers got {max_input_buffers!r}.\n"
                "  why: It is a number of buffers.\n"
                "  fix: Pass an int of at least 1."
            )
        if max_input_buffers < 1:
            raise ValueError(
                f"max_input_buffers must be a positive int, got {max_input_buffers}.\n"
                "  why: A backward pass needs a buffer for the gradients that it reduces.\n"
                "  fix: Pass at least 1."
            )
        for group in groups_in(self, recurse):
            group.reduction.most = max_input_buffers

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted: gathers are always started ahead and waited for when their result is used."""

    def _get_fsdp_state(self) -> State:
        return required_state(self)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Accepted: gathered parameters are in memory that is allocated for each gather."""

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Let `finalize_backward` reduce the gradients that backward passes without synchronization accumulated."""

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce gradients that earlier backward passes accumulated without synchronization.

        Args:
            async_op: return a handle; the gradients are complete in any case.

        It sends the reductions of the groups that have such gradients.
        """
        for group in groups_in(self, recurse=True):
            group.reduction.reduce_accumulated()
        return GradientReductionHandle() if async_op else None


@contextmanager
def _stored_parameters(module: Any) -> Iterator[None]:
    """Inside, the modules have their stored parameters, also after unshard()."""
    with ExitStack() as stack:
        for group in groups_in(module, recurse=True):
            stack.enter_context(group.stored())
        yield


def _refuse_custom(what: str, comm: Any, fix: str) -> None:
    raise NotImplementedError(
        f"{what} got a {type(comm).__name__}.\n"
        "  why: A group moves by the collectives of its plan, which differ with layouts: uneven blocks go by an all-to-all.\n"
        f"  fix: Leave the call out; {fix}."
    )


@functools.cache
def _data_parallel_class(cls: Any, prefix: str) -> Any:
    # calling the class, as slicing a Sequential does, gives a module of the original class; copies keep the new one
    kind = type(cls)
    meta = type(kind.__name__, (kind,), {"__call__": lambda _, *args, **kwargs: cls(*args, **kwargs)})
    return meta(f"{prefix}{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


def mark_recomputed(modules: Sequence[nn.Module], groups: Sequence[Group]) -> None:
    """Let submodules have the gathered tensors of groups when they are called in a backward pass."""
    for module in modules:
        for child in module.children():
            if state_of(child) is None:  # otherwise its calls gather its own group
                vars(child)[GROUPS] = [*vars(child).get(GROUPS, ()), *groups]
                mark_recomputed([child], groups)


def make_data_parallel(module: nn.Module, state: State, prefix: str) -> None:
    """Change the class of a module to one whose calls gather its parameters."""
    module.__class__ = _data_parallel_class(cast("Any", type(module)), prefix)
    vars(module)[STATE] = state
    module.register_state_dict_pre_hook(_reshard)
    module.register_load_state_dict_pre_hook(_reshard)


def _reshard(module: nn.Module, *_: Any) -> None:
    """Let states be those of the stored parameters, also after unshard()."""
    for group in required_state(module).groups:
        group.unpin()


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
            f"register_fsdp_forward_method: {type(module)} does not have a method {method_name}.\n"
            "  why: A method of this name is to gather the parameters when it is called.\n"
            "  fix: Pass the name of one of its methods."
        )
    cls = type(module)
    own = vars(module).get(method_name)
    # parallelize_module binds a function of its own, which a method of the class would not replace
    bound = own if isinstance(own, MethodType) and own.__self__ is module else None
    original: Callable[..., Any] = getattr(cls, method_name) if bound is None else bound.__func__

    @functools.wraps(original)
    def gathered(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = state_of(self)
        call = functools.partial(original, self)
        return call(*args, **kwargs) if state is None else state.call(call, args, kwargs)

    if bound is not None:
        vars(module)[method_name] = MethodType(gathered, module)
        return
    # a class of its own: other instances of the module's class keep their method, and copies have the same
    methods: Mapping[str, Any] = {method_name: gathered, "__module__": cls.__module__}
    module.__class__ = type(cls.__name__, (cls,), dict(methods))
