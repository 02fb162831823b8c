"""Losses with split batches, classes and elements: dense values and gradients, and nothing is gathered."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from tests.dense import compare, randn

import shardwise as sw

ELEMENTWISE = {
    "mse": lambda x, y, **k: F.mse_loss(x, y, **k),
    "smooth l1": lambda x, y, **k: F.smooth_l1_loss(x, y, beta=0.7, **k),
    "huber": lambda x, y, **k: F.huber_loss(x, y, delta=0.7, **k),
    "l1": lambda x, y, **k: F.l1_loss(x, y, **k),
    "kl": lambda x, y, reduction: torch.kl_div(x, y.exp(), ["none", "mean", "sum"].index(reduction)),
    "poisson": lambda x, y, **k: F.poisson_nll_loss(x, y.exp(), **k),
    "bce": lambda x, y, **k: F.binary_cross_entropy(x.sigmoid(), y.detach().sigmoid(), **k),
    "bce logits": lambda x, y, **k: F.binary_cross_entropy_with_logits(x, y.sigmoid(), **k),
    "soft margin": lambda x, y, **k: F.soft_margin_loss(x, y.detach().sign(), **k),
    "hinge": lambda x, y, **k: F.hinge_embedding_loss(x, y.detach().sign(), **k),
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize(
    "placement", ["0", "1"]
)  # over 4 ranks, 5 rows leave an empty block and 7 a short one
def test_elementwise(name, reduction, placement):
    ledger = compare(
        lambda x, y: ELEMENTWISE[name](x, y, reduction=reduction),
        [randn(5, 7), randn(5, 7, seed=1)],
        [placement, placement],
    )
    assert ledger.bytes == 0


def test_elementwise_with_pending_sums_and_different_layouts():
    for placements in (["P", "0"], ["0", "P"], ["R", "1"], ["P", "P"], ["0", "1"]):
        for reduction in ("none", "mean", "sum"):
            compare(
                lambda x, y, r=reduction: F.mse_loss(x, y, reduction=r),
                [randn(5, 7), randn(5, 7, seed=1)],
                placements,
            )


def test_a_mean_is_over_the_broadcast_shape():
    def loss(x, y):
        return torch.ops.aten.smooth_l1_loss(x, y, 1, 1.0)

    compare(loss, [randn(6, 1), randn(6, 5, seed=1)], ["0", "0"], grad=False)
    compare(loss, [randn(6, 1), randn(6, 5, seed=1)], ["R", "1"], grad=False)
    compare(loss, [randn(0, 4), randn(0, 4)], ["1", "1"], grad=False)  # the mean of nothing is nan


def test_weights_of_binary_cross_entropy():
    weight, pos = randn(7, seed=2).abs(), randn(7, seed=3).abs()

    def loss(x, y, w, p):
        return F.binary_cross_entropy_with_logits(x, y.sigmoid(), w.detach(), pos_weight=p.detach())

    for placements in (
        ["0", "0", "R", "R"],
        ["1", "1", "0", "R"],
        ["1", "1", "0", "0"],
        ["P", "0", "P", "0"],
    ):
        compare(loss, [randn(5, 7), randn(5, 7, seed=1), weight, pos], placements)


TARGET = torch.tensor([0, 3, -100, 6, 2])
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 0.25, 3.0, 1.5, 0.75], dtype=torch.float64)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize(
    "placements", [("0", "0", "R"), ("1", "R", "0"), ("1", "0", "R"), ("P", "0", "R"), ("0", "R", "0")]
)
def test_nll(reduction, weight, placements):
    def loss(x, t, w):
        return F.nll_loss(x, t, None if w is None else w.detach(), reduction=reduction)

    ledger = compare(loss, [randn(5, 7), TARGET, weight], placements)
    if placements == ("1", "R", "0"):
        assert ledger.bytes <= 100  # the total of the weights


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("placements", [("0", "0"), ("1", "R"), ("2", "1"), ("3", "2"), ("1", "2")])
def test_nll_of_images(reduction, placements):
    target = torch.arange(5 * 2 * 6).view(5, 2, 6) % 3
    target[0] = 1  # ignored
    compare(
        lambda x, t: F.nll_loss(x.log_softmax(1), t, ignore_index=1, reduction=reduction),
        [randn(5, 3, 2, 6), target],
        placements,
    )


def test_nll_on_two_mesh_axes_and_without_a_batch():
    for reduction in ("none", "mean", "sum"):
        for placements in (("0 1", "0 R"), ("1 0", "R 0"), ("1 1", "0 R"), ("P 1", "0 0")):
            compare(
                lambda x, t, r=reduction: F.cross_entropy(x, t, reduction=r),
                [randn(5, 7), TARGET],
                placements,
                (2, 2),
            )
        compare(
            lambda x, t, r=reduction: F.nll_loss(x, t, reduction=r), [randn(7), torch.tensor(5)], ["0", "R"]
        )


def test_the_mean_over_ignored_targets_is_nan():
    compare(F.nll_loss, [randn(5, 7), torch.full((5,), -100)], ["0", "0"], grad=False)
    compare(F.nll_loss, [randn(5, 7), torch.full((5,), -100)], ["1", "R"], grad=False)


def test_a_target_out_of_range_is_an_error():
    target = torch.tensor([0, 7, 1, 2, 3])
    with pytest.raises(IndexError):
        F.nll_loss(randn(5, 7), target)
    for bad in (7, -1):
        target[1] = bad
        with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
            _nll_with_split_classes(target)


def _nll_with_split_classes(target):
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,))
        x = sw.distribute_tensor(randn(5, 7), mesh, [sw.Shard(1)])
        F.nll_loss(x, sw.distribute_tensor(target, mesh, [sw.Replicate()]), reduction="sum")


def test_classes_of_a_large_vocabulary_are_not_gathered():
    target = torch.tensor([5, 39_999, 20_000, -100])
    ledger = compare(F.cross_entropy, [randn(4, 40_000), target], ["1", "R"])
    assert ledger.bytes < 4 * 40_000 * 8 / 100


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_margins(reduction):
    target, labels = torch.tensor([0, 3, 1, 6, 2, 2, 5]), torch.tensor([[3, 0, -1, 1], [0, 1, 2, 3]] * 4)

    def multi(x, t, w):
        return F.multi_margin_loss(x, t, p=2, weight=w.detach(), reduction=reduction)

    def multilabel(x, t):
        return F.multilabel_margin_loss(x, t, reduction=reduction)

    for placement in ("0", "P", "1"):
        ledger = compare(multi, [randn(7, 7), target, WEIGHT], [placement, "0", "R"])
        assert placement != "0" or ledger.bytes == 0
        compare(multilabel, [randn(8, 4), labels], [placement, "0"])
        compare(multilabel, [randn(5, 4), labels[:5]], [placement, "0"])  # 5 rows leave an empty block
    compare(lambda x, t: F.multilabel_soft_margin_loss(x, t.sigmoid(), reduction=reduction),
           [randn(5, 4), randn(5, 4, seed=1)], ["0", "0"])  # fmt: skip


def test_pairs_and_triplets():
    a, b, c = randn(5, 6), randn(5, 6, seed=1), randn(5, 6, seed=2)
    sign = torch.tensor([1.0, -1, 1, 1, -1], dtype=torch.float64)
    for placement in ("0", "1"):
        compare(F.triplet_margin_loss, [a, b, c], [placement] * 3)
        compare(
            lambda x, y, s: F.cosine_embedding_loss(x, y, s.detach()),
            [a, b, sign],
            [placement, placement, "R"],
        )
    compare(lambda x, y, s: F.margin_ranking_loss(x[:, 0], y[:, 0], s.detach()), [a, b, sign], ["0"] * 3)
