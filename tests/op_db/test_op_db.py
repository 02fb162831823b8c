"""A sample of each op of torch's op_db in random layouts, with gradients; `make sweep` runs all samples.

Each op has one sample that is always the same, in float32 if it supports that. A third of the ops, other ones every week, have
a second one in another dtype. A failure prints the command that repeats it.
"""

import datetime
import random

import pytest
import torch
from tests.op_db.random_layouts import distribute_randomly
from tests.op_db.sweep import DTYPES, DTYPES_OF, sweep_op

import shardwise as sw

WEEK = "{}-W{:02}".format(*datetime.date.today().isocalendar()[:2])


def _check(name, dtype, seed):
    tally = sweep_op(name, dtype, 1, seed, find_splits=False)
    for kind, number, why in tally.whys:
        command = f"python -m benchmarks.sweep --only ={name} --dtype {dtype} --number {number} --seed {seed}"
        assert kind in ("rounded", "skipped"), f"{kind}: {why}\nrepeat it with {command}"
    assert tally.compared == 1, f"no sample of {name} in {dtype} runs on one device, so nothing was compared"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DTYPES_OF)
def test_results_and_gradients_equal_the_dense_ones(name, caplog):
    caplog.set_level("ERROR", logger="shardwise")
    _check(name, DTYPES_OF[name][0], "always")
    draw = random.Random(f"{WEEK} {name}")
    if draw.randrange(3) == 0:
        _check(name, draw.choice(DTYPES_OF[name]), WEEK)


@pytest.mark.parametrize("dtype", DTYPES)
def test_terms_of_a_pending_reduction_are_exact(dtype):
    rng = torch.Generator().manual_seed(0)
    values = torch.randint(0, 2**31, (5, 7), generator=rng)
    kind = getattr(torch, dtype)
    t = (values.double() / 2**31 * 18 - 9).to(kind) if kind.is_floating_point else values.to(kind)
    pending = set()
    for mesh_shape in ((2,), (3,), (2, 2)):
        with sw.simulate(4 if len(mesh_shape) > 1 else mesh_shape[0]):
            mesh = sw.init_device_mesh("cpu", mesh_shape)
            for seed in range(40):
                x = distribute_randomly(t, mesh, random.Random(seed))
                pending |= {op for _, op in x.sharding.partial}
                assert all(torch.equal(r, t) for r in x.full_tensor().ranks)
    assert pending >= ({"sum"} if dtype != "bool" else {"max"})
