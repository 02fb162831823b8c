"""More views and their copying variants: other dims stay split, and a copy does not share memory."""

import pytest
import torch
from tests.rules.against_dense import check, numbers

import shardwise as sw

X = numbers(5, 6, 7)
CASES = {
    "diagonal": (lambda x: x.diagonal(1, 1, 2), "[5:tp, 6, 7]", "[5:tp, 6]"),
    "diagonal of other dims": (lambda x: x.diagonal(0, 2, 0), "[5, 6:tp, 7]", "[6:tp, 5]"),
    "diag_embed": (lambda x: x.diag_embed(1, 0, 2), "[5:tp, 6, 7]", "[8, 5:tp, 8, 6]"),
    "unfold_copy": (lambda x: torch.unfold_copy(x, 1, 3, 2), "[5:tp, 6, 7]", "[5:tp, 2, 7, 3]"),
    "repeat": (lambda x: x.repeat(2, 1, 3, 1), "[5, 6, 7:tp]", "[2, 5, 18, 7:tp]"),
    "rot90": (lambda x: x.rot90(1, (0, -1)), "[5, 6:tp, 7]", "[7, 6:tp, 5]"),
    "narrow_copy": (lambda x: torch.narrow_copy(x, 1, 2, 3), "[5:tp, 6, 7]", "[5:tp, 3, 7]"),
    "permute_copy": (lambda x: torch.permute_copy(x, (2, 0, 1)), "[5:tp, 6, 7]", "[7, 5:tp, 6]"),
    "transpose_copy": (lambda x: torch.transpose_copy(x, 0, 2), "[5:tp, 6, 7]", "[7, 6, 5:tp]"),
    "expand_copy": (lambda x: torch.expand_copy(x, (2, 5, 6, 7)), "[5:tp, 6, 7]", "[2, 5:tp, 6, 7]"),
    "select_copy": (lambda x: torch.select_copy(x, 1, 2), "[5:tp, 6, 7]", "[5:tp, 7]"),
    "unbind_copy": (lambda x: torch.unbind_copy(x, 1), "[5:tp, 6, 7]", "[5:tp, 7]"),
    "split_with_sizes_copy": (
        lambda x: torch.split_with_sizes_copy(x, (2, 4), 1), "[5:tp, 6, 7]", "[5:tp, 2, 7]"
    ),
    "alias_copy": (torch.alias_copy, "[5:tp, 6, 7] ", "[5:tp, 6, 7]"),
    "a pending sum": (lambda x: x.diagonal(0, 1, 2), "[5, 6, 7] P(tp,sum)", "[5, 6] P(tp,sum)"),
    "glu": (lambda x: torch.nn.functional.glu(x, 1), "[5:tp, 6, 7]", "[5:tp, 3, 7]"),
    "prelu": (lambda x: torch.prelu(x, x.new_full((1,), 0.25)), "[5:tp, 6, 7]", "[5:tp, 6, 7]"),
    "sort": (lambda x: x.sort(1)[0], "[5:tp, 6, 7]", "[5:tp, 6, 7]"),
    "topk": (lambda x: x.topk(2, 1)[0], "[5:tp, 6, 7]", "[5:tp, 2, 7]"),
    "kthvalue": (lambda x: x.kthvalue(2, 1)[0], "[5, 6, 7:tp]", "[5, 7:tp]"),
    "cummax": (lambda x: x.cummax(1)[0], "[5:tp, 6, 7]", "[5:tp, 6, 7]"),
    "cumsum": (lambda x: x.cumsum(1), "[5:tp, 6, 7]", "[5:tp, 6, 7]"),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), "[5, 6, 7:tp]", "[5, 6, 7:tp]"),
    "fft": (lambda x: torch.fft.rfft(x, dim=1).abs(), "[5, 6, 7:tp]", "[5, 4, 7:tp]"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_other_dims_stay_split(name):
    fn, layout, expect = CASES[name]
    check(fn, [X], [layout], expect=expect, free=name not in COMMUNICATES_BACKWARD)
    check(fn, [X], [layout], expect=expect, grad=False)


# torch's backward formula needs an unsplit tensor
COMMUNICATES_BACKWARD = {"fft", "logcumsumexp", "cummax", "prelu"}


def test_a_fourier_transform_is_linear():
    check(
        lambda x: torch.view_as_real(torch.fft.fft(x, dim=1)), [X], ["[5, 6, 7] P(tp,sum)"],
        expect="[5, 6, 7, 2] P(tp,sum)",
    )  # fmt: skip


@pytest.mark.parametrize(
    "fn",
    [
        torch.squeeze_copy,
        lambda x: torch.squeeze_copy(x, 1),
        lambda x: torch.unsqueeze_copy(x, 0),
        lambda x: torch.view_copy(x, (6, 1)),
        torch.alias_copy,
        torch.detach_copy,
        lambda x: torch.permute_copy(x, (1, 0)),
        lambda x: torch.expand_copy(x, (6, 1)),
    ],
)
def test_a_copy_does_not_share_memory(fn):
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = sw.zeros(6, 1, device_mesh=mesh, placements=[sw.Shard(0)])
        fn(x).add_(1)
        assert not x.full_tensor().ranks[0].any()


@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_a_pending_max_min_or_product_does_not_pass_to_complex_numbers(op):
    check(
        lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), [numbers(5, 2)], [f"[5, 2] P(tp,{op})"],
        free=False, grad=False,
    )  # fmt: skip
