"""Statements with one op of tensors: pointwise, reductions, matrices, networks, rearrangements, indexing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.programs.drawing import Drawing, template
from torch import Tensor

_PATTERNS: dict[str, tuple[str, ...]] = {
    # kind and least number of dims: patterns; x a tensor, y one that broadcasts, s one of the same shape,
    # d a dim, e another, i an index of d, k 0 to 3, v a small number
    "f0": (
        "{x}.exp().clamp(max=20)", "{x}.tanh()", "{x}.sigmoid()", "{x}.sin()", "{x}.abs().sqrt()", "{x}.square()",
        "{x}.neg()", "F.relu({x})", "F.gelu({x})", "F.silu({x})", "F.softplus({x})", "F.leaky_relu({x}, 0.1)",
        "{x}.clamp(-0.5, 0.5)", "{x}.erf()", "{x}.abs().log1p()", "{x}.round()", "{x}.frac()", "{x}.sign()", "{x}.floor()",
        "torch.where({x} > 0, {x}, {y})", "torch.lerp({x}, {s}, 0.3)", "torch.addcmul({x}, {s}, {s}, value=0.5)",
        "{x} / ({y}.abs() + 1)", "torch.maximum({x}, {y})", "torch.fmod({x}, 0.7)", "torch.atan2({x}, {y})",
        "torch.hypot({x}, {y})", "torch.special.xlogy({x}, {y}.abs() + 0.5)", "{x}.nan_to_num()", "{x}.to(torch.float32)",
        "{x}.double()", "{x}.to(torch.int64)", "{x}.abs().pow({v})", "{x} ** 2", "{x}.mean()", "{x}.std()", "{x}.norm()",
        "torch.linalg.vector_norm({x}, ord=1)", "{x}.aminmax()[0]", "F.mse_loss({x}, {s})", "F.smooth_l1_loss({x}, {s})",
        "F.mse_loss({x}, {s}, reduction='none')", "{x}.masked_fill({x} > 0.3, {v})", "torch.complex({x}, {x})",
        "F.binary_cross_entropy_with_logits({x}, {s}.sigmoid())", "F.kl_div({x}, {s}.abs() + 0.1, reduction='sum')",
        "{x}.isfinite()", "torch.nanmean({x})", "F.huber_loss({x}, {s})", "torch.signbit({x})", "torch.heaviside({x}, {y})",
    ),
    "m0": (
        "{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} + {v}", "{v} * {x}", "{x}.sum()", "{x} * 2 - 1", "{x} == {y}",
        "torch.add({x}, {y}, alpha=2)", "{x}.prod()", "{x}.reshape(-1)", "{x}.flatten()", "{x}.clone()", "{x}.contiguous()",
        "{x}.detach()", "{x}.detach().clone()", "torch.zeros_like({x})", "torch.ones_like({x}) * {v}", "{x}.new_zeros({x}.shape)",
        "{x}.ne(0)", "{x}.expand(2, *{x}.shape)", "{x}.unsqueeze(0)", "{x}.unsqueeze(-1)", "{x}.count_nonzero()",
        "{x}.view({x}.shape)", "{x}.squeeze()", "{x}.view(-1)", "{x}.expand_as({x})", "torch.broadcast_to({x}, (2, *{x}.shape))",
        "{x}.reshape({x}.shape + (1,))", "torch.tensor_split({x}.reshape(-1), 3)[{k} % 3]", "{x}.ravel()",
    ),
    "n0": (
        "{x}.detach().max()", "{x}.detach().min()", "{x} > {y}", "{x}.clamp(min=0)", "{x} // 2", "{x}.remainder(3)", "{x}.float()", "{x}.amax()",
        "torch.minimum({x}, {y})", "{x}.argmax()", "{x}.bool()", "({x} > 0).any()", "{x}.clamp({s}, None)", "{x}.abs().amax()",
        "{x}.sort(stable=True).values", "torch.isclose({x}, {y})", "{x}.msort()",
    ),
    "i0": ("{x} & 3", "{x} | {y}", "{x} << 1", "{x} / 2", "{x}.double() * 0.25", "{x}.to(torch.complex128)", "{x} % 3", "{x} ^ {y}"),
    "b0": ("~{x}", "{x} & {y}", "{x}.all()", "{x}.any()", "{x}.sum()", "{x}.long()", "{x} | {y}", "{x}.double()", "{x} ^ {y}",
           "torch.where({x}, 1.0, 0.5)", "{x}.logical_not()", "{x}.nonzero()"),
    "b1": ("{x}.any({d})", "{x}.all({d})", "{x}.sum({d})", "{x}.cumsum({d})", "{x}.float().mean({d})"),
    "c0": (
        "{x}.real", "{x}.imag", "{x}.conj()", "{x}.abs()", "{x}.angle()", "torch.view_as_real({x})", "{x}.conj() * {x}",
        "{x}.conj().resolve_conj()", "{x} * 1j", "{x}.exp()", "{x}.real + {x}.imag", "{x}.conj().imag",
    ),
    "c1": ("torch.fft.ifft({x}, dim={d}).real", "{x}.mean({d})", "{x}.cumsum({d})", "torch.fft.fft({x}, dim={d})"),
    "f1": (
        "{x}.softmax({d})", "{x}.log_softmax({d})", "{x}.mean({d})", "{x}.mean({d}, keepdim=True)", "{x}.var({d}, correction=0)",
        "{x}.std({d}, correction=0)", "{x}.logsumexp({d})", "{x}.norm(dim={d})", "F.normalize({x}, dim={d})", "{x}.contiguous().median({d}).values",
        "F.layer_norm({x}, {x}.shape[-1:])", "F.layer_norm({x}, {x}.shape[-1:], {w}, {b})", "F.rms_norm({x}, {x}.shape[-1:], {w})",
        "{x}.cumprod({d})", "{x}.renorm(2, {d}, 1.0)", "{x}.quantile(0.3, dim={d})", "F.glu(torch.cat([{x}, {x}], {d}), {d})",
        "{x}.logcumsumexp({d})", "{x}.diff(dim={d})", "torch.trapezoid({x}, dim={d})", "torch.fft.rfft({x}, dim={d}).abs()",
        "torch.fft.fft({x}, dim={d})", "F.softmin({x}, {d})", "F.pad({x}, (1, 2))",
        "F.pad({x}, (1, 0), value=0.5)", "F.pad({x}, (-1, 1))", "{x}.nansum({d})", "{x}.var_mean({d})[0]", "F.hardtanh({x})",
        "F.cosine_similarity({x}, {s}, dim={d})", "{x}.cummax({d}).values", "torch.linalg.vector_norm({x}, 3, {d})",
    ),
    "m1": (
        "{x}.sum({d})", "{x}.sum({d}, keepdim=True)", "{x}.cumsum({d})", "{x}.flip({d})", "{x}.roll({k}, {d})", "{x}.roll({k})",
        "torch.cat([{x}, {s}], {d})", "torch.cat([{x}, {s}, {x}], {d})", "torch.stack([{x}, {s}], {d})", "{x}.split(2, {d})[{k} % 1]",
        "{x}.chunk(2, {d})[0]", "{x}.chunk(3, {d})[-1]", "{x}.repeat_interleave(2, {d})", "{x}.select({d}, {i})",
        "{x}.narrow({d}, {i}, 1)", "{x}[..., {j}]", "{x}[{k}:]", "{x}[::2]", "{x}[..., 1:]", "{x}[..., ::2]", "{x}[..., None]",
        "{x}.index_select({d}, {ix})", "{x}.movedim({d}, 0)", "{x}.movedim(0, {d})", "{x}.prod({d})", "{x}.unflatten({d}, (-1, 1))",
        "{x}.unfold({d}, 2, 1)", "{x}.unfold({d}, 1, 1)", "{x}.unbind({d})[{i}]", "{x}[{ix0}]", "torch.hstack([{x}, {s}])",
        "torch.vstack([{x}, {s}])", "{x}.flipud()",
        "{x}.repeat(2, *[1] * ({x}.dim() - 1))", "{x}.tile(2)", "torch.gather({x}, {d}, {ixs})", "{x}.take({ixs})",
        "torch.zeros_like({x}).scatter_add({d}, {ixs}, {x})", "{x}.scatter({d}, {ixs}, {v})", "{x}.index_add({d}, {ix}, {xd})",
        "{x}.unsqueeze({d})", "{x}.squeeze({d})", "{x}.select_scatter({x}.select({d}, 0), {d}, {i})", "{x}.slice_scatter({x}[..., :1], -1, 0, 1)",
        "torch.diag_embed({x})", "{x}.diff(dim={d})", "{x}.scatter_reduce({d}, {ixs}, {x}, 'sum')", "{x}.index_copy({d}, {ixu}, {xd})",
        "{x}.index_fill({d}, {ix}, {v})", "{x}.masked_select({x} != {v})", "{x}.tensor_split(2, {d})[1]",
    ),
    "n1": (
        "{x}.max({d}).values", "{x}.argmax({d})", "{x}.argmin({d}, keepdim=True)", "{x}.amax({d})", "{x}.amin({d}, keepdim=True)",
        "{x}.sort({d}).values", "{x}.sort({d}, descending=True, stable=True).values", "{x}.topk(1, {d}).values", "{x}.topk(2, {d}).values",
        "{x}.cummin({d}).values", "{x}.kthvalue(1, {d}).values", "{x}.argsort({d}, stable=True)", "{x}[{x} > 0]",
        "torch.searchsorted({x}.sort(-1).values, {x})", "torch.where({x} > 0)[0]", "{x}.nonzero()", "{x}.unique()",
        "{x}.scatter_reduce({d}, {ixs}, {x}, 'amax')", "torch.bucketize({x}, torch.zeros_like({x}).flatten()[:1])",
        "{x}.isin({x}.flatten()[:2])", "{x}.amax({d}, keepdim=True)",
    ),
    "m2": (  # kron of copies: torch does not notice writes to what its kron saves for the backward pass
        "{x}.t()", "{x}.transpose({d}, {e})", "{x}.mT", "{x} @ {x}.mT", "{x}.transpose(-1, -2)", "{x}.triu()", "{x}.tril(-1)",
        "{x}.diagonal()", "{x}.sum(({d}, {e}))", "{x}.flatten(0, 1)", "{x}.flatten(-2)", "{x}[:, {k}]", "{x}[:, 1:]", "{x}[1:, ::2]",
        "{x}.diagonal(1)", "{x}.rot90()", "{x}[..., 1:, :-1]", "{x}.mT.contiguous()", "{x}.mT.reshape(-1)", "{x}.trace()",
        "torch.einsum('...ij,...kj->...ik', {x}, {x})", "torch.einsum('...ij->...', {x})", "torch.einsum('ab...->ba...', {x})",
        "{x}[:, {ix1}]", "{x}[0, {ix1}]", "{x}.permute(*range({x}.dim())[::-1])", "torch.kron({x}[:1].clone(), {x}[:1].clone())",
        "{x}.roll((1, 2), (0, 1))", "{x}.flip((0, 1))", "torch.outer({x}.reshape(-1)[:3], {x}.reshape(-1)[:4])", "{x}.swapaxes(0, 1)",
        "{x}.mT @ {x}", "{x}.diag_embed().sum(-1)",
    ),
    "f2": (
        "F.linear({x}, {x})", "torch.linalg.matrix_norm({x})", "{x}.softmax(-1) @ {x}.mT", "F.linear({x}, {wn})", "F.linear({x}, {wn}, {bn})",
        "torch.baddbmm({x} @ {x}.mT, {x}, {x}.mT)", "torch.cdist({x}, {x} + 1)", "{x}.mT.softmax({d})", "F.scaled_dot_product_attention({x}, {x}, {x})",
        "F.scaled_dot_product_attention({x}, {x}, {x}, is_causal=True)", "F.layer_norm({x}, {x}.shape[-2:])", "torch.addmm({bn}, {x}, {wn}.t())",
        "F.cross_entropy({x}, {cls})", "F.nll_loss({x}.log_softmax(1), {cls})", "F.cross_entropy({x}, {cls}, reduction='none')",
        "F.batch_norm({x}, None, None, training=True)", "F.avg_pool1d({x}, 2)", "F.max_pool1d({x}, 2)", "F.instance_norm({x}[None])",
        "F.group_norm({x}, 1)", "{x}.cov()", "{x}.mT.cumsum({d})", "F.embedding({cls} % {x}.shape[0], {x})", "F.interpolate({x}[None], scale_factor=2)",
        "F.embedding_bag({cls}[None] % {x}.shape[0], {x}, mode='sum')", "{x}.var(({d}, {e}))",
        "F.gaussian_nll_loss({x}, {s}, {s}.abs() + 1)", "F.cross_entropy({x}, {cls}, label_smoothing=0.1)",
    ),
    "f3": (
        "{x} @ {x}.mT", "torch.bmm({x}, {x}.mT)", "F.conv1d({x}, {conv})", "F.conv1d({x}, {conv}, padding=1)", "F.conv1d({x}, {conv}, stride=2, padding=1)",
        "F.avg_pool1d({x}, 2, 1)", "F.max_pool2d({x}, 2, 1)", "F.avg_pool2d({x}, 2)", "torch.einsum('bij,bkj->bik', {x}, {x})",
        "torch.einsum('bij,bij->b', {x}, {s})", "torch.einsum('bij,kij->bk', {x}, {x})", "F.batch_norm({x}, None, None, training=True)",
        "F.group_norm({x}, 1)", "{x}.permute(2, 0, 1)", "{x}.permute(1, 2, 0)", "{x}.flatten(1)", "F.scaled_dot_product_attention({x}, {x}, {x})",
        "F.interpolate({x}, scale_factor=2, mode='linear')", "F.adaptive_avg_pool1d({x}, 2)", "torch.linalg.matrix_norm({x})", "{x}.sum((0, 2))",
        "F.pad({x}, (1, 1), mode='reflect')", "F.pad({x}, (1, 1), mode='replicate')", "F.pad({x}, (1, 1), mode='circular')",
        "F.conv_transpose1d({x}, {convt})", "F.unfold({x}[None], 2)", "F.conv1d({x}, {conv}, dilation=2, padding=2)", "F.lp_pool1d({x}.abs() + 0.1, 2, 2)",
        "F.instance_norm({x})", "F.local_response_norm({x}, 2)", "torch.tensordot({x}, {x}, ([0, 1], [0, 1]))",
    ),
}  # fmt: skip

_INPLACE: dict[str, tuple[str, ...]] = {
    "m0": ("{x}.add_({y})", "{x}.mul_(2)", "{x}.zero_()", "{x}.sub_({v})", "{x}.copy_({y})", "{x}.neg_()", "{x} += {y}", "{x} *= {s}",
           "{x}.fill_({v})", "{x}.view(-1).add_(1)", "{x}.data.add_(1)", "{x}.detach().mul_(2)", "torch.add({s}, 1, out={x}.detach())",
           "{x}.copy_({x} * 2)", "{x}.masked_fill_({x} == {v}, 1)", "{x}.add_({x})"),
    "f0": ("{x}.clamp_(-1, 1)", "{x}.tanh_()", "{x}.addcmul_({s}, {s})", "{x}.lerp_({s}, 0.25)", "F.relu_({x})", "{x}.exp_().clamp_(max=4)",
           "{x}.div_(2)", "{x}.masked_fill_({x} > 0, {v})", "{x}.sigmoid_()", "F.relu({x}, inplace=True)", "torch._foreach_mul_([{x}, {s}], 0.5)",
           "torch._foreach_add_([{x}], [{s}])", "{x}.grad = None"),
    "m1": ("{x}[0] = {v}", "{x}[{k}:] = {v}", "{x}[..., 0].add_(1)", "{x}[1:].mul_(2)", "{x}[::2] = 0", "{x}.select({d}, {i}).zero_()",
           "{x}.narrow({d}, {i}, 1).fill_({v})", "{x}[{ix0}] = {v}", "{x}.index_add_({d}, {ix}, {xd})", "{x}.scatter_({d}, {ixs}, {v})",
           "{x}.index_fill_({d}, {ix}, {v})", "{x}.scatter_add_({d}, {ixs}, {s})", "{x}[{x} == {v}] = 0", "{x}.unbind({d})[{i}].add_(1)",
           "{x}.flip({d}).add_(1)", "{x}[..., 1:] += 1", "{x}[0] += {x}[-1]", "{x}.chunk(2, {d})[0].mul_(3)", "{x}.cumsum_({d})", "{x}[{k} % 2, ...] = {x}[0] * 2",
           "{x}.index_put_(({ix0},), {x}[{ix0}].detach() * 2)", "{x}.expand(2, *{x}.shape)[0].add_(1)", "{x}.masked_scatter_({x} == {v}, {s})",
           "{x}.index_copy_({d}, {ixu}, {xd})", "{x}[...] = {y}", "{x}[{ix0}] += 1", "{x}.unfold({d}, 2, 2).zero_()", "{x}.reshape(-1)[0:2].zero_()"),
    "m2": (  # kron of copies: torch does not notice writes to what its kron saves for the backward pass"{x}.t().add_(1)", "{x}.mT[0] = {v}", "{x}[:, 1:].zero_()", "{x}.diagonal().fill_({v})", "{x}[:, {k}] = {v}", "{x}.triu_()",
           "{x}.transpose({d}, {e}).mul_(2)", "{x}[1:, 1:] += {x}[:-1, :-1].clone()", "{x}.fill_diagonal_(0)", "{x}.flatten(0, 1)[1] = {v}", "{x}[:, 0].copy_({x}[:, -1])"),
    "f1": ("{x}.requires_grad_()", "{x}.detach_()", "{x}.requires_grad_(False)", "{x}.renorm_(2, {d}, 1.0)"),
    "i0": ("{x}.remainder_(3)", "{x} &= 3", "{x} //= 2"),
    "b0": ("{x}.logical_not_()", "{x} &= {y}", "{x} |= {x}"),
    "c0": ("{x}.real.mul_(2)", "{x}.conj().mul_(1j)", "{x}.imag.zero_()", "torch.view_as_real({x})[..., 0] = 1"),
}  # fmt: skip

_NUMBERS = (
    "{x}.sum().item()", "{x}.tolist()", "tuple({x}.shape)", "{x}.numel()", "bool(({x} == {x}).all())", "[s for s, n in zip({x}.stride(), {x}.shape) if n > 1 and {x}.numel()]",
    "torch.equal({x}, {x})", "torch.allclose({x}, {x} + 0)", "len({x})", "{x}.is_contiguous()", "float({x}.sum())", "{x}.dim()",
    "torch.equal({x}, {s})", "{x}.max().item()",
)  # fmt: skip

_LATER = ("0.5", "2", "-1", "0.25", "1")


def fill_pattern(d: Drawing, pattern: str, x: str) -> str | None:
    """A pattern with its placeholders filled; None if the tensor has no dim of the needed kind."""
    t = d[x]
    if ("{ix" in pattern and not t.numel()) or (".data" in pattern and t.is_inference()):
        return None  # torch takes any index then; `data` of a subclass is an inference tensor, that of a plain one is not
    values: dict[str, object] = {
        "x": x,
        "v": d.rng.choice(_LATER if t.is_floating_point() else ("2", "-1", "1")),
    }
    values["k"] = d.rng.randrange(4)
    if "{y}" in pattern:
        values["y"] = d.broadcastable(x)
    if "{s}" in pattern:
        values["s"] = d.like(x)
    if t.dim():
        dim = d.dim(x)
        size = t.shape[dim]
        values |= {"d": dim, "i": d.rng.randrange(max(size, 1)), "j": d.rng.randrange(max(t.shape[-1], 1))}
        others = [e for e in range(t.dim()) if e != dim % t.dim()]
        values["e"] = d.rng.choice(others) if others else 0
        _fill_operands(d, pattern, x, dim, values)
    try:
        return pattern.format(**values)
    except KeyError:
        return None


def _fill_operands(d: Drawing, pattern: str, x: str, dim: int, values: dict[str, object]) -> None:
    t = d[x]
    dtype, shape = str(t.dtype)[6:], list(t.shape)
    if "{ix}" in pattern or "{ixu}" in pattern or "{xd}" in pattern:
        n = d.rng.choice((1, 2, 3))
        values["ix"] = values["ixu"] = d.indices([n], shape[dim])
        if "{ixu}" in pattern:
            values["ixu"] = name = d.new()
            n = min(n, shape[dim])
            d.run(
                f"{name} = torch.randperm(0).new_zeros(0)"
                if n == 0
                else f"{name} = put(({n},), 'int64', 1, '[{n}]') * 0 + put(({n},), 'int64', 1, '[{n}]').argsort(stable=True)"
            )
        shape[dim] = n
        values["xd"] = d.fresh(shape, dtype)
    if "{ixs}" in pattern:
        values["ixs"] = d.indices(t.shape, min(t.shape) if "take(" not in pattern else t.numel())
    if "{ix0}" in pattern:
        values["ix0"] = d.indices(d.rng.choice(([2], [3], [2, 2])), t.shape[0])
    if "{ix1}" in pattern and t.dim() > 1:
        values["ix1"] = d.indices([3], t.shape[1])
    if "{w}" in pattern or "{b}" in pattern:
        values["w"], values["b"] = d.fresh(t.shape[-1:], dtype), d.fresh(t.shape[-1:], dtype)
    if "{wn}" in pattern or "{bn}" in pattern:
        n = d.rng.choice(d.sizes)
        values["wn"], values["bn"] = d.fresh([n, t.shape[-1]], dtype), d.fresh([n], dtype)
    if "{cls}" in pattern and t.dim() == 2:
        values["cls"] = d.indices([t.shape[0]], t.shape[1])
    if "{conv}" in pattern and t.dim() == 3:
        values["conv"] = d.fresh([d.rng.choice((2, 3)), t.shape[1], d.rng.choice((1, 2, 3))], dtype)
    if "{convt}" in pattern and t.dim() == 3:
        values["convt"] = d.fresh([t.shape[1], 2, 2], dtype)


def has_no_overlap(t: Tensor) -> bool:
    """Whether each element has memory of its own; what a write to others does depends on the order of the kernel."""
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(t.shape, t.stride(), strict=True):
        places = places[..., None] + torch.arange(size) * stride
    return places.unique().numel() == t.numel()


def _from(
    table: dict[str, tuple[str, ...]], d: Drawing, where: Callable[[Tensor], bool] | None = None
) -> tuple[str, str] | None:
    """A pattern of the table and a tensor for it."""
    keys = list(table)
    kind = d.rng.choices(keys, [len(table[k]) for k in keys])[0]
    x = d.pick(kind[0], int(kind[1]), where)
    return None if x is None else (d.rng.choice(table[kind]), x)


def expression(d: Drawing) -> str | None:
    """An expression of one op or a few."""
    found = _from(_PATTERNS, d)
    return None if found is None else fill_pattern(d, *found)


@template(14)
def op(d: Drawing) -> str | None:
    code = expression(d)
    return code and f"{d.new()} = {code}"


@template(2)
def op_under_mode(d: Drawing) -> str | None:
    mode = d.rng.choice(
        ("torch.no_grad()", "torch.no_grad()", "torch.inference_mode()", "torch.enable_grad()")
    )
    code = expression(d)
    return code and f"with {mode}:\n    {d.new()} = {code}"


@template(4)
def write(d: Drawing) -> str | None:
    found = _from(_INPLACE, d, has_no_overlap)
    code = found and fill_pattern(d, *found)
    if not code:
        return None
    mode = d.rng.random()
    if mode < 0.45:
        return f"with torch.no_grad():\n    {code}"
    return f"with torch.inference_mode():\n    {code}" if mode < 0.5 else code


@template(2)
def write_to_copy(d: Drawing) -> str | None:
    """A write to a tensor that is not a leaf, which autograd records."""
    x = d.pick("m")
    if x is None:
        return None
    y = d.new()
    d.run(f"{y} = {x}.clone()")
    if y not in d.env:
        return None
    kinds = [
        k
        for k in _INPLACE
        if int(k[1]) <= d[y].dim() and (k[0] == "m" or (k[0] == "f" and d[y].is_floating_point()))
    ]
    return fill_pattern(d, d.rng.choice(_INPLACE[d.rng.choice(kinds)]), y)


@template(3)
def view(d: Drawing) -> str | None:
    """A view, for later writes to it or to its base."""
    x = d.pick("a", 1)
    patterns = (
        "{x}[{k} % 2:]", "{x}[0]", "{x}.t()", "{x}.transpose(0, -1)", "{x}.view(-1)", "{x}.flatten()", "{x}[..., 0]", "{x}.narrow({d}, 0, 1)",
        "{x}.unsqueeze({d})", "{x}.diagonal()", "{x}.chunk(2, {d})[1]", "{x}.expand(2, *{x}.shape)", "{x}[::2]", "{x}[..., 1:]", "{x}.detach()",
        "{x}.unfold({d}, 2, 1)", "{x}.squeeze()", "{x}.select({d}, -1)", "{x}.movedim(0, -1)", "{x}.view_as({x})", "{x}.unflatten({d}, (-1, 2))",
        "{x}.unflatten({d}, (2, -1))", "{x}.permute(*range({x}.dim())[::-1])", "{x}.split(1, {d})[-1]", "{x}.as_strided({x}.shape, {x}.stride())",
        "{x}.data", "{x}.swapdims(0, {d})", "{x}.hsplit(2)[0]", "{x}.T" , "{x}.unbind({d})[0]",
    )  # fmt: skip
    code = x and fill_pattern(d, d.rng.choice(patterns), x)
    return code and f"{d.new()} = {code}"


@template(1)
def several_results(d: Drawing) -> str | None:
    x = d.pick("n", 1)
    pattern = d.rng.choice(
        ("{x}.max({d})", "{x}.sort({d}, stable=True)", "{x}.topk(1, {d})", "{x}.chunk(2, {d})", "{x}.split([1, {x}.shape[{d}] - 1], {d})",
         "{x}.cummax({d})", "torch.frexp({x})", "{x}.min({d}, keepdim=True)", "torch.var_mean({x}, {d})", "torch.aminmax({x})",
         "torch.broadcast_tensors({x}, {x}[:1])", "{x}.tensor_split(2, {d})", "torch.unique({x}, return_counts=True)", "{x}.mode({d})")
    )  # fmt: skip
    code = x and fill_pattern(d, pattern, x)
    return code and f"{d.new()}, {d.new()} = {code}"


@template(1)
def number(d: Drawing) -> str | None:
    x = d.pick("a")
    code = x and fill_pattern(d, d.rng.choice(_NUMBERS), x)
    return code and f"{d.new()} = {code}"


@template(1.5)
def new_input(d: Drawing) -> None:
    d.fresh(d.shape(), d.rng.choice((d.dtype, d.dtype, d.dtype, "int64", "bool", "complex128", "float32")))


_WITH_OTHER = (
    "{x} + {o}", "{x} * {o}", "torch.where({x} != 0, {x}, {o})", "{x} < {o}" , "torch.add({x}, {o}, out=torch.zeros_like({x} + {o}))",
    "{x}.to({o}.dtype)", "torch.result_type({x}, {o})", "torch.cat([{x}.flatten(), {o}.flatten()])", "{x}.type_as({o})",
    "torch.stack([{x}.flatten()[:2], {x}.flatten()[:2]]).to({o}.dtype)", "torch.maximum({x}, {o})", "{x} - {o}.sum()", "{x} / ({o}.abs() + 1)",
    "torch.broadcast_tensors({x}, {o})[1]", "{x}.expand_as({x} + {o})", "torch.atleast_2d({x}) + torch.atleast_2d({o})", "{x}.mul({o})",
)  # fmt: skip


@template(1.5)
def promotion(d: Drawing) -> str | None:
    """Two tensors that broadcast, of any two dtypes."""
    x = d.pick("a")
    if x is None:
        return None
    o = d.broadcastable(x, d.rng.choice(("float64", "float32", "int64", "bool", "complex128")))
    return f"{d.new()} = {d.rng.choice(_WITH_OTHER).format(x=x, o=o)}"


@template(2)
def advanced_index(d: Drawing) -> str | None:
    """Reading from or writing to a tensor with several kinds of indices."""
    x = d.pick("a", 1)
    if x is None:
        return None
    parts, shape = [], list(d[x].shape)
    n = d.rng.choice((1, 2, 3))
    for size in shape[: d.rng.randrange(1, len(shape) + 1)]:
        kind = d.rng.random()
        if kind < 0.35:
            parts.append(d.indices(d.rng.choice(([n], [n], [1], [2, n])), size))
        elif kind < 0.5:
            parts.append(str(d.rng.randrange(-size, size) if size else 0))
        elif kind < 0.6:
            parts.append(str([d.rng.randrange(max(size, 1)) for _ in range(n)]))
        elif kind < 0.7:
            parts.append(f"{d.fresh([size], 'int64')} > 0")
        elif kind < 0.78:
            parts.append("None")
        else:
            parts.append(d.rng.choice((":", "1:", "::2", ":-1", "...", ":2")))
    index = ", ".join(parts)
    write = d.rng.random()
    if write < 0.25:
        return f"with torch.no_grad():\n    {x}[{index}] = {d.rng.choice(('1', f'{x}[{index}].clone() * 2', f'{x}[{index}].detach().sum()'))}"
    if write < 0.35:
        y = d.new()
        return f"{y} = {x}.clone()\n{y}[{index}] {d.rng.choice(('=', '+=', '*='))} 2"
    return f"{d.new()} = {x}[{index}]"


_MORE = {
    "f1": (
        "torch.histc({x}, 4)", "{x}.cumsum({d}).flip({d})", "torch.nanquantile({x}, 0.5, dim={d})", "torch.take_along_dim({x}, {x}.argsort({d}), {d})",
        "torch.cumulative_trapezoid({x}, dim={d})", "F.threshold({x}, 0.1, 0.2)", "F.celu({x})", "torch.std_mean({x}, {d})[1]", "{x}.lerp({s}, {s})",
        "torch.unravel_index({x}.argmax(), {x}.shape)[0]", "torch.dot({x}.flatten(), {s}.flatten())", "torch.fft.irfft(torch.fft.rfft({x}, dim={d}), n={x}.shape[{d}], dim={d})",
        "torch.special.logit({x}.sigmoid())", "torch.gradient({x}, dim={d})[0]", "torch.meshgrid({x}.flatten()[:2], {s}.flatten()[:3], indexing='ij')[1]",
        "torch.cartesian_prod({x}.flatten()[:2], {s}.flatten()[:3])", "torch.block_diag({x}.flatten()[:2], {s}.flatten()[:3])", "{x}.aminmax(dim={d})[1]", "torch.nanmedian({x}.contiguous(), {d}).values",
    ),
    "f2": (
        "torch.einsum('ij,kj,lj->ikl', {x}[..., :3], {x}[..., :3], {x}[..., :3])", "torch.linalg.multi_dot([{x}, {x}.mT, {x}])", "torch.chain_matmul({x}, {x}.mT)", "F.bilinear({x}, {x}, {x}[None, :, :1].expand(2, -1, -1).mT @ {x}[None, :, :][:, :1])",
        "torch.linalg.inv({x} @ {x}.mT + 5 * torch.diag_embed(torch.ones_like({x}[..., 0])))", "torch.linalg.solve({x} @ {x}.mT + 5 * torch.diag_embed(torch.ones_like({x}[..., 0])), {x})", "torch.linalg.qr({x})[1].abs()", "torch.linalg.svdvals({x})",
        "torch.cross({x}[..., :3], {s}[..., :3], dim=-1)", "F.pairwise_distance({x}, {s})", "F.cosine_embedding_loss({x}, {s}, torch.ones_like({x}[:, 0]))", "F.triplet_margin_loss({x}, {s}, {s} + 1)", "F.pdist({x})", "F.multilabel_soft_margin_loss({x}, ({s} > 0).to({x}.dtype))", "torch.linalg.det({x} @ {x}.mT + 1)", "{x}.logsumexp((0, 1))", "torch.matrix_exp({x} @ {x}.mT * 0.1)", "torch.linalg.cholesky({x} @ {x}.mT + 5 * torch.diag_embed(torch.ones_like({x}[..., 0])))",
    ),
    "i1": ("{x}.abs().flatten().bincount()", "F.one_hot({x}.abs(), 8)", "{x}.cumsum({d})", "{x}.cumprod({d})", "torch.bitwise_and({x}, {s})", "{x}.unique(return_inverse=True)[1]", "{x}.histc(3)" , "torch.unique_consecutive({x})", "{x}.float().softmax({d})", "torch.gcd({x}, {s})"),
    "c1": ("{x} @ {x}.mH", "torch.fft.fft2({x}[None])", "torch.linalg.vector_norm({x}, dim={d})", "torch.polar({x}.abs(), {x}.angle())", "{x}.mH", "{x}.conj()[0]", "{x}.sum({d}).conj()", "torch.view_as_complex(torch.view_as_real({x}) * 2)", "torch.vdot({x}.flatten(), {x}.flatten())"),
    "b1": ("{x}.nonzero()", "torch.where({x}, {x}.long(), {x}.sum())", "{x}.int().argmax({d})", "{x}.logical_xor({x}.flip({d}))", "{x}.cumsum({d}) > 1", "torch.count_nonzero({x}, {d})", "{x}.view(torch.uint8).clone()"),
}  # fmt: skip


@template(3)
def rarer_op(d: Drawing) -> str | None:
    found = _from(_MORE, d)
    code = found and fill_pattern(d, *found)
    return code and f"{d.new()} = {code}"


@template(1)
def matmul(d: Drawing) -> str | None:
    x = d.pick("f", 1)
    if x is None:
        return None
    n = d.rng.choice(d.sizes)
    lead = d.rng.choice(([], [], [1], list(d[x].shape[:-2])))
    w = d.fresh([*lead, d[x].shape[-1], n], str(d[x].dtype)[6:])
    return f"{d.new()} = {x} @ {w}"
