"""The head and the token loss in one, a chunk of tokens at a time, so that logits [T, V] never exist.

For 5M tokens on 8 ranks those of LLaMA-3-8B would take 157 GiB in bfloat16, and their float32 copy twice that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Backend = Literal["own", "torch"]


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore: int = -100,
    chunk: int | None = None,
    z_loss: float = 0.0,
    backend: Backend = "own",
) -> tuple[Tensor, Tensor]:
    """`token_loss(F.linear(hidden, weight, bias), labels)` without holding the logits; it fits a model's `head`.

    A chunk's logits are computed once, in the dtype of `hidden` (under autocast, in autocast's), and softmax in
    float32. Their gradients are computed right then, in the forward pass, for those inputs alone that require one;
    backward scales them, any number of times (`retain_graph`), but cannot be differentiated itself.

    With e bytes to an element: from forward to backward there live d(hidden), T E e, and d(weight) in float32, 4 V E;
    in forward a chunk's logits and their float32 copy too, chunk V (e + 4). Neither `hidden` nor `weight` is kept.

    Args:
        hidden: [B, T, E].
        weight: [V, E], whole: a linear layer's or an embedding's, under FSDP2 within `forward`.
        labels: integers [B, T], shifted already: `labels[b, t]` is what `hidden[b, t]` predict.
        bias: [V].
        ignore: the label that is not counted.
        chunk: how many tokens at a time, over all rows; `chunk_rows` of these shapes unless given.
        z_loss: adds `z_loss * logsumexp(logits)**2` for each valid label (PaLM, arXiv 2204.02311).
        backend: "own", or "torch" for `F.linear_cross_entropy` of torch 2.13. In float32 that is as exact and as fast,
            but keeps its gradients for as long as the sum is kept. In bfloat16 it rounds the sum and d(weight) after
            every chunk: with 1024 chunks the sum came out at a sixth.

    Returns:
        The sum of the cross entropies, in nats, a scalar in float32 (float64 for float64), and the count of valid
        labels, an integer scalar on the same device. With no valid label the sum is 0, with zero gradients.

    Raises:
        ValueError: shapes or dtypes that do not match, a chunk below 1, a backend that cannot do this. A label that
            is neither below V nor `ignore` is left to torch, as in `token_loss`: to look would stall a GPU.
    """
    check(hidden, weight, labels, bias, chunk)
    dtype = matmul_dtype(hidden)
    chunk = chunk or chunk_rows(labels.numel(), *reversed(weight.shape), itemsize=dtype.itemsize)
    work = Work(labels.flatten().long(), ignore, chunk, dtype, z_loss)
    total = backend_named(backend, z_loss)(hidden.flatten(0, 1), weight, bias, work)
    return total, (labels != ignore).sum()


def chunk_rows(tokens: int, dim: int, vocabulary: int, itemsize: int = 2) -> int:
    """How many tokens to take at a time, in chunks as equal as can be.

    Logits and their float32 copy are allowed 64 MiB or, where that is more, half of what `hidden` [tokens, dim] and
    `weight` [vocabulary, dim] take, which are there anyway: 683 tokens of 8192 for LLaMA-3-8B, 4148 of 655360. Smaller
    chunks would cost time, since each reads the weight and adds to all of its gradient.
    """
    budget = max(2**26, (tokens + vocabulary) * dim * itemsize // 2)
    wide = 4 if itemsize < 4 else 0
    chunks = ceil(tokens * vocabulary * (itemsize + wide) / budget)
    return max(1, ceil(tokens / max(1, chunks)))


@dataclass(frozen=True)
class Work:
    """What to do with hidden states [T, E]: their labels [T], and how."""

    labels: Tensor
    ignore: int
    chunk: int
    dtype: torch.dtype  # of the matmuls
    z_loss: float

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums."""
        return torch.promote_types(self.dtype, torch.float32)


Run = Callable[[Tensor, Tensor, Tensor | None, Work], Tensor]
"""From hidden [T, E], weight [V, E] and bias [V] to the sum."""


def with_torch(hidden: Tensor, weight: Tensor, bias: Tensor | None, work: Work) -> Tensor:
    """The sum by `F.linear_cross_entropy`."""
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=work.chunk, chunking_method=None, allow_retain_graph=True)
    total = F.linear_cross_entropy(
        hidden.to(work.dtype),
        weight.to(work.dtype),
        work.labels,
        linear_bias=None if bias is None else bias.to(work.dtype),
        reduction="sum",
        ignore_index=work.ignore,
        options=options,
    )
    return total.to(work.wide)


@torch.compiler.disable  # Traced, it would be a graph of all chunks, one after the other.
def with_own(hidden: Tensor, weight: Tensor, bias: Tensor | None, work: Work) -> Tensor:
    """The sum by the code below."""
    # Asked here, because inside a Function grad mode is off.
    wanted = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in (hidden, weight, bias)]
    return cast(Tensor, LinearLoss.apply(hidden, weight, bias, work, wanted))


class LinearLoss(torch.autograd.Function):
    """The sum, with its gradients computed along with it."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: Work, wanted: Sequence[bool]
    ) -> Tensor:
        total, gradients = loss_and_gradients(hidden, weight, bias, work, wanted)
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if x is None else scaled(x, grads[0], dtype) for x, dtype in saved), None, None


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` times a scalar, in `dtype`. The product is rounded and nothing else: a factor without dims would be too."""
    return torch.mul(x, factor.view([1] * x.ndim), out=torch.empty_like(x, dtype=dtype))


