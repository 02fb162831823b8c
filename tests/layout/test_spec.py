import copy
import enum
import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import layouts

from shardwise.layout import Axes, Spec, TensorMeta, dtype_text, parse_layout

ON = Axes((2, 2), ("dp", "tp"))


class Mesh(enum.Enum):
    """Stand-ins for meshes: a member of an enum unpickles to the same object."""

    A = 1
    B = 2


class AnyMesh:
    """A mesh that equals every other."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


def spec_of(layout, mesh=Mesh.A, dtype=torch.float32, stride=None):
    shape = torch.Size(layout.shape)
    return Spec(
        mesh, layout, dtype, shape, torch.empty(shape, device="meta").stride() if stride is None else stride
    )


def parse(text):
    return parse_layout(text, ON)[0]


@given(layouts(), st.sampled_from(Mesh), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_specs_are_interned(layout, mesh, dtype):
    spec = spec_of(layout, mesh, dtype)
    assert spec_of(layout, mesh, dtype) is spec
    assert copy.copy(spec) == spec
    assert copy.deepcopy([spec])[0] is spec
    assert pickle.loads(pickle.dumps(spec)) is spec
    assert spec.with_layout(layout) is spec
    assert spec.with_dtype(dtype) is spec


@given(layouts())
def test_a_spec_has_everything_but_the_data(layout):
    spec = spec_of(layout)
    assert spec.mesh is spec.device_mesh is Mesh.A
    assert spec.layout is layout
    assert spec.placements == layout.placements
    assert type(spec.shape) is torch.Size
    assert spec.shape == layout.shape
    assert spec.ndim == layout.ndim
    assert spec.tensor_meta == TensorMeta(spec.shape, spec.stride, torch.float32)


def test_specs_that_differ_in_one_part_differ():
    layout = parse("[8:dp, 6]")
    different = [
        spec_of(layout),
        spec_of(layout, Mesh.B),
        spec_of(layout, dtype=torch.float64),
        spec_of(layout, stride=(1, 8)),
        spec_of(parse("[8, 6:dp]")),
        spec_of(parse("[8:dp, 6] P(tp,sum)")),
    ]
    assert len(set(different)) == len(different)
    assert all((a == b) == (a is b) for a in different for b in different)


def test_meshes_are_compared_by_identity():
    a, b = AnyMesh(), AnyMesh()
    layout = parse("[8:dp]")
    assert spec_of(layout, a) is spec_of(layout, a)
    assert spec_of(layout, a) is not spec_of(layout, b)
    assert spec_of(layout, b).mesh is b
    spec = spec_of(layout, a)
    assert copy.deepcopy(spec) == copy.copy(spec) == spec


def test_specs_are_hashed_by_identity():
    assert Spec.__hash__ is object.__hash__
    a, b = spec_of(parse("[8:dp]")), spec_of(parse("[8]"))
    assert a.__eq__(a) is True
    assert a.__eq__(b) is False


def test_layout_and_dtype_can_be_replaced():
    spec = spec_of(parse("[8:dp, 6]"))
    assert spec.with_layout(parse("[8, 6:tp]")) is spec_of(parse("[8, 6:tp]"))
    assert spec.with_layout(parse("[8, 6:tp]"), (1, 8)) is spec_of(parse("[8, 6:tp]"), stride=(1, 8))
    assert spec.with_dtype(torch.int32) is spec_of(parse("[8:dp, 6]"), dtype=torch.int32)


def test_a_spec_cannot_be_changed():
    spec = spec_of(parse("[8:dp]"))
    for name in ("mesh", "layout", "dtype", "shape", "stride", "placements", "tensor_meta", "other"):
        with pytest.raises(AttributeError):
            setattr(spec, name, None)
        with pytest.raises(AttributeError):
            delattr(spec, name)
    assert spec_of(parse("[8:dp]")) is spec


def test_unused_specs_are_freed():
    mesh = AnyMesh()
    spec, known = weakref.ref(spec_of(parse("[8:dp]"), mesh)), weakref.ref(mesh)
    del mesh
    gc.collect()
    assert spec() is None
    assert known() is None


def test_a_spec_prints_as_its_layout_and_dtype():
    spec = spec_of(parse("[8:dp, 6] P(tp,sum)"), dtype=torch.bfloat16)
    assert str(spec) == "bf16[8:dp, 6] P(tp,sum)"
    assert repr(spec) == "Spec(bf16[8:dp, 6] P(tp,sum) on dp=2, tp=2)"
    assert parse_layout(str(spec), ON) == (spec.layout, "bf16")


DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def test_every_dtype_of_torch_has_a_unique_short_name_that_parses():
    names = [dtype_text(d) for d in DTYPES]
    assert len(set(names)) == len(DTYPES)
    for name in names:
        assert parse_layout(f"{name}[8:dp]", ON) == (parse("[8:dp]"), name)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "f32"),
        (torch.bfloat16, "bf16"),
        (torch.int64, "i64"),
        (torch.uint8, "u8"),
        (torch.bool, "bool"),
        (torch.complex64, "c64"),
        (torch.float8_e5m2, "f8_e5m2"),
    ],
)
def test_examples_of_short_names(dtype, name):
    assert dtype_text(dtype) == name
