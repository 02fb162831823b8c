"""Where torch keeps the state of random ops. Here each mesh has a stream of its own, on every device type."""

from torch.distributed.device_mesh import DeviceMesh

from shardwise.tensor.seeding import manual_seed

__all__ = ["is_rng_supported_mesh", "manual_seed"]


def is_rng_supported_mesh(device_mesh: DeviceMesh) -> bool:
    """Whether random ops on the mesh give the numbers of one device: always."""
    return True
