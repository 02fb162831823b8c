"""Elastic runs: when processes die, the others go on from the blocks that they hold in memory."""

from shardwise.recovery.elastic import elastic
from shardwise.recovery.errors import ElasticError, LeftBehindError, StateLostError
from shardwise.recovery.run import ElasticRun

__all__ = ["ElasticError", "ElasticRun", "LeftBehindError", "StateLostError", "elastic"]
