"""The last rung: gather the inputs, run the op on the whole, and say so once."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.call.trace import tell
from shardwise.comm import PerRank, axes_of, map_ranks, members_of, spread
from shardwise.layout import Layout, LayoutError, Spec
from shardwise.plan import Plan, plan_redistribute
from shardwise.random.seeded_generator import borrowing, draws_now
from shardwise.tensor.autograd import redistributed
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.errors import MeshError
from shardwise.tensor.policy import mind, replicates
from shardwise.tensor.seeding import next_draw
from shardwise.tensor.sparse_tensor import holds_sparse, made, stride_of

__all__ = [
    "check_operands",
    "draws_random",
    "gathered",
    "is_held",
    "off_mesh",
    "on_whole",
    "passing_on",
    "place_returned",
    "plain_targets",
    "plans_to_whole",
    "replicated_like",
    "returned_by",
    "tensors_in",
    "write_back",
    "written_by",
]

aten = torch.ops.aten
_log = logging.getLogger("shardwise")


def on_whole(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any] | None = None
) -> Any:
    """The last rung: gather the inputs, run the op on the whole, or another in its place, and say so once."""
    found = tensors_in([*args, *kwargs.values()])
    first = next(t for t in found if isinstance(t, DTensor))
    plans = plans_to_whole(found)
    mind(func, plans)
    tell(func, "whole", args, kwargs, plans)
    _say_once(func, [t._spec for t in found if isinstance(t, DTensor)], plans)
    written = written_by(func, args, kwargs)
    whole: dict[int, Tensor] = {}
    for t in found:
        if isinstance(t, DTensor) and id(t) not in whole:
            whole[id(t)] = gathered(func, t)
    targets = plain_targets(func, args, kwargs) if isinstance(first._local_tensor, PerRank) else []
    for plain in targets:
        whole[id(plain)] = spread(plain, list(members_of(first.device_mesh)))
    run = run or _drawing_alike(func, args, kwargs, first.device_mesh)
    result = map_ranks(run, *_swap(args, whole), **_swap(kwargs, whole))
    for t in written:
        write_back(t, whole[id(t)])
    if isinstance(result, tuple) and place_returned(func) is not None:
        pairs = zip(result, _each_returned(func, args, kwargs), strict=True)
        return tuple(_wrap(r, first._spec) if t is None else t for r, t in pairs)
    target = returned_by(func, args, kwargs)
    return _wrap(result, first._spec) if target is None else target


def _drawing_alike(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh
) -> Callable[..., Any]:
    """An op that draws at random draws the same on each rank, by its place in the stream."""
    if not draws_random(func, args, kwargs):
        return func  # type: ignore[no-any-return]
    generator = next((v for v in [*args, *kwargs.values()] if isinstance(v, torch.Generator)), None)
    if generator is None:
        return borrowing(func, next_draw(mesh))
    before = generator.get_state()

    def drawn(*args: Any, **kwargs: Any) -> Any:
        generator.set_state(before)
        return func(*args, **kwargs)

    return drawn


def draws_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers; an op with a dropout argument does so only if that is not 0."""
    dropout = None
    for i, arg in enumerate(func._schema.arguments):
        if arg.name in ("dropout_p", "dropout"):
            dropout = args[i] if i < len(args) else kwargs.get(arg.name, 0.0)
    return draws_now(func._schema.name, func.tags, dropout)


def gathered(func: Any, t: DTensor) -> Tensor:
    """The whole of a tensor, as an op is to see it."""
    whole = redistributed(t, Layout.replicated(t.shape, t.layout.axes))._local_tensor
    if "as_strided" not in func._schema.name or whole is t._local_tensor:
        return whole
    # the one op that reads strides, and what was gathered is contiguous whatever the tensor's are
    return map_ranks(lambda w: w.new_empty_strided(t.shape, t._spec.stride).copy_(w), whole)  # type: ignore[no-any-return]


def plans_to_whole(found: Sequence[Tensor]) -> list[Plan]:
    """What gathers each DTensor among some tensors."""
    return [
        plan_redistribute(t.layout, Layout.replicated(t.shape, t.layout.axes), t.dtype.itemsize)
        for t in found
        if isinstance(t, DTensor)
    ]


def off_mesh(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], specs: Sequence[Spec] | None) -> Any:
    """An op on a rank that is not on the mesh: it holds nothing and makes nothing, of the right shape and dtype."""
    found = tensors_in([*args, *kwargs.values()])
    first = next(t for t in found if isinstance(t, DTensor))
    if specs is None:  # the others run it on the whole, and what draws there takes a place in the stream
        _drawing_alike(func, args, kwargs, first.device_mesh)
    if written_by(func, args, kwargs) and (
        returned_by(func, args, kwargs) is not None or not func._schema.returns
    ):
        return returned_by(func, args, kwargs)
    sparse = any(map(holds_sparse, found))
    if sparse and func in _COUNTS and torch._C._current_graph_task_id() == -1:
        raise _off(func, first)
    instead = {id(t): _void(t) if sparse else _on_meta(t) for t in found}
    try:
        result = func(*_swap(args, instead), **_swap(kwargs, instead))
    except (NotImplementedError, RuntimeError) as error:
        if not sparse and (result := _sparse_of_nothing(func, args, kwargs)) is not None:
            return _nothing(result, first, None)
        raise _off(func, first) from error
    return _nothing(result, first, None if specs is None else iter(specs))


