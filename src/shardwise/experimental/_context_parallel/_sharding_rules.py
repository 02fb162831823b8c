"""Where torch keeps the rules of attention over split sequences, which it has only while they are registered."""

__all__ = ["register_cp_sharding_rules", "unregister_cp_sharding_rules"]


def register_cp_sharding_rules() -> None:
    """Do nothing: attention over a split sequence is one of our rules."""


def unregister_cp_sharding_rules(clear_the_cache: bool = False) -> None:
    """Do nothing, as `register_cp_sharding_rules`."""
