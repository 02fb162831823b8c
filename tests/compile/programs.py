"""Drawn training programs: a model, a plan, a mesh, an optimizer and what else a step does; run eagerly and captured."""

import random
from collections import Counter
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm import counting, is_simulated
from shardwise.compile import EXACT, FAST, NONE, whole_step
from shardwise.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    parallelize_module,
    replicate,
)
from shardwise.plan.settings import override_settings

WIDTH, VOCABULARY, SEQUENCE = 16, 24, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.RMSNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class Model(nn.Module):
    def __init__(self, layers, dropout, tied):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Convolutions(nn.Module):
    """Convolutions along the sequence, with norms whose statistics are buffers."""

    def __init__(self, layers, dropout):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH), nn.ReLU())
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        x = self.embedding(x).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.dropout(x.transpose(1, 2)))


class Recurrent(nn.Module):
    """Recurrent layers, every other of another kind."""

    def __init__(self, layers, dropout):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        kinds = [nn.LSTM, nn.GRU]
        self.blocks = nn.ModuleList(kinds[i % 2](WIDTH, WIDTH, batch_first=True) for i in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)[0]
        return self.head(x)


class Experts(nn.Module):
    """Each token goes to two of four experts, as weights of a sum."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH) * 0.2)
        self.down = nn.Parameter(torch.randn(4, 2 * WIDTH, WIDTH) * 0.2)

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        top, index = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, index, top / top.sum(-1, keepdim=True))
        hidden = functional.silu(torch.einsum("bsd,edf->bsef", x, self.up))
        return x + torch.einsum("bsef,efd,bse->bsd", hidden, self.down, weights)


class Mixture(nn.Module):
    """Layers of experts."""

    def __init__(self, layers, dropout):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Experts() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(self.norm(x)))


def _llama(layers, dropout):
    """A tiny model of transformers."""
    transformers = import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, attention_dropout=dropout, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.blocks = model.model.layers
    return model


MODELS = {"convolutions": Convolutions, "recurrent": Recurrent, "mixture": Mixture, "llama": _llama}
DATA_PARALLEL = ("fsdp", "ddp", "hsdp")


def _tensor_plan(tied):
    """Tensor parallelism of all layers; hidden states stay DTensors."""
    out, rows = {"use_local_output": False}, sw.Replicate()
    layers = {"blocks.*.attention.o": RowwiseParallel(**out), "blocks.*.down": RowwiseParallel(**out)}
    for name in ("attention.q", "attention.k", "attention.v", "up"):
        layers[f"blocks.*.{name}"] = ColwiseParallel(**out)
    if not tied:
        layers["embedding"] = RowwiseParallel(input_layouts=rows, output_layouts=rows, **out)
        layers["head"] = ColwiseParallel(**out)
    return layers


def _sequence_plan():
    """Sequence parallelism: hidden states are split along the sequence between the layers."""
    rows, split = sw.Replicate(), sw.Shard(1)
    out = {"use_local_output": False}
    plan = {
        "embedding": RowwiseParallel(input_layouts=rows, output_layouts=split, **out),
        "blocks.*.norm1": SequenceParallel(),
        "blocks.*.norm2": SequenceParallel(),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=split, **out),
    }
    for name in ("attention.q", "attention.k", "attention.v", "up"):
        plan[f"blocks.*.{name}"] = ColwiseParallel(input_layouts=split, **out)
    for name in ("attention.o", "down"):
        plan[f"blocks.*.{name}"] = RowwiseParallel(output_layouts=split, **out)
    return plan


KINDS = ("tp", "sp", "fsdp", "ddp", "fsdp+tp", "hsdp")


@dataclass(frozen=True)
class Case:
    """One training program."""

    kind: str
    layers: int = 1
    dropout: float = 0.1
    tied: bool = False
    optimizer: str = "AdamW"
    clip_norm: float | None = None
    accumulate: int = 1
    scheduled: bool = True
    model: str = "transformer"


OTHER_MODELS = [
    Case("fsdp", model="convolutions"),
    Case("ddp", model="mixture", clip_norm=0.3),
    Case("hsdp", model="recurrent", optimizer="momentum", accumulate=2),
    Case("fsdp", model="llama", dropout=0.0),
]


def draw_case(seed):
    """A case that a seed determines; seeds in a row have all kinds."""
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    models = (
        [*MODELS, "transformer"]
        if kind in DATA_PARALLEL
        else ["llama", "transformer"]
        if "tp" in kind
        else []
    )
    model = rng.choice(models) if models and seed >= 6 else "transformer"
    return Case(
        kind,
        model=model,
        layers=rng.choice([1, 1, 2]),
        dropout=rng.choice([0.0, 0.2]),
        tied=kind != "sp" and model == "transformer" and rng.random() < 0.3,
        optimizer=rng.choice(
            ["AdamW", "Adam", "SGD", "momentum", "foreach", "RMSprop", "NAdam", "Adagrad", "Adamax", "RAdam"]
        ),
        clip_norm=rng.choice([None, 0.3]),
        accumulate=rng.choice([1, 1, 2]),
        scheduled=rng.random() < 0.5,
    )


def _build(case):
    size = dist.get_world_size()
    two = case.kind in ("fsdp+tp", "hsdp")
    mesh = sw.init_device_mesh(
        "cpu", (2, size // 2) if two else (size,), mesh_dim_names=("dp", "tp")[: 1 + two]
    )
    torch.manual_seed(0)
    if case.model == "transformer":
        model = Model(case.layers, case.dropout, case.tied)
    else:
        model = MODELS[case.model](case.layers, case.dropout)
    if case.kind in ("tp", "fsdp+tp"):
        tp = mesh["tp"] if two else mesh
        plan = model.tp_plan if case.model == "llama" else _tensor_plan(case.tied)
        sw.distribute_module(parallelize_module(model, tp, plan), tp)
    if case.kind == "sp":
        parallelize_module(model, mesh, _sequence_plan())
    if case.kind in ("fsdp", "hsdp", "fsdp+tp"):
        data = mesh["dp"] if case.kind == "fsdp+tp" else mesh
        for block in model.blocks:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
    if case.kind == "ddp":
        replicate(model, device_mesh=mesh)
    return model


def _optimizer(name, params):
    make = {
        "SGD": partial(torch.optim.SGD, lr=0.1),
        "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
        "foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    }
    return make[name](params) if name in make else getattr(torch.optim, name)(params, lr=1e-2)


def loss_of(model, x, y):
    """The loss of a batch of tokens; plain ones are the same on all ranks of a tensor-parallel group."""
    with sw.policy(plain="replicate"):
        out = model(x)
        return functional.cross_entropy(getattr(out, "logits", out).flatten(0, 1), y.flatten())


def train(case, captured, steps, passes=NONE, backend="fx"):
    """Train; returns losses, blocks of parameters, numbers of the optimizer, what was sent, reasons and programs."""
    sw.manual_seed(1)
    model = _build(case)
    optimizer = _optimizer(case.optimizer, model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    step = whole_step(
        model,
        optimizer,
        loss_of,
        accumulate=case.accumulate,
        clip_norm=case.clip_norm,
        passes=passes,
        backend=backend,
    )
    if not captured:
        step._find = lambda *_: None
    split = case.kind in ("fsdp", "ddp", "hsdp")
    # in a simulation there is one batch for all ranks
    torch.manual_seed(5 + (dist.get_rank() if split and not is_simulated() else 0))
    losses, sent, reasons = [], [], []
    for _ in range(steps * case.accumulate):
        x, y = torch.randint(0, VOCABULARY, (2, 2, SEQUENCE)).unbind(0)
        with counting() as ledger, override_settings(reuse=0):
            loss = step(x, y)
        losses.append(loss._local_tensor if isinstance(loss, sw.DTensor) else loss)
        sent.append(_multiset(ledger.entries))
        reasons.append(step.reason)
        if case.scheduled:
            scheduler.step()
    numbers = [
        float(v)
        for s in optimizer.state.values()
        for v in s.values()
        if isinstance(v, torch.Tensor) and v.dim() == 0
    ]
    tensors = [*model.parameters(), *model.buffers()]
    weights = [t._local_tensor if isinstance(t, sw.DTensor) else t.detach() for t in tensors]
    programs = step.programs
    return losses, weights, numbers, sent, reasons, programs


def _multiset(entries):
    return Counter((e.step, e.axes, e.group_size, e.bytes) for e in entries)


def compare(cases, steps=3):
    """For each case the differences between eager and captured training on this rank, as text; none if there are none."""
    found = []
    for case in cases:
        eager, captured = (train(case, c, steps) for c in (False, True))
        wrong = _differences(eager, captured)
        if eager[3] != captured[3]:
            wrong.append("what is sent differs")
        late = captured[4][case.accumulate + 1 :]
        if any(late) or not captured[5]:
            wrong.append(f"not captured: {late}")
        last = captured[5][-1]
        listed = Counter((c.kind, c.axes, c.group_size, c.bytes) for c in last.collectives)
        if listed != captured[3][-1]:
            wrong.append("the listed collectives are not those that ran")
        optimized = train(case, True, steps, EXACT)
        wrong += [f"optimized: {w}" for w in _differences(eager, optimized)]
        if sum(optimized[3][-1].values()) > sum(captured[3][-1].values()):
            wrong.append("optimized: more is sent")
        found.append(f"{case}: {', '.join(wrong)}" if wrong else "")
    return found


def _differences(eager, captured):
    wrong = []
    for name, a, b in zip(("losses", "weights"), eager, captured, strict=False):
        if not all(torch.equal(x, y) for x, y in zip(a, b, strict=True)):
            wrong.append(f"{name} differ")
    if eager[2] != captured[2]:
        wrong.append("the optimizer's numbers differ")
    return wrong


def compare_compiled(cases, steps=3):
    """The same for programs that inductor compiles, with all passes, up to rounding."""
    found = []
    for case in cases:
        eager, compiled = train(case, False, steps), train(case, True, steps, FAST, "inductor")
        wrong = [] if eager[2] == compiled[2] else ["the optimizer's numbers differ"]
        if any(compiled[4][case.accumulate + 1 :]) or not compiled[5]:
            wrong.append(f"not compiled: {compiled[4]}")
        for a, b in zip(eager[0] + eager[1], compiled[0] + compiled[1], strict=True):
            # the updates of a weight whose gradient is near 0 may have another sign
            error = (a - b).norm() / a.norm().clamp_min(1e-3)
            if not error < 2e-3:
                wrong.append(f"{tuple(a.shape)} differs by {error}")
        found.append(f"{case}: {', '.join(wrong)}" if wrong else "")
    return found
