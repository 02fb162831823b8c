"""Where torch keeps the state of random ops. Here each mesh has a stream of its own, on every device type."""

from torch.distributed.device_mesh import DeviceMesh

from shardwise._absent import absent
from shardwise.tensor.seeding import manual_seed

__all__ = ["is_rng_supported_mesh", "manual_seed"]

_rng_tracker = None
"""torch's tracker of the device generator; numbers are functions of seed, position and element index, so there is none."""


def is_rng_supported_mesh(device_mesh: DeviceMesh) -> bool:
    """Whether random ops on the mesh give the numbers of one device: always."""
    return True


__getattr__ = absent(
    "_random",
    "_calc_first_shard_size _calc_shard_info _calc_shard_linear_idx OffsetBasedRNGTracker "
    "_PhiloxState _resolve_device _RNGStateTracker",
    why="Random ops do not use the state of the device generator, so there is nothing to track.",
    fix="shardwise.manual_seed(seed), shardwise.get_rng_state() and set_rng_state(state)",
)
