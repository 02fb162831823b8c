"""What capture raises."""

from __future__ import annotations

__all__ = ["CaptureError"]


class CaptureError(RuntimeError):
    """A step cannot be captured; the message says why and what to do."""

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(f"{what}\n  why: {why}\n  fix: {fix}")
        self.reason = why
