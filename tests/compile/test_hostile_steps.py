"""Steps that a capture could get wrong: each trains as eager mode does, captured again or eagerly with a reason."""

import copy
import random
import warnings

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.compile import fake_mesh, whole_step

STEPS = 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.drop, self.scale, self.calls = nn.Dropout(0.0), 1.0, 0

    def hidden(self, x):
        return self.drop(self.norm(self.up(x)).relu())

    def forward(self, x):
        return self.down(self.hidden(x)) * self.scale


class Case:
    """A training run; subclasses change what is not usual about them."""

    captured = "most"  # of the steps; "none" and "some" are allowed to differ
    plain = False

    def model(self):
        return Net()

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss(self, model, x):
        return model(x).square().mean()

    def batch(self, i, x):
        return x

    def between(self, i, model, optimizer):
        pass

    def call(self, step, x):
        return step(x)

    def seen(self):
        return []


class Usual(Case):
    pass


class Freezing(Case):
    def between(self, i, model, optimizer):
        model.up.weight.requires_grad_(i != 2)


class FreezingWithGradientsKept(Case):
    def between(self, i, model, optimizer):
        model.down.requires_grad_(i < 2)


class NewParameter(Case):
    captured = "some"

    def between(self, i, model, optimizer):
        if i == 2:
            model.down = sw.distribute_module(nn.Linear(8, 4), model.up.weight.device_mesh)
            with torch.no_grad():
                model.down.weight.fill_(0.1)
                model.down.bias.fill_(0.2)
            optimizer.add_param_group({"params": list(model.down.parameters()), "lr": 0.1})


class ReplacedParameter(Case):
    def between(self, i, model, optimizer):
        if i == 2:
            weight = nn.Parameter(model.up.weight.detach() * 0.5)
            model.up.weight = weight  # the optimizer keeps the old one, as in eager mode


class SwappedData(Case):
    def between(self, i, model, optimizer):
        if i == 2:
            model.up.weight.data = model.up.weight.data * 0.5


class LoadedState(Case):
    def between(self, i, model, optimizer):
        if i == 1:
            self.kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if i == 3:
            model.load_state_dict(self.kept[0])
            optimizer.load_state_dict(self.kept[1])


class StepsOfParametersDiffer(Case):
    def between(self, i, model, optimizer):
        if i == 2:
            optimizer.state[model.up.weight]["step"].fill_(50)


class ChangedAttribute(Case):
    def between(self, i, model, optimizer):
        model.scale = 2.0 if i == 2 else 1.0


class ChangedDropout(Case):
    def between(self, i, model, optimizer):
        model.drop.p = 0.5 if i >= 2 else 0.0


class Modes(Case):
    def between(self, i, model, optimizer):
        model.train(i % 2 == 0)


class Counter(Case):
    captured = "none"

    def loss(self, model, x):
        model.calls += 1
        return model(x).square().mean() * (1 + model.calls)


class CounterInForward(Case):
    captured = "none"

    def model(self):
        class Counting(Net):
            def forward(self, x):
                self.calls = self.calls + 1
                return super().forward(x) * self.calls

        return Counting()


class Buffer(Case):
    """A buffer that is added to in place."""

    def model(self):
        class Averaging(Net):
            def __init__(self):
                super().__init__()
                self.register_buffer("mean", torch.zeros(8))

            def forward(self, x):
                h = self.hidden(x)
                self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
                return self.down(h + self.mean)

        return Averaging()


class ReplacedBuffer(Case):
    captured = "none"

    def model(self):
        class Averaging(Net):
            def __init__(self):
                super().__init__()
                self.register_buffer("mean", torch.zeros(8))

            def forward(self, x):
                h = self.hidden(x)
                self.mean = self.mean * 0.9 + h.detach().mean(0) * 0.1
                return self.down(h + self.mean)

        return Averaging()


class Hook(Case):
    captured = "none"

    def model(self):
        net, self.found = Net(), []
        net.up.register_forward_hook(lambda module, args, out: self.found.append(out.shape))
        return net

    def seen(self):
        return [len(self.found)]


class HookThatChangesResults(Case):
    def model(self):
        net = Net()
        net.up.register_forward_hook(lambda module, args, out: out * 2)
        return net


class AddedHook(Case):
    def between(self, i, model, optimizer):
        if i == 2:
            model.up.register_forward_hook(lambda module, args, out: out * 2)


class History(Case):
    captured = "none"

    def __init__(self):
        self.losses = []

    def loss(self, model, x):
        loss = model(x).square().mean()
        self.losses.append(loss.detach())
        return loss

    def seen(self):
        return [float(x.full_tensor() if isinstance(x, sw.DTensor) else x) for x in self.losses]


class Average(Case):
    """An exponential average of the parameters, inside the step."""

    def loss(self, model, x):
        with torch.no_grad():
            for p, mean in zip(model.parameters(), self.means, strict=True):
                mean.lerp_(p.detach(), 0.1)
        return model(x).square().mean() + self.means[0].sum() * 0.01

    def between(self, i, model, optimizer):
        if i < 0:
            self.means = [p.detach().clone() for p in model.parameters()]


class Autocast(Case):
    def loss(self, model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().mean()


class AutocastAround(Case):
    def call(self, step, x):
        self.count = getattr(self, "count", 0) + 1
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.count % 2 == 0):
            return step(x)


class Checkpointed(Case):
    """Dropout inside of checkpointed code draws the same numbers when it is computed again."""

    def model(self):
        class Checkpointing(Net):
            def forward(self, x):
                return self.down(checkpoint(self.hidden, x, use_reentrant=False))

        net = Checkpointing()
        net.norm, net.drop.p = nn.Identity(), 0.5
        return net


