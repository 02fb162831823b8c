"""Training programs: each runs a few steps and returns losses, gradients, parameters and buffers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tests.programs.models import GPT, ConvNet, Experts, GraphLayer, LoRA, Tagger, perceptron
from tests.programs.worlds import World, initialized, randn, state
from torch import nn
from torch.nn import functional


def gpt(world: World) -> dict[str, Any]:
    """Language modelling with AdamW, clipping and a schedule."""
    model = world.model(initialized(GPT()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    tokens = torch.arange(24).view(4, 6) * 7 % 11
    found: dict[str, Any] = {}
    for step in range(2):
        logits = model(world.data(tokens))
        labels = world.data(tokens.roll(-1, 1))
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        found[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found[f"loss {step}"] = loss
        optimizer.step()
        schedule.step()
    with torch.no_grad():  # greedy decoding
        tokens = world.data(tokens[:, :3])
        for _ in range(2):
            tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert model.head.weight is model.tokens.weight
    return found | state(model) | {"tokens": tokens}


def conv_net(world: World) -> dict[str, Any]:
    """Image classification with batch norm; evaluation uses the running statistics."""
    model = world.model(initialized(ConvNet()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    images, labels = randn(6, 3, 8, 8), torch.arange(6) % 5
    found: dict[str, Any] = {}
    for step in range(2):
        loss = functional.cross_entropy(model(world.data(images)), world.data(labels), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found[f"loss {step}"] = loss
    model.eval()
    with torch.no_grad():
        found["evaluation"] = model(world.data(images))
    return found | state(model) | {f"buffer {n}": b for n, b in model.named_buffers()}


def tagger(world: World) -> dict[str, Any]:
    """An LSTM with Adam and gradient accumulation over two batches."""
    model = world.model(initialized(Tagger()))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tokens = torch.arange(30).view(6, 5) * 5 % 9
    for _ in range(2):
        optimizer.zero_grad()
        for batch in (tokens[:4], tokens[4:]):
            logits = model(world.data(batch))
            loss = functional.cross_entropy(
                logits.flatten(0, 1), world.data(batch % 3).flatten(), ignore_index=2
            )
            (loss / 2).backward()
        optimizer.step()
    return {"loss": loss} | state(model)


def gan(world: World) -> dict[str, Any]:
    """Two networks with an optimizer each; the generator's gradient passes through the discriminator."""
    generator = world.model(initialized(perceptron(3, 5, 4), seed=1))
    discriminator = world.model(initialized(perceptron(4, 6, 1), seed=2))
    g = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
    d = torch.optim.RMSprop(discriminator.parameters(), lr=1e-2)
    real = randn(6, 4)
    for step in range(2):
        noise = world.data(randn(6, 3, seed=step))
        fake = generator(noise)
        yes, no = discriminator(world.data(real)), discriminator(fake.detach())
        d_loss = functional.softplus(-yes).mean() + functional.softplus(no).mean()
        d.zero_grad()
        d_loss.backward()
        d.step()
        discriminator.requires_grad_(False)
        g_loss = functional.softplus(-discriminator(fake)).mean()
        g.zero_grad()
        g_loss.backward()
        g.step()
        discriminator.requires_grad_(True)
    return {"d": d_loss, "g": g_loss} | state(generator, "generator") | state(discriminator, "discriminator")


def gradient_penalty(world: World) -> dict[str, Any]:
    """The norm of the critic's gradient is part of its loss: double backward."""
    critic = world.model(initialized(perceptron(4, 6, 1)))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for step in range(2):
        real, fake = world.data(randn(6, 4, seed=step)), world.data(randn(6, 4, seed=step + 10))
        mix = (real * 0.3 + fake * 0.7).detach().requires_grad_()
        (slope,) = torch.autograd.grad(critic(mix).sum(), mix, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).pow(2).mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"loss": loss, "penalty": penalty} | state(critic)


def graph_network(world: World) -> dict[str, Any]:
    """Message passing by gather and scatter, and a readout for each graph."""
    model = world.model(initialized(nn.ModuleList([GraphLayer(4), GraphLayer(4)])))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    source, target = (world.data(torch.tensor(t)) for t in ([0, 1, 2, 3, 4, 5, 0], [1, 2, 0, 4, 5, 3, 6]))
    graph = world.data(torch.tensor([0, 0, 0, 1, 1, 1, 2]))
    for _ in range(2):
        x = world.data(randn(7, 4))
        for layer in model:
            x = layer(x, source, target)
        readout = x.new_zeros(3, 4).index_add(0, graph, x)
        loss = readout.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"loss": loss, "readout": readout} | state(model)


