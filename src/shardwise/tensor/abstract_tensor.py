"""AbstractTensor: a DTensor without data, on which a dry run records what ops would send."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.comm import PerRank
from shardwise.layout import Spec
from shardwise.plan import Plan
from shardwise.tensor.dtensor import DTensor

__all__ = ["AbstractTensor", "Recording", "abstract", "recording"]


class Recording(Protocol):
    """A dry run: the plans that its ops would run so far, and how it evaluates an op."""

    plans: list[Plan]

    def evaluate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


def _current_recording() -> Recording:
    current = recording.get()
    if current is None:
        raise RuntimeError("a tensor of a dry run was used after it; please report this bug in shardwise")
    return current


class AbstractTensor(DTensor):
    """A DTensor that has a spec and no data."""

    __slots__ = ()
    _can_change_places = False

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _current_recording().evaluate(func, args, kwargs or {})

    def moved(self, plan: Plan, spec: Spec) -> AbstractTensor:
        """The tensor after a plan, which is recorded."""
        _current_recording().plans.append(plan)
        return abstract(spec, isinstance(self._local_tensor, PerRank))


def abstract(spec: Spec, simulated: bool) -> AbstractTensor:
    """The tensor of a spec, without data.

    Args:
        spec: the spec.
        simulated: whether all ranks of its mesh are simulated in this process.
    """
    block: Tensor = torch.empty(0, dtype=spec.dtype, device="meta")
    return AbstractTensor(PerRank({0: block}) if simulated else block, spec)
