"""Faults: what happens on all ranks when one of them raises, dies, stops, or calls other collectives than the others."""

from shardwise.faults.current import current_session, note_error, watch_world
from shardwise.faults.error import Fault, PeerError
from shardwise.faults.folder import FOLDER_VARIABLE
from shardwise.faults.guard import guard
from shardwise.faults.scope import uninterrupted

__all__ = [
    "FOLDER_VARIABLE",
    "Fault",
    "PeerError",
    "current_session",
    "guard",
    "note_error",
    "uninterrupted",
    "watch_world",
]
