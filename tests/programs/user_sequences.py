"""Recurrent and attention models that users write.

A program takes `put(tensor, requires_grad)`, which distributes a tensor, and returns values by name.
"""

from __future__ import annotations

import torch
import torch.distributions
from tests.programs.user_world import initialized, integers, placed, randn, user_program
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the usual name)


@user_program
def manual_gru(put):
    wi, wh, b = (put(randn(9, 4), True), put(randn(9, 3, seed=1), True), put(randn(9, seed=2), True))
    x = put(randn(5, 7, 4, seed=3))
    h = put(torch.zeros(7, 3, dtype=torch.float64))
    outs = []
    for t in range(5):
        gi = F.linear(x[t], wi, b)
        gh = F.linear(h, wh)
        ir, iz, ic = gi.chunk(3, 1)
        hr, hz, hc = gh.chunk(3, 1)
        r, z = (torch.sigmoid(ir + hr), torch.sigmoid(iz + hz))
        n = torch.tanh(ic + r * hc)
        h = (1 - z) * n + z * h
        outs.append(h)
    y = torch.stack(outs)
    y.pow(2).mean().backward()
    return {"y": y, "a": wi.grad, "b": wh.grad, "c": b.grad}


@user_program
def bidirectional_lstm_cell(put):
    cell = initialized(nn.LSTMCell(4, 3))
    placed(cell, put)
    x = put(randn(4, 5, 4, seed=3), True)
    h = c = put(torch.zeros(5, 3, dtype=torch.float64))
    out = []
    for t in range(4):
        h, c = cell(x[t], (h, c))
        out.append(h)
    h = c = torch.zeros_like(h)
    for t in reversed(range(4)):
        h, c = cell(x[t], (h, c))
        out[t] = torch.cat([out[t], h], 1)
    y = torch.stack(out, 1)
    (y * y).sum().backward()
    return {"y": y, "g": x.grad, "w": cell.weight_ih.grad, "b": cell.bias_hh.grad}


@user_program
def rnn_packed_mask(put):
    w, u = (put(randn(4, 4), True), put(randn(4, 3, seed=1), True))
    x, lens = (put(randn(6, 5, 3, seed=2)), put(torch.tensor([1, 5, 3, 5, 2, 4])))
    h = torch.zeros_like(x[:, 0, :1]).expand(6, 4)
    for t in range(5):
        new = torch.tanh(h @ w + x[:, t] @ u.T)
        h = torch.where((lens > t)[:, None], new, h)
    last = h.gather(1, (lens % 4)[:, None]).squeeze(1)
    last.sum().backward()
    return {"h": h, "last": last, "g": w.grad, "u": u.grad}


@user_program
def attention_variants(put):
    mha = placed(initialized(nn.MultiheadAttention(6, 3, batch_first=True)), put)
    x = put(randn(2, 5, 6), True)
    m = put(torch.triu(torch.ones(5, 5, dtype=torch.bool), 1))
    kp = put(torch.tensor([[False] * 5, [False, False, False, True, True]]))
    y, w = mha(x, x, x, attn_mask=m, key_padding_mask=kp)
    enc = placed(initialized(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 3), put)
    z = enc(y, src_mask=m, is_causal=True)
    d = placed(initialized(nn.TransformerDecoderLayer(6, 2, 8, 0.0, batch_first=True), 4), put)(x, z)
    d.pow(2).sum().backward()
    return {"y": y, "w": w, "z": z, "d": d, "g": x.grad, "gw": mha.in_proj_weight.grad}


@user_program
def sequences(put):
    s = [put(randn(n, 3, seed=n), True) for n in (4, 1, 5)]
    a = nn.utils.rnn.pad_sequence(s, batch_first=True, padding_value=0.5)
    b = nn.utils.rnn.pad_sequence(s, padding_side="left")
    c = nn.utils.rnn.pad_sequence([t[:, 0] for t in s])
    (a.sin().sum() + b.pow(2).sum() + c.sum()).backward()
    x = put(randn(4, seed=9))
    i = put(integers(5, 4))
    return {
        "a": a,
        "b": b,
        "c": c,
        "g": [t.grad for t in s],
        "v": torch.vander(x),
        "w": torch.vander(x, 3, True),
        "z": torch.vander(i),
        "e": torch.vander(x, 0),
        "o": torch.vander(i, 1),
        "u": nn.utils.rnn.unpad_sequence(a.detach(), put(torch.tensor([4, 1, 5])), batch_first=True),
    }


