"""Reports about modules and training, by their number in the list of regressions: each program has one device's answer."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.parallel.models import Gpt, Llama, Moe
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.experimental import implicit_replication, local_map
from shardwise.layout import Partial, Replicate, Shard
from shardwise.parallel import (
    ColwiseParallel,
    PlanError,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    linear_cross_entropy,
    loss_parallel,
    parallelize_module,
    register_fsdp_forward_method,
)


def full(t: Tensor) -> Tensor:
    t = t.full_tensor() if isinstance(t, sw.DTensor) else t
    return t.ranks[0] if isinstance(t, sw.PerRank) else t


def close(a: Tensor, b: Tensor, msg: str = "") -> None:
    torch.testing.assert_close(full(a), full(b), rtol=1e-9, atol=1e-9, msg=msg or None)


def same_gradients(model: nn.Module, dense: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-9, atol=1e-9, msg=name)


@pytest.fixture
def mesh():
    with sw.simulate(2):
        yield sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


@pytest.fixture
def grid():
    with sw.simulate(4):
        yield sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


MOE_TP = {"experts.gate_up": "packed_colwise", "experts.down": "rowwise", "experts": "moe_tp_experts"}
MOE_EP = {"experts.gate_up": "grouped_gemm", "experts.down": "grouped_gemm", "experts": "moe_tp_experts"}
LLAMA = {
    "layers.*.attn.w[qkv]": "colwise",
    "layers.*.attn.wo": "rowwise",
    "layers.*.gate": "colwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}


def double(model: nn.Module) -> nn.Module:
    return model.double()


def test_053_055_058_gradients_below_split_experts(mesh):
    """tt4054, tt2416, hf48205: the router and everything below the experts get the gradients of all ranks."""
    torch.manual_seed(0)
    dense, ids = double(Moe()), torch.randint(0, 14, (3, 5))
    (dense(ids) ** 2).sum().backward()
    for plan in (MOE_TP, MOE_EP):
        model = parallelize_module(copy.deepcopy(dense).requires_grad_(), mesh, plan)
        model.zero_grad()
        (model(ids) ** 2).sum().backward()
        same_gradients(model, dense)


def test_053_local_map_experts_default_to_pending_gradients(mesh):
    w, x = torch.randn(6, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    (F.linear(x, w).sum(1) ** 2).sum().backward()
    dx = sw.distribute_tensor(x.detach(), mesh).requires_grad_()
    experts = local_map(lambda x, w: F.linear(x, w).sum(1), out_placements=[Partial()])
    (experts(dx, sw.distribute_tensor(w, mesh, [Shard(0)])) ** 2).sum().backward()
    close(dx.grad, x.grad)


def test_054_chunked_cross_entropy_under_tp(mesh):
    x, w = (torch.randn(n, 4, dtype=torch.float64) for n in (9, 6))
    y = torch.randint(0, 6, (9,))
    a, b = (t.clone().requires_grad_() for t in (x, w))
    F.cross_entropy(F.linear(a, b), y).backward()
    da = sw.distribute_tensor(x, mesh).requires_grad_()
    db = sw.distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()
    linear_cross_entropy(da, db, sw.distribute_tensor(y, mesh), chunk_size=2).backward()
    close(da.grad, a.grad)
    close(db.grad, b.grad)


def test_056_a_row_parallel_bias_is_added_once(mesh):
    dense, x = double(nn.Linear(6, 4)), torch.randn(3, 6, dtype=torch.float64)
    for plan in ({"": "rowwise"}, RowwiseParallel(input_layouts=Replicate())):
        model = parallelize_module(copy.deepcopy(dense), mesh, plan)
        close(model(x), dense(x))


def test_057_a_routing_bias_follows_the_counts_of_all_tokens(grid):
    torch.manual_seed(0)
    scores = torch.randn(8, 4)
    bias = torch.zeros(4)
    bias += torch.sign(
        scores.argmax(-1).bincount(minlength=4).float().mean() - scores.argmax(-1).bincount(minlength=4)
    )
    split = sw.distribute_tensor(scores, grid, [Shard(0), Shard(0)])
    mine = sw.zeros(4, device_mesh=grid)
    counts = F.one_hot(split.argmax(-1), 4).sum(0).float()
    mine += torch.sign(counts.mean() - counts)
    close(mine, bias)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_059_062_norms_over_split_heads_with_accumulation(mesh, accumulate):
    """hf source, tt1373: a replicated weight that split heads use is reduced once for each backward pass."""
    torch.manual_seed(0)
    dense = double(Llama(layers=1))
    model = parallelize_module(copy.deepcopy(dense), mesh, LLAMA)
    for i in range(accumulate):
        ids = torch.randint(0, 14, (2, 5), generator=torch.Generator().manual_seed(i))
        (dense(ids) ** 2).sum().backward()
        (model(ids) ** 2).sum().backward()
    same_gradients(model, dense)


def test_060_087_the_mean_of_a_loss_counts_every_token_once(grid):
    """hf45994, tt2206, hf47073: ranks of a tp group are no data ranks, and a rank may have no valid token."""
    logits, labels = torch.randn(4, 3, 6, dtype=torch.float64), torch.randint(0, 6, (4, 3))
    labels[:2] = -100
    labels[2, 0] = -100
    x = logits.clone().requires_grad_()
    want = F.cross_entropy(x.flatten(0, 1), labels.flatten())
    want.backward()
    for placements in ([Shard(0), Replicate()], [Shard(0), Shard(1)], [Shard(0), Shard(2)]):
        dx = sw.distribute_tensor(logits, grid, placements).requires_grad_()
        dy = sw.distribute_tensor(
            labels, grid, [Shard(0), placements[1] if placements[1] != Shard(2) else Replicate()]
        )
        got = F.cross_entropy(dx.flatten(0, 1), dy.flatten())
        got.backward()
        close(got, want)
        close(dx.grad, x.grad)


def test_061_every_rank_has_initial_values(mesh):
    with torch.device("meta"):
        model = Gpt()
    parallelize_module(model, mesh, {"head": "colwise"})
    sw.materialize(model)
    assert all(bool(full(p).isfinite().all()) for p in model.parameters())


def test_063_norm_gradients_under_sequence_parallelism(mesh):
    torch.manual_seed(0)
    dense, ids = double(Llama(layers=1)), torch.randint(0, 14, (2, 5))
    (dense(ids) ** 2).sum().backward()
    plan = {**LLAMA, "layers.*.norm[12]": "sequence_parallel", "norm": "sequence_parallel"}
    model = parallelize_module(copy.deepcopy(dense), mesh, plan)
    model.zero_grad()
    (model(ids) ** 2).sum().backward()
    same_gradients(model, dense)
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    for block in (model.norm.weight.grad.to_local(), model.norm.weight.to_local()):
        assert all(torch.equal(r, block.ranks[0]) for r in block.ranks)


@pytest.mark.parametrize("norm_type", [0.0, 1.0, 2.0, math.inf])
def test_064_065_066_gradient_norms_over_meshes_and_beside_plain_ones(grid, norm_type):
    """te-rocm715, mlm6489, miles35: each element counts once, on any mesh and beside plain parameters."""
    torch.manual_seed(0)
    values = [torch.randn(4, 6, dtype=torch.float64) for _ in range(4)]
    wanted = [nn.Parameter(v.clone()) for v in values]
    for p in wanted:
        p.grad = p.detach() * 3
    places = [(grid, [Replicate(), Shard(0)]), (grid["tp"], [Shard(1)]), (grid["dp"], [Replicate()]), None]
    mine = [
        nn.Parameter(v.clone() if at is None else sw.distribute_tensor(v, *at))
        for v, at in zip(values, places, strict=True)
    ]
    for p in mine:
        p.grad = p.detach() * 3
    want = nn.utils.clip_grad_norm_(wanted, 0.5, norm_type)
    close(nn.utils.clip_grad_norm_(mine, 0.5, norm_type), want)
    for p, q in zip(mine, wanted, strict=True):
        close(p.grad, q.grad)


def test_069_090_tied_parameters_stay_tied(mesh):
    """hyper-parallel606, tt2253: one object after distributing, giving memory and loading."""
    for build in (
        lambda m: sw.distribute_module(m, mesh),
        lambda m: parallelize_module(m, mesh, {"head": "colwise"}),
    ):
        with torch.device("meta"):
            model = Gpt()
        build(model)
        model.to_empty(device="cpu")
        assert model.head.weight is model.wte.weight
        sw.materialize(model)
        sw.load_sharded(model, Gpt().state_dict())
        assert model.head.weight is model.wte.weight
        assert len(list(model.parameters())) == len(list(Gpt().parameters()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_077_checkpointing_under_autocast(mesh, reentrant):
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
    model = parallelize_module(copy.deepcopy(dense), mesh, {"0": "colwise", "2": "rowwise"})
    x = torch.randn(3, 4, requires_grad=True)
    grads = []
    for m in (dense, model):
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(m, x, use_reentrant=reentrant) + m(x)
        y.float().square().sum().backward()
        grads.append([full(p.grad) for p in m.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.1)


def test_078_frozen_parameters_stay_frozen(mesh):
    model = Gpt()
    for p in model.parameters():
        p.requires_grad_(p.dim() == 1)
    before = {n: p.requires_grad for n, p in model.named_parameters()}
    parallelize_module(model, mesh, {"head": "colwise", "blocks.*.mlp.up": "colwise"})
    assert {n: p.requires_grad for n, p in model.named_parameters()} == before
    model(torch.randint(0, 14, (2, 4))).sum().backward()
    assert all((p.grad is not None) == before[n] for n, p in model.named_parameters())


class Adapted(nn.Module):
    """A linear layer with an adapter of low rank, built from the layer's own sizes."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("plan", [{"0": "colwise", "2": "rowwise"}, {"0": "colwise_rep", "2": "rowwise_rep"}])
