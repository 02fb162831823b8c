"""What `torch.load(weights_only=True)` needs to know of torch's own private classes."""

from __future__ import annotations

from torch.distributed import _mesh_layout

__all__ = ["mesh_layout_classes"]


def mesh_layout_classes() -> list[type]:
    """The classes that a pickled `DeviceMesh` consists of, beside itself.

    >>> all(isinstance(c, type) for c in mesh_layout_classes())
    True
    """
    return [
        c for name in ("_FlatLayout", "_MeshLayout") if (c := getattr(_mesh_layout, name, None)) is not None
    ]
