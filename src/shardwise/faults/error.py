"""The error that a rank raises because of another rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["Fault", "PeerError"]


@dataclass(frozen=True)
class Fault:
    """What went wrong in a world, as one of its ranks found and told all others.

    Attributes:
        kind: "raised", "died", "ended", "diverged", "timeout", or "lost" for a connection that broke for no known reason.
        ranks: the ranks that caused it, in order.
        text: the message, the same on all ranks.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str

    def encode(self) -> bytes:
        """The fault as JSON.

        >>> Fault.decode(Fault("died", (2,), "rank 2 died").encode())
        Fault(kind='died', ranks=(2,), text='rank 2 died')
        """
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Fault:
        """The fault that `encode` encoded."""
        value = json.loads(data)
        return cls(value["kind"], tuple(value["ranks"]), value["text"])


class PeerError(RuntimeError):
    """Another rank failed, died, stopped or diverged, so the collectives of this rank cannot complete.

    Every rank raises it with the same text, except a rank that raised an error of its own. The process groups are broken
    afterwards: a program that goes on needs new ones, `destroy_process_group` and `init_process_group`.

    Attributes:
        fault: what went wrong: its `kind`, the `ranks` that caused it and the `text`.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.text)
        self.fault = fault

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.fault,)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that caused it."""
        return self.fault.ranks

    @property
    def kind(self) -> str:
        """What happened: "raised", "died", "ended", "diverged", "timeout" or "lost"."""
        return self.fault.kind