def _off(func: Any, first: DTensor) -> LayoutError:
    return LayoutError(
        f"{func} ran on a rank that is not on the mesh {first.device_mesh}.",
        why="this rank holds nothing of the tensor, and the op's result depends on its values",
        fix="call it only where mesh.get_coordinate() is not None",
    )


# What these give depends on how many elements a sparse tensor has.
_COUNTS = {
    getattr(aten, name).default
    for name in "_nnz is_coalesced indices _indices values _values col_indices row_indices".split()
}


def _on_meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _void(t: Tensor) -> Tensor:
    """A tensor to run an op on that has no values: zeros in no memory, or a sparse one without elements."""
    if isinstance(t, DTensor) and holds_sparse(t):
        return t._local_tensor
    return t if holds_sparse(t) else torch.zeros((), dtype=t.dtype, device=t.device).expand(t.shape)


def _sparse_of_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What comes out, without elements, of an op that makes a sparse tensor; None of any other."""
    void = {id(t): _void(t) for t in tensors_in([*args, *kwargs.values()])}
    try:
        result = func(*_swap(args, void), **_swap(kwargs, void))
    except (NotImplementedError, RuntimeError):
        return None
    return result if isinstance(result, Tensor) and holds_sparse(result) else None


def _nothing(result: Any, first: DTensor, specs: Iterator[Spec] | None) -> Any:
    if isinstance(result, Tensor) and holds_sparse(result):
        return made(result, replicated_like(result, first.device_mesh))
    if isinstance(result, Tensor):
        layout = Layout.replicated(result.shape, first.layout.axes)
        whole = Spec(first.device_mesh, layout, result.dtype, result.shape, tuple(result.stride()))
        spec = whole if specs is None else next(specs)
        return DTensor(first._local_tensor.new_empty(0, dtype=result.dtype), spec)
    if isinstance(result, list | tuple):
        return type(result)([_nothing(r, first, specs) for r in result])
    return result


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments, in lists too, in order."""
    out: list[Tensor] = []
    for v in values:
        if isinstance(v, Tensor):
            out.append(v)
        elif isinstance(v, list | tuple):
            out.extend(tensors_in(v))
    return out