class PlainCheckpointed(Checkpointed):
    plain, captured = True, "none"


class PlainDropout(Case):
    plain = True

    def model(self):
        net = Net()
        net.drop.p = 0.5
        return net


class Shapes(Case):
    captured = "some"

    def batch(self, i, x):
        return x[: 2 + i % 3]


class TensorRate(Case):
    captured = "none"

    def optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))


class Schedules(Case):
    def optimizer(self, model):
        out = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(out, 0.1, total_steps=STEPS + 1)
        return out

    def between(self, i, model, optimizer):
        if i >= 0:
            self.schedule.step()


class Flags(Case):
    def between(self, i, model, optimizer):
        optimizer.param_groups[0]["maximize"] = i == 2


class UnusedParameter(Case):
    def loss(self, model, x):
        return model.up(x).square().mean() if model.scale > 1.5 else model(x).square().mean()

    def between(self, i, model, optimizer):
        model.scale = 2.0 if i >= 2 else 1.0


class GradientsBefore(Case):
    """Gradients that are there when a step begins are added to."""

    def between(self, i, model, optimizer):
        if i == 2:
            model.up.weight.grad = torch.ones_like(model.up.weight)


class Seeds(Case):
    captured = "none"

    def model(self):
        net = Net()
        net.drop.p = 0.5
        return net

    def loss(self, model, x):
        sw.manual_seed(3)
        return model(x).square().mean()


class Values(Case):
    captured = "none"

    def loss(self, model, x):
        loss = model(x).square().mean()
        return loss * 2 if loss > 0.1 else loss


class SameTensorTwice(Case):
    def loss(self, model, x, y):
        return (model(x) - y).square().mean()

    def call(self, step, x):
        self.count = getattr(self, "count", 0) + 1
        return step(x, x) if self.count < 4 else step(x, x * 2)


class ReadsObjects(Case):
    """Numbers in lists, attributes and tensors that the loss reads, and that change between steps."""

    captured = "some"
    factors = [1.0]  # noqa: RUF012  of the class

    def loss(self, model, x):
        return model(x).square().mean() * self.scale[0] * self.factors[0] * self.tensor

    def between(self, i, model, optimizer):
        self.scale, self.factors[0], self.tensor = [i + 2.0], 1.0 + (i > 2), torch.full((), 1.0 + (i > 3))


class PythonNumbers(Case):
    captured = "none"

    def loss(self, model, x):
        return model(x).square().mean() * (1 + random.random())

    def between(self, i, model, optimizer):
        if i < 0:
            random.seed(3)


class NumpyNumbers(Case):
    captured = "none"

    def loss(self, model, x):
        return model(x).square().mean() * (1 + numpy.random.rand())

    def between(self, i, model, optimizer):
        if i < 0:
            numpy.random.seed(3)


class Iterator(Case):
    captured = "none"

    def loss(self, model, x):
        return model(x).square().mean() * next(self.numbers)

    def between(self, i, model, optimizer):
        if i < 0:
            self.numbers = iter([1, 2, 3, 4, 5, 6])


class NumbersAsTensors(Case):
    """Rprop writes its factors to elements of a tensor."""

    captured = "none"

    def optimizer(self, model):
        return torch.optim.Rprop(model.parameters(), lr=0.01)


class OpsDependOnTheStep(Case):
    """RAdam runs other ops from the sixth step on."""

    captured = "some"

    def optimizer(self, model):
        return torch.optim.RAdam(model.parameters(), lr=0.01)


class Closure(Case):
    """A gradient scaler reads whether gradients are finite."""

    captured = "none"

    def optimizer(self, model):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        class Scaled(torch.optim.SGD):
            def step(self, closure=None):
                for g in self.param_groups:
                    for p in g["params"]:
                        if p.grad is not None and not bool(torch.isfinite(p.grad).all()):
                            return
                super().step()

        self.scaler = scaler
        return Scaled(model.parameters(), lr=0.01)


CASES = [*Case.__subclasses__(), PlainCheckpointed]


def train(case, captured):
    with fake_mesh((1,), ("tp",)) as mesh:
        torch.manual_seed(0)
        sw.manual_seed(1)
        model = case.model()
        if not case.plain:
            sw.distribute_module(model, mesh)
        optimizer = case.optimizer(model)
        step = whole_step(model, optimizer, case.loss)
        if not captured:
            step._find = lambda *_: None
        data = torch.randn(STEPS, 5, 4)
        case.between(-1, model, optimizer)
        losses, reasons = [], []
        for i in range(STEPS):
            x = data[i] if case.plain else sw.distribute_tensor(data[i], mesh, [sw.Replicate()])
            loss = case.call(step, case.batch(i, x))
            losses.append(loss)
            reasons.append(step.reason)
            case.between(i, model, optimizer)
        tensors = [*losses, *model.parameters(), *model.buffers()]
        tensors += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        blocks = [(t._local_tensor if isinstance(t, sw.DTensor) else t).detach().clone() for t in tensors]
        return blocks, [*case.seen(), sw.get_rng_state().tolist(), torch.get_rng_state().tolist()], reasons


@pytest.mark.parametrize("kind", CASES, ids=lambda c: c.__name__)
def test_trains_as_eager_mode_does(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager, captured = (train(kind(), c) for c in (False, True))
    assert captured[1] == eager[1]
    assert len(captured[0]) == len(eager[0])
    wrong = [i for i, (a, b) in enumerate(zip(eager[0], captured[0], strict=True)) if not torch.equal(a, b)]
    assert wrong == []
    late = captured[2][1:]
    if kind.captured == "none":
        assert all(late), late
    elif kind.captured == "most":
        assert not any(late), late