def test_079_080_081_adapters_have_global_sizes_and_join_in_the_state_of_their_base(mesh, plan):
    """mbr5840, mbr5634, peft3079: fan-in of the full layer; pending, split and full bases; plain adapters get plain gradients."""
    torch.manual_seed(0)
    dense = double(nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)))
    model = parallelize_module(copy.deepcopy(dense), mesh, plan)
    assert (model[0].in_features, model[0].out_features, model[2].in_features) == (4, 6, 6)
    for m in (dense, model):
        for i in (0, 2):
            torch.manual_seed(i)
            m[i] = Adapted(m[i]).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    (dense(x) ** 2).sum().backward()
    out = model(x)
    close(out, dense(x))
    (out**2).sum().backward()
    same_gradients(model, dense)
    assert type(model[0].down.weight.grad) is Tensor


def test_082_a_parameter_changes_its_dtype_through_data(mesh):
    model = parallelize_module(nn.Linear(4, 6), mesh, {"": "colwise"})
    p = model.weight
    p.data = p.data.to(torch.float64)
    assert p.dtype is torch.float64
    assert p.to_local().ranks[0].dtype is torch.float64
    assert model.weight is p


class Decoder(nn.Module):
    """A model whose `generate` uses parameters outside of any forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted(nn.Linear(6, 6)) for _ in range(2))
        self.head = nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)

    def generate(self, x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            chosen = self(x)[:, -1].argmax(-1)
            x = torch.cat([x, self.head.weight[chosen][:, None]], 1)
        return x


def test_083_generate_with_adapters_under_fully_shard_and_tp(grid):
    """hf42436: a method other than forward gathers the parameters, those of frozen layers with adapters, too."""
    torch.manual_seed(0)
    dense = double(Decoder())
    model = copy.deepcopy(dense)
    parallelize_module(model, grid["tp"], {"layers.*.base": "colwise", "head": "rowwise_rep"})
    for layer in [*model.layers, model]:
        fully_shard(layer, mesh=grid["dp"])
    register_fsdp_forward_method(model, "generate")
    x = torch.randn(3, 2, 6, dtype=torch.float64)
    with torch.no_grad():
        close(model.generate(x, 3), dense.generate(x, 3))
    assert not model.layers[0].base.weight.requires_grad


def test_084_views_with_the_global_number_of_heads(mesh):
    """hf45109: `view(b, -1, n_heads, d)` with the model's own number of heads after a split projection."""
    model = parallelize_module(double(nn.Linear(4, 6, bias=False)), mesh, {"": "colwise"})
    x = sw.distribute_tensor(torch.randn(2, 5, 4, dtype=torch.float64), mesh)
    assert model(x).view(2, -1, 3, 2).shape == (2, 5, 3, 2)
    close(model(x).view(2, -1, 3, 2), F.linear(full(x), full(model.weight)).view(2, 5, 3, 2))


