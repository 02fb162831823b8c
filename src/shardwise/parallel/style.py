"""The module of torch's parallel styles; none is implemented yet."""

__all__: list[str] = []
