"""A sample of torch's own op_db on drawn layouts, results and gradients; `make sweep` runs all of it.

Each op has one sample that is always the same, in float32 where it has that, and one that changes from week to week,
in a dtype that does too. A failure says how to see it again.
"""

import datetime
import random

import pytest
import torch
from tests.op_db.drawn import distributed
from tests.op_db.judge import DTYPES, OPS, sweep_op

import shardwise as sw

WEEK = "{}-W{:02}".format(*datetime.date.today().isocalendar()[:2])


def _dtypes(name):
    return [d for d in DTYPES if getattr(torch, d) in OPS[name].supported_dtypes("cpu")]


def _of_the_week(name):
    return random.Random(f"{WEEK} {name}").choice(_dtypes(name)), WEEK


def _is_right(name, dtype, seed):
    for kind, number, why in sweep_op(name, dtype, 1, seed, judge=False).whys:
        again = f"python -m benchmarks.sweep --only ={name} --dtype {dtype} --number {number} --seed {seed}"
        assert kind in ("rounded", "skipped"), f"{kind}: {why}\nagain with {again}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in OPS if _dtypes(name)])
def test_an_op_gives_the_dense_result_and_gradient(name, caplog):
    caplog.set_level("ERROR", logger="shardwise")
    _is_right(name, _dtypes(name)[0], "always")
    _is_right(name, *_of_the_week(name))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pending_parts_add_up_exactly(dtype):
    made = torch.Generator().manual_seed(0)
    values = torch.randint(0, 2**31, (5, 7), generator=made)
    kind = getattr(torch, dtype)
    t = (values.double() / 2**31 * 18 - 9).to(kind) if kind.is_floating_point else values.to(kind)
    pending = set()
    for mesh_shape in ((2,), (3,), (2, 2)):
        with sw.simulate(4 if len(mesh_shape) > 1 else mesh_shape[0]):
            mesh = sw.init_device_mesh("cpu", mesh_shape)
            for seed in range(40):
                x = distributed(t, mesh, random.Random(seed))
                pending |= {op for _, op in x.sharding.partial}
                assert all(torch.equal(r, t) for r in x.full_tensor().ranks)
    assert pending >= ({"sum"} if dtype != "bool" else {"max"})
