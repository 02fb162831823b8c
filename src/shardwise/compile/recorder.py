"""Recording a program on blocks: every op that reaches the blocks of this rank becomes a node of one graph.

Ops on DTensors run as ever; beneath them are ops on blocks, steps of plans and random draws. A block with values that the program
meets (a parameter, an input, a state of the optimizer) becomes an input of the graph, and has no values from there on.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh

from shardwise.call.schema import op_info
from shardwise.comm import coord_of
from shardwise.comm.recording import recorders
from shardwise.compile.constants import Constants, is_factory
from shardwise.compile.errors import CaptureError
from shardwise.compile.targets import FILL, GETITEM, RECORDED_AS, STRIDED, Move, MoveMany
from shardwise.layout import contiguous_stride
from shardwise.plan import GroupedStep, Step
from shardwise.plan.settings import fresh_routes
from shardwise.random.philox import Draw
from shardwise.random.stream import stream_of
from shardwise.tensor.seeding import stream_key
from shardwise.torch_internals.autograd import current_backward
from shardwise.torch_internals.recording import (
    VALUE_ERRORS,
    empty_fake,
    has_plain_types,
    new_fake_mode,
    without_modes,
)
from shardwise.torch_internals.rng import seeding_listeners
from shardwise.torch_internals.tracing import TorchDispatchMode

__all__ = ["Draws", "Recorder", "recording"]

aten = torch.ops.aten
_SAME = frozenset({aten.detach.default, aten.alias.default, aten.lift.default})
"""Ops whose result is their argument, where nothing is differentiated."""
_SAME_SHAPE = frozenset(
    getattr(getattr(aten, name), overload)
    for name in "add_ addcdiv_ addcmul_ copy_ div_ fill_ lerp_ mul_ neg_ sqrt_ sub_ zero_".split()
    for overload in getattr(aten, name).overloads()
)
"""Ops that write to their first argument and return it as it is; the optimizer's, above all."""
_HIDDEN = ("/torch/", "/shardwise/")


@cache
def _names(func: Any) -> frozenset[str]:
    return frozenset(a.name for a in op_info(func).arguments)


class Draws(NamedTuple):
    """The random draws from one stream: the input that has its state, a mesh that it belongs to, and where it began."""

    state: fx.Node
    mesh: DeviceMesh
    first: Draw