def _swap(value: Any, whole: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return whole.get(id(value), value)
    if isinstance(value, list | tuple):
        return type(value)(_swap(v, whole) for v in value)
    if isinstance(value, dict):
        return {k: _swap(v, whole) for k, v in value.items()}
    return value


# What an op made itself on the way (the index of x[[0, 3]], a mask) no Python name or stack refers to. The count
# is that of such a tensor in an argument list, held in a loop or a parameter and passed on to `is_held`.
_UNHELD = 6
# What a product transposes is a weight that somebody passed, even if no name holds it any more.
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
_UNHELD_BASE = 3  # the name in `is_held`, its argument, and the op that made it


def is_held(t: Tensor) -> bool:
    """Whether the program holds a tensor, or what it is a view of, and not only the arguments of the op that runs."""
    if sys.getrefcount(t) > _UNHELD + _passed_on:
        return True
    base = t._base
    return base is not None and sys.getrefcount(base) > _UNHELD_BASE


_passed_on = 0  # how many more refer to each argument because a dispatch mode of ours passes it on


@contextmanager
def passing_on(references: int) -> Iterator[None]:
    """Inside, arguments come through Python code that holds this many references to each."""
    global _passed_on
    _passed_on += references
    try:
        yield
    finally:
        _passed_on -= references


def _torchs_own(func: Any) -> bool:
    """Whether Python code of torch that makes plain tensors to help itself is calling."""
    if any(name in func._schema.name for name in ("embedding_bag", "fractional_max_pool")):
        return True  # offsets, and where regions begin, drawn where the caller gives none
    frame = sys._getframe(1)
    ours_or_torchs = ("shardwise.", "torch.")
    while frame is not None and (module := str(frame.f_globals.get("__name__"))).startswith(ours_or_torchs):
        if module.startswith(_HELPS_ITSELF) or frame.f_code.co_name == "_unravel_index":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# identities of reductions, a basis to begin with, which elements to set to zero, and states that are zero at first
_HELPS_ITSELF = ("torch.masked", "torch._lowrank", "torch.nn.init", "torch.nn.modules.rnn")


def check_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """The first DTensor; raise if tensors of several meshes meet, or a plain one that nobody has explained."""
    found = tensors_in([*args, *kwargs.values()])
    first = next(t for t in found if isinstance(t, DTensor))
    for t in found:
        if isinstance(t, DTensor):
            if t.device_mesh != first.device_mesh:
                raise MeshError(
                    f"{func} got tensors on {first.device_mesh} and on {t.device_mesh}.",
                    why="an op runs on one mesh; only one that is a part of the other, along the rest of which the "
                    "other tensor is replicated, takes it in, if it is not written to and wants no gradient",
                    fix="distribute both over one mesh",
                )
        elif (is_held(t) or (func in _PRODUCTS and t._base is not None)) and not _counts_as_replicated(
            func, t
        ):
            raise LayoutError(
                f"{func}: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor: "
                f"a plain tensor of shape {tuple(t.shape)} beside {first._spec}.",
                why="nothing says whether the plain one is replicated, a block, or a part of a sum",
                fix="wrap it: distribute_tensor(t, mesh, [Replicate()]), or DTensor.from_local(t, mesh, …)",
            )
    return first


def _counts_as_replicated(func: Any, t: Tensor) -> bool:
    """Numbers are the same everywhere, and so is what autograd makes in a backward pass, and torch for itself."""
    in_backward = torch._C._current_graph_task_id() != -1
    return t.dim() == 0 or in_backward or replicates() or _torchs_own(func)


# Ops that write to arguments though their schema does not say so.
_WRITES_UNSAID = dict.fromkeys(
    (aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default),
    ("running_mean", "running_var"),
)


def plain_targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The plain tensors that an op writes to: in a simulation one rank writes to each, not all in turn."""
    return [t for t in _written(func, args, kwargs) if not isinstance(t, DTensor)]


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DTensor]:
    """The DTensors that the op writes to, by its schema."""
    return [t for t in _written(func, args, kwargs) if isinstance(t, DTensor)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    out: list[Tensor] = []
    unsaid = _WRITES_UNSAID.get(func, ())
    for i, arg in enumerate(func._schema.arguments):
        if arg.name in unsaid or (arg.alias_info is not None and arg.alias_info.is_write):
            value = args[i] if i < len(args) else kwargs.get(arg.name)
            out.extend(tensors_in([value]))
    return out


_returned: dict[Any, tuple[int, str] | None] = {}


def place_returned(func: Any) -> tuple[int, str] | None:
    """Which argument an op writes to and returns, by its schema; None if what it returns is new, or nothing."""
    if func not in _returned:
        _returned[func] = next(
            (
                (i, arg.name)
                for r in func._schema.returns
                if r.alias_info is not None and r.alias_info.is_write
                for i, arg in enumerate(func._schema.arguments)
                if arg.alias_info is not None and arg.alias_info.before_set & r.alias_info.before_set
            ),
            None,
        )
    return _returned[func]


def returned_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument that an op writes to and returns, or None."""
    at = place_returned(func)
    return None if at is None else args[at[0]] if at[0] < len(args) else kwargs.get(at[1])


def _each_returned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """For each of several results the argument that it is, or None, by the schema."""
    given: dict[str, Any] = {}
    for i, arg in enumerate(func._schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(arg.name)
            given |= dict.fromkeys(arg.alias_info.before_set, value)
    named = [r.alias_info.before_set if r.alias_info is not None else () for r in func._schema.returns]
    return [next((given[n] for n in names if n in given), None) for names in named]


def write_back(t: DTensor, whole: Tensor) -> None:
    """Bring what the op wrote to the whole back into the blocks."""
    if t._local_tensor is whole:
        return
    if tuple(whole.shape) != tuple(t.shape):
        raise LayoutError(
            f"an in-place op changed {t._spec} to shape {tuple(whole.shape)}.",
            why="blocks cannot follow a change of shape in place",
            fix="use the op that returns a new tensor",
        )
    spec = t._spec.with_layout(Layout.replicated(t.shape, t.layout.axes))
    map_ranks(
        aten.copy_.default, t._local_tensor, redistributed(DTensor(whole, spec), t.layout)._local_tensor
    )


def _wrap(result: Any, spec: Spec) -> Any:
    if isinstance(result, Tensor):
        alike = replicated_like(result, spec.mesh)
        # conjugated by a flag, which a DTensor has not
        if result.dtype.is_complex and alike.stride is not None:
            result = map_ranks(torch.resolve_conj, result)
        return made(result, alike)
    if isinstance(result, list | tuple):
        return type(result)(_wrap(r, spec) for r in result)
    return result


def replicated_like(whole: Tensor, mesh: DeviceMesh) -> Spec:
    """The spec of a tensor that every rank of a mesh holds like this one."""
    layout = Layout.replicated(whole.shape, axes_of(mesh))
    return Spec(mesh, layout, whole.dtype, whole.shape, stride_of(whole))


_said: set[Any] = set()


def _say_once(func: Any, specs: Sequence[Spec], plans: Sequence[Plan]) -> None:
    key = (func, tuple(specs))
    if key in _said:
        return
    if len(_said) < 10_000:
        _said.add(key)
    sent = sum(plan.bytes for plan in plans)
    if sent:
        shown = ", ".join(map(str, specs))
        _log.warning("%s ran on the whole of %s: gathering it sent %s bytes", func, shown, f"{sent:,}")
