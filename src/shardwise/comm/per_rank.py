"""PerRank: one tensor per rank, all in this process; what is done to it is done to each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

__all__ = ["PerRank", "map_ranks", "spread"]

_T = TypeVar("_T")


class PerRank(torch.Tensor):
    """A tensor for each rank of a simulated world.

    Torch functions map over the ranks; a plain tensor beside it counts as the same on every rank. Each rank's
    tensor has its own autograd graph, as on real processes. A result that is not a tensor must be the same on
    all ranks, for there is no other way to hand it to the one program that runs.

    >>> x = PerRank({0: torch.zeros(2), 1: torch.ones(2)})
    >>> (x + 1).ranks
    (tensor([1., 1.]), tensor([2., 2.]))
    >>> x.shape
    torch.Size([2])
    """

    _blocks: dict[int, Tensor]

    @staticmethod
    def __new__(cls, blocks: Mapping[int, Tensor]) -> PerRank:
        first = _first(blocks)
        # The wrapper's own metadata is the first rank's: only code that bypasses torch functions sees it.
        # Sparse ones have no strides, and which of several kinds they are is asked by an op.
        sparse = first.layout is not torch.strided
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            first.shape,
            strides=None if sparse else first.stride(),
            dtype=first.dtype,
            device=first.device,
            layout=first.layout,
            dispatch_layout=sparse,
        )
        self._blocks = dict(blocks)
        return self

    @property
    def ranks(self) -> tuple[Tensor, ...]:
        """The blocks, in the order of the ranks that hold one."""
        return tuple(self._blocks.values())

    def of_rank(self, rank: int) -> Tensor:
        """The block of one rank of the world."""
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
        joined = _JOINED.get(func)
        if joined is not None:
            return joined(*args, **kwargs)
        sends = _collective_name(func)
        if sends is not None:
            from shardwise.comm.simulated_collectives import (
                collective,  # it works on PerRank, so the two know each other
            )

            return collective(sends, args, dict(kwargs))
        if torch.is_grad_enabled():
            _refuse_shared_leaves(func, [*args, *kwargs.values()])
        return map_ranks(func, *args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        sends = _collective_name(func)
        if sends is not None:
            from shardwise.comm.simulated_collectives import collective

            return collective(sends, args, dict(kwargs or {}))
        return map_ranks(func, *args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return PerRank, (self._blocks,)

    def __deepcopy__(self, memo: dict[int, Any]) -> PerRank:
        return PerRank({r: t.__deepcopy__(memo) for r, t in self._blocks.items()})


def _first(blocks: Mapping[int, Tensor]) -> Tensor:
    if not blocks:
        raise ValueError(
            "a PerRank of no ranks.\n  why: nothing says what its shape and dtype are\n  fix: give a tensor per rank"
        )
    first = next(iter(blocks.values()))
    if isinstance(first, PerRank) or hasattr(first, "device_mesh"):
        raise TypeError(
            f"a PerRank of {type(first).__name__}s.\n"
            "  why: each rank holds a plain tensor, and what lies on all ranks is no one rank's\n"
            "  fix: make it outside of per_rank, and pass it in: the rank sees its own block"
        )
    return first


def _collective_name(func: Callable[..., Any]) -> str | None:
    """The name of a collective, which ranks must not run one by one; None for any other function."""
    name = getattr(func, "_qualified_op_name", None) or getattr(getattr(func, "_schema", None), "name", None)
    if name is not None:
        return str(name) if "c10d" in str(name) else None
    module = getattr(func, "__module__", None) or ""
    return func.__name__ if module.startswith("torch.distributed.distributed_c10d") else None


def spread(tensor: Tensor, ranks: Sequence[int]) -> PerRank:
    """The same value on each rank, in memory of its own as on real processes."""
    return PerRank({r: tensor if i == 0 else tensor.clone() for i, r in enumerate(ranks)})


def map_ranks(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `fn` once per rank with that rank's blocks, and put the results together again.

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


def name_of(fn: Callable[..., Any]) -> str:
    """What to call a function in an error; a getter by its attribute."""
    name = getattr(fn, "__name__", str(fn))
    return getattr(getattr(fn, "__self__", None), "__name__", name) if name == "__get__" else name


def ranks_in(values: Sequence[Any]) -> tuple[int, ...] | None:
    """The ranks that the PerRank tensors among some values live on; None if there are none."""
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
                f"values of different ranks met: {found} and {here}.\n"
                "  why: they live on different sets of simulated ranks\n"
                "  fix: put both on one mesh first"
            )
        found = here if found is None else found
    return found


def at_rank(value: Any, rank: int) -> Any:
    """A value as one rank sees it."""
    if isinstance(value, PerRank):
        return value._blocks[rank]
    if isinstance(value, list | tuple):
        inner = [at_rank(v, rank) for v in value]
        return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
    if isinstance(value, dict):
        return {k: at_rank(v, rank) for k, v in value.items()}
    return value


def join(results: Mapping[int, Any], what: str) -> Any:
    """The results of all ranks as one: tensors per rank, anything else the same on all."""
    first, *others = results.values()
    if isinstance(first, Tensor) and all(isinstance(v, Tensor) for v in others):
        return PerRank(results)
    if isinstance(first, list | tuple) and not isinstance(first, torch.Size) and _holds_tensor(first):
        if all(isinstance(v, type(first)) and len(v) == len(first) for v in others):
            inner = [join({r: v[i] for r, v in results.items()}, what) for i in range(len(first))]
            return inner if isinstance(first, list) else tuple(inner)
    elif isinstance(first, dict) and _holds_tensor(list(first.values())):
        if all(isinstance(v, dict) and v.keys() == first.keys() for v in others):
            return {k: join({r: v[k] for r, v in results.items()}, what) for k in first}
    elif isinstance(first, RemovableHandle):
        return _Handles(results)
    elif not isinstance(first, Tensor) and all(_same(v, first) for v in others):
        return first
    shown = ", ".join(f"rank {r}: {v}" for r, v in list(results.items())[:4])
    raise RuntimeError(
        f"{what} differs between the simulated ranks ({shown}{', …' if len(results) > 4 else ''}).\n"
        "  why: one program runs for all ranks, so a value that is not a tensor must be the same on each\n"
        "  fix: look at x.ranks, or compute it with shardwise.per_rank(lambda rank, x: …, x)"
    )


class _Handles:
    """The handles of a hook that was registered on each rank."""

    def __init__(self, handles: Mapping[int, RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()


def _holds_tensor(values: Sequence[Any]) -> bool:
    return any(isinstance(v, Tensor) or (isinstance(v, list | tuple) and _holds_tensor(v)) for v in values)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if getattr(a, "shape", None) != getattr(b, "shape", None):
        return False
    same = (a == b) | ((a != a) & (b != b))  # NaN is NaN on every rank
    return bool(same.all() if hasattr(same, "all") else same)  # arrays compare by element


def _refuse_shared_leaves(func: Callable[..., Any], values: Sequence[Any]) -> None:
    """A plain tensor that wants a gradient would get the sum of all ranks' instead of each rank's own."""
    for v in values:
        if isinstance(v, list | tuple):
            _refuse_shared_leaves(func, v)
        elif type(v) in (Tensor, torch.nn.Parameter) and v.requires_grad:
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} met a plain tensor that requires grad beside a PerRank one.\n"
                "  why: on real processes each rank has its own copy and its own gradient; here there is one\n"
                "  fix: give each rank its own: shardwise.per_rank(lambda rank: w.detach().clone().requires_grad_())"
            )


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _blocks_of(value: Any) -> list[Any]:
    return list(value.ranks) if isinstance(value, PerRank) else [value]


def _backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    """All ranks go backward together, as they do in a real run."""
    roots = _listed(tensors)
    seeds = _listed(grad_tensors) or [None] * len(roots)
    if kwargs.get("inputs") is not None:
        kwargs["inputs"] = [b for x in _listed(kwargs["inputs"]) for b in _blocks_of(x)]
    torch.autograd.backward(
        [b for root in roots for b in _blocks_of(root)],
        [g for root, seed in zip(roots, seeds, strict=True) for g in _seeds(root, seed)],
        *args,
        **kwargs,
    )


def _seeds(root: Any, seed: Any) -> list[Any]:
    n = len(_blocks_of(root))
    return list(seed.ranks) if isinstance(seed, PerRank) else [seed] * n


def _tensor_backward(
    self: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    _backward(self, gradient, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)


def _grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **kwargs: Any) -> tuple[Any, ...]:
    roots, leaves = _listed(outputs), _listed(inputs)
    seeds = _listed(grad_outputs) or [None] * len(roots)
    flat = torch.autograd.grad(
        [b for root in roots for b in _blocks_of(root)],
        [b for leaf in leaves for b in _blocks_of(leaf)],
        [g for root, seed in zip(roots, seeds, strict=True) for g in _seeds(root, seed)],
        **kwargs,
    )
    out: list[Any] = []
    at = 0
    for leaf in leaves:
        n = len(_blocks_of(leaf))
        part = flat[at : at + n]
        at += n
        out.append(_grads_of(leaf, part) if isinstance(leaf, PerRank) else part[0])
    return tuple(out)


def _grads_of(leaf: PerRank, grads: Sequence[Any]) -> PerRank | None:
    if all(g is None for g in grads):
        return None
    # a rank whose block took no part has gradient zero, as its peers would say
    pairs = zip(leaf._blocks.items(), grads, strict=True)
    return PerRank({r: torch.zeros_like(b) if g is None else g for (r, b), g in pairs})


def _get_grad(self: PerRank) -> PerRank | None:
    return _grads_of(self, [b.grad for b in self.ranks])


_JOINED: dict[Any, Callable[..., Any]] = {
    torch.Tensor.backward: _tensor_backward,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _grad,
    torch.Tensor.grad.__get__: _get_grad,  # type: ignore[union-attr]
}
