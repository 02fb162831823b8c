"""The ops that a module consists of."""

import torch
from torch import nn

from shardwise.debug._op_coverage import get_inductor_decomp_graphs, print_op_coverage_summary


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6))


def test_a_call_has_a_forward_and_a_backward_graph():
    model = _model()
    forward, backward = get_inductor_decomp_graphs(model, (torch.randn(3, 4),), {})
    assert all(isinstance(g, torch.fx.GraphModule) for g in (forward, backward))
    targets = {str(n.target) for n in forward.graph.nodes}
    assert "aten.addmm.default" in targets
    assert "aten.native_layer_norm.default" not in targets
    assert all(p.grad is None for p in model.parameters())


def test_the_summary_names_each_op_with_its_rule(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    print_op_coverage_summary(_model(), (torch.randn(3, 4),), {}, output_csv=True)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("aten.addmm.default") and "m k, k n -> m n" in line for line in lines)
    assert len((tmp_path / "op_summary.csv").read_text().splitlines()) == len(lines) + 1
