"""An object per thread that torch hands on to the threads in which a backward pass runs."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["inherited_object", "publish_object"]


def publish_object(key: str, value: Any) -> None:
    """Set this thread's object; backward passes that it starts see it in all their threads."""
    torch._C._stash_obj_in_tls(key, value)


def inherited_object(key: str) -> Any | None:
    """The object of this thread: its own, or that of the thread that started the backward pass it works for.

    >>> publish_object("doctest", 5)
    >>> inherited_object("doctest"), inherited_object("another")
    (5, None)
    """
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None
