"""The rows of torch's ops, one module per family of ops; `rules.table` joins their `ROWS` into one table."""

__all__: list[str] = []
