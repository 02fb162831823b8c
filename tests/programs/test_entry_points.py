"""The same method called in other ways than `x.name()`: by its op, by `torch.Tensor`, in inference mode, on a view that is a leaf."""

from __future__ import annotations

import pytest
from tests.programs.side_by_side import run_program, sides, simulated_mesh

BY_STRIDES = {
    "as_strided": ("x.as_strided", "torch.as_strided", "torch.Tensor.as_strided", "torch.ops.aten.as_strided"),
    "as_strided_scatter": (
        "torch.as_strided_scatter", "torch.Tensor.as_strided_scatter", "torch.ops.aten.as_strided_scatter.default",
    ),
    "as_strided_copy": ("torch.as_strided_copy", "torch.ops.aten.as_strided_copy"),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["0", "1", "R"])
@pytest.mark.parametrize("function", [f for fs in BY_STRIDES.values() for f in fs])
def test_offsets_count_in_the_memory_of_the_base(function, layout):
    source = "v, " if not function.startswith("x.") else ""
    values = "make((2, 2), 'R', seed=1), " if "scatter" in function else ""
    lines = [
        f"x = make((3, 10), {layout!r})",
        "v = x[1]",
        f"y = {function.replace('x.', 'v.')}({source}{values}(2, 2), (1, 2), 0)",
        f"z = {function.replace('x.', 'v.')}({source}{values}(2, 2), (1, 2), storage_offset=12)",
        f"w = {function.replace('x.', 'v.')}({source}{values}(2, 2), (1, 2))",
        "check()",
        "y.mul_(2)",
        "check()",
        "x.mul_(3)",
        "z.mul_(2)",
    ]
    with simulated_mesh((2,)) as mesh:
        run_program(lines, mesh)


@pytest.mark.parametrize("layout", ["0", "1", "R"])
def test_strides_of_the_row_before(layout):
    with simulated_mesh((2,)) as mesh:
        lines = [f"x = make((3, 4), {layout!r})", "y = x[1].as_strided((4,), (1,), 0)", "y.add_(1)"]
        run_program(lines, mesh)


@pytest.mark.parametrize("layout", ["0", "1", "R"])
def test_gradients_of_strides_reach_a_view_that_is_a_leaf(layout):
    with simulated_mesh((2,)) as mesh:
        lines = [
            f"x = make((4, 4), {layout!r})",
            "v = x.mT[1:].mT",
            "w = x[1:]",
            "w.requires_grad_()",
            "y = w.as_strided((2,), (5,))",
            "(y * y).sum().backward()",
            "z = w.as_strided((2, 2), (5, 1), 5)",
            "(z * z).sum().backward()",
            "s = w.as_strided_scatter(y.detach(), (2,), (5,))",
            "(s * s).sum().backward()",
        ]
        run_program(lines, mesh)


def test_gradients_of_strides_outside_of_a_leaf_are_refused():
    with simulated_mesh((2,)) as mesh:
        _, distributed = sides(mesh)
        for line in ("x = make((4, 4), '0')", "w = x[1:].requires_grad_()"):
            assert distributed.run(line) is None
        error = distributed.run("w.as_strided((2,), (5,), 0)")
        assert isinstance(error, RuntimeError)
        assert "fix: " in str(error)
        assert distributed.run("w.detach().as_strided((2,), (5,), 0)") is None


@pytest.mark.parametrize(
    "change", ["t_()", "transpose_(0, -1)", "unsqueeze_(0)", "squeeze_()", "resize_as_(x)"]
)
def test_shapes_change_in_inference_mode(change):
    with simulated_mesh((2,)) as mesh:
        lines = ["x = make((4, 3), '0', grad=True)", f"with torch.inference_mode(): x.{change}"]
        run_program(lines, mesh)
        lines = ["y = make((2, 4, 3), '0', grad=True)", "with torch.no_grad(): x = y[1]"]
        run_program([*lines, f"with torch.inference_mode(): x.{change}"], mesh)
