"""Norms with split batches, channels, groups and rows: dense values, gradients and running statistics."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from tests.dense import compare, randn

import shardwise as sw
from shardwise.call.fallback import run_on_full
from shardwise.comm import counting


@pytest.mark.parametrize("placement", ["0", "1", "2", "P"])
@pytest.mark.parametrize("shape", [(5, 8, 3), (8, 8, 2)])
def test_group_norm(placement, shape):
    weight, bias = randn(8, seed=1), randn(8, seed=2)
    compare(lambda x, w, b: F.group_norm(x, 4, w, b), [randn(*shape), weight, bias], [placement, "R", "0"])
    compare(lambda x: F.group_norm(x, 4), [randn(*shape)], [placement])


def test_splitting_batch_or_groups_needs_no_communication():
    x = randn(8, 8, 3)
    for placement in ("0", "1"):
        assert compare(lambda x: F.group_norm(x, 4), [x], [placement]).bytes == 0


def test_splitting_within_groups_communicates_statistics_only():
    x = randn(2, 4, 100_000)
    ledger = compare(lambda x: F.group_norm(x, 2), [x], ["2"])
    assert ledger.bytes < 1000


@pytest.mark.parametrize("placement", ["0", "1", "2", "P", "R"])
@pytest.mark.parametrize("stats", ["R", "0"])
def test_batch_norm_in_training_updates_running_statistics_with_the_global_batch(placement, stats):
    mean, var = randn(6, seed=3), randn(6, seed=4).abs()
    weight, bias = randn(6, seed=1), randn(6, seed=2)

    def norm(x, w, b, m, v):
        m, v = m.detach().clone(), v.detach().clone()
        y = F.batch_norm(x, m, v, w, b, training=True, momentum=0.3)
        return y, m, v

    compare(norm, [randn(5, 6, 3), weight, bias, mean, var], [placement, "R", "R", stats, stats])


def test_batch_norm_in_training_communicates_statistics_only():
    def norm(x):
        return F.batch_norm(x, None, None, training=True)

    assert compare(norm, [randn(5, 8, 3)], ["1"]).bytes == 0
    assert compare(norm, [randn(8, 3, 20_000)], ["0"]).bytes < 1000
    assert compare(norm, [randn(8, 3, 20_000)], ["2"]).bytes < 1000


@pytest.mark.parametrize("placement", ["0", "1", "2", "P"])
def test_batch_norm_with_given_statistics(placement):
    mean, var = randn(8, seed=3), randn(8, seed=4).abs()
    weight, bias = randn(8, seed=1), randn(8, seed=2)

    def norm(x, w, b, m, v):
        return F.batch_norm(x, m.detach(), v.detach(), w, b, training=False)

    sent = compare(norm, [randn(4, 8, 4), weight, bias, mean, var], [placement] + ["R"] * 4).bytes
    assert placement == "P" or sent == 0
    compare(norm, [randn(5, 8, 4), weight, bias, mean, var], [placement, "R", "0", "0", "R"])


@pytest.mark.parametrize("placement", ["0", "1", "R"])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_data_without_gradient(placement, training):
    def norm(x, w, b, m, v):
        stats = (None, None) if training else (m.detach(), v.detach())
        return F.batch_norm(x.detach(), *stats, w, b, training=training)

    values = [randn(5, 6, 3), *(randn(6, seed=i).abs() for i in range(1, 5))]
    compare(norm, values, [placement, "R", "0", "R", "R"])


def test_running_statistics_in_another_layout_keep_it():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,))
        for data in (sw.Replicate(), sw.Shard(0), sw.Shard(1)):
            for stats in (sw.Replicate(), sw.Shard(0)):
                x, mean, var = (
                    randn(5, 6),
                    torch.zeros(6, dtype=torch.float64),
                    torch.ones(6, dtype=torch.float64),
                )
                tensors = [
                    sw.distribute_tensor(t, mesh, [p]) for t, p in ((x, data), (mean, stats), (var, stats))
                ]
                F.batch_norm(tensors[0], tensors[1], tensors[2], training=True)
                F.batch_norm(x, mean, var, training=True)
                torch.testing.assert_close(tensors[1].full_tensor().ranks[3], mean)
                torch.testing.assert_close(tensors[2].full_tensor().ranks[3], var)
                assert tensors[1].placements == (stats,)


def test_the_fallback_updates_running_statistics_too():
    x, mean, var = randn(5, 6), torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    func, rest = torch.ops.aten.native_batch_norm.default, (True, 0.1, 1e-5)
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,))
        tensors = [sw.distribute_tensor(t, mesh, [sw.Shard(0)]) for t in (x, mean, var)]
        run_on_full(func, (tensors[0], None, None, *tensors[1:], *rest), {})
        func(x, None, None, mean, var, *rest)
        torch.testing.assert_close(tensors[1].full_tensor().ranks[1], mean)
        torch.testing.assert_close(tensors[2].full_tensor().ranks[1], var)


def test_instance_norm_and_channel_shuffle():
    for placement in ("0", "1", "2"):
        compare(lambda x: F.instance_norm(x), [randn(4, 6, 5)], [placement])
        compare(lambda x: F.channel_shuffle(x, 2), [randn(4, 6, 5, 2)], [placement])
    compare(lambda x: F.channel_shuffle(x, 2), [randn(4, 6, 5, 2)], ["P"], grad=False)


@pytest.mark.parametrize("placement", ["0", "1", "2"])
def test_renorm_and_weight_norm(placement):
    for dim in (0, 1, -1):
        compare(lambda x, d=dim: x.renorm(2, d, 1.5), [randn(4, 6, 5)], [placement])
    g = randn(4, 1, 1, seed=1)
    for other in ("0", "R"):
        compare(lambda v, g: torch._weight_norm(v, g, 0), [randn(4, 6, 5), g], [placement, other])

    def fused(v, g):
        return torch.ops.aten._weight_norm_interface(v, g, 0)

    compare(fused, [randn(4, 6, 5), g], [placement, "0"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("placement", ["0", "1"])
def test_statistics_of_16_bit_floats_have_the_stated_dtype(dtype, placement):
    x, w = randn(4, 8, dtype=dtype), randn(8, seed=1, dtype=dtype)
    for weight in (None, w, w.float()):
        compare(
            lambda x, w: torch.ops.aten.native_layer_norm(x, [8], w, None, 1e-5),
            [x, weight], [placement, "R"], grad=False, tol=2e-2,
        )  # fmt: skip
        compare(
            lambda x, w: torch.ops.aten.native_group_norm(x, w, None, 4, 8, 1, 4, 1e-5),
            [x, weight], [placement, "R"], grad=False, tol=2e-2,
        )  # fmt: skip
        compare(
            lambda x, w: torch.ops.aten.native_batch_norm(x, w, None, None, None, True, 0.1, 1e-5),
            [x, weight], [placement, "R"], grad=False, tol=2e-2,
        )  # fmt: skip


@pytest.mark.parametrize("placement", ["0", "1"])
def test_statistics_of_16_bit_floats_have_the_dtype_of_the_bias_or_of_running_statistics(placement):
    x, b = randn(4, 8, dtype=torch.bfloat16), randn(8, seed=1, dtype=torch.float32)

    def batch(x, m, v):
        return torch.ops.aten._native_batch_norm_legit(x, None, None, m.clone(), v.clone(), True, 0.1, 1e-5)

    compare(
        lambda x, b: torch.ops.aten.native_layer_norm(x, [8], None, b, 1e-5),
        [x, b],
        [placement, "R"],
        grad=False,
        tol=2e-2,
    )
    compare(
        lambda x, b: torch.ops.aten.native_group_norm(x, None, b, 4, 8, 1, 4, 1e-5),
        [x, b],
        [placement, "R"],
        grad=False,
        tol=2e-2,
    )
    compare(batch, [x, b, b.abs()], [placement, "R", "R"], grad=False, tol=2e-2)


def test_rms_norm():
    for placement in ("0", "1", "P"):
        compare(lambda x, w: F.rms_norm(x, (6,), w), [randn(5, 6), randn(6, seed=1)], [placement, "R"])


def test_layer_norm_does_not_gather_in_inference_mode():
    with sw.simulate(4), torch.inference_mode():
        mesh = sw.init_device_mesh("cpu", (4,))
        x = sw.distribute_tensor(randn(8, 4), mesh, [sw.Shard(0)])
        with counting() as ledger:
            y = F.layer_norm(x, (4,))
        assert (ledger.bytes, str(y.sharding)) == (0, str(x.sharding))
