"""The data-parallel engine: groups of parameters that move between the layouts they are stored and computed in."""

__all__: list[str] = []
