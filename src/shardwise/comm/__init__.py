"""Communication: running steps over process groups or over all ranks in one process, and counting it."""

from shardwise.comm.async_block import Pending
from shardwise.comm.codec import check_reducible
from shardwise.comm.launch import LaunchError, launch
from shardwise.comm.ledger import Sent, counting
from shardwise.comm.mesh import (
    Coord,
    PerMesh,
    axes_of,
    coord_of,
    current_mesh,
    lifted,
    members_of,
    ranks_of,
    siblings_of,
)
from shardwise.comm.per_rank import PerRank, first_rank, map_ranks, spread
from shardwise.comm.rows import exchange_rows
from shardwise.comm.scatter import block_of
from shardwise.comm.simulate import is_simulated, on_mesh, per_rank, simulate
from shardwise.comm.sparse_parts import cut_sparse, detached, is_sparse, parts_of

__all__ = [
    "Coord",
    "LaunchError",
    "Pending",
    "PerMesh",
    "PerRank",
    "Sent",
    "axes_of",
    "block_of",
    "check_reducible",
    "coord_of",
    "counting",
    "current_mesh",
    "cut_sparse",
    "detached",
    "exchange_rows",
    "first_rank",
    "is_simulated",
    "is_sparse",
    "launch",
    "lifted",
    "map_ranks",
    "members_of",
    "on_mesh",
    "parts_of",
    "per_rank",
    "ranks_of",
    "siblings_of",
    "simulate",
    "spread",
]
