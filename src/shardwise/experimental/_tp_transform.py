"""Where torch keeps tensor parallelism of exported programs."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "experimental._tp_transform",
    "tensor_parallel_transformation",
    why="Layouts are chosen where ops run, not by a pass over an exported graph.",
    fix="shardwise.parallel.parallelize_module(module, mesh, plan), or shardwise.compile for a whole step.",
)
