"""`capture`: run a step once on tensors without values, and return the program that it consists of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardwise.call.kept_moves import forget_moves
from shardwise.comm import coord_of, is_simulated
from shardwise.compile.errors import CaptureError
from shardwise.compile.numbers import OptimizerNumbers
from shardwise.compile.passes.dead_code import remove_dead_code
from shardwise.compile.passes.memory_use import storages, written
from shardwise.compile.program import Gradient, Input, Output, Program, key_of, module_tensors
from shardwise.compile.recorder import Recorder, recording
from shardwise.parallel.data.group import forget_gathered
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.pytree import tree_flatten
from shardwise.torch_internals.recording import without_modes

__all__ = ["capture"]

Read = Callable[[Sequence[Any]], Any]
"""How to find a tensor in a run, given the leaves of its arguments."""


def capture(
    step: Callable[..., Any],
    *args: Any,
    mesh: DeviceMesh | None = None,
    optimizer: Optimizer | None = None,
    modules: Sequence[nn.Module] = (),
) -> Program:
    """Capture a step as one graph of ops on the blocks of this rank and collectives.

    The step runs once, on tensors without values: nothing is computed, nothing is communicated, and no state changes. Whatever it
    does to tensors is in the program: forward, loss, backward, clipping, the update of the optimizer, random draws. What it does
    to other Python objects is not.

    Args:
        step: a function that trains or evaluates; it may call `backward()` and `optimizer.step()`.
        *args: its arguments. Tensors among them are inputs of the program, other values are part of it.
        mesh: the mesh; by default that of the first DTensor among the arguments, the optimizer's parameters and the modules.
        optimizer: the optimizer that the step calls. Its numbers (learning rate, step number, ...) become inputs.
        modules: modules whose parameters get gradients without an optimizer, and whose tensors get names.

    Raises:
        CaptureError: the step depends on values of tensors, or calls an optimizer that was not passed.

    Nothing is communicated.

    >>> import shardwise as sw
    >>> with sw.compile.fake_mesh((4,), ("tp",)) as mesh:
    ...     x = sw.empty(8, 6, device_mesh=mesh, placements=[sw.Shard(0)])
    ...     program = capture(lambda x: x.sum(), x)
    >>> [c.kind for c in program.collectives]
    []
    """
    if is_simulated():
        raise CaptureError(
            "capture was called in a simulation.",
            why="A program is that of one rank, and a simulation has the blocks of all.",
            fix="Capture on real ranks, or on a mesh that is not there: with sw.compile.fake_mesh((2, 4), ('dp', 'tp')) as mesh: ...",
        )
    leaves, structure = tree_flatten(args)
    owned = _owners(leaves, optimizer, modules)
    mesh = mesh or next((o.device_mesh for o in owned.tensors if isinstance(o, DTensor)), None)
    if optimizer is not None:
        _create_states(optimizer)
        owned = _owners(leaves, optimizer, modules)
    recorder = Recorder(on_meta=all(t.is_meta for t in owned.tensors if t.dim()))
    numbers = OptimizerNumbers(optimizer) if optimizer is not None else None
    params = [t for t in owned.tensors if t.requires_grad and t.is_leaf]
    with _restored_gradients(params), _nothing_gathered(), torch.enable_grad():
        before = [p.grad for p in params]
        with recording(recorder), _optimizer_section(recorder, numbers):
            result = step(*args)
        found, shape = tree_flatten(result)
        results: list[fx.Node] = []
        outputs = [_output(recorder, leaf, results) for leaf in found]
        gradients = [
            _gradient(recorder, p, results) for p, b in zip(params, before, strict=True) if p.grad is not b
        ]
    graph = recorder.graph
    graph.output(tuple(results))
    numbers = numbers if numbers is not None and numbers.is_used else None
    if numbers is not None:
        numbers.bind(graph)
    remove_dead_code(graph)
    inputs = _order_inputs(recorder, graph, owned)
    streams = [(d.mesh, d.drawn) for d in recorder.draws.values()]
    has_values = not any(x.is_meta for x, _, _ in recorder.lifted.values())
    coord = () if mesh is None else coord_of(mesh) or ()
    keys = ([key_of(x) for x in leaves], structure)
    return Program(graph, mesh, coord, inputs, streams, numbers, outputs, shape, gradients, keys, has_values)


def _create_states(optimizer: Optimizer) -> None:
    """Create the state of an optimizer whose parameters have no values, which it otherwise does in its first step."""
    params = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    if any(optimizer.state.get(p) for p in params):
        return
    if all(p.is_meta for p in params):
        with _restored_gradients(params):
            for p in params:
                p.grad = torch.zeros_like(p)
            optimizer.step()


class _Owners:
    """The tensors that a program knows by name, and the inputs that their blocks become."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.inputs: dict[int, Input] = {}

    def add(self, name: str, tensor: Any, read: Read) -> None:
        """Add a tensor, if it is one, and how to find the one in its place in a run."""
        if not isinstance(tensor, Tensor):
            return
        self.tensors.append(tensor)
        if isinstance(tensor, DTensor):
            found = Input(name, lambda leaves: read(leaves)._local_tensor, tensor)
            self.inputs.setdefault(id(tensor._local_tensor), found)
        else:
            self.inputs.setdefault(id(tensor), Input(name, lambda leaves: read(leaves).detach()))


