"""Where torch keeps several blocks of one rank as one tensor; here layouts have that, and there is no such class."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_shards_wrapper",
    "LocalShardsWrapper",
    why="A block is one tensor, whatever runs of the full tensor it holds.",
    fix="DTensor.from_local(block, mesh, placements)",
)
