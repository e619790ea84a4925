"""The ring attention of torch's context parallelism."""

from typing import Any

import torch
import torch.distributed as dist
from contender import BASE, Contender
from torch import Tensor


class TorchRing(Contender):
    name = "torch, private ring"
    requirements = BASE
    modules = ("torch.distributed.tensor.experimental",)
    dtypes = ("float64", "float32", "bfloat16")
    masks = ("full", "causal")
    note = "`_templated_ring_attention` and its backward, over the CPU flash op; balanced: with its load balance"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Ring.apply(*(x.transpose(1, 2) for x in (q, k, v)), self).transpose(1, 2)


class TorchZigzag(TorchRing):
    name = "torch, private ring balanced"
    masks = ("causal",)
    layouts = ("zigzag",)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, contender: TorchRing) -> Tensor:
        ctx.contender, op = contender, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        causal = contender.setting.causal
        ring = _private(contender)._templated_ring_attention
        out, lse, *_ = ring(dist.group.WORLD, 2, op, q, k, v, is_causal=causal, dropout_p=0.0)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        options = {"is_causal": ctx.contender.setting.causal, "dropout_p": 0.0}
        ring = _private(ctx.contender)._templated_ring_attention_backward
        return *ring(dist.group.WORLD, 2, op, dout, "grad_out", *ctx.saved_tensors, **options)[:3], None


def _private(contender: TorchRing) -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    _attention._cp_options.enable_load_balance = contender.setting.layout == "zigzag"
    return _attention


class TorchContextParallel(Contender):
    name = "torch, context_parallel"
    requirements = BASE
    modules = ("torch.distributed.tensor.experimental",)
    masks = ("causal",)
    dtypes = ("float32",)
    ranks = (2,)
    note = "the public `context_parallel` around `F.scaled_dot_product_attention`: it takes over CUDA's kernels only"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Inside.apply(q, k, v, self)

    def region(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel

        _private(self)
        full = torch.zeros(1, 1, self.setting.length, 1)
        return context_parallel(init_device_mesh("cpu", (dist.get_world_size(),)), buffers=[full], buffer_seq_dims=[2])


class TorchBalanced(TorchContextParallel):
    name = "torch, context_parallel balanced"
    layouts = ("zigzag",)


class _Inside(torch.autograd.Function):
    """Runs forward and backward inside the region, and the code around them outside."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, contender: TorchContextParallel) -> Tensor:
        leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        options = {"is_causal": contender.setting.causal, "enable_gqa": q.shape[2] != k.shape[2]}
        with torch.enable_grad(), contender.region():
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, **options)
        ctx.kept, ctx.contender = (leaves, out), contender
        return out.detach().transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (leaves, out), contender = ctx.kept, ctx.contender
        with contender.region():
            gradients = torch.autograd.grad(out, leaves, dout.transpose(1, 2))
        return *(x.transpose(1, 2) for x in gradients), None
