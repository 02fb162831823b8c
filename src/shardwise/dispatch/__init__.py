"""Dispatch: choosing the route of each op on DTensors, caching it, and taking it."""

from shardwise.dispatch.router import dispatch, find_recipe, find_route, on_direct_route

__all__ = ["dispatch", "find_recipe", "find_route", "on_direct_route"]
