"""Rules: what each op allows. Ops are known here by name only."""

from shardwise.rules.call import Call, Local, Out, Slot
from shardwise.rules.rule import Place, Row, Rule

__all__ = ["Call", "Local", "Out", "Place", "Row", "Rule", "Slot"]
