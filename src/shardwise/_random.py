"""Where torch keeps the state of random ops. Here each mesh has a stream of its own, on every device type."""

from torch.distributed.device_mesh import DeviceMesh

from shardwise.tensor.seeding import manual_seed

__all__ = ["OffsetBasedRNGTracker", "is_rng_supported_mesh", "manual_seed"]

_rng_tracker = None
"""torch's tracker of the device generator; numbers are functions of seed, position and element index, so there is none."""


class OffsetBasedRNGTracker:
    """The class of torch's tracker, for programs that ask whether there is one."""

    def __init__(self, device_mesh: DeviceMesh, run_state_sync: bool = True) -> None:
        raise RuntimeError(
            "OffsetBasedRNGTracker was constructed.\n"
            "  why: Random ops do not use the state of the device generator, so there is nothing to track.\n"
            "  fix: shardwise.manual_seed(seed), shardwise.get_rng_state() and set_rng_state(state)"
        )


def is_rng_supported_mesh(device_mesh: DeviceMesh) -> bool:
    """Whether random ops on the mesh give the numbers of one device: always."""
    return True
