"""What capture raises."""

from __future__ import annotations

__all__ = ["CaptureError", "StateCreatedError"]


class CaptureError(RuntimeError):
    """A step cannot be captured; the message says why and what to do."""

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(f"{what}\n  why: {why}\n  fix: {fix}")
        self.reason = why


class StateCreatedError(CaptureError):
    """The step creates state of the optimizer, which the next one will have."""

    def __init__(self) -> None:
        super().__init__(
            "The step creates state of the optimizer.",
            why="the first step creates the state of the optimizer",
            fix="Take the first step of an optimizer, and of parameters that are added to it, eagerly.",
        )