def _always(value: Any) -> Read:
    return lambda leaves: value


def _gradient_of(p: Tensor) -> Read:
    return lambda leaves: p.grad


def _state_of(optimizer: Optimizer, p: Tensor, key: str) -> Read:
    return lambda leaves: optimizer.state[p][key]


def _owners(leaves: Sequence[Any], optimizer: Optimizer | None, modules: Sequence[nn.Module]) -> _Owners:
    owners = _Owners()
    for i, leaf in enumerate(leaves):
        owners.add(f"argument {i}", leaf, itemgetter(i))
    for name, t in module_tensors(modules).items():
        owners.add(name, t, _always(t))
        owners.add(f"{name}.grad", t.grad, _gradient_of(t))
    if optimizer is None:
        return owners
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            owners.add(f"parameter {g}.{i}", p, _always(p))
            owners.add(f"parameter {g}.{i}.grad", p.grad, _gradient_of(p))
            for key, value in optimizer.state.get(p, {}).items():
                owners.add(f"parameter {g}.{i}.{key}", value, _state_of(optimizer, p, key))
    return owners


@contextmanager
def _nothing_gathered() -> Iterator[None]:
    """Begin and end without blocks that were moved or gathered earlier: outside of the block they have values, inside not."""
    forget_moves()
    forget_gathered()
    try:
        yield
    finally:
        forget_moves()
        forget_gathered()


@contextmanager
def _restored_gradients(params: Sequence[Tensor]) -> Iterator[None]:
    before = [(p, p.grad) for p in params]
    try:
        yield
    finally:
        for p, grad in before:
            p.grad = grad


@contextmanager
def _optimizer_section(recorder: Recorder, numbers: OptimizerNumbers | None) -> Iterator[None]:
    """Have the optimizer's step recorded as such, with replaced numbers."""
    if numbers is None:
        yield
        return
    with ExitStack() as section, ExitStack() as hooks:

        def begin(*_: Any) -> None:
            with without_modes():
                section.enter_context(numbers.replaced())
            recorder.host = {id(t): t for t in numbers.host_tensors if isinstance(t, Tensor)}
            recorder.section = "optimizer"

        def end(*_: Any) -> None:
            recorder.section, recorder.host = "after", {}
            section.close()

        optimizer = numbers.optimizer
        hooks.callback(optimizer.register_step_pre_hook(begin).remove)
        hooks.callback(optimizer.register_step_post_hook(end).remove)
        yield


def _output(recorder: Recorder, leaf: Any, results: list[fx.Node]) -> Output:
    if not isinstance(leaf, Tensor):
        return Output(None, constant=leaf)
    spec = leaf._spec if isinstance(leaf, DTensor) else None
    results.append(recorder.node_of(leaf._local_tensor if isinstance(leaf, DTensor) else leaf))
    return Output(len(results) - 1, spec)


def _gradient(recorder: Recorder, p: Tensor, results: list[fx.Node]) -> Gradient:
    if p.grad is None:
        return Gradient(p, None)
    number, spec, _ = _output(recorder, p.grad, results)
    return Gradient(p, number, spec)


def _order_inputs(recorder: Recorder, graph: fx.Graph, owners: _Owners) -> list[Input]:
    """Put the inputs of the graph in the order in which a run passes them: blocks, states of streams, numbers."""
    written_to: set[int] = set()
    for node in graph.nodes:
        written_to |= written(node)
    inputs = []
    order = []
    for x, _, node in recorder.lifted.values():
        if not node.users:
            graph.erase_node(node)
            continue
        known = owners.inputs.get(id(x)) or Input("constant", _always(x))
        node.meta["name"] = known.name
        inputs.append(known._replace(is_written=bool(storages(node) & written_to)))
        order.append(node)
    order += [d.state for d in recorder.draws.values()]
    order += [n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("number_")]
    for node in reversed(order):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)
    return inputs
