"""The training step of `benchmarks/fsdp.py` written by hand: flat parameters, two collectives per group, no autograd."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["ByHand"]

# the names of torch 2.13, or those of earlier releases
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_norm = torch.ops.aten.native_layer_norm
_norm_backward = torch.ops.aten.native_layer_norm_backward


class _Flat:
    """The parameters of a group: this rank's part of them in one flat tensor, gathered and reduced as such."""

    def __init__(self, module: nn.Module) -> None:
        params = list(module.parameters())
        self._shapes = [p.shape for p in params]
        flat = torch.cat([p.detach().reshape(-1) for p in params])
        self._size, self._ranks = flat.numel(), dist.get_world_size()
        self.part = flat.chunk(self._ranks)[dist.get_rank()].clone()
        self.grad = torch.empty(0)

    def start_gathering(self) -> tuple[Tensor, Any]:
        whole = torch.empty(self._size)
        return whole, _gather(whole, self.part, async_op=True)

    def views(self, whole: Tensor) -> list[Tensor]:
        parts = whole.split([s.numel() for s in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def start_reducing(self, whole: Tensor) -> Any:
        self.grad = torch.empty_like(self.part)
        return _scatter(self.grad, whole, async_op=True)

    def new_grads(self) -> tuple[Tensor, list[Tensor]]:
        whole = torch.empty(self._size)
        return whole, self.views(whole)


class ByHand:
    """`Residual` with its blocks and its head as groups; blocks are gathered again in the backward pass, one ahead."""

    def __init__(self, model: Any, lr: float) -> None:
        self._blocks = [_Flat(block) for block in model.blocks]
        self._head, self._lr = _Flat(model.head), lr

    def step(self, x: Tensor) -> Tensor:
        """A step of SGD on the mean of squares; the loss before it."""
        with torch.no_grad():
            return self._step(x)

    def _step(self, x: Tensor) -> Tensor:
        groups, saved = [*self._blocks, self._head], []
        coming = groups[0].start_gathering()
        width = [x.shape[1]]
        for i, group in enumerate(self._blocks):
            whole, work = coming
            work.wait()
            coming = groups[i + 1].start_gathering()
            scale, shift, w1, b1, w2, b2 = group.views(whole)
            y, mean, rstd = _norm(x, width, scale, shift, 1e-5)
            hidden = torch.addmm(b1, y, w1.t()).relu_()
            saved.append((x, mean, rstd, y, hidden))
            x = x + torch.addmm(b2, hidden, w2.t())
        whole, work = coming
        work.wait()
        coming = self._blocks[-1].start_gathering()
        weight, bias = self._head.views(whole)
        out = torch.addmm(bias, x, weight.t())
        loss, grad = out.pow(2).mean(), out * (2 / out.numel())
        flat, (dweight, dbias) = self._head.new_grads()
        torch.mm(grad.t(), x, out=dweight)
        torch.sum(grad, 0, out=dbias)
        grad = grad @ weight
        pending = self._head.start_reducing(flat)
        for i in reversed(range(len(self._blocks))):
            group = self._blocks[i]
            whole, work = coming
            work.wait()
            if i:
                coming = self._blocks[i - 1].start_gathering()
            grad, flat = self._block_backward(group, whole, grad, *saved.pop())
            pending.wait()
            pending = group.start_reducing(flat)
        pending.wait()
        for group in groups:
            group.part.add_(group.grad, alpha=-self._lr / dist.get_world_size())
        return loss

    @staticmethod
    def _block_backward(
        group: _Flat,
        whole: Tensor,
        grad: Tensor,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        y: Tensor,
        hidden: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The gradient of the block's input, and those of its parameters in one flat tensor."""
        scale, shift, w1, _, w2, _ = group.views(whole)
        flat, (dscale, dshift, dw1, db1, dw2, db2) = group.new_grads()
        torch.mm(grad.t(), hidden, out=dw2)
        torch.sum(grad, 0, out=db2)
        inner = torch.ops.aten.threshold_backward(grad @ w2, hidden, 0)
        torch.mm(inner.t(), y, out=dw1)
        torch.sum(inner, 0, out=db1)
        dx, ds, dt = _norm_backward(inner @ w1, x, [x.shape[1]], mean, rstd, scale, shift, [True, True, True])
        dscale.copy_(ds)
        dshift.copy_(dt)
        return grad + dx, flat