def test_085_a_tied_head_is_saved_in_full(mesh):
    model = parallelize_module(Gpt(), mesh, {"head": "colwise"})
    saved = {n: full(t) for n, t in model.state_dict().items()}
    assert torch.equal(saved["head.weight"], saved["wte.weight"])
    assert saved["head.weight"].numel() == 14 * 12


def test_086_names_that_do_not_exist_are_errors(mesh):
    renamed = PrepareModuleInput(
        input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={"x": Replicate()}
    )
    with pytest.raises(PlanError, match="no argument 'x'; it has input"):
        parallelize_module(nn.Linear(4, 4), mesh, renamed)
    with pytest.raises(PlanError, match="matches no module"):
        parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"linear": ColwiseParallel()})


def test_088_fused_qkv_with_fewer_kv_heads_than_ranks():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        dense, ids = double(Llama(heads=4, kv_heads=2, layers=1)), torch.randint(0, 14, (2, 5))
        (dense(ids) ** 2).sum().backward()
        model = parallelize_module(copy.deepcopy(dense), mesh, LLAMA)
        model.zero_grad()
        out = model(ids)
        close(out, dense(ids))
        (out**2).sum().backward()
        same_gradients(model, dense)


def test_093_describe_says_what_is_not_split(mesh, capsys):
    sw.describe(parallelize_module(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), mesh, {"0": "colwise"}))
    text = capsys.readouterr().out
    assert "2 of 4 parameters and buffers are replicated" in text
    assert any(line.startswith("1.weight") and line.endswith("replicated") for line in text.splitlines())


