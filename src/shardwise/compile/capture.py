"""`capture`: run a step once on tensors without values, and return the program that it consists of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardwise.call.kept_moves import forget_moves
from shardwise.comm import coord_of, is_simulated, members_of
from shardwise.comm.per_rank import at_rank
from shardwise.compile.constants import MOST_LINES, Constants, ConstantWrittenError
from shardwise.compile.errors import CaptureError, StateCreatedError
from shardwise.compile.numbers import FIXED_NUMBERS, OptimizerNumbers
from shardwise.compile.owners import Find, Input, Owners, always, owners_of
from shardwise.compile.passes.dead_code import remove_dead_code
from shardwise.compile.passes.memory_use import storages, written
from shardwise.compile.program import Gradient, Output, Program
from shardwise.compile.recorder import Recorder, recording
from shardwise.compile.side_effects import unchanged_objects
from shardwise.compile.signature import keys_of, known_ids
from shardwise.compile.viewpoint import seen_from
from shardwise.parallel.data.passes import forget_gathered, forget_interrupted_passes
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.mesh import root_mesh
from shardwise.torch_internals.pytree import tree_flatten, tree_unflatten
from shardwise.torch_internals.recording import is_fake, without_modes

__all__ = ["capture"]


def capture(
    step: Callable[..., Any],
    *args: Any,
    mesh: DeviceMesh | None = None,
    rank: int | None = None,
    optimizer: Optimizer | None = None,
    modules: Sequence[nn.Module] = (),
) -> Program:
    """Capture a step as one graph of ops on the blocks of one rank and collectives.

    The step runs once, on tensors without values: nothing is computed, nothing is communicated, and no state changes. Whatever it
    does to tensors is in the program: forward, loss, backward, clipping, the update of the optimizer, random draws. A step that
    changes other Python objects that it can be seen to refer to (attributes of modules, lists, counters) is refused.

    Args:
        step: a function that trains or evaluates; it may call `backward()` and `optimizer.step()`.
        *args: its arguments. Tensors among them are inputs of the program, other values are part of it.
        mesh: the mesh; by default that of the first DTensor among the parameters and the arguments, or the one that it is a part of.
        rank: the rank whose program it is; by default this process, in a simulation the first rank of the mesh. The program of
            another rank can be printed and measured, and in a simulation all ranks run theirs.
        optimizer: the optimizer that the step calls. Its numbers (learning rate, step number, ...) become inputs.
        modules: modules whose parameters get gradients without an optimizer, and whose tensors get names.

    Raises:
        CaptureError: the step depends on values of tensors, changes Python objects, or calls an optimizer that was not passed.

    Nothing is communicated.

    >>> import shardwise as sw
    >>> with sw.compile.fake_mesh((4,), ("tp",)) as mesh:
    ...     x = sw.empty(8, 6, device_mesh=mesh, placements=[sw.Shard(0)])
    ...     program = capture(lambda x: x.sum(), x)
    >>> [c.kind for c in program.collectives]
    []
    """
    leaves, structure = tree_flatten(args)
    if optimizer is not None:
        _create_states(optimizer)
    tensors = owners_of(leaves, optimizer, modules).tensors
    mesh = mesh or next((root_mesh(t.device_mesh) for t in tensors if isinstance(t, DTensor)), None)
    known = known_ids(optimizer, modules)
    keys = (keys_of(leaves, known), structure)
    rank = _rank_to_be(rank, mesh)
    with seen_from(rank, tensors):
        here = tree_unflatten([at_rank(x, rank) for x in leaves], structure) if rank is not None else args
        program = _record_with_constants(step, here, mesh, optimizer, modules, keys)
    program.fixed_ids = known
    program.capture_at = lambda r: capture(
        step, *args, mesh=mesh, rank=r, optimizer=optimizer, modules=modules
    )
    return program


def _rank_to_be(rank: int | None, mesh: DeviceMesh | None) -> int | None:
    """The rank whose program to capture; None for this process."""
    if mesh is None or (rank is None and not is_simulated()):
        return rank
    ranks = members_of(mesh)
    if rank is None:
        return next(iter(ranks))
    if rank not in ranks:
        raise CaptureError(
            f"capture got rank={rank}.", why=f"The mesh has the ranks {_ranges(ranks)}.", fix="rank=0"
        )
    is_here = not is_simulated() and ranks[rank] == coord_of(mesh)
    return None if is_here else rank


def _ranges(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    is_range = found == [*range(found[0], found[-1] + 1)]
    return f"{found[0]} to {found[-1]}" if is_range else str(found)


def _record_with_constants(step: Callable[..., Any], *how: Any) -> Program:
    """Record the step with the values of the constants that it does not write inputs to."""
    excluded: frozenset[str] = frozenset()
    while len(excluded) < MOST_LINES:
        try:
            return _record(step, *how, constants=Constants(excluded))
        except ConstantWrittenError as error:
            excluded |= {error.line}
    return _record(step, *how, constants=None)


def _record(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: DeviceMesh | None,
    optimizer: Optimizer | None,
    modules: Sequence[nn.Module],
    keys: tuple[Any, Any],
    *,
    constants: Constants | None,
) -> Program:
    leaves, _ = tree_flatten(args)
    owned = owners_of(leaves, optimizer, modules)
    recorder = Recorder(all(t.is_meta for t in owned.tensors if t.dim()), constants)
    numbers = OptimizerNumbers(optimizer) if optimizer is not None else None
    params = [t for t in owned.tensors if t.requires_grad and t.is_leaf]
    with (
        _restored_gradients(params),
        _nothing_kept(),
        _same_states(optimizer),
        unchanged_objects(step, modules),
        torch.enable_grad(),
    ):
        before = [p.grad for p in params]
        with recording(recorder), _optimizer_section(recorder, numbers):
            result = step(*args)
        if constants:
            constants.check_memory()
        found, shape = tree_flatten(result)
        results: list[fx.Node] = []
        outputs = [_output(recorder, leaf, results) for leaf in found]
        gradients = [
            _gradient(recorder, p, owned.finds[id(p)], results)
            for p, b in zip(params, before, strict=True)
            if p.grad is not b
        ]
        streams = recorder.drawn()
    graph = recorder.graph
    graph.output(tuple(results))
    numbers = numbers if numbers is not None and numbers.is_used else None
    if numbers is not None:
        numbers.bind(graph)
    remove_dead_code(graph)
    inputs = _order_inputs(recorder, graph, owned)
    has_values, has_overlap = _memory(recorder, inputs)
    coord = () if mesh is None else coord_of(mesh) or ()
    return Program(
        graph,
        mesh,
        coord,
        inputs,
        streams,
        numbers,
        outputs,
        shape,
        gradients,
        keys,
        has_values=has_values,
        has_overlap=has_overlap,
    )


def _memory(recorder: Recorder, inputs: Any) -> tuple[bool, bool]:
    """Whether the inputs have values, and whether some of them share memory."""
    if any(x.is_meta or is_fake(x) for x, _, _ in recorder.lifted.values()):
        return False, False
    alive = set(recorder.graph.nodes)
    return True, _overlap([x for x, _, n in recorder.lifted.values() if n in alive], inputs)


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


@contextmanager
def _nothing_kept() -> Iterator[None]:
    """Begin and end without blocks that were moved, gathered or cast earlier, which have values; generators stay where they are."""
    state = torch.get_rng_state()
    _forget()
    try:
        yield
    except BaseException:
        forget_interrupted_passes()
        raise
    finally:
        _forget()
        torch.set_rng_state(state)


def _forget() -> None:
    forget_moves()
    forget_gathered()
    torch.clear_autocast_cache()


@contextmanager
def _same_states(optimizer: Optimizer | None) -> Iterator[None]:
    """Refuse a step in which the optimizer creates or replaces tensors of its state, and undo it."""
    if optimizer is None:
        yield
        return
    state = optimizer.state
    before = {p: dict(s) for p, s in state.items()}
    try:
        yield
        new = [p for p, s in state.items() if s.keys() != before.get(p, {}).keys()]
        if new:
            raise StateCreatedError
        if any(
            v is not before[p][k] for p, s in state.items() for k, v in s.items() if isinstance(v, Tensor)
        ):
            raise CaptureError(
                f"{type(optimizer).__name__} replaces a tensor of its state.",
                why="A program writes to the tensors of a state, and a tensor that replaces one would have no values.",
                fix="Capture the forward and backward pass only, and call optimizer.step() after each run.",
            )
    finally:
        for p in [p for p in state if p not in before]:
            del state[p]
        for p, s in before.items():
            state[p].clear()
            state[p].update(s)


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


def _gradient(recorder: Recorder, p: Tensor, named: tuple[str, Find], results: list[fx.Node]) -> Gradient:
    if p.grad is None:
        return Gradient(*named, None)
    number, spec, _ = _output(recorder, p.grad, results)
    return Gradient(*named, number, spec)


def _overlap(blocks: Sequence[Tensor], inputs: Sequence[Input]) -> bool:
    """Whether an input that is written to shares memory with another one."""
    spans = []
    for x, i in zip(blocks, inputs, strict=True):
        if x.numel():
            last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
            start = x.data_ptr()
            spans.append((start, start + (last + 1) * x.itemsize, i.is_written))
    spans.sort()
    end, written_end = 0, 0
    for start, stop, is_written in spans:
        if start < written_end or (is_written and start < end):
            return True
        end = max(end, stop)
        written_end = max(written_end, stop) if is_written else written_end
    return False


def _check_constant(x: Tensor, node: fx.Node) -> None:
    """Refuse a number of the optimizer that became a tensor, as in `sign[mask] = factor`: a later step might have another one."""
    if x.dim() or not x.is_floating_point() or x.is_meta or is_fake(x):
        return
    if all(user.meta.get("section") != "optimizer" for user in node.users) or float(x) in FIXED_NUMBERS:
        return
    raise CaptureError(
        "The optimizer makes a tensor of a number of its update.",
        why="The numbers of an update (step, learning rate) are inputs of a program, and this tensor would be a constant.",
        fix="Capture the forward and backward pass only, and call optimizer.step() after each run.",
    )


def _order_inputs(recorder: Recorder, graph: fx.Graph, owners: Owners) -> list[Input]:
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
        known = owners.inputs.get(id(x))
        if known is None:
            _check_constant(x, node)
            known = Input("constant", always(x))
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
