"""The functions that create DTensors, map functions over their blocks, and register rules."""

__all__: list[str] = []