def test_094_contexts_end_with_an_exception_and_nest(mesh):
    x = sw.distribute_tensor(torch.randn(3, 4, dtype=torch.float64), mesh, [Shard(1)]).requires_grad_()
    plain = torch.ones(3, 4, dtype=torch.float64)
    with pytest.raises(KeyError), loss_parallel():
        raise KeyError
    with implicit_replication():
        with implicit_replication():
            pass
        assert (x + plain).shape == (3, 4)
    with pytest.raises(sw.PlainTensorError):
        x + plain
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": "colwise"})
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 3))
    with pytest.raises(sw.PlainTensorError):
        x + plain


@pytest.mark.parametrize("placements", [[Shard(0), Shard(1)], [Shard(1), Shard(1)], [Shard(1), Replicate()]])
def test_095_loss_parallel_on_two_axes_with_smoothing(grid, placements):
    logits, labels = torch.randn(5, 6, dtype=torch.float64), torch.randint(0, 6, (5,))
    x = logits.clone().requires_grad_()
    F.cross_entropy(x, labels, label_smoothing=0.1).backward()
    dx = sw.distribute_tensor(logits, grid, placements).requires_grad_()
    with loss_parallel():
        F.cross_entropy(dx, sw.distribute_tensor(labels, grid), label_smoothing=0.1).backward()
    close(dx.grad, x.grad)


def test_096_the_gradient_norm_under_sequence_parallelism_in_bfloat16(mesh):
    """mbr5411: sums over ranks are of the dtype of the activations, in one reduction per tensor."""
    torch.manual_seed(0)
    dense, x = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).bfloat16(), torch.randn(2, 16, 8).bfloat16()
    dense(x).float().square().sum().backward()
    want = nn.utils.get_total_norm([p.grad for p in dense.parameters()])
    model = parallelize_module(copy.deepcopy(dense), mesh, {"0": SequenceParallel(), "1": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Replicate())})  # fmt: skip
    model.zero_grad()
    blocks = sw.distribute_tensor(x, mesh, [Shard(1)])
    model(blocks).float().square().sum().backward()
    got = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.testing.assert_close(full(got), want, rtol=0.02, atol=0.0)


@pytest.mark.parametrize("built_inside", [False, True])
def test_097_split_activations_in_inference_mode(mesh, built_inside):
    """Tensors of inference mode count no writes: what was moved for one layer is moved again for the next."""
    with torch.inference_mode(built_inside):
        dense, x = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 16, 8)
        plan = {"0": "sequence_parallel", "1": "colwise", "2": "rowwise"}
        model = parallelize_module(copy.deepcopy(dense), mesh, plan)
        sharded = fully_shard(copy.deepcopy(dense), mesh=mesh)
    with torch.inference_mode():
        want = dense(x)
        torch.testing.assert_close(full(model(x)), want)
        torch.testing.assert_close(full(sharded(x)), want)
        sharded[2].weight.zero_()
        torch.testing.assert_close(full(sharded(x)), dense[2].bias.expand(2, 16, 8))
