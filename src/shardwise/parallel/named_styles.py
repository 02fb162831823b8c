"""The styles that plans name as strings: Hugging Face's names, older ones included."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.parallel.boundary import Inputs, Outputs
from shardwise.parallel.partition import Split

__all__ = ["NAMED_STYLES", "NamedStyle"]


@dataclass(frozen=True, slots=True)
class NamedStyle:
    """What a name in a plan means.

    Args:
        split: the features of the parameters that the axis splits, or None.
        inputs: how activations enter, see `Boundary`.
        outputs: how they leave.
        packed: the number of projections that are packed into the split dim, each of which is split.
    """

    split: Split | None = None
    inputs: Inputs = "keep"
    outputs: Outputs = "keep"
    packed: int = 1


_COLWISE = NamedStyle("out", inputs="gather")
_GATHERED = NamedStyle("out", inputs="gather", outputs="gather")
_ROWWISE = NamedStyle("in", outputs="reduce")
_CUT = NamedStyle("in", inputs="gather", outputs="reduce")
_EXPERTS = NamedStyle(inputs="gather", outputs="reduce")
# Layouts say what these are for: a gradient that is a pending sum is reduced, and routing is over all experts
_REPLICATED = NamedStyle()

NAMED_STYLES: dict[str, NamedStyle] = {
    "colwise": _COLWISE,
    "local_colwise": _COLWISE,
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "rowwise": _ROWWISE,
    "local_rowwise": _ROWWISE,
    "rowwise_split_input": _CUT,
    "rowwise_rep": _CUT,
    "embedding_rowwise": _ROWWISE,
    "embedding_colwise": NamedStyle("out", outputs="gather"),
    "packed_colwise": NamedStyle("out", inputs="gather", packed=2),
    "local_packed_colwise": NamedStyle("out", inputs="gather", packed=2),
    "packed_rowwise": NamedStyle("in", outputs="reduce", packed=2),
    "local_packed_rowwise": NamedStyle("in", outputs="reduce", packed=2),
    "sequence_parallel": NamedStyle(inputs="sequence", outputs="sequence"),
    "grouped_gemm": NamedStyle("experts"),
    "moe_tp_experts": _EXPERTS,
    "ep_dispatch_experts": _EXPERTS,
    "megamoe_experts": _EXPERTS,
    "ep_router": _REPLICATED,
    "megamoe_router": _REPLICATED,
    "moe_identity_expert": _REPLICATED,
    "replicated_with_grad_allreduce": _REPLICATED,
    "mla_kv_a_proj": _REPLICATED,
    "replicate": _REPLICATED,
    "local": _REPLICATED,
    "all_reduce": NamedStyle(outputs="reduce"),
    "gather": NamedStyle(outputs="gather"),
}
"""By name."""
