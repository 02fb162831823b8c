"""SpecDraft: a copy of a spec whose placements can be assigned, as those of torch's specs can."""

from __future__ import annotations

from typing import Any, ClassVar

from shardwise.layout.placement import Placement, Shard, StridedShard
from shardwise.layout.spec import Spec

__all__ = ["SpecDraft"]


class SpecDraft:
    """What `copy.copy(spec)` and `copy.deepcopy(spec)` return: it reads as a spec, and assignments lead to another one.

    Specs are shared by the tensors that have them, so they themselves cannot change. A draft is equal to the spec that it
    reads as, has its hash, and can be the spec of a tensor.

    >>> import copy, torch, shardwise as sw
    >>> with sw.simulate(2):
    ...     x = sw.zeros(4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
    ...     draft = copy.deepcopy(x._spec)
    ...     draft.placements = (sw.Replicate(),)
    ...     print(draft, draft == x._spec, x.placements)
    f32[4] False (Shard(dim=0),)
    """

    __slots__ = ("_spec",)
    _spec: Spec
    is_spec_draft: ClassVar[bool] = True

    def __init__(self, spec: Spec) -> None:
        object.__setattr__(self, "_spec", spec)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec, name)

    def __setattr__(self, name: str, value: Any) -> None:
        spec = self._spec
        if name == Spec.ORDER_FLAG:
            return
        if name not in ("mesh", "placements", "tensor_meta", "shard_order"):
            raise AttributeError(
                f"cannot set {name} of a spec: only mesh, placements, tensor_meta and shard_order"
            )
        placements = [_plain(p) for p in spec.placements] if name == "shard_order" else spec.placements
        fields = {"mesh": spec.mesh, "placements": placements, "tensor_meta": spec.tensor_meta, name: value}
        object.__setattr__(self, "_spec", Spec.of_placements(**fields))

    def __eq__(self, other: object) -> bool:
        return self._spec is (other._spec if isinstance(other, SpecDraft) else other)

    def __hash__(self) -> int:
        return hash(self._spec)

    def __copy__(self) -> SpecDraft:
        return SpecDraft(self._spec)

    def __deepcopy__(self, memo: object) -> SpecDraft:
        return SpecDraft(self._spec)

    def __reduce__(self) -> tuple[object, ...]:
        return self._spec.__reduce__()

    def __str__(self) -> str:
        return str(self._spec)

    def __repr__(self) -> str:
        return repr(self._spec)


def _plain(placement: Placement) -> Placement:
    """A placement without the place of its axis among those that split the same dim."""
    return Shard(placement.dim) if isinstance(placement, Shard | StridedShard) else placement


Spec.draft = staticmethod(SpecDraft)
