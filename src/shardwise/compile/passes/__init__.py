"""Passes: functions that change a captured graph and keep its results, bit for bit."""

__all__: list[str] = []
