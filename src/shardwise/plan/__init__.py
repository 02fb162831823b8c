"""Plans: what to send, chosen before anything is sent."""

from shardwise.plan.cost import CostModel
from shardwise.plan.exchange import Exchange, Move, plan_exchanges
from shardwise.plan.grouped import GroupedPlan, GroupedStep, Item, plan_redistribute_many
from shardwise.plan.redistribute import plan_redistribute
from shardwise.plan.settings import costs
from shardwise.plan.step import (
    AllGather,
    AllReduce,
    AllToAll,
    Identity,
    Permute,
    Plan,
    ReduceScatter,
    Slice,
    Step,
)
from shardwise.plan.strategy import Choice, choose, choose_view, every_choice

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Choice",
    "CostModel",
    "Exchange",
    "GroupedPlan",
    "GroupedStep",
    "Identity",
    "Item",
    "Move",
    "Permute",
    "Plan",
    "ReduceScatter",
    "Slice",
    "Step",
    "choose",
    "choose_view",
    "costs",
    "every_choice",
    "plan_exchanges",
    "plan_redistribute",
    "plan_redistribute_many",
]