def loss_and_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, work: Work, wanted: Sequence[bool]
) -> tuple[Tensor, Gradients]:
    """The sum, and its gradients by those of hidden [T, E], weight [V, E] and bias [V] that are `wanted`."""
    gradients = Gradients.room(hidden, weight, work.wide, wanted)
    weight, bias = weight.to(work.dtype), None if bias is None else bias.to(work.dtype)
    losses = hidden.new_empty(len(hidden), dtype=work.wide)
    for start in range(0, len(hidden), work.chunk):
        part = slice(start, start + work.chunk)
        losses[part] = add_chunk(part, hidden[part].to(work.dtype), weight, bias, work, gradients)
    return losses.sum(), gradients


def add_chunk(
    part: slice, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: Work, gradients: Gradients
) -> Tensor:
    """The losses [c] of one chunk, hidden [c, E]. A function of its own, so that buffers are gone before the next."""
    logits = F.linear(hidden, weight, bias)
    wide = logits.to(work.wide)
    losses = cross_entropy_(wide, work.labels[part], work, gradients.wanted)
    if gradients.wanted:
        gradients.add(part, wide, logits.copy_(wide), hidden, weight)
    return losses


def cross_entropy_(logits: Tensor, labels: Tensor, work: Work, gradient: bool) -> Tensor:
    """The losses [c] of logits [c, V], overwritten by their gradient if one is asked for. Makes nothing as large."""
    valid = (labels != work.ignore).unsqueeze(1)
    labels = labels.unsqueeze(1).where(valid, 0)
    chosen = logits.gather(1, labels)
    peak = logits.amax(1, keepdim=True)
    total = logits.sub_(peak).exp_().sum(1, keepdim=True)
    lse = peak + total.log()
    if gradient:
        logits.mul_(valid * (1 + 2 * work.z_loss * lse) / total)
        # What scatter_add_ would do, and the same on every run on a GPU.
        logits.scatter_(1, labels, logits.gather(1, labels) - valid.to(logits.dtype))
    return (lse - chosen + work.z_loss * lse.square()).where(valid, 0).squeeze(1)


@dataclass(frozen=True)
class Gradients:
    """By hidden [T, E], in its dtype, and by weight [V, E] and bias [V], in that of sums; None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def room(cls, hidden: Tensor, weight: Tensor, wide: torch.dtype, wanted: Sequence[bool]) -> Gradients:
        return cls(
            torch.empty_like(hidden) if wanted[0] else None,
            torch.zeros_like(weight, dtype=wide) if wanted[1] else None,
            weight.new_zeros(len(weight), dtype=wide) if wanted[2] else None,
        )

    @property
    def wanted(self) -> bool:
        """Whether any is."""
        return not (self.hidden is self.weight is self.bias is None)

    def add(self, part: slice, wide: Tensor, narrow: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Adds what a chunk gives: the gradient of its logits [c, V], in the dtype of sums and in that of matmuls."""
        if self.hidden is not None:
            self.hidden[part] = narrow @ weight
        if self.bias is not None:
            self.bias.add_(wide.sum(0))
        if self.weight is not None and self.weight.is_cuda and narrow.dtype != wide.dtype:
            # Tensor cores multiply the narrow ones and add to the wide sum, without a product in between.
            torch.addmm(self.weight, narrow.T, hidden, out_dtype=wide.dtype, out=self.weight)
        elif self.weight is not None:
            self.weight.addmm_(wide.T, hidden.to(wide.dtype))


def backend_named(name: str, z_loss: float) -> Run:
    """The function of that name; refuses torch's where this torch lacks it, or what is asked of it."""
    if name not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}; got {name!r}")
    if name == "torch" and (z_loss or not hasattr(nn, "LinearCrossEntropyOptions")):
        raise ValueError(f"torch's has no z_loss, and needs torch 2.13; got {z_loss} and torch {torch.__version__}")
    return with_torch if name == "torch" else cast(Run, with_own)


def matmul_dtype(hidden: Tensor) -> torch.dtype:
    """That of `hidden`, unless autocast lowers it, as it does all but float64."""
    lowered = autocasts(hidden) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(hidden.device.type) if lowered else hidden.dtype


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on where `x` is; the meta device knows none, and would raise."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, chunk: int | None) -> None:
    """Refuses what does not fit together, as far as it can be seen without waiting for a GPU."""
    wanted = hidden.shape[:-1], (weight.shape[0], hidden.shape[-1]), weight.shape[:1]
    got = labels.shape, weight.shape, weight.shape[:1] if bias is None else bias.shape
    if hidden.ndim != 3 or got != wanted:
        shapes = ", ".join(str(tuple(x.shape)) for x in (hidden, weight, labels, bias) if x is not None)
        raise ValueError(f"hidden [B, T, E], weight [V, E], labels [B, T] and bias [V] are needed; got {shapes}")
    dtypes = [x.dtype for x in (hidden, weight, bias) if x is not None]
    if not autocasts(hidden) and len({*dtypes}) > 1:
        raise ValueError(f"hidden, weight and bias need one dtype outside of autocast; got {dtypes}")
    if labels.is_floating_point() or (chunk is not None and chunk < 1):
        raise ValueError(f"labels must be integers and a chunk 1 token at least; got {labels.dtype} and {chunk}")
