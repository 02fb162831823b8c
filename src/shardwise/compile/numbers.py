"""The numbers of an optimizer: learning rates, bias corrections and the like change from step to step, and a graph must not hold them.

They are found by running the optimizer's own code. A stand-in of the optimizer has one parameter of one element for each class of
parameters (those of one group with the same step number); the numbers that it passes to ops are those that the optimizer passes
for every parameter of the class. Capture runs both with distinct numbers in place of the real ones, so that each number in the
graph is recognized by its value. Before each run the stand-in takes a step with the real ones, which also advances the step number.
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from shardwise.compile.errors import CaptureError
from shardwise.torch_internals.tracing import TorchDispatchMode

__all__ = ["FIXED_NUMBERS", "OpsChangedError", "OptimizerNumbers"]

FIXED_NUMBERS = frozenset({0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5})
"""Numbers that optimizers write into their formulas."""


class OpsChangedError(Exception):
    """The optimizer no longer runs the ops that were captured."""


class _Class(NamedTuple):
    """Parameters of one group whose states have the same numbers."""

    group: int
    params: list[Tensor]


class _Collector(TorchDispatchMode):
    """Collects the ops that run and the numbers that they are passed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Any] = []
        self.numbers: list[float] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.ops.append(func)
        self.numbers += _floats([*args, *(kwargs or {}).values()])
        return func(*args, **(kwargs or {}))


def _floats(values: Any) -> list[float]:
    found = []
    for v in values:
        if type(v) is float:
            found.append(v)
        elif isinstance(v, list | tuple):
            found += _floats(v)
    return found


def _is_number(value: Any) -> bool:
    """Whether an entry of a parameter's state is a number, such as its step."""
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.dim() == 0 and value.device.type == "cpu"
    return isinstance(value, int | float) and not isinstance(value, bool)


def _value(entry: Any) -> float:
    return float(entry)