def k_means(world: World) -> dict[str, Any]:
    """Lloyd's algorithm: distances, argmin and one-hot sums."""
    points = world.data(torch.cat([randn(5, 3), randn(6, 3, seed=1) + 4]))
    centers = points[:3]
    for _ in range(3):
        nearest = torch.cdist(points, centers).argmin(dim=1)
        members = functional.one_hot(nearest, 3).to(points.dtype)
        count = members.sum(0)[:, None]
        centers = torch.where(count > 0, members.T @ points / count.clamp(min=1), centers)
    inertia = (points - centers[nearest]).pow(2).sum()
    return {
        "centers": centers,
        "nearest": nearest,
        "inertia": inertia,
        "sizes": torch.bincount(nearest, minlength=3),
    }


def fft_filter(world: World) -> dict[str, Any]:
    """A filter in the frequency domain is learned by gradient descent."""
    signal = world.data(randn(5, 16))
    filters = world.model(nn.ParameterList([nn.Parameter(randn(9, seed=1)), nn.Parameter(randn(9, seed=2))]))
    target = world.data(randn(5, 16, seed=3))
    optimizer = torch.optim.SGD(filters.parameters(), lr=0.1)
    for _ in range(2):
        spectrum = torch.fft.rfft(signal) * torch.complex(filters[0], filters[1])
        out = torch.fft.irfft(spectrum, n=16)
        loss = (out - target).pow(2).mean() + spectrum.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"loss": loss, "out": out} | state(filters)


def lora(world: World) -> dict[str, Any]:
    """Adapters of a frozen network are trained and then merged into it."""
    network = initialized(perceptron(5, 7, 4))
    network[0], network[2] = LoRA(network[0]), LoRA(network[2])
    model = world.model(initialized(network))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    x = world.data(randn(6, 5))
    for _ in range(2):
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(p.grad is None for n, p in model.named_parameters() if ".base." in n)
    out = model(x)
    with torch.no_grad():
        layer = model[0]
        layer.base.weight += layer.up.weight @ layer.down.weight
    return {"loss": loss, "out": out, "merged": layer.base.weight} | state(model)


def moving_average(world: World) -> dict[str, Any]:
    """An exponential moving average of the parameters, by hand and by torch's AveragedModel."""
    model = world.model(initialized(perceptron(4, 5, 2)))
    shadow = copy.deepcopy(model).requires_grad_(False)
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = world.data(randn(6, 4))
    for _ in range(3):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for s, p in zip(shadow.parameters(), model.parameters(), strict=True):
                s.lerp_(p, 0.1)
        averaged.update_parameters(model)
    return {"shadow": shadow(x), "averaged": averaged(x)} | state(model) | state(shadow, "shadow")


def experts(world: World) -> dict[str, Any]:
    """A mixture of experts with a loss that balances their load."""
    model = world.model(initialized(Experts()))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        out, balance = model(world.data(randn(7, 6)))
        loss = out.pow(2).mean() + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"loss": loss, "balance": balance} | state(model)


def tied_weights(world: World) -> dict[str, Any]:
    """An autoencoder whose decoder is the transposed encoder."""
    encoder = world.model(initialized(nn.Linear(6, 3)))
    bias = world.model(nn.ParameterList([nn.Parameter(randn(6, seed=1))]))
    optimizer = torch.optim.Adam([*encoder.parameters(), *bias.parameters()], lr=1e-2)
    x = world.data(randn(5, 6))
    for _ in range(2):
        out = functional.linear(encoder(x).tanh(), encoder.weight.t(), bias[0])
        loss = functional.mse_loss(out, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"loss": loss} | state(encoder) | state(bias, "bias")


def freezing(world: World) -> dict[str, Any]:
    """Layers are thawed one after the other, each in a parameter group of its own."""
    model = world.model(initialized(perceptron(4, 5, 5, 2)))
    model.requires_grad_(False)
    model[4].requires_grad_(True)
    optimizer = torch.optim.AdamW(model[4].parameters(), lr=1e-2)
    x = world.data(randn(6, 4))
    for layer in (2, 0):
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model[layer].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[layer].parameters()), "lr": 1e-3})
    return {"loss": loss} | state(model)


def lbfgs(world: World) -> dict[str, Any]:
    """A least-squares problem by L-BFGS with a line search."""
    model = world.model(initialized(nn.Linear(4, 3)))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    x, y = world.data(randn(7, 4)), world.data(randn(7, 3, seed=1))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(2)]
    return {"first": losses[0], "second": losses[1]} | state(model)


PROGRAMS = {
    f.__name__: f
    for f in (
        gpt, conv_net, tagger, gan, gradient_penalty, graph_network, k_means, fft_filter, lora, moving_average, experts,
        tied_weights, freezing, lbfgs,
    )
}  # fmt: skip
"""By name."""
