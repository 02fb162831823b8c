"""Programs that were saved and loaded are the same programs, and run on other modules and optimizers of the kind."""

import json

import pytest
import torch
from tests.compile.test_capture import meta_step
from torch import nn

import shardwise as sw
from shardwise.compile import EXACT, FAST, CaptureError, capture, fake_mesh, load, save


def build(mesh):
    torch.manual_seed(0)
    model = sw.distribute_module(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x, options):
        loss = (model(x["a"]) * options[0]).square().mean() + torch.tensor([1.0, 2.0]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach()}

    x = {"a": sw.ones(2, 4, device_mesh=mesh, placements=[sw.Replicate()])}
    step(x, (2.0,))
    return model, optimizer, step, x


def test_a_loaded_program_trains_another_model_as_the_first(tmp_path):
    with fake_mesh((1,), ("tp",)) as mesh:
        model, optimizer, step, x = build(mesh)
        first = capture(step, x, (2.0,), optimizer=optimizer, modules=[model])
        save(first, tmp_path / "step.json")
        other, their_optimizer, _, x = build(mesh)
        second = load(tmp_path / "step.json", mesh=mesh, optimizer=their_optimizer, modules=[other])
        assert second.text() == first.text()
        for program in (first, second):
            sw.manual_seed(7)
            for _ in range(3):
                result = program.run(x, (2.0,))
            assert set(result) == {"loss"}
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a._local_tensor, b._local_tensor)
        assert [int(s["step"]) for s in their_optimizer.state.values()] == [4] * 4
        with pytest.raises(CaptureError, match="differ from those"):
            second.run(x, (3.0,))
        with pytest.raises(CaptureError, match="optimizer"):
            load(tmp_path / "step.json", mesh=mesh, modules=[other])
        with pytest.raises(CaptureError, match=r"0\.weight"):
            load(tmp_path / "step.json", mesh=mesh, optimizer=their_optimizer, modules=[nn.ReLU()])


@pytest.mark.parametrize("passes", [None, EXACT, FAST])
def test_what_a_program_says_of_itself_is_saved(tmp_path, passes):
    with fake_mesh((2, 3), ("dp", "tp"), rank=4) as mesh:
        program = meta_step(mesh, dropout=0.1, data="dp")
        program = program if passes is None else program.optimize(passes)
        save(program, tmp_path / "step.json")
        model = torch.nn.Module()
        with pytest.raises(CaptureError, match="optimizer"):
            load(tmp_path / "step.json", mesh=mesh, modules=[model])
        said = json.loads((tmp_path / "step.json").read_text())
        said["inputs"] = [["argument 0", w] for _, w in said["inputs"]]
        said["gradients"], said["numbers"] = [], None
        (tmp_path / "step.json").write_text(json.dumps(said))
        again = load(tmp_path / "step.json", mesh=mesh)
        assert again.text() == program.text()
        assert again.collectives == program.collectives
        assert (again.memory(), again.flops()) == (program.memory(), program.flops())
    with fake_mesh((2, 3), ("dp", "tp"), rank=0) as mesh, pytest.raises(CaptureError, match=r"\(1, 1\)"):
        load(tmp_path / "step.json", mesh=mesh)


@pytest.mark.parametrize(
    "target", [{"op": "os.system.default"}, {"call": "eval"}, {"op": "aten.nothing_of_the_kind.default"}]
)
def test_a_file_cannot_name_other_functions(tmp_path, target):
    with fake_mesh((2,), ("tp",)) as mesh:
        x = sw.empty(8, 6, device_mesh=mesh, placements=[sw.Shard(0)])
        save(capture(lambda x: x * 2, x), tmp_path / "step.json")
        said = json.loads((tmp_path / "step.json").read_text())
        call = next(n for n in said["nodes"] if n["op"] == "call_function")
        call["target"] = target
        (tmp_path / "step.json").write_text(json.dumps(said))
        with pytest.raises(CaptureError):
            load(tmp_path / "step.json", mesh=mesh)
        (tmp_path / "step.json").write_text("[]")
        with pytest.raises(CaptureError, match="no program"):
            load(tmp_path / "step.json", mesh=mesh)