class Recorder(TorchDispatchMode):
    """A mode that records the ops on plain tensors, and what `shardwise.comm.recording` hands to it."""

    def __init__(self, on_meta: bool = False, constants: Constants | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.on_meta = on_meta
        """Whether all tensors are on the meta device: then they have no values anyway, and torch's kernels infer sizes."""
        self.fake_mode = None if on_meta else new_fake_mode()
        self._constants = None if on_meta else constants
        self.lifted: dict[int, tuple[Tensor, Tensor, fx.Node]] = {}
        """By id, the tensors with values that were met, what stands for each, and its input of the graph."""
        self.draws: dict[Any, Draws] = {}
        self.section = "forward"
        self.host: dict[int, Tensor] = {}
        """By id, tensors that have values while the step is captured, and on which ops are not recorded."""
        self._nodes: dict[int, tuple[Tensor, fx.Node]] = {}
        self._draws_plain = self._is_rewound = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch call the mode without looking for a compiler first."""
        return True

    # ops -------------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not has_plain_types(types):
            return NotImplemented
        kwargs = kwargs or {}
        if self.host and any(id(a) in self.host for a in args):
            return self._on_host(func, args, kwargs)
        constants = self._constants
        if constants is not None and (is_factory(func) or (constants and constants.among(args, kwargs))):
            return self._on_constants(constants, func, args, kwargs)
        return self._on_blocks(func, args, kwargs)

    def _on_blocks(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op on tensors without values, and record it."""
        if func is aten.lift_fresh.default:  # a constant of the program, which may be written to
            with without_modes():
                constant = args[0].clone()
            return self._on_blocks(aten.clone.default, (self._lift(constant),), {})
        args = self._without_values(args)
        if kwargs:
            kwargs = {name: self._without_values(a) for name, a in kwargs.items()}
        if func is aten.as_strided.default:
            return self._restride(*args, **kwargs)
        if func in _SAME_SHAPE:
            self._record(func, args, kwargs, args[0])
            return args[0]
        if self.on_meta and "device" in _names(func):
            kwargs["device"] = torch.device("meta")
        if func in _SAME:
            out = func(*args)
            self._nodes[id(out)] = (out, self.node_of(args[0]))
            return out
        out = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draws_plain = True
        if isinstance(out, Tensor | list | tuple) or op_info(func).writes:
            target = RECORDED_AS.get(func, func) if torch.is_grad_enabled() else func
            self._record(target, args, kwargs, out)
        return out  # else a device, or a fact about sizes, which does not change from run to run

    def _on_constants(
        self, constants: Constants, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an op on tensors that have their values, if all have; record it as the same op without."""
        if self._section() != "forward" or not constants.determine(func, args, kwargs):
            constants.check_writes(func, args, kwargs)
            return self._on_blocks(func, args, kwargs)
        try:
            inferred = self._on_blocks(func, args, kwargs)
        except VALUE_ERRORS:
            with without_modes():
                out = func(*args, **kwargs)
                if not isinstance(out, Tensor):
                    return out
                return constants.keep(out, self._lift(out), _caller())  # its size depends on values
        if not constants.are_wanted(inferred):
            return inferred
        with without_modes():
            out = args[0].clone() if func is aten.lift_fresh.default else func(*args, **kwargs)
            return constants.keep(out, inferred, _caller())

    def _restride(
        self, x: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None
    ) -> Tensor:
        """A view by strides, with its place relative to that of `x`: blocks may be parts of larger memory in a run."""
        own = int(x.storage_offset())
        first = 0 if storage_offset is None else storage_offset - own
        with self.pause():
            out = x.as_strided(size, stride, first + own)
        dims = _permutation(x, size, stride) if first == 0 else None
        if dims == [*range(x.dim())]:
            self._nodes[id(out)] = (out, self.node_of(x))
        elif dims is not None:
            self._record(aten.permute.default, (x, dims), {}, out)
        else:
            self._record(STRIDED, (x, list(size), list(stride), first), {}, out)
        return out

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op on numbers of the optimizer that are tensors, such as the step."""
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if not all(id(t) in self.host for t in tensors):
            raise CaptureError(
                f"The optimizer passes the step number to {func} as a tensor.",
                why="A captured step takes the numbers of the update as numbers.",
                fix="Capture the forward and backward pass only, and call optimizer.step() after each run.",
            )
        with without_modes():
            out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            self.host[id(out)] = out
        return out

    def _without_values(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) in self._nodes:
                return value
            known = self._constants.stand_in(value) if self._constants is not None else None
            return self._lift(value) if known is None else known
        if isinstance(value, list | tuple):
            return type(value)([self._without_values(v) for v in value])
        return value

    def _lift(self, x: Tensor) -> Tensor:
        known = self.lifted.get(id(x))
        if known is None:
            if self._constants:
                self._constants.check_alias(x)
            if not has_plain_types([type(x)]):
                raise CaptureError(
                    f"The step computes with a {type(x).__name__}.",
                    why=f"A program is one of plain tensors, the blocks of one rank; a {type(x).__name__} is something else.",
                    fix="Capture on real ranks, or on a fake_mesh."
                    if type(x).__name__ == "PerRank"
                    else "Use DTensors.",
                )
            fake = self._empty(x.shape, x.stride(), x)
            node = self.graph.placeholder(f"input_{len(self.lifted)}")
            node.meta["val"] = fake
            known = self.lifted[id(x)] = (x, fake, node)
            self._nodes[id(fake)] = (fake, node)
        return known[1]

    def node_of(self, x: Tensor) -> fx.Node:
        """The node that computes a tensor."""
        return self._nodes[id(self._without_values(x))][1]

    def _empty(self, shape: Sequence[int], stride: Sequence[int], like: Tensor) -> Tensor:
        return empty_fake(self.fake_mode, shape, stride, like)

    def _as_nodes(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._nodes[id(value)][1]
        if isinstance(value, list | tuple):
            return type(value)([self._as_nodes(v) for v in value])
        return value

    def _record(self, target: Any, args: Any, kwargs: dict[str, Any], out: Any) -> fx.Node:
        named = {name: self._as_nodes(a) for name, a in kwargs.items()}
        node = self.graph.call_function(target, self._as_nodes(tuple(args)), named)
        node.meta["section"] = section = self._section()
        node.meta["val"] = out
        if isinstance(out, Tensor):
            self._nodes.setdefault(id(out), (out, node))  # an op in place returns a tensor that has a node
        elif out is not None:
            for i, part in enumerate(out):
                if isinstance(part, Tensor) and id(part) not in self._nodes:
                    item = self.graph.call_function(GETITEM, (node, i))
                    item.meta["val"], item.meta["section"] = part, section
                    self._nodes[id(part)] = (part, item)
        return node

    # what `shardwise.comm.recording` hands over ----------------------------------------------------------------------

    def move(self, step: Step, block: Tensor, mesh: DeviceMesh) -> Tensor:
        """Record a step of a plan; returns the block after it."""
        block = self._without_values(block)
        coord = coord_of(mesh) or ()
        shape = step.shape_at(coord)
        out = self._empty(shape, contiguous_stride(shape), block)
        node = self._record(Move(step, mesh, coord, block.dtype), (block,), {}, out)
        node.meta["line"] = _caller()
        return out

    def move_many(self, step: GroupedStep, blocks: Sequence[Tensor], mesh: DeviceMesh) -> list[Tensor]:
        """Record a step of a grouped plan; returns the blocks after it."""
        blocks = self._without_values(list(blocks))
        coord = coord_of(mesh) or ()
        shapes = [m.step.shape_at(coord) for m in step.members]
        pairs = zip(shapes, blocks, strict=True)
        outs = [self._empty(s, contiguous_stride(s), b) for s, b in pairs]
        target = MoveMany(step, mesh, coord, tuple(b.dtype for b in blocks))
        node = self._record(target, (blocks,), {}, outs)
        node.meta["line"] = _caller()
        return outs

    def fill(self, block: Tensor, numbers: str, mesh: DeviceMesh, others: Sequence[Tensor]) -> None:
        """Record a random draw that fills a block; `numbers` says with what, as text."""
        key = stream_key(mesh)
        if key not in self.draws:
            state = self.graph.placeholder(f"stream_{len(self.draws)}")
            state.meta["val"] = self._empty((2,), (1,), torch.empty(0, dtype=torch.int64))
            stream = stream_of(key)
            self.draws[key] = Draws(state, mesh, Draw(stream.seed, stream.position))
        draws, now = self.draws[key], stream_of(key).next()
        if now.seed != draws.first.seed:
            raise reseeded()
        if self._constants is not None:
            self._constants.check_write(block)
        block = self._without_values(block)
        args = (self.node_of(block), draws.state, now.position - draws.first.position, numbers)
        node = self.graph.call_function(FILL, args)
        node.meta["section"], node.meta["val"] = self._section(), None

    def heard(self, what: str) -> None:
        """A generator was seeded, or its state was set."""
        if what == "seed":
            raise reseeded()
        self._is_rewound = True

    def drawn(self) -> list[tuple[DeviceMesh, int]]:
        """For each stream that was drawn from, a mesh that it belongs to, and how far it was advanced."""
        if self._is_rewound and self._draws_plain:
            raise CaptureError(
                "The step sets torch's random generator back, and draws from it.",
                why="Activation checkpointing recomputes dropout of plain tensors from a state of torch's generator, and a captured program has no such state.",
                fix="Use dropout on DTensors, checkpoint without dropout, or train eagerly.",
            )
        found = []
        for key, draws in self.draws.items():
            stream = stream_of(key)
            if stream.seed != draws.first.seed:
                raise reseeded()
            found.append((draws.mesh, stream.position - draws.first.position))
        return found

    def _section(self) -> str:
        return "backward" if self.section == "forward" and current_backward() >= 0 else self.section

    def pause(self) -> Any:
        """A context in which ops run and are not recorded."""
        return without_modes()


def reseeded() -> CaptureError:
    """The error of a step that seeds a generator."""
    return CaptureError(
        "The step seeds a random generator.",
        why="A program draws from the generator as it is when it runs, so the seed would be set when it is captured, and never again.",
        fix="Seed before the step.",
    )


def _permutation(x: Tensor, size: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """The order of dims in which `x` has these sizes and strides; None if there is none."""
    rest = list(zip(x.shape, x.stride(), range(x.dim()), strict=True))
    found = []
    for n, s in zip(size, stride, strict=True):
        match = next((r for r in rest if r[:2] == (n, s)), None)
        if match is None:
            return None
        rest.remove(match)
        found.append(match[2])
    return None if rest else found


def _caller() -> str:
    """The line of the program outside of torch and of this library that is running."""
    for frame, number in traceback.walk_stack(None):
        name = frame.f_code.co_filename
        if not any(part in name for part in _HIDDEN):
            return f"{name}:{number}"
    return ""


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Record what runs inside the block."""
    if recorders:
        raise CaptureError(
            "capture was called inside a step that is being captured.",
            why="A program is recorded at a time.",
            fix="Capture the outer step, which includes the inner one.",
        )
    with ExitStack() as stack:
        recorders.append(recorder)
        stack.callback(recorders.remove, recorder)
        seeding_listeners.append(recorder.heard)
        stack.callback(seeding_listeners.remove, recorder.heard)
        stack.enter_context(fresh_routes())
        if recorder.fake_mode is not None:
            stack.enter_context(recorder.fake_mode)
        stack.enter_context(recorder)
        try:
            yield
        except VALUE_ERRORS as error:
            raise CaptureError(
                f"The step reads the value of a tensor: {error}",
                why=f"{_user_line(error)} needs a value that only a run has, as item() and branches on tensors do.",
                fix="Compute with tensors (torch.where instead of if), or move the reading out of the step.",
            ) from error


def _user_line(error: BaseException) -> str:
    found, at = "an unknown line", error.__traceback__
    while at is not None:
        name = at.tb_frame.f_code.co_filename
        if not any(part in name for part in _HIDDEN):
            found = f"{name}:{at.tb_lineno}"
        at = at.tb_next
    return found
