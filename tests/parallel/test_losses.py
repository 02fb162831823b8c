"""Cross entropy over split classes, plain and fused with the projection, against one device."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import placements

import shardwise as sw
from shardwise.comm import axes_of
from shardwise.debug import CommDebugMode
from shardwise.layout import Axes
from shardwise.parallel import linear_cross_entropy, loss_parallel

OPTIONS = st.fixed_dictionaries(
    {
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "label_smoothing": st.sampled_from([0.0, 0.2]),
        "weighted": st.booleans(),
        "probabilities": st.booleans(),
    }
)


def full(t):
    return t.full_tensor().ranks[0]


def values(rows: tuple[int, ...], classes: int, probabilities: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and targets, of which some are ignored: all of the first rows, so that blocks have unequal counts."""
    generator = torch.Generator().manual_seed(sum(rows) + classes)
    logits = torch.randn(*rows, classes, generator=generator, dtype=torch.float64)
    if probabilities:
        return logits, torch.randn(*rows, classes, generator=generator, dtype=torch.float64).softmax(-1)
    target = torch.randint(0, classes, rows, generator=generator)
    target.view(-1)[: target.numel() // 3] = -100
    return logits, target


@settings(max_examples=25)
@given(st.data(), OPTIONS)
def test_cross_entropy_in_any_layout(data, options):
    logits, target = values((7,), 6, options.pop("probabilities"))
    weight = torch.rand(6, dtype=torch.float64) + 0.1 if options.pop("weighted") else None
    x = logits.clone().requires_grad_()
    want = F.cross_entropy(x, target, weight, **options)
    want.sum().backward()
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        on = Axes((2, 2), ("dp", "tp"))
        assert axes_of(mesh) == on
        dx = sw.distribute_tensor(logits, mesh, data.draw(placements(on, 2, partial=False))).requires_grad_()
        dy = sw.distribute_tensor(target, mesh, data.draw(placements(on, target.dim(), partial=False)))
        dw = weight if weight is None else sw.distribute_tensor(weight, mesh)
        with loss_parallel():
            got = F.cross_entropy(dx, dy, dw, **options)
            got.sum().backward()
        torch.testing.assert_close(full(got), want, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(full(dx.grad), x.grad, rtol=1e-9, atol=1e-9)


@settings(max_examples=20)
@given(st.data(), OPTIONS, st.integers(1, 9), st.booleans())
def test_linear_cross_entropy_in_any_layout(data, options, chunk, biased):
    _, target = values((2, 7), 6, options.pop("probabilities"))
    generator = torch.Generator().manual_seed(3)
    x, w, b = (
        torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((2, 7, 5), (6, 5), (6,))
    )
    weight = torch.rand(6, dtype=torch.float64) + 0.1 if options.pop("weighted") else None
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    logits = F.linear(leaves[0], leaves[1], leaves[2] if biased else None).flatten(0, 1)
    want = F.cross_entropy(logits, target.flatten(0, 1), weight, **options)
    want.square().sum().backward()
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        on = Axes((2, 2), ("dp", "tp"))

        def place(t):
            return sw.distribute_tensor(t, mesh, data.draw(placements(on, t.dim(), partial=False)))

        mine = [place(t).requires_grad_() for t in (x, w, b)]
        dw = weight if weight is None else sw.distribute_tensor(weight, mesh)
        got = linear_cross_entropy(
            mine[0], mine[1], place(target), mine[2] if biased else None,
            class_weight=dw, chunk_size=chunk, **options,
        )  # fmt: skip
        got.square().sum().backward()
        torch.testing.assert_close(full(got).flatten(), want.flatten(), rtol=1e-9, atol=1e-9)
        for a, c in zip(mine[: 2 + biased], leaves, strict=False):
            torch.testing.assert_close(full(a.grad), c.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"reduction": "sum"}, {"reduction": "none"}]
)
@pytest.mark.parametrize("probabilities", [False, True])
def test_logits_are_not_gathered(options, probabilities):
    logits, target = values((32,), 4000, probabilities)
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(logits, mesh, [sw.Shard(1)]).requires_grad_()
        y = sw.distribute_tensor(target, mesh, [sw.Shard(1) if probabilities else sw.Replicate()])
        with CommDebugMode() as comm:
            F.cross_entropy(x, y, **options).sum().backward()
        assert x.grad.sharding is x.sharding
        assert comm.get_total_bytes() < logits.nbytes / 100


def test_linear_cross_entropy_keeps_the_logits_of_one_chunk(monkeypatch):
    rows = []
    original = F.cross_entropy
    monkeypatch.setattr(
        F, "cross_entropy", lambda x, *a, **k: (rows.append(x.shape[0]), original(x, *a, **k))[1]
    )
    x, w = torch.randn(2, 64, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    linear_cross_entropy(x, w, torch.randint(0, 5, (2, 64)), chunk_size=16).backward()
    assert max(rows) == 16
    assert sum(rows) == 2 * 128  # each chunk again in the backward pass


def test_the_context_ends_with_an_exception_and_nests():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(torch.randn(3, 4, dtype=torch.float64), mesh, [sw.Shard(1)]).requires_grad_()
        with pytest.raises(ZeroDivisionError), loss_parallel(), loss_parallel():
            raise ZeroDivisionError
        (x.log_softmax(-1) ** 2).sum().backward()
        dense = full(x.detach()).requires_grad_()
        (dense.log_softmax(-1) ** 2).sum().backward()
        torch.testing.assert_close(full(x.grad), dense.grad)


def _one_loss(loss, logits, targets):
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(logits, mesh, [sw.Shard(1)])
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            loss(x, targets)
        with loss_parallel():
            return full(loss(x, targets))


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        lambda x, y: F.cross_entropy(x, y, torch.arange(1.0, 5), label_smoothing=0.1),
        lambda x, y: F.nll_loss(x, y, torch.arange(1.0, 5)),
        lambda x, y: F.cross_entropy(x, F.one_hot(y, 4).float(), torch.arange(1.0, 5)),
        lambda x, y: F.kl_div(x, F.one_hot(y, 4).float(), reduction="sum"),
        lambda x, y: F.binary_cross_entropy_with_logits(x, F.one_hot(y, 4).float()),
        lambda x, y: F.mse_loss(x, F.one_hot(y, 4).float()) + F.l1_loss(x, F.one_hot(y, 4).float()),
    ],
)
def test_plain_targets_and_weights_count_as_replicated_in_losses(loss):
    logits, targets = torch.randn(3, 4), torch.tensor([0, 3, 1])
    torch.testing.assert_close(_one_loss(loss, logits, targets), loss(logits, targets))


def test_plain_tensors_are_refused_by_other_ops_in_the_context():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(torch.randn(3, 4), mesh, [sw.Shard(1)])
        # a value that ranks have terms of, which code outside of DTensors has not added up yet
        terms = sw.DTensor.from_local(torch.ones(3, 4), mesh, [sw.Partial()]).to_local()
        with loss_parallel():
            for op in (torch.add, torch.mul, lambda a, b: a[b > 0]):
                with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                    op(x, terms)
            assert full(x + 1).equal(full(x) + 1)
        with sw.policy(plain="replicate"), loss_parallel():
            assert full(x + torch.ones(3, 4)).equal(full(x) + 1)
