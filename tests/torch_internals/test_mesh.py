"""The private facts about meshes agree with the documented ones."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import axes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.torch_internals.mesh import (
    axis_group_names,
    innermost_mesh,
    restored_mesh_stack,
    root_mesh,
    sibling_ranks,
    split_axis,
    watch_new_meshes,
)
from shardwise.torch_internals.process_groups import fake_world


@given(axes(), st.randoms(use_true_random=False), st.data())
def test_sibling_ranks(on, rng, data):
    ranks = torch.tensor(rng.sample(range(on.count), on.count)).view(on.sizes)
    names = on.names if on.names[0] != "0" else tuple("abc"[: len(on)])
    with fake_world(on.count):
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        assert sibling_ranks(mesh) == [ranks.flatten().tolist()]
        keep = sorted(data.draw(st.sets(st.integers(0, len(on) - 1), min_size=1)))
        part = mesh[tuple(names[a] for a in keep)]
        others = [a for a in range(len(on)) if a not in keep]
        rows = ranks.permute(*others, *keep).reshape(-1, math.prod(on.sizes_of(keep))).tolist()
        assert sorted(sibling_ranks(part)) == sorted(rows)
        assert part.mesh.flatten().tolist() in sibling_ranks(part)
        assert root_mesh(part) is root_mesh(mesh) is mesh


def test_sibling_ranks_while_torch_traces():
    with fake_world(6):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
        with FakeTensorMode():
            assert sibling_ranks(mesh["a"]) == [[0, 3], [1, 4], [2, 5]]


def test_sibling_ranks_of_flattened_axes():
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        assert sibling_ranks(mesh["a", "c"]._flatten("ac")) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_names_of_groups():
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert axis_group_names(mesh) == tuple(mesh.get_group(name).group_name for name in ("a", "b"))
        assert axis_group_names(mesh["b"]) == (mesh.get_group("b").group_name,)
        assert axis_group_names(DeviceMesh("cpu", [1, 2])) == ()


def test_the_stack_of_meshes():
    with fake_world(2):
        mesh, other = (init_device_mesh("cpu", (2,)) for _ in range(2))
        assert innermost_mesh() is None
        with mesh:
            assert innermost_mesh() is mesh
            with restored_mesh_stack():
                other.__enter__()
                assert innermost_mesh() is other
            assert innermost_mesh() is mesh
            with pytest.raises(ValueError), restored_mesh_stack():  # noqa: PT011, PT012
                mesh.__exit__(None, None, None)
                raise ValueError
            assert innermost_mesh() is mesh
        assert innermost_mesh() is None


def test_new_meshes_are_seen():
    seen, before = [], DeviceMesh.__init__
    with fake_world(4):
        with watch_new_meshes(seen.append):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            part = mesh["a"]
            flat = mesh._flatten("ab")
        init_device_mesh("cpu", (4,))
    assert [any(m is s for s in seen) for m in (mesh, part, flat)] == [True] * 3
    assert len(seen) == 3
    assert DeviceMesh.__init__ is before


def test_a_replacement_of_init_by_others_is_kept(monkeypatch):
    original, seen = DeviceMesh.__init__, []
    monkeypatch.setattr(DeviceMesh, "__init__", original)
    with watch_new_meshes(seen.append):
        ours = DeviceMesh.__init__

        def theirs(self, *args, **kwargs):
            ours(self, *args, **kwargs)

        DeviceMesh.__init__ = theirs
    assert DeviceMesh.__init__ is theirs
    with fake_world(2):
        init_device_mesh("cpu", (2,))
    assert seen == []


def test_an_axis_is_divided():
    with fake_world(8):
        root = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        both = split_axis(root, 0, (2, 2), ("outer", "inner"))
        assert both.mesh_dim_names == ("outer", "inner", "tp")
        assert both.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        assert sibling_ranks(split_axis(root["dp"], 0, (2, 2), ("outer", "inner"))) == [
            [0, 2, 4, 6],
            [1, 3, 5, 7],
        ]
