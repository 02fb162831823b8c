"""The names of torch's context parallelism. A DTensor whose sequence dim is split needs none of it: attention exchanges what
it reads. The functions here are for plain tensors, and refuse.
"""

from __future__ import annotations

from typing import Any, NoReturn

from shardwise._absent import absent

__all__ = ["context_parallel", "context_parallel_unshard", "flex_cp_allgather", "set_rotate_method"]


_WHY = "It changes attention on plain tensors; here attention runs on DTensors in any layout."
_FIX = (
    "q, k, v = (distribute_tensor(t, mesh, [Shard(2)]) for t in (q, k, v)), then\n"
    "       F.scaled_dot_product_attention(q, k, v, is_causal=True)"
)


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(f"{name} is not supported.\n  why: {_WHY}\n  fix: {_FIX}")


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


__getattr__ = absent(
    "experimental._context_parallel._attention",
    "_AllGatherRotater _AllToAllRotater _CausalBehavior _ContextParallel _HeadTailLoadBalancer _LoadBalancer "
    "_PTRRLoadBalancer _PerDocumentHeadTailLoadBalancer _RotateMethod _SDPAMerger _context_parallel_buffers _cp_options "
    "_create_cp_block_mask _disable_context_parallel_dispatcher _is_causal_behavior _templated_ring_attention "
    "create_cp_block_mask",
    why=_WHY,
    fix=_FIX,
)
