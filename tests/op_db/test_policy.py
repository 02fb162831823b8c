"""policy(implicit="error") refuses every op that communicates, before it sends anything; every other op runs.

Each op of op_db runs in random layouts: once to count what its calls send, once under the policy.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.op_db.excluded import FILLED
from tests.op_db.random_layouts import distribute_randomly, map_tensors
from tests.op_db.sweep import DTYPES_OF, OPS

import shardwise as sw
from shardwise.call.trace import trace_calls
from shardwise.comm import counting

DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
NAMES = sorted(DTYPES_OF)[:: 1 if DEEP else 4]


def _bind(name: str, sample: Any, put: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
    """A call of an op, with the random stream at its start."""
    first, args, kwargs = (map_tensors(part, put) for part in (sample.input, sample.args, sample.kwargs))
    sw.manual_seed(3)
    return lambda: OPS[name](first, *args, **kwargs)


def _runs(name: str, sample: Any) -> bool:
    """Whether a sample runs on one device."""
    try:
        _bind(name, sample, lambda t: t.detach().clone())()
    except Exception:
        return False
    return True


def _sample(name: str) -> Any:
    torch.manual_seed(0)
    dtype = getattr(torch, DTYPES_OF[name][0])
    samples = list(OPS[name].sample_inputs("cpu", dtype, requires_grad=False))
    return next(s for s in random.Random(name).sample(samples, len(samples)) if _runs(name, s))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_an_op_that_communicates_is_refused_and_any_other_runs(name, caplog):
    caplog.set_level("ERROR", logger="shardwise")
    sample = _sample(name)
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

        def bind() -> Callable[[], Any]:
            draw = random.Random(f"layouts of {name}")
            return _bind(
                name, sample, lambda t: distribute_randomly(t, mesh, draw, pending=name not in FILLED)
            )

        calls, run = [], bind()
        with counting() as allowed, trace_calls(calls.append):
            run()
        run = bind()
        with counting() as refused, sw.policy(implicit="error"):
            if _only_requests(calls) or not allowed.collectives:
                run()
                assert refused.entries == allowed.entries
            else:
                with pytest.raises(
                    sw.CommunicationError,
                    match=r"(?s)Implicit redistribution: .* would communicate .* B\..*why: .*fix: ",
                ):
                    run()
                assert refused.collectives == 0


def _only_requests(calls: list[Any]) -> bool:
    """Whether the program asked for everything that was sent."""
    requests = [call for call in calls if call.route == "request"]
    return bool(requests) and all(call in requests for call in calls if call.communicates)
