"""Communication: running steps over process groups or over all ranks in one process, and counting it."""

from shardwise.comm.async_block import Pending
from shardwise.comm.broadcast_seed import broadcast_seed
from shardwise.comm.codec import bytes_of, check_reducible
from shardwise.comm.launch import LaunchError, launch
from shardwise.comm.ledger import Ledger, Sent, counting
from shardwise.comm.mesh import (
    Coord,
    PerMesh,
    axes_of,
    coord_of,
    current_mesh,
    group_of,
    has_current_mesh,
    members_of,
    peers_of,
    siblings_of,
)
from shardwise.comm.per_rank import PerRank, first_rank, map_ranks, spread
from shardwise.comm.scatter import block_of, scatter
from shardwise.comm.simulate import at_simulation_end, is_simulated, on_mesh, per_rank, simulate
from shardwise.comm.sparse_parts import (
    cut_sparse,
    detached,
    is_sparse,
    parts_of,
    places_in,
    scatter_sparse,
    sparse_of,
)

__all__ = [
    "Coord",
    "LaunchError",
    "Ledger",
    "Pending",
    "PerMesh",
    "PerRank",
    "Sent",
    "at_simulation_end",
    "axes_of",
    "block_of",
    "broadcast_seed",
    "bytes_of",
    "check_reducible",
    "coord_of",
    "counting",
    "current_mesh",
    "cut_sparse",
    "detached",
    "first_rank",
    "group_of",
    "has_current_mesh",
    "is_simulated",
    "is_sparse",
    "launch",
    "map_ranks",
    "members_of",
    "on_mesh",
    "parts_of",
    "peers_of",
    "per_rank",
    "places_in",
    "scatter",
    "scatter_sparse",
    "siblings_of",
    "simulate",
    "sparse_of",
    "spread",
]
