"""A sample of torch's own op_db on drawn layouts, forward and backward; `make sweep` runs more."""

import random

import pytest
import torch
from benchmarks.sweep import RANDOM, check, check_grad
from torch.testing._internal.common_methods_invocations import op_db

import shardwise as sw

# The dense gradient itself is not a number there: autograd takes another formula for subclasses, which has fewer.
NOT_A_NUMBER = {"masked.prod"}
# C++ code that reads the values of an index tensor, which a DTensor does not have in one place.
READS_VALUES = {"tensor_split"}
OPS = [
    op for op in op_db if torch.float64 in op.supported_dtypes("cpu") and op.name not in RANDOM | READS_VALUES
]
OPS = [op for op in OPS if "sparse" not in op.name]


def _sample(op, draw):
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=False))
    samples = [s for s in samples if not s.kwargs.get("sparse") and not s.kwargs.get("dropout_p")]
    if op.name == "nn.functional.multi_head_attention_forward":
        samples = [s for s in samples if not s.kwargs.get("training", True)]  # else it drops out at random
    return draw.choice(samples) if samples else None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.full_name)
def test_an_op_gives_the_dense_result_and_gradient(op, caplog):
    caplog.set_level("ERROR", logger="shardwise")
    draw = random.Random(op.full_name)
    sample = _sample(op, draw)
    if sample is None:
        return
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert check(op, sample, mesh, draw)[0] in ("right", "skipped"), check(op, sample, mesh, draw)[1]
        if op.supports_autograd and op.full_name not in NOT_A_NUMBER:
            verdict, why = check_grad(op, sample, mesh, draw)
            assert verdict in ("right", "skipped"), why
