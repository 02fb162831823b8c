"""The path of torch's parallel styles; they come here as they are delivered."""

__all__: list[str] = []
