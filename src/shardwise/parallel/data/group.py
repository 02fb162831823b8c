"""A group of parameters that is gathered and reduced together."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import ranks_of
from shardwise.parallel.agreement import compare_ranks
from shardwise.parallel.data.connect import WeakReduce, connected_tensors
from shardwise.parallel.data.extension import is_extended
from shardwise.parallel.data.layouts import common_mesh
from shardwise.parallel.data.memory import GatheredBlocks, gather_plan
from shardwise.parallel.data.passes import Backward, Order, Pass, current_backward_pass, current_pass, engine
from shardwise.parallel.data.policy import MixedPrecisionPolicy
from shardwise.parallel.data.reduction import Finish, Reduction, buckets_of
from shardwise.parallel.data.slot import Slot, joined
from shardwise.parallel.data.smaller_group import SmallerGroup, smaller_group
from shardwise.plan import GroupedPlan
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.autograd import in_backward
from shardwise.torch_internals.patches import outside_transforms
from shardwise.torch_internals.selective_checkpoints import outside_selective_checkpoints
from shardwise.torch_internals.subclass import mark_parameter

__all__ = ["Group"]


class Group:
    """Parameters that are gathered and reduced together, with what is known about them in the current pass.

    Attributes:
        name: the name of the module in messages.
        label: the same with its place in the model and its first parameter; different for the groups of a mesh.
        slots: the parameters.
        mesh: the mesh of the collectives.
        is_moved: whether a parameter is computed with in another layout than it is stored in.
        is_in_place: whether parameters are computed with as they are stored: nothing is gathered or cast.
        buckets: the slots whose gradients are reduced together, in the order in which they are expected.
        reduction: how they are.
        reshard_after_backward: whether gathered blocks are freed after the backward pass.
        ahead: the groups to gather ahead in forward and backward, instead of the observed next one.
        smaller: how parameters stay gathered within smaller groups between forward and backward; None if they do not.
    """

    def __init__(
        self, name: str, slots: list[Slot], policy: MixedPrecisionPolicy, bucket_bytes: int | None
    ) -> None:
        self.name, self.slots, self.policy = name, slots, policy
        self.mesh: DeviceMesh = common_mesh([slot.layout.mesh for slot in slots])
        for slot in slots:
            slot.use_mesh(self.mesh)
        self.is_moved = any(slot.is_moved for slot in slots)
        self.is_in_place = not self.is_moved and all(self._is_as_stored(slot) for slot in slots)
        self.buckets = buckets_of(slots, bucket_bytes)
        self.reduction = Reduction(slots, policy.reduce_dtype, self.is_in_place)
        self.reshard_after_backward = True
        self.ahead: dict[str, list[Group]] = {}
        self.smaller: SmallerGroup | None = None
        self._reset()
        numbers, ranks = engine().numbers, tuple(ranks_of(self.mesh))
        self._number = numbers[ranks]
        numbers[ranks] += 1
        self.set_path(name)
        engine().add(self)

    def set_path(self, path: str) -> None:
        """Set the place of the module in the model, for messages."""
        self.path = path
        self.label = self.reduction.label = f"{path} ({self.slots[0].name}, …), group {self._number}"

    def _is_as_stored(self, slot: Slot) -> bool:
        """Whether a parameter is stored where it is computed with, and in the dtype that it is computed with."""
        block = slot.block(slot.param)
        on_device = block.device.type in (self.mesh.device_type, "meta")
        return on_device and not slot.is_cast and not is_extended(block)

    def _reset(self) -> None:
        self.gathered = GatheredBlocks()
        self._tensors: _Tensors | None = None
        # the stored parameters, while the modules have others
        self._held: list[Sequence[Tensor] | None] = [None]
        for i, slot in enumerate(self.slots):
            slot.index, slot.held = i, self._held
        self._seen: list[Tensor] = []  # the stored parameters of the last call, which were found in order
        self._depth = 0
        self._pass: Pass | None = None  # the last one outside of backward passes
        self._recomputes = False
        self._needed_in: Backward | None = None
        self.is_pinned = False  # by unshard(), until the blocks are freed
        self.backward_order: Order[Group] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        out = object.__new__(Group)
        memo[id(self)] = out
        vars(out).update(vars(self))
        vars(out).pop("_homes", None)
        out.slots = [copy.deepcopy(slot, memo) for slot in self.slots]
        out.ahead = {key: [copy.deepcopy(g, memo) for g in groups] for key, groups in self.ahead.items()}
        out._reset()
        out.reduction = self.reduction.of_copies(out.slots)
        # without a number: a rank may have more copies than others
        out.label = out.reduction.label = f"a copy of {self.label.removeprefix('a copy of ')}"
        engine().add(out)
        return out

    # ---- gathering

    def gather_plan(self) -> GroupedPlan:
        """The plan that gathers the parameters."""
        return gather_plan(self)

    def gather_again_plan(self) -> GroupedPlan:
        """The plan that gathers them for the backward pass."""
        if self.smaller is None:
            return self.gather_plan()
        return self.smaller.gather_plan([s.dtype for s in self.slots])

    def use_smaller_groups(self, size: int, what: str) -> None:
        """Let parameters stay gathered within groups of `size` ranks between forward and backward."""
        self.smaller = smaller_group(self.slots, self.mesh, size, what)

    def start_gathering(self) -> None:
        """Begin to gather, unless it has begun."""
        if self.is_in_place:
            return
        if self.is_moved and not self.gathered.are_wanted:
            compare_ranks(self.mesh, f"gather {self.label}")
        self.gathered.start(self)

    def gather(self) -> list[Tensor]:
        """The gathered blocks."""
        if self.is_in_place:
            return [slot.block(slot.param) for slot in self.slots]
        if self.is_moved and not self.gathered.are_wanted:
            compare_ranks(self.mesh, f"gather {self.label}")
        return self.gathered.wait(self)

    def gather_in_order(self, order: Order[Group], direction: str) -> list[Tensor]:
        """The gathered blocks, beginning to gather what was needed next in the previous pass."""
        if not self.is_moved:
            return [] if self.is_in_place else self.gather()
        if not self.gathered.are_here:
            order.needed(self)
        blocks = self.gather()
        following = order.next_after(self)
        for group in self.ahead.get(direction) or ([] if following is None else [following]):
            if not group.gathered.are_wanted and group.is_moved and group not in order:
                order.ahead(group)
                group.start_gathering()
        return blocks

    def free(self) -> None:
        """Free the gathered blocks, and let the modules have the stored parameters."""
        self.is_pinned = False
        self.restore()
        if not self.is_in_place:
            self._tensors = None
            self.gathered.free()

    def block_for_backward(self, slot: int, stamp: object) -> Tensor:
        """The gathered block of a slot, for a tensor that autograd saved when the parameters had this stamp."""
        block = self._gather_in_backward()[slot]
        if self.gathered.stamp is not stamp and self.gathered.stamp != stamp:
            raise RuntimeError(
                f"A parameter of {self.name} needed for gradient computation has been modified by an inplace operation.\n"
                "  why: The parameters were written to between the forward and the backward pass.\n"
                "  fix: Call backward() before optimizer.step(), or run the forward pass again."
            )
        return block

    def _gather_in_backward(self) -> list[Tensor]:
        backward = current_backward_pass()
        if backward is None or self.backward_order is None:
            return self.gather()
        if self._needed_in is backward and self.gathered.are_here:  # and compared with the parameters
            return self.gathered.blocks
        self._needed_in = backward
        self._take_part(backward)
        backward.begin_order(self.backward_order)
        with outside_selective_checkpoints():
            return self.gather_in_order(self.backward_order, "backward")

    def _take_part(self, backward: Backward) -> None:
        backward.at_end(self, self.finish_backward)
        if self.backward_order is not None and self.is_moved:
            backward.at_end(self.backward_order, self.backward_order.drop_unused)

    # ---- calls

    def enter(self) -> None:
        """Let the modules have the gathered tensors; calls may be nested."""
        self._depth += 1
        if self._depth > 1:
            return
        now = current_pass()
        with outside_transforms(), outside_selective_checkpoints():
            if in_backward():  # activation checkpointing runs the forward pass again
                self._gather_in_backward()
            elif now is not None:
                self._pass = now
                now.groups.append(self)
                self.backward_order = now.root.backward_order
                self.gather_in_order(now.root.forward_order, "forward")
            self._register(now)

    def _register(self, now: Pass | None) -> None:
        params = self._held[0] or self._params()
        tensors = self._current_tensors(now, params)
        self._held[0] = params
        self._give(tensors)

    def _give(self, tensors: Sequence[Tensor]) -> None:
        """Let the modules have these tensors."""
        if self._are_simple:
            for (home, name), tensor in zip(self._homes, tensors, strict=True):
                home[name] = tensor
        else:
            for slot, tensor in zip(self.slots, tensors, strict=True):
                slot.register(tensor)

    def _params(self) -> list[Tensor]:
        """The stored parameters, as the modules have them."""
        params: list[Any] = [home.get(name) for home, name in self._homes]
        if len(params) != len(self._seen) or not all(map(operator.is_, params, self._seen)):
            self._seen = params = [slot.param for slot in self.slots]
        return params

    @cached_property
    def _homes(self) -> list[tuple[dict[str, Any], str]]:
        return [slot.homes[0] for slot in self.slots]

    @cached_property
    def _are_simple(self) -> bool:
        return all(slot.is_plain and len(slot.homes) == 1 for slot in self.slots)

    def restore(self) -> None:
        """Let the modules have the stored parameters, as they do between passes; unless a call runs, or `unshard` was called."""
        if self._depth == 0 and not self.is_pinned:
            stored, self._held[0], self._recomputes = self._held[0], None, False
            if stored is not None:
                self._give(stored)

    @contextmanager
    def stored(self) -> Iterator[None]:
        """Inside, the modules have the stored parameters."""
        (held,) = self._held
        if held is None:
            yield
            return
        gathered = [home[name] for home, name in self._homes]
        self._held[0] = None
        self._give(held)
        try:
            yield
        finally:
            self._held[0] = held
            self._give(gathered)

    def enter_recomputation(self) -> None:
        """Let the modules have the gathered tensors until the end of the backward pass, or until they are reduced.

        Activation checkpointing runs parts of the module again, without calling the module itself.
        """
        if self._depth == 0 and not self._recomputes and not self.is_pinned:
            self._recomputes = True
            with outside_selective_checkpoints():
                self._gather_in_backward()
                self._register(self._pass)

    def leave(self, free: bool) -> None:
        """Let the modules have the stored parameters again; those that are not freed, at the end of the pass."""
        self._depth -= 1
        if self._depth or not free or in_backward():
            if current_pass() is None or in_backward():
                self.restore()
            return
        self.release()

    def release(self) -> None:
        """Free the gathered blocks after the forward pass, except for what smaller groups keep."""
        if self.smaller is not None and torch.is_grad_enabled():
            self._tensors = None
            with outside_transforms(), outside_selective_checkpoints():
                self.gathered.shrink(self.smaller)
        self.free()

    def pin(self) -> None:
        """Let the modules have the gathered tensors until `unpin`."""
        if not self.is_pinned:
            self.is_pinned = True
            self.gather()
            self._register(None)

    def unpin(self) -> None:
        """Let the modules have the stored parameters, and free the gathered blocks."""
        self.is_pinned = False
        if self._depth == 0:
            self.free()

    def _current_tensors(self, now: Pass | None, params: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of this pass; the same ones for several calls, so that their gradients are reduced once.

        Parameters that are computed with in place have the same tensors in all passes.
        """
        grad, whole = torch.is_grad_enabled(), now is not None and now.on_whole_mesh
        if self.is_in_place:
            key: _Key = (grad, whole, [p.requires_grad for p in params], self._addresses(params))
        else:
            key = (grad, now)
        last = self._tensors
        if last is None or last.key != key or not (self.is_in_place or self.gathered.are_here):
            # tensors of inference mode could not be used outside of it
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                blocks = self.gather()
                self._tensors = last = _Tensors(key, self._tensors_of(params, blocks, whole), blocks)
        return last.tensors

    def _addresses(self, params: Sequence[Any]) -> list[int]:
        """Numbers that change when the memory of stored parameters is replaced, as long as their blocks are held."""
        if isinstance(params[0], DTensor):
            return [id(p._local_tensor) for p in params]
        return [p.data_ptr() or id(p.dtype) for p in params]  # an empty tensor has no address

    def _tensors_of(self, params: Sequence[Tensor], blocks: Sequence[Tensor], whole: bool) -> list[Tensor]:
        """The tensors to compute with; those that need gradients are connected to the stored parameters."""
        out: dict[int, Tensor] = {}
        reduce = WeakReduce(self)
        for bucket in self.buckets:
            trained = {i: self.slots[i] for i in bucket if params[i].requires_grad}
            if trained and torch.is_grad_enabled():
                out |= connected_tensors(trained, [params[i] for i in trained], blocks, whole, reduce)
        for i, slot in enumerate(self.slots):
            if i not in out:
                out[i] = joined(slot.raw(blocks[i], whole), self.mesh)
            if slot.is_plain:
                mark_parameter(out[i])
        return [out[i] for i in range(len(self.slots))]

    # ---- backward passes

    def reduce(self, slots: Sequence[int], grads: Sequence[Tensor | None]) -> Finish | None:
        """Begin to reduce the gradients of some slots, or accumulate them; returns what completes them."""
        backward = current_backward_pass()
        if backward is not None:
            self._take_part(backward)
        if self.reshard_after_backward:
            self.free()
        whole = self._pass is not None and self._pass.on_whole_mesh
        return self.reduction.reduce(slots, grads, whole)

    def finish_backward(self) -> None:
        """The end of a backward pass that this group took part in."""
        self._needed_in = None
        if self.reshard_after_backward:
            self.is_pinned = False
        self.restore()
        self.gathered.drop_kept()
        if self.reshard_after_backward and not self.is_in_place:
            self._tensors = None
            self.gathered.drop_all()

    def forget(self) -> None:
        """Drop everything that belongs to passes: gathered blocks and gradients that are not reduced."""
        self.reduction.forget()
        self._depth, self._needed_in = 0, None
        if not self.is_pinned:
            self.restore()
            self._tensors = None
            self.gathered.drop_all()

    def forget_gathered(self) -> None:
        """Drop gathered blocks and the tensors that modules compute with."""
        self._tensors = None
        if not self.is_in_place:
            self.gathered.drop_all()


_Key = tuple[Any, ...]


class _Tensors(NamedTuple):
    """The tensors that modules compute with, and the blocks that they are made of, whose addresses may be in the key."""

    key: _Key
    tensors: list[Tensor]
    blocks: list[Tensor]
