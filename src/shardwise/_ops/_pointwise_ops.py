"""Where torch keeps the rules of pointwise ops."""

__all__ = ["register_inductor_prims"]


def register_inductor_prims() -> None:
    """Do nothing: ops of inductor are pointwise by their schemas, here as elsewhere."""
