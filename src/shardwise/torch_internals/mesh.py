"""Interim."""

from typing import Any


def root_mesh(mesh: Any) -> Any:
    return mesh._get_root_mesh()
