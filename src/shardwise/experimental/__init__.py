"""The path of torch's experimental names; they come here as they are delivered."""

__all__: list[str] = []