class OptimizerNumbers:
    """The numbers of an optimizer's steps, for the parameters that have a gradient."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._classes: list[_Class] = []
        self._ops: list[tuple[Any, ...]] = []
        self._slots: list[list[int | None]] = []
        self._known: dict[float, int] = {}
        self._random = random.Random(0)
        self._used = False
        self.host_tensors: list[Any] = []
        """The numbers in states that are tensors: while a step is captured, they have values, and ops on them are not recorded."""

    @property
    def is_used(self) -> bool:
        """Whether the captured step called the optimizer."""
        return self._used

    # while a step is captured ----------------------------------------------------------------------------------------

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Have the optimizer take its step with distinct numbers in place of the real ones."""
        if self._used:
            raise CaptureError(
                "The step calls optimizer.step() twice.",
                why="The numbers of an optimizer (step, learning rate) are inputs of a program, once per run.",
                fix="Capture a step that calls it once, and run the program twice.",
            )
        self._used = True
        optimizer = self.optimizer
        self._check()
        groups = [dict(g) for g in optimizer.param_groups]
        numbers: list[tuple[dict[str, Any], str, Any]] = []
        self._classes, distinct = self._classify(), []
        for c in self._classes:
            first = self._state(c.params[0])
            state = {k: self._draw_step(v) for k, v in first.items() if _is_number(v)}
            for p in c.params:
                mine = self._state(p)
                for k, v in state.items():
                    numbers.append((mine, k, mine[k]))
                    mine[k] = copy_of(v)
                    self.host_tensors.append(mine[k])
            distinct.append(state)
        try:
            for g in optimizer.param_groups:
                g.update({k: self._distinct(k, v) for k, v in g.items() if k != "params"})
                if "foreach" in g:  # the same ops, one parameter after the other
                    g["foreach"] = False
            self._expect(distinct)
            yield
        finally:
            for g, before in zip(optimizer.param_groups, groups, strict=True):
                g.update(before)
            for mine, k, v in numbers:
                mine[k] = v

    def _check(self) -> None:
        for i, g in enumerate(self.optimizer.param_groups):
            for flag in ("fused", "capturable", "differentiable"):
                if g.get(flag):
                    raise CaptureError(
                        f"The optimizer's group {i} has {flag}=True.",
                        why=f"A captured step runs the update as ops of its own, which {flag}=True replaces.",
                        fix=f"{type(self.optimizer).__name__}(..., {flag}=False)",
                    )
            if any(isinstance(v, Tensor) and k != "params" for k, v in g.items()):
                raise CaptureError(
                    f"The optimizer's group {i} has a tensor among its settings.",
                    why="A captured step takes them as numbers.",
                    fix="Pass lr and the other settings as floats.",
                )

    def _state(self, p: Tensor) -> dict[str, Any]:
        return self.optimizer.state.get(p, {})  # type: ignore[no-any-return]

    def _classify(self) -> list[_Class]:
        found: dict[Any, _Class] = {}
        for i, g in enumerate(self.optimizer.param_groups):
            for p in g["params"]:
                if p.grad is None:
                    continue
                state = self._state(p)
                numbers = tuple((k, _value(v)) for k, v in sorted(state.items()) if _is_number(v))
                tensors = tuple(sorted(k for k in state if not _is_number(state[k])))
                found.setdefault((i, numbers, tensors, p.dtype), _Class(i, [])).params.append(p)
        return list(found.values())

    def _draw_step(self, like: Any) -> Any:
        number = 3.0 + self._random.random()
        return torch.tensor(number, dtype=like.dtype) if isinstance(like, Tensor) else number

    def _distinct(self, name: str, value: Any) -> Any:
        if isinstance(value, float) or (name == "lr" and type(value) is int):
            value = value or (1e-3 if name == "lr" else 0.0)
            return value * (1 + 1e-3 * self._random.random())
        if isinstance(value, tuple):
            return tuple(self._distinct(name, v) for v in value)
        return value

    def _expect(self, states: list[dict[str, float]]) -> None:
        """Take a step of the stand-in with the distinct numbers, to recognize them in the graph."""
        for c, state in zip(self._classes, states, strict=True):
            ops, numbers, _ = self._take_step(c, {k: copy_of(v) for k, v in state.items()})
            self._ops.append(ops)
            for n in numbers:
                if n not in FIXED_NUMBERS:
                    self._known.setdefault(n, len(self._known))
            self._slots.append([self._known[n] if n not in FIXED_NUMBERS else None for n in numbers])

    def _take_step(
        self, c: _Class, numbers: dict[str, Any]
    ) -> tuple[tuple[Any, ...], list[float], dict[str, Any]]:
        group, p = self.optimizer.param_groups[c.group], c.params[0]
        tiny = torch.zeros(1, dtype=p.dtype, requires_grad=True)
        tiny.grad = torch.zeros(1, dtype=p.dtype)
        twin = copy(self.optimizer)
        twin.__dict__.pop("step", None)  # a scheduler's wrapper, which is bound to the optimizer
        twin.__dict__.update({k: OrderedDict() for k in twin.__dict__ if k.endswith("_hooks")})
        twin.param_groups = [
            {**group, "params": [tiny], **({"foreach": False} if "foreach" in group else {})}
        ]
        state = {k: torch.zeros(1, dtype=v.dtype) for k, v in self._state(p).items() if isinstance(v, Tensor)}
        twin.state = defaultdict(dict, {tiny: state | numbers})
        collector = _Collector()
        with collector, torch.no_grad():
            twin.step()
        after = {k: twin.state[tiny].get(k) for k in numbers}
        return tuple(collector.ops), collector.numbers, after

    def saved(self) -> dict[str, Any]:
        """What `restored` takes: parameters by their numbers in their groups, and ops by name."""
        groups = [[id(p) for p in g["params"]] for g in self.optimizer.param_groups]
        return {
            "classes": [[c.group, [groups[c.group].index(id(p)) for p in c.params]] for c in self._classes],
            "ops": [[str(op) for op in ops] for ops in self._ops],
            "slots": self._slots,
            "count": len(self._known),
        }

    @classmethod
    def restored(cls, optimizer: Optimizer, said: dict[str, Any]) -> OptimizerNumbers:
        """The numbers of an optimizer for a program that was captured with one like it."""
        out = cls(optimizer)
        for group, numbers in said["classes"]:
            params = optimizer.param_groups[group]["params"]
            out._classes.append(_Class(group, [params[i] for i in numbers]))
        out._ops = [tuple(ops) for ops in said["ops"]]
        out._slots = [list(slots) for slots in said["slots"]]
        out._known = {float(i): i for i in range(said["count"])}
        out._used = True
        return out

    # afterwards ------------------------------------------------------------------------------------------------------

    def bind(self, graph: fx.Graph) -> list[fx.Node]:
        """Replace the numbers of the optimizer in a graph by inputs; returns these."""
        if not self._used:
            return []
        inputs: dict[int, fx.Node] = {}

        def replace(value: Any) -> Any:
            if type(value) is float and value not in FIXED_NUMBERS:
                if (number := self._known.get(value)) is None:
                    raise CaptureError(
                        f"The optimizer {type(self.optimizer).__name__} passes {value} to an op.",
                        why="It is none of the numbers of its update, so a later step might have another one.",
                        fix="Capture the forward and backward pass only, and call optimizer.step() after each run.",
                    )
                return inputs[number]
            if isinstance(value, list | tuple):
                return type(value)([replace(v) for v in value])
            return value

        first = next(iter(graph.nodes))
        with graph.inserting_before(first):
            for number in range(len(self._known)):
                inputs[number] = graph.placeholder(f"number_{number}")
        for node in graph.nodes:
            if node.op == "call_function" and node.meta.get("section") == "optimizer":
                node.args = replace(node.args)
                node.kwargs = {k: replace(v) for k, v in node.kwargs.items()}
        return list(inputs.values())

    def read(self) -> tuple[list[float], list[tuple[list[Any], dict[str, Any]]]]:
        """The numbers of the next step, and the states to set when it has been taken."""
        values = [0.0] * len(self._known)
        updates = []
        for c, ops, slots in zip(self._classes, self._ops, self._slots, strict=True):
            state = self._state(c.params[0])
            if not self._are_alike(c, state):
                raise OpsChangedError
            now = {k: copy_of(v) for k, v in state.items() if _is_number(v)}
            ran, numbers, after = self._take_step(c, now)
            if tuple(map(str, ran)) != tuple(map(str, ops)):
                raise OpsChangedError
            for slot, n in zip(slots, numbers, strict=True):
                if slot is not None:
                    values[slot] = n
            updates.append((c.params, after))
        return values, updates

    def _are_alike(self, c: _Class, first: dict[str, Any]) -> bool:
        """Whether the states of a class still have the same numbers: one may have been loaded, or missed a step."""
        states = [self._state(p) for p in c.params]
        for k, v in first.items():
            if not _is_number(v):
                continue
            others = [s.get(k) for s in states]
            if isinstance(v, Tensor):
                if not all(isinstance(x, Tensor) for x in others):
                    return False
                if not bool((torch.stack(others) == v).all()):  # type: ignore[arg-type]
                    return False
            elif any(x != v for x in others):
                return False
        return True

    def advance(self, updates: list[tuple[list[Any], dict[str, Any]]]) -> None:
        """Set the numbers in the optimizer's states to those after the step."""
        for params, after in updates:
            for p in params:
                state = self.optimizer.state[p]
                for k, v in after.items():
                    if isinstance(state[k], Tensor):
                        state[k].fill_(v)
                    else:
                        state[k] = v


def copy_of(value: Any) -> Any:
    """A number of a state, which may be a tensor that a step writes to."""
    return value.clone() if isinstance(value, Tensor) else value
