"""Where torch keeps the functions of its public package."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.api.distribute import distribute_tensor
from shardwise.api.factories import empty, full, ones, zeros
from shardwise.api.random_factories import rand, randn
from shardwise.layout import Placement
from shardwise.parallel.distribute_module import distribute_module
from shardwise.tensor.dtensor import DTensor

__all__ = [
    "DTensor",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "ones",
    "rand",
    "randn",
    "zeros",
]


def _shard_tensor(
    full_tensor: Tensor, placements: Sequence[Placement], device_mesh: DeviceMesh | None = None
) -> DTensor:
    """Distribute a tensor of which every rank has the whole, without communication."""
    return distribute_tensor(full_tensor.detach(), device_mesh, placements, src_data_rank=None)