@user_program
def packed(put):
    out = {}
    for cost, bf in ((nn.GRU, False), (nn.LSTM, True), (nn.RNN, False)):
        s = [put(randn(n, 3, seed=n), True) for n in (5, 4, 1)]
        p = nn.utils.rnn.pack_sequence(s)
        loss = placed(initialized(cost(3, 2, num_layers=2, bidirectional=bf)), put)
        o, h = loss(p)
        q, n = nn.utils.rnn.pad_packed_sequence(o, batch_first=bf, total_length=6, padding_value=0.5)
        (q * q).sum().backward()
        out[cost.__name__] = {
            "q": q,
            "h": h,
            "g": loss.weight_ih_l0.grad,
            "sg": [t.grad for t in s],
            "n": n.tolist(),
            "b": p.batch_sizes.tolist(),
            "d": p.data,
        }
    x = put(randn(3, 5, 2))
    k = nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2], batch_first=True)
    out["k"] = k.data
    return out


@user_program
def rnn_modules(put):
    out = {}
    for cost, kw in (
        (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
        (nn.GRU, {"num_layers": 2}),
        (nn.RNN, {"nonlinearity": "relu"}),
        (nn.LSTM, {"proj_size": 2}),
    ):
        m = placed(initialized(cost(4, 3, **kw)), put)
        x = put(randn(5, 4, 4, seed=2), True)
        y, h = m(x)
        (y * y).sum().backward()
        out[cost.__name__ + str(kw)] = [y, h, x.grad, m.weight_hh_l0.grad]
    return out


@user_program
def swin_windows(put):
    x = put(randn(2, 6, 6, 4), True)
    s = x.roll((-1, -1), (1, 2))
    w = s.view(2, 3, 2, 3, 2, 4).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 4)
    a = (w @ w.mT).softmax(-1) @ w
    y = a.view(2, 3, 3, 2, 2, 4).permute(0, 1, 3, 2, 4, 5).contiguous().view(2, 6, 6, 4).roll((1, 1), (1, 2))
    y.pow(2).sum().backward()
    return {
        "y": y,
        "g": x.grad,
        "f": F.fold(F.unfold(x.detach().permute(0, 3, 1, 2), 2, stride=2), (6, 6), 2, stride=2),
    }


@user_program
def rope_alibi_gqa(put):
    q, k, v = (
        put(randn(2, 5, 4, 6), True),
        put(randn(2, 5, 2, 6, seed=1), True),
        put(randn(2, 5, 2, 6, seed=2), True),
    )
    t = put(torch.arange(5.0).double())
    f = put(10000 ** (-torch.arange(0, 6, 2).double() / 6))
    ang = torch.outer(t, f)

    def rot(x):
        c = torch.view_as_complex(x.reshape(*x.shape[:-1], 3, 2))
        return torch.view_as_real(c * torch.polar(torch.ones_like(ang), ang)[None, :, None]).flatten(-2)

    qq, kk = (rot(q).transpose(1, 2), rot(k).transpose(1, 2).repeat_interleave(2, 1))
    vv = v.transpose(1, 2)[:, :, None].expand(2, 2, 2, 5, 6).reshape(2, 4, 5, 6)
    b = (t[None] - t[:, None]).clamp(max=0) * 0.5
    y = F.scaled_dot_product_attention(qq, kk, vv, attn_mask=b)
    z = F.scaled_dot_product_attention(qq, kk, vv, is_causal=True)
    (y * z).sum().backward()
    return {"y": y, "z": z, "q": q.grad, "k": k.grad, "v": v.grad}
