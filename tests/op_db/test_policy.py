"""Every op that can communicate is refused by policy(implicit="error"), before it sends; every other op runs.

Each op of op_db runs on drawn layouts: once to count what its calls send, once under the policy.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from tests.op_db.drawn import distributed, swap
from tests.op_db.excluded import FILLED
from tests.op_db.judge import OPS

import shardwise as sw
from shardwise.call.trace import trace_calls
from shardwise.comm import counting

DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
NAMES = sorted(OPS)[:: 1 if DEEP else 4]


def _sample(name: str) -> Any:
    op = OPS[name]
    dtypes = [
        d
        for d in (torch.float32, torch.int64, torch.bool, torch.complex64)
        if d in op.supported_dtypes("cpu")
    ]
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", dtypes[0], requires_grad=False)) if dtypes else []
    return random.Random(name).choice(samples) if samples else None


def _run(name: str, sample: Any, mesh: sw.DeviceMesh) -> None:
    draw = random.Random(f"layouts of {name}")

    def put(t: torch.Tensor) -> Any:
        return distributed(t, mesh, draw, pending=name not in FILLED)

    first, args, kwargs = (swap(part, put) for part in (sample.input, sample.args, sample.kwargs))
    sw.manual_seed(3)
    _run.made = lambda: OPS[name](first, *args, **kwargs)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_an_op_that_communicates_is_refused_and_any_other_runs(name, caplog):
    caplog.set_level("ERROR", logger="shardwise")
    sample = _sample(name)
    if sample is None:
        pytest.skip("op_db has no sample of it in these dtypes")
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        seen = []
        _run(name, sample, mesh)
        try:
            with counting() as allowed, trace_calls(seen.append):
                _run.made()
        except Exception as error:  # the dense op refuses it as well, or it needs what this machine lacks
            pytest.skip(f"{type(error).__name__}: {str(error)[:80]}")
        _run(name, sample, mesh)
        with counting() as refused, sw.policy(implicit="error"):
            if _only_requests(seen) or not allowed.collectives:
                _run.made()
            else:
                with pytest.raises(
                    sw.CommunicationError, match=r"(?s)would communicate .* B implicitly.*why: .*fix: "
                ):
                    _run.made()
                assert refused.collectives == 0


def _only_requests(calls: list[Any]) -> bool:
    """Whether the program asked for all that was sent."""
    return all(call.route == "request" for call in calls if call.communicates or call.route == "request")
