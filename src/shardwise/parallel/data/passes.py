"""Passes through a model: the outermost call of a data-parallel module, and the backward passes.

A pass knows the order in which groups were needed, so that the next one can gather ahead.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from shardwise.comm.recording import recorders
from shardwise.tensor.redistribute_many import PendingBlocks
from shardwise.torch_internals.autograd import at_backward_end, current_backward, in_backward
from shardwise.torch_internals.modules import stop_watching_calls, watch_calls
from shardwise.torch_internals.process_groups import ranks_are_threads

__all__ = [
    "GROUPS",
    "Backward",
    "BeginBackward",
    "Engine",
    "Order",
    "Pass",
    "backward_was_interrupted",
    "current_backward_pass",
    "current_pass",
    "engine",
    "forget_gathered",
    "forget_interrupted_passes",
]

G = TypeVar("G")


class Order(Generic[G]):
    """The order in which groups were needed in the previous pass and so far in this one."""

    def __init__(self) -> None:
        self._before: dict[int, weakref.ref[Any]] = {}
        self._now: list[weakref.ref[Any]] = []
        self._ahead: list[Any] = []

    def start(self) -> None:
        """Begin a pass: what was seen since the last call is the previous order."""
        if self._now:
            refs = self._now
            self._before = {id(a()): b for a, b in itertools.pairwise(refs)}
        self._now = []

    def needed(self, group: G) -> None:
        """Record that a group is needed."""
        self._now.append(weakref.ref(group))

    def ahead(self, group: G) -> None:
        """Record that a group is gathered ahead."""
        self._ahead.append(group)

    def drop_unused(self) -> None:
        """At the end of a pass, free what was gathered ahead and not needed."""
        for group in self._ahead:
            if group not in self:
                group.gathered.drop_all()
        self._ahead.clear()

    def next_after(self, group: G) -> G | None:
        """The group that was needed after this one in the previous pass; none in a capture, which orders collectives itself."""
        if recorders:
            return None
        found = self._before.get(id(group))
        return None if found is None else found()

    def __contains__(self, group: object) -> bool:
        return any(ref() is group for ref in self._now)

    @property
    def is_empty(self) -> bool:
        """Whether no group was needed so far in this pass."""
        return not self._now

    def __deepcopy__(self, memo: dict[int, Any]) -> Order[G]:
        return Order()


class Pass:
    """One outermost call, which runs in a `with` block of it.

    Attributes:
        root: the state of its module.
        on_whole_mesh: whether its data are DTensors on the whole mesh.
        groups: those that were entered.
        partly_called: the states that free their groups after the calls of several modules, by id.
    """

    def __init__(self, root: Any, on_whole_mesh: bool) -> None:
        self.root, self.on_whole_mesh = root, on_whole_mesh
        self.groups: list[Any] = []
        self.partly_called: dict[int, Any] = {}

    def __enter__(self) -> None:
        self._token = _current.set(self)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


_current: ContextVar[Pass | None] = ContextVar("shardwise_data_parallel_pass", default=None)


def current_pass() -> Pass | None:
    """The pass that runs, or None outside of data-parallel modules."""
    return _current.get()


class Backward:
    """One backward pass. At its end gradients are reduced that only earlier ones computed, and `finish` functions run in order."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.orders: dict[int, Order[Any]] = {}
        self._finish: dict[Any, Callable[[], None]] = {}

    def at_end(self, key: Any, finish: Callable[[], None]) -> None:
        """Call a function at the end of the pass, once for each key."""
        self._finish.setdefault(key, finish)

    def run_finish(self) -> None:
        """End the pass."""
        mine = engine()
        mine.backwards.pop(self.number, None)
        if not mine.backwards:  # a checkpoint may run one inside another
            mine.stop_watching()
        for group in list(mine.groups.values()):
            group.reduction.reduce_accumulated()
        mine.end_reductions()  # they would keep gradients alive
        for finish in list(self._finish.values()):
            finish()

    def begin_order(self, order: Order[Any]) -> None:
        """Begin an order at its first use in this pass."""
        if id(order) not in self.orders:
            self.orders[id(order)] = order
            order.start()


class Engine:
    """What the passes of a rank share.

    Attributes:
        backwards: the backward passes that run, by number.
        running: the reductions that have begun and not ended.
        groups: all groups, in the order in which they were created: the same on all ranks.
        numbers: the number of groups that were created, by the ranks of their mesh.
    """

    def __init__(self) -> None:
        self.backwards: dict[int, Backward] = {}
        self.running: list[PendingBlocks] = []
        self.groups: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.numbers: Counter[tuple[int, ...]] = Counter()
        self._created = itertools.count()

    def add(self, group: object) -> None:
        """Know a group as long as it exists."""
        self.groups[next(self._created)] = group

    def end_reductions(self, left: int = 0) -> None:
        """Wait for the reductions that began first, until so many are left."""
        while len(self.running) > left:
            self.running.pop(0).wait()

    def watch_recomputation(self) -> None:
        """Let modules that are called in a backward pass have gathered tensors, until it ends.

        Activation checkpointing calls them, without their data-parallel module.
        """
        watch_calls(-id(self), _before_forward)

    def stop_watching(self) -> None:
        """End what `watch_recomputation` began."""
        stop_watching_calls(-id(self))


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.engine = Engine()


_of_process, _of_thread = Engine(), _OfThread()


def engine() -> Engine:
    """The engine of this rank."""
    return _of_thread.engine if ranks_are_threads() else _of_process


def current_backward_pass() -> Backward | None:
    """The backward pass that runs, or None."""
    number = current_backward()
    if number == -1:
        return None
    running = engine().backwards
    found = running.get(number)
    if found is None:
        found = running[number] = Backward(number)
        at_backward_end(found.run_finish)
    return found


def backward_was_interrupted() -> bool:
    """Whether a backward pass began that neither ended nor runs, because of an exception; asking forgets it."""
    mine = engine()
    if not mine.backwards or current_backward() != -1:
        return False
    mine.backwards.clear()
    mine.stop_watching()
    return True


def forget_interrupted_passes() -> None:
    """After a backward pass that ended by an exception: drop its gathered blocks and unreduced gradients."""
    engine().running.clear()
    for group in engine().groups.values():
        group.forget()


def forget_gathered() -> None:
    """Drop gathered blocks and the tensors that modules compute with, before and after a capture; nothing runs then."""
    for group in engine().groups.values():
        group.forget_gathered()


GROUPS = "_shardwise_recomputed_groups"
"""The attribute of a module with the groups whose gathered tensors it needs when it is called in a backward pass."""


class BeginBackward:
    """A hook of the results of a pass: the backward pass begins. The graph keeps the groups by it, which it refers to weakly."""

    def __init__(self, groups: list[Any]) -> None:
        self._groups = groups

    def __call__(self, grad: Tensor) -> None:
        if current_backward_pass() is not None:
            engine().watch_recomputation()


def _before_forward(module: nn.Module, args: Any) -> None:
    groups = vars(module).get(GROUPS)
    if groups and in_backward():
        for group in groups:
            group.enter_recomputation()
