"""PerRank: one tensor per rank of a simulation; torch functions apply to each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from shardwise.comm.shared_writes import run_with_shared_writes, shared_writes, watch_shared_tensors
from shardwise.torch_internals.collectives import collective_name
from shardwise.torch_internals.patches import is_wrapped_by_transform
from shardwise.torch_internals.subclass import make_wrapper, without_torch_functions

__all__ = [
    "CollectiveHandler",
    "PerRank",
    "RankHandles",
    "check_no_shared_leaves",
    "first_rank",
    "handle_collectives",
    "map_ranks",
    "on_all_ranks",
    "spread",
]

CollectiveHandler = Callable[[str, Sequence[Any], Mapping[str, Any]], Any]
"""Runs a collective on the blocks of all ranks, given its name (see `collective_name`) and its arguments."""


def _no_handler(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    raise RuntimeError(f"{name} of PerRank tensors: shardwise.comm.simulated_collectives is not loaded")


_handle_collective: CollectiveHandler = _no_handler


def handle_collectives(handler: CollectiveHandler) -> None:
    """Set the function that runs collectives of PerRank tensors, which cannot run rank by rank."""
    global _handle_collective
    _handle_collective = handler


class PerRank(torch.Tensor):
    """A tensor for each rank of a simulated world.

    Torch functions are applied rank by rank; a plain tensor among the arguments counts as replicated. Each rank's
    tensor has its own autograd graph, as on real processes. A result that is not a tensor must be the same on all
    ranks, since one program runs for all of them.

    >>> x = PerRank({0: torch.zeros(2), 1: torch.ones(2)})
    >>> (x + 1).ranks
    (tensor([1., 1.]), tensor([2., 2.]))
    >>> x.shape
    torch.Size([2])
    """

    _blocks: dict[int, Tensor]
    _hooked: PerRank | None = None
    _hooks: Any = None
    _joined: Tensor | None = None  # as one tensor of torch's LocalTensorMode

    @staticmethod
    def __new__(cls, blocks: Mapping[int, Tensor]) -> PerRank:
        first = _check_first(blocks)
        # The metadata of the wrapper is that of the first rank; only code that bypasses torch functions reads it.
        # Sparse tensors have no strides, and torch asks for their layout by an op.
        sparse = first.layout is not torch.strided
        strides = None if sparse else first.stride()
        self = make_wrapper(cls, first.shape, strides, first.dtype, first.device, first.layout, sparse)
        self._blocks = dict(blocks)
        return self

    @property
    def ranks(self) -> tuple[Tensor, ...]:
        """The blocks of all ranks, in the order in which they were given."""
        return tuple(self._blocks.values())

    @property
    def tracked(self) -> PerRank:
        """The blocks whose gradients pass through the hooks of this tensor, where autograd is on."""
        return self if self._hooked is None or not torch.is_grad_enabled() else self._hooked

    def wait(self) -> PerRank:
        """The tensor itself: on real processes functional collectives return tensors to wait for."""
        return self

    def of_rank(self, rank: int) -> Tensor:
        """The block of one rank."""
        return self._blocks[rank]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        lines = [f"  {r}: {' '.join(repr(t).split())}" for r, t in self._blocks.items()]
        return "PerRank(\n" + "\n".join(lines) + "\n)"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        on_all_ranks = _ON_ALL_RANKS.get(func)
        if on_all_ranks is not None:
            return on_all_ranks(*args, **kwargs)
        collective = collective_name(func)
        if collective is not None:
            return _handle_collective(collective, args, kwargs)
        if torch.is_grad_enabled():
            check_no_shared_leaves(func, [*args, *kwargs.values()])
        if _beside_dtensors([*args, *kwargs.values()]) and not torch.is_grad_enabled():
            with without_torch_functions():  # as beside a plain tensor on real processes
                return func(*args, **kwargs)
        if func in _ATTRIBUTES:
            self, *rest = args
            return join(
                {r: func(b, *(at_rank(a, r) for a in rest)) for r, b in self._blocks.items()}, name_of(func)
            )
        return _run_program(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        collective = collective_name(func)
        if collective is not None:
            return _handle_collective(collective, args, kwargs or {})
        if _beside_dtensors([*args, *(kwargs or {}).values()]):
            return NotImplemented
        if torch.is_grad_enabled() and any(isinstance(a, PerRank) and _any_requires_grad(a) for a in args):
            raise RuntimeError(
                f"{func} got a PerRank tensor that requires grad, from code that bypasses torch functions.\n"
                "  why: Each rank has its own autograd graph, which a torch.func transform or C++ code does not see.\n"
                "  fix: Call it for each rank: shardwise.per_rank(lambda rank, x: torch.func.vmap(f)(x), x)"
            )
        return _run_program(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return PerRank, (self._blocks,)

    def __deepcopy__(self, memo: dict[int, Any]) -> PerRank:
        return PerRank({r: t.__deepcopy__(memo) for r, t in self._blocks.items()})


def _beside_dtensors(values: Sequence[Any]) -> bool:
    """Whether there are DTensors among arguments."""
    return any(
        _beside_dtensors(v) if isinstance(v, list | tuple) else hasattr(v, "device_mesh") for v in values
    )


def _any_requires_grad(x: PerRank) -> bool:
    return any(b.requires_grad for b in x._blocks.values())


def _check_first(blocks: Mapping[int, Tensor]) -> Tensor:
    if not blocks:
        raise ValueError(
            "PerRank got no blocks.\n"
            "  why: Its shape and dtype are those of the first block.\n"
            "  fix: PerRank({0: torch.zeros(2)}), with one tensor per rank"
        )
    first = next(iter(blocks.values()))
    if isinstance(first, PerRank) or hasattr(first, "device_mesh"):
        raise TypeError(
            f"PerRank got a {type(first).__name__} as the block of a rank.\n"
            "  why: A block is a plain tensor; a PerRank or DTensor spans all ranks.\n"
            "  fix: Create it outside of per_rank and pass it in; the function gets the rank's own block."
        )
    return first


def spread(tensor: Tensor, ranks: Sequence[int]) -> PerRank:
    """The same value on each rank, each in its own memory as on real processes; a tensor of each rank as it is."""
    if isinstance(tensor, PerRank):
        return tensor
    return PerRank({r: tensor if i == 0 else tensor.clone() for i, r in enumerate(ranks)})


def first_rank(tensor: Tensor) -> Tensor:
    """The block of the first simulated rank; a plain tensor as it is."""
    return next(iter(tensor._blocks.values())) if isinstance(tensor, PerRank) else tensor


def map_ranks(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `fn` once per rank with that rank's blocks, and join the results.

    >>> map_ranks(torch.add, PerRank({0: torch.tensor(1), 1: torch.tensor(2)}), 10).ranks
    (tensor(11), tensor(12))
    """
    ranks = ranks_in([*args, *kwargs.values()])
    if ranks is None:
        return fn(*args, **kwargs)
    results = {
        r: fn(*(at_rank(a, r) for a in args), **{k: at_rank(v, r) for k, v in kwargs.items()}) for r in ranks
    }  # fmt: skip
    return join(results, name_of(fn))


