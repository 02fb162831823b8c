"""Rules: which layouts each op allows. Ops are known by name only; this package does not import torch."""

from shardwise.rules.call import Call, Local, Out, Slot
from shardwise.rules.proof import Proof, RuleError, verify
from shardwise.rules.rule import Candidate, Creates, Listed, Listing, Place, Row, Rule

__all__ = [
    "Call",
    "Candidate",
    "Creates",
    "Listed",
    "Listing",
    "Local",
    "Out",
    "Place",
    "Proof",
    "Row",
    "Rule",
    "RuleError",
    "Slot",
    "verify",
]
