"""torch's styles: documented behaviour, any module with features to split, equal to one device."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.layout import Placement, Replicate, Shard
from shardwise.ops.pending_gradients import settle_gradients
from shardwise.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Conv1D(nn.Module):
    """A linear layer as GPT-2 has it: the weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


class Grouped(nn.Module):
    """One linear map per group, as experts have them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 7, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bgi,goi->bgo", x, self.weight)


MODULES = {
    "linear": (lambda: nn.Linear(5, 7), (3, 4, 5)),
    "conv1d": (lambda: Conv1D(7, 5), (3, 4, 5)),
    "convolution": (lambda: nn.Conv2d(5, 7, 3), (2, 5, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose1d(5, 7, 3), (2, 5, 6)),
    "grouped": (Grouped, (3, 2, 5)),
    "embedding": (lambda: nn.Embedding(5, 7), None),
}
SPLITS = {
    "colwise": {"linear": "[7:tp, 5]", "conv1d": "[5, 7:tp]", "convolution": "[7:tp, 5, 3, 3]", "transposed": "[5, 7:tp, 3]",
                "grouped": "[2, 7:tp, 5]", "embedding": "[5, 7:tp]"},
    "rowwise": {"linear": "[7, 5:tp]", "conv1d": "[5:tp, 7]", "convolution": "[7, 5:tp, 3, 3]", "transposed": "[5:tp, 7, 3]",
                "grouped": "[2, 7, 5:tp]", "embedding": "[5:tp, 7]"},
}  # fmt: skip


def full(t: Tensor) -> Tensor:
    t = t.full_tensor() if isinstance(t, sw.DTensor) else t
    return t.ranks[0] if isinstance(t, sw.PerRank) else t


@pytest.mark.parametrize("style", SPLITS)
@pytest.mark.parametrize("kind", MODULES)
def test_every_kind_of_module_in_either_style(kind, style):
    torch.manual_seed(1)
    build, shape = MODULES[kind]
    dense = build().double()
    x = torch.randint(0, 5, (3, 4)) if shape is None else torch.randn(shape, dtype=torch.float64)
    want = dense(x)
    (want**2).sum().backward()
    with sw.simulate(3):
        mesh = sw.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        make = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}[style]
        m = parallelize_module(
            copy.deepcopy(dense), mesh, make(input_layouts=Replicate(), use_local_output=False)
        )
        assert str(m.weight.sharding) == SPLITS[style][kind]
        got = m(x)
        assert got.placements == ((Replicate(),) if style == "rowwise" else got.placements)
        torch.testing.assert_close(full(got), want, rtol=1e-9, atol=1e-9)
        (got**2).sum().backward()
        for settled in (False, True):
            for p, q in zip(m.parameters(), dense.parameters(), strict=True):
                torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-9, atol=1e-9)
                assert p.grad.sharding is p.sharding or not settled
            settle_gradients(m.parameters())


class Block(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 9) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@settings(max_examples=10)
@given(st.sampled_from([2, 3, 4]), st.integers(1, 3), st.booleans())
def test_sequence_parallel_blocks_equal_one_device(ranks, accumulate, local):
    torch.manual_seed(2)
    dense = Block().double()
    batches = [torch.randn(2, 12, 6, dtype=torch.float64) for _ in range(accumulate)]
    for x in batches:
        (dense(x) ** 2).sum().backward()
    with sw.simulate(ranks):
        mesh = sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        split: Placement = Shard(1)
        plan = {
            "": PrepareModuleInputOutput(
                input_layouts=(Replicate(),), desired_input_layouts=(split,), use_local_input=local,
                output_layouts=(split,), desired_output_layouts=(Replicate(),), use_local_output=True,
            ),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=split),
            "down": RowwiseParallel(output_layouts=split, use_local_output=local),
        }  # fmt: skip
        m = parallelize_module(copy.deepcopy(dense), mesh, plan)
        for x in batches:
            with CommDebugMode() as comm:
                out = m(x)
            # gather for `up`, reduce-scatter of `down`, gather of the result
            assert comm.get_total_counts() == 3
            torch.testing.assert_close(out.ranks[-1], dense(x), rtol=1e-9, atol=1e-9)
            (out**2).sum().backward()
        for (name, p), q in zip(m.named_parameters(), dense.named_parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q[1].grad, rtol=1e-9, atol=1e-9, msg=name)


def test_local_outputs_are_plain_and_layouts_are_torchs():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        m = parallelize_module(nn.Linear(4, 6), mesh, ColwiseParallel())
        out = m(torch.ones(3, 4))
        assert [tuple(t.shape) for t in out.ranks] == [(3, 3)] * 2
        assert (m.in_features, m.out_features) == (4, 6)
        gathered = parallelize_module(nn.Linear(4, 6), mesh, ColwiseParallel(output_layouts=Replicate()))
        assert gathered(torch.ones(3, 4)).ranks[0].shape == (3, 6)


def test_inputs_and_outputs_are_prepared_by_position_and_name():
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor, *, c: Tensor) -> tuple[Tensor, Tensor]:
            return a + c, b

    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        m = parallelize_module(Two(), mesh, PrepareModuleInput(
            input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None),
            input_kwarg_layouts={"c": Replicate()}, desired_input_kwarg_layouts={"c": Shard(1)},
        ))  # fmt: skip
        block, plain = torch.ones(2, 4), torch.ones(1)
        a, b = m(block, plain, c=torch.ones(4, 4))
        assert a.shape == (4, 4)
        assert b is plain
        m = parallelize_module(
            nn.Identity(),
            mesh,
            PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()),
        )
        assert m(block).ranks[0].shape == (4, 4)


def test_a_style_of_ones_own():
    class Doubling(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: sw.DeviceMesh) -> nn.Module:
            module.register_forward_hook(lambda m, args, out: 2 * out)
            assert self.src_data_rank is None
            return module

    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        m = parallelize_module(nn.Sequential(nn.Identity()), mesh, {"*": Doubling()}, src_data_rank=None)
        assert torch.equal(m(torch.ones(2)), torch.full((2,), 2.0))


def test_without_a_source_rank_nothing_is_sent():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for plan in (ColwiseParallel(), {"": "colwise"}):
            with CommDebugMode() as comm:
                parallelize_module(nn.Linear(4, 6), mesh, plan, src_data_rank=None)
            assert comm.get_total_counts() == 0


def test_a_tied_parameter_that_another_style_placed_is_used_as_it_is():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        dense = nn.ModuleDict({"tokens": nn.Embedding(8, 6), "output": nn.Linear(6, 8, bias=False)}).double()
        dense["output"].weight = dense["tokens"].weight
        model = copy.deepcopy(dense)
        parallelize_module(model, mesh, {"tokens": RowwiseParallel(input_layouts=Replicate())})
        parallelize_module(model["output"], mesh, ColwiseParallel(output_layouts=Replicate()))
        assert model["output"].weight is model["tokens"].weight
        ids = torch.tensor([[1, 5, 7]])
        for m in (dense, model):
            m["output"](m["tokens"](ids)).pow(2).sum().backward()
        torch.testing.assert_close(model["tokens"].weight.grad.full_tensor(), dense["tokens"].weight.grad)
