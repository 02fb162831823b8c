"""Where torch keeps the functions of its public package."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise._dtensor_spec import DTensorSpec, TensorMeta
from shardwise._reexports import reexports
from shardwise.api.distribute import distribute_tensor
from shardwise.api.factories import empty, full, ones, zeros
from shardwise.api.random_factories import rand, randn
from shardwise.layout import Placement, Replicate
from shardwise.parallel.distribute_module import distribute_module
from shardwise.tensor.dtensor import DTensor

__all__ = [
    "DTensor",
    "DTensorSpec",
    "TensorMeta",
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


def _normalize_placements_for_grad(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The placements of a gradient: a value with a pending reduction has a replicated one."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)


class _FromTorchTensor:
    """`DTensor.from_local`, called as torch's autograd function is."""

    @staticmethod
    def apply(
        input: Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: tuple[int, ...] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """The same as `DTensor.from_local(input, device_mesh, placements, ...)`."""
        return DTensor.from_local(
            input,
            device_mesh,
            placements,
            run_check=run_check,
            shape=shape,
            stride=stride,
            grad_placements=grad_placements,
        )


class _ToTorchTensor:
    """`DTensor.to_local`, called as torch's autograd function is."""

    @staticmethod
    def apply(input: DTensor, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The same as `input.to_local(grad_placements=grad_placements)`."""
        return input.to_local(grad_placements=grad_placements)


__getattr__ = reexports("_api")
