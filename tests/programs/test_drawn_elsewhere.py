"""Programs that drew a difference from one device in generators other than those in this folder."""

from __future__ import annotations

import pytest
from tests.programs.side_by_side import run_program, simulated_mesh

PROGRAMS = {
    "a copy to the same elements of an expanded tensor": """
        x = make((5,), L)
        v = x.expand(3, 5)
        u = x.expand(3, 5)
        u.copy_(v)
        u[:1].copy_(v[-1:])
        z = x[::2].expand(2, 3)
        z.copy_(x[::2].expand(2, 3))
        z.copy_(x[1:4].expand(2, 3))
        u.copy_(x.clone().expand(3, 5))""",
    "a copy in another shape is contiguous": """
        x = make((5, 25), L, grad=True)
        y = torch.view_copy(x.T, (5, 5, 5))
        z = y.flatten()
        with torch.no_grad(): z.mul_(2)
        a = torch.unsqueeze_copy(x.T, 0)
        b = torch.squeeze_copy(x.T[None])""",
    "strides of the parts of complex numbers": """
        z = make((4, 3), L, 'complex128', grad=True)
        k = torch.view_as_real(z * 1)
        q = k.as_strided((4,), (2,), 3)
        (q * q).sum().backward()
        u = (z * 1)[1:].imag.as_strided((2,), (2,))
        u.add_(1)
        x = make((4, 2), L, 'float32')
        c = torch.view_as_complex(x)
        d = c.as_strided((2,), (2,), 1)
        d.mul_(2)
        i = x.view(torch.int32).as_strided((3,), (1,), 2)""",
    "the same memory in another shape is no overlap": """
        x = make((3, 4), L)
        s = x.as_strided((12,), (1,))
        v = x.detach().view(-1)
        v.addcmul_(s, s, value=0.5)
        s.add_(v)
        x.view(-1).add_(s)""",
    "resizing one of several views to its own size": """
        x = make((4, 2, 2), L, grad=True)
        v = [t for t in x[::2]][-1]
        with torch.inference_mode(): v.resize_as_(v)
        with torch.no_grad(): v.mul_(0.5)""",
    "strides of batch norms": """
        x = make((5, 4, 6), 'R').transpose(0, 2)
        m = make((4,), L)
        v = make((4,), L).abs() + 1
        w = make((4,), 'R')
        y = torch.nn.functional.batch_norm(x, m, v, w, w, True)
        z = torch._native_batch_norm_legit(x, w, w, m, v, True, 0.5, 0.6)
        u = torch._batch_norm_no_update(x, w, w, m, v, 0.5, 0.6)""",
    "strides of isin": """
        x = make((6, 5), L, 'int64').mT
        e = make((3,), L, 'int64')
        y = torch.isin(x, e)
        z = y.contiguous().view(-1)""",
    "a vander matrix of one column does not depend on its values": """
        x = make((4,), L, grad=True)
        a = torch.vander(x, 1)
        b = torch.vander(x[:1])
        c = torch.vander(x, 0)
        d = torch.vander(x, 3, increasing=True)""",
}


@pytest.mark.parametrize("layout", ["0", "R", "P"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, layout):
    lines = [
        line.strip().replace("L,", f"{layout!r},").replace("L)", f"{layout!r})")
        for line in PROGRAMS[name].strip().split("\n")
    ]
    with simulated_mesh((3,)) as mesh:
        run_program(lines, mesh)
