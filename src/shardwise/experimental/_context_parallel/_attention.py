"""The names of torch's context parallelism. A DTensor whose sequence dim is split needs none of it: attention exchanges what
it reads. The functions here are for plain tensors, and refuse.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["context_parallel", "context_parallel_unshard", "flex_cp_allgather", "set_rotate_method"]


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name} is not supported.\n"
        "  why: It changes attention on plain tensors; here attention runs on DTensors in any layout.\n"
        "  fix: q, k, v = (distribute_tensor(t, mesh, [Shard(2)]) for t in (q, k, v)), then\n"
        "       F.scaled_dot_product_attention(q, k, v, is_causal=True)"
    )


def context_parallel(
    mesh: Any, *, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None
) -> NoReturn:
    """Refuse; torch's splits buffers in place and replaces attention on plain tensors."""
    _refuse("context_parallel")


def context_parallel_unshard(mesh: Any, buffers: Any, seq_dims: Any, load_balancer: Any = None) -> NoReturn:
    """Refuse; torch's gathers what `context_parallel` split."""
    _refuse("context_parallel_unshard")


def set_rotate_method(rotate_method: str) -> None:
    """Accept torch's choices; the cheapest exchange is chosen by its cost here.

    Raises:
        NotImplementedError: another method.
    """
    if rotate_method not in ("allgather", "alltoall"):
        raise NotImplementedError(
            f"set_rotate_method got {rotate_method!r}.\n"
            "  why: Blocks of keys and values are gathered or exchanged.\n"
            '  fix: set_rotate_method("allgather") or set_rotate_method("alltoall")'
        )


def flex_cp_allgather(k: Any, v: Any, seq_dim: int, pg_name: str) -> NoReturn:
    """Refuse; torch's gathers keys and values for flex attention on plain tensors."""
    _refuse("flex_cp_allgather")


def _context_parallel_shard(mesh: Any, buffers: Any, seq_dims: Any, load_balancer: Any = None) -> NoReturn:
    _refuse("_context_parallel_shard")


def _enable_context_parallel_dispatcher() -> NoReturn:
    _refuse("_enable_context_parallel_dispatcher")


class _HeadTailLoadBalancer:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("_HeadTailLoadBalancer")


class _PTRRLoadBalancer:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("_PTRRLoadBalancer")
