"""Deferred initialisation: the numbers of one device, bit for bit, for every module of torch that initialises itself."""

import inspect
import os
import random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.strategies import every_factoring
from torch import nn

import shardwise as sw
from shardwise.comm import axes_of
from shardwise.layout import Axes, Factor, Layout
from shardwise.parallel import parallelize_module

ARGUMENTS = {
    "AdaptiveLogSoftmaxWithLoss": (16, 12, [3, 7]),
    "Bilinear": (3, 4, 5),
    "Embedding": (7, 6),
    "EmbeddingBag": (7, 6),
    "GroupNorm": (2, 6),
    "LayerNorm": ((5, 6),),
    "RMSNorm": ((5, 6),),
    "Linear": (5, 6),
    "MultiheadAttention": (6, 2),
    "PReLU": (6,),
    "RNNBase": ("LSTM", 3, 5),
    "RNNCellBase": (3, 5, True, 4),
    "Transformer": (6, 2, 1, 1, 7, 0.1, "relu", None, None, 1e-5, True),
}


def _initialise_themselves() -> dict[str, type[nn.Module]]:
    found = {
        name: kind
        for name, kind in vars(nn).items()
        if inspect.isclass(kind)
        and issubclass(kind, nn.Module)
        and (hasattr(kind, "reset_parameters") or hasattr(kind, "_reset_parameters"))
    }
    # lazy modules have no parameters before their first input, and then are the others
    return {name: kind for name, kind in found.items() if not name.startswith("Lazy")}


DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
MODULES = _initialise_themselves()


def build(name: str) -> nn.Module:
    kind = MODULES[name]
    if name in ARGUMENTS:
        return kind(*ARGUMENTS[name])
    if "Conv" in name:
        return kind(4, 6, 3)
    if "InstanceNorm" in name:
        return kind(6, affine=True, track_running_stats=True)
    if name in ("RNN", "LSTM", "GRU") or name.endswith("Cell"):
        return kind(3, 5)
    return kind(6)


def some_layout(shape: tuple[int, ...], axes: Axes, choose: random.Random) -> Layout:
    """A layout with any of the axes on any factor of any dim."""
    dims = [[[f, []] for f in choose.choice(list(every_factoring(n)))] for n in shape]
    factors = [f for dim in dims for f in dim]
    for axis in choose.sample(range(len(axes)), len(axes)):
        if factors and choose.random() < 0.7:
            choose.choice(factors)[1].append(axis)
    return Layout(axes, [[Factor(size, tuple(on)) for size, on in dim] for dim in dims])


def place_in_some_layouts(module: nn.Module, mesh: sw.DeviceMesh, seed: int) -> None:
    choose = random.Random(seed)
    for owner in module.modules():
        for name, t in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
            layout = some_layout(tuple(t.shape), axes_of(mesh), choose)
            placed = sw.distribute_tensor(t.detach(), mesh, layout.placements)
            setattr(owner, name, nn.Parameter(placed) if isinstance(t, nn.Parameter) else placed)


def same_bits(module: nn.Module, dense: nn.Module) -> None:
    theirs = dense.state_dict()
    for key, t in module.state_dict().items():
        assert torch.equal(t.full_tensor().ranks[-1], theirs[key]), key


@pytest.mark.parametrize("name", MODULES)
@settings(max_examples=30 if DEEP else 2, phases=[Phase.generate])  # shrinking takes minutes
@given(st.integers(0, 2**32), st.sampled_from([(3,), (2, 2)]), st.booleans())
def test_every_module_of_torch_has_the_numbers_of_one_device(name, seed, shape, by_hand):
    sw.manual_seed(11)
    with sw.one_device():
        dense = build(name)
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
        with torch.device("meta"):
            module = build(name)
        place_in_some_layouts(module, mesh, seed)
        before = dict(module.named_parameters())
        sw.manual_seed(11)
        if by_hand and hasattr(module, "reset_parameters") and not list(module.children()):
            module.to_empty(device="cpu")
            module.reset_parameters()
        else:
            sw.materialize(module)
        same_bits(module, dense)
        assert all(p is before[n] for n, p in module.named_parameters())


def test_tied_parameters_stay_one_object():
    def tied() -> nn.Module:
        embed, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        head.weight = embed.weight
        return nn.ModuleDict({"embed": embed, "head": head})

    sw.manual_seed(2)
    with sw.one_device():
        dense = tied()
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with torch.device("meta"):
            module = tied()
        parallelize_module(module, mesh, {"head": "colwise"})
        assert module["head"].weight is module["embed"].weight
        sw.manual_seed(2)
        sw.materialize(module)
        assert module["head"].weight is module["embed"].weight
        same_bits(module, dense)
        module.load_state_dict(module.state_dict())
        assert module["head"].weight is module["embed"].weight


def test_a_module_that_nothing_initialises_is_an_error():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, device="meta"))

    with pytest.raises(sw.LayoutError, match=r"(?s)scale of Own.*reset_parameters"):
        sw.materialize(Own())