def _run_program(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A call of the program: `map_ranks`, which also takes care of plain tensors that are written to."""
    name, ranks = name_of(func), ranks_in([*args, *kwargs.values()])
    written = shared_writes(func, name, args, kwargs)
    if not written or ranks is None:
        with watch_shared_tensors(name, args, kwargs):
            return map_ranks(func, *args, **kwargs)
    results = run_with_shared_writes(func, at_rank, ranks, name, written, args, kwargs)
    first = results[ranks[0]]
    is_same = all(r is first for r in results.values())
    return first if is_same else join(results, name)


def name_of(fn: Callable[..., Any]) -> str:
    """The name of a function in an error message; for a getter, that of its attribute."""
    name = getattr(fn, "__name__", str(fn))
    return getattr(getattr(fn, "__self__", None), "__name__", name) if name == "__get__" else name


def ranks_in(values: Sequence[Any]) -> tuple[int, ...] | None:
    """The ranks of the PerRank tensors among some values; None if there are none."""
    found: tuple[int, ...] | None = None
    for v in values:
        if isinstance(v, PerRank):
            here: tuple[int, ...] | None = tuple(v._blocks)
        elif isinstance(v, list | tuple):
            here = ranks_in(v)
        elif isinstance(v, dict):
            here = ranks_in(list(v.values()))
        else:
            continue
        if here is not None and found is not None and here != found:
            raise RuntimeError(
                f"PerRank arguments have different ranks: {found} and {here}.\n"
                "  why: A function is applied rank by rank, so all arguments need a block for each rank.\n"
                "  fix: Redistribute both to one mesh first."
            )
        found = here if found is None else found
    return found


def at_rank(value: Any, rank: int) -> Any:
    """A value with each PerRank tensor in it replaced by the block of one rank."""
    if isinstance(value, PerRank):
        return value.tracked._blocks[rank]
    if isinstance(value, list | tuple):
        return _sequence_like(value, [at_rank(v, rank) for v in value])
    if isinstance(value, dict):
        return {k: at_rank(v, rank) for k, v in value.items()}
    return value


def _sequence_like(value: Any, inner: list[Any]) -> Any:
    """A sequence of the same class, so that `x.max(0).values` and named tuples keep their names."""
    return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)


def join(results: Mapping[int, Any], what: str) -> Any:
    """Join the results of all ranks: tensors as PerRank, other values if they are equal on all ranks."""
    first, *others = results.values()
    if isinstance(first, Tensor) and all(isinstance(v, Tensor) for v in others):
        if hasattr(first, "device_mesh"):
            raise TypeError(
                f"{what} returned a DTensor for each rank of a simulation.\n"
                "  why: It got tensors of each rank (PerRank), perhaps beside DTensors, which span all ranks.\n"
                "  fix: Pass DTensors only, DTensor.from_local(x, mesh, [Replicate()]) of a tensor of each rank, or run on real\n"
                "       processes with shardwise.launch. A function for per_rank takes DTensors from outside."
            )
        return PerRank(results)
    if isinstance(first, list | tuple) and not isinstance(first, torch.Size) and _holds_tensor(first):
        if all(isinstance(v, type(first)) and len(v) == len(first) for v in others):
            inner = [join({r: v[i] for r, v in results.items()}, what) for i in range(len(first))]
            return _sequence_like(first, inner)
    elif isinstance(first, dict) and _holds_tensor(list(first.values())):
        if all(isinstance(v, dict) and v.keys() == first.keys() for v in others):
            return {k: join({r: v[k] for r, v in results.items()}, what) for k in first}
    elif isinstance(first, RemovableHandle):
        return RankHandles(results)
    elif not isinstance(first, Tensor) and all(_are_equal(v, first) for v in others):
        return first
    shown = ", ".join(f"rank {r}: {_shortened(v)}" for r, v in list(results.items())[:4])
    raise RuntimeError(
        f"{what} differs between the simulated ranks ({shown}{', …' if len(results) > 4 else ''}).\n"
        "  why: One program runs for all ranks, so a value that is not a tensor must be equal on all of them.\n"
        "  fix: Read x.ranks, or compute a tensor with shardwise.per_rank(lambda rank, x: …, x)"
    )


def _shortened(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 120 else text[:120] + "…"


class RankHandles:
    """The handles of a hook that is registered on each rank."""

    def __init__(self, handles: Mapping[int, RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()


def _holds_tensor(values: Sequence[Any]) -> bool:
    return any(isinstance(v, Tensor) or (isinstance(v, list | tuple) and _holds_tensor(v)) for v in values)


def _are_equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    if getattr(a, "shape", None) != getattr(b, "shape", None):
        return False
    same = (a == b) | ((a != a) & (b != b))  # NaN counts as equal to NaN
    return bool(same.all() if hasattr(same, "all") else same)  # arrays compare elementwise


def check_no_shared_leaves(func: Callable[..., Any], values: Sequence[Any]) -> None:
    """Raise if a plain tensor requires grad: it would accumulate the gradients of all ranks."""
    for v in values:
        if isinstance(v, list | tuple):
            check_no_shared_leaves(func, v)
        elif is_wrapped_by_transform(v):
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} got a PerRank tensor inside a torch.func transform.\n"
                "  why: Each rank has its own autograd graph, and a transform sees one tensor.\n"
                "  fix: Call it for each rank: shardwise.per_rank(lambda rank, x: torch.func.grad(f)(x), x)"
            )
        elif type(v) in (Tensor, torch.nn.Parameter) and v.requires_grad:
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} got a plain tensor that requires grad beside a PerRank one.\n"
                "  why: On real processes each rank has its own copy and its own gradient; this is one tensor.\n"
                "  fix: w = shardwise.per_rank(lambda rank: w.detach().clone().requires_grad_())"
            )


def on_all_ranks(func: Any, run: Callable[..., Any]) -> None:
    """Have a torch function of PerRank tensors call `run`, which gets all ranks at once."""
    _ON_ALL_RANKS[func] = run


_ATTRIBUTES: frozenset[Any] = frozenset(
    accessor
    for name in ("is_leaf", "requires_grad", "grad", "data", "retains_grad", "_version", "_backward_hooks")
    for accessor in (getattr(torch.Tensor, name).__get__, getattr(torch.Tensor, name).__set__)
) | {torch.Tensor.requires_grad_, torch.Tensor.retain_grad, torch.Tensor.detach_}  # fmt: skip
"""What belongs to a tensor itself rather than to the value that hooks see."""

_ON_ALL_RANKS: dict[Any, Callable[..., Any]] = {}
