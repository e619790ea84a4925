"""Token losses: of whole logits, and of hidden states in chunks, so that logits [T, V] never exist.

For 5Mi tokens of LLaMA-3-8B on 8 ranks, logits would take 157 GiB per rank in bfloat16, and their float32 copy twice
as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import Axis, LabelTriples, accumulation_dtype
from armillary.core.parts import check_local, compat
from armillary.models.loss.head import ChunkedHead, Gradients, pad_empty_shard
from armillary.models.loss.labels import ChunkLabels, TokenLabels
from armillary.models.loss.vocabulary_shard import VocabularyShard

Backend = Literal["own", "torch"]


# -- whole logits -----------------------------------------------------------------------------------------------------


def token_loss(
    logits: Tensor,
    labels: Tensor | LabelTriples,
    *,
    ignore: int = -100,
    z_loss: float = 0.0,
    axis: DeviceMesh | Axis | None = None,
    vocabulary: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the sum of the cross entropies, in nats, over valid labels, and the number of valid labels.

    Sum both over all ranks, then divide: a mean per rank would be wrong, because ranks have different numbers of valid
    labels. Without valid labels the sum is 0, with zero gradients.

    Args:
        logits: [B, T, V]; with an axis [B, T, V_r], this rank's part of the vocabulary, cut as by `torch.chunk` and
            DTensor's `Shard`: ceil(V / R) entries per rank until none are left.
        labels: integers [B, T], shifted: `logits[b, t]` predict `labels[b, t]`. With an axis, the same on all ranks.
            Or `LabelTriples`, with several labels per position.
        ignore: labels with this value are not counted.
        z_loss: adds `z_loss * logsumexp(logits)**2` for each valid label (PaLM, arXiv 2204.02311).
        axis: a 1-D mesh of R ranks, over which the vocabulary is sharded. All ranks make the same call, all with
            gradients or all without.
        vocabulary: V, needed with an axis.

    Bytes sent, all in forward, with w = 4 (8 in float64). Logits are [B, T, V_r] on each rank; for the exchange each
    rank owns B T / R of the tokens: "reduce_scatter" 2 w for each token of the other ranks; "all_gather" (R - 1) w,
    and with gradients (R - 1) ceil(B T / R) w more.

    Returns:
        The sum, a scalar in float32 (float64 for float64 logits), and the count, an integer scalar on the same device.
        For triples they are the sum of weight times cross entropy, and the sum of weights in float64.

        With an axis both are bitwise equal on all ranks. It is one loss with a copy on each rank, not R losses: each
        rank calls backward with the same upstream gradient, and gets the gradient of its own logits. With an axis of
        several ranks, or with triples, backward cannot be differentiated.

    Raises:
        ValueError: `logits` or `labels` is a DTensor (pass its `to_local()`), shapes do not match, labels are not
            integers, `vocabulary` is missing with an axis, V_r is not this rank's part of it, or a label of triples is
            not below V. Raised before any communication. Other labels outside of the vocabulary are not checked on the
            host, which would have to wait for a GPU: torch's kernels report them, on every rank.
    """
    check_local("logits", logits)
    token_labels = TokenLabels.of(labels, ignore)
    if logits.ndim != 3 or labels.shape != logits.shape[:2]:
        raise ValueError(
            f"logits [B, T, V] and labels [B, T] are needed; got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    shard, flat = VocabularyShard.of(logits.shape[-1], axis, vocabulary), logits.flatten(0, 1)
    wide = accumulation_dtype(logits.dtype)
    if shard.alone and isinstance(labels, Tensor):  # torch's loss may be differentiated twice
        wide_logits = flat.to(wide)
        total = F.cross_entropy(wide_logits, token_labels.labels, ignore_index=ignore, reduction="sum")
        if z_loss:
            total = total + z_loss * wide_logits.logsumexp(1).square().where(token_labels.weights, 0).sum()
        return total, token_labels.count
    token_labels.check(shard.total_rows)

    def loss_and_gradient(needs_grad: Sequence[bool]) -> tuple[Tensor, Sequence[Tensor | None]]:
        padded_logits = pad_empty_shard(flat)
        # A copy in the dtype of sums, since the caller's logits must stay. `cross_entropy_` overwrites it with the
        # softmax, and then with the gradient.
        buffer = padded_logits.to(wide, copy=True, memory_format=torch.contiguous_format)
        chunk = token_labels.of_chunk(slice(0, len(flat)), shard, wide)
        gradient = buffer if needs_grad[0] else None
        losses = cross_entropy_(buffer, padded_logits, chunk, shard, z_loss=z_loss, gradient=gradient)
        return shard.total(losses), [None if gradient is None else gradient.narrow(1, 0, flat.shape[1])]

    return with_gradients(loss_and_gradient, flat), token_labels.count


# -- head and loss in one ---------------------------------------------------------------------------------------------


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor | LabelTriples,
    *,
    bias: Tensor | None = None,
    ignore: int = -100,
    chunk: int | None = None,
    z_loss: float = 0.0,
    backend: Backend = "own",
    axis: DeviceMesh | Axis | None = None,
    vocabulary: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `token_loss(F.linear(hidden, weight, bias), labels)` chunk by chunk. Can be passed as a model's `head`.

    A chunk's logits are computed once, in the dtype of `hidden` (or of autocast), and softmax in float32 or wider.
    Gradients are computed in the same forward pass, for inputs that require them. Backward multiplies them by the
    upstream gradient, any number of times (`retain_graph`); it cannot be differentiated.

    Memory, with e bytes per element: d(hidden), B T E e bytes, and d(weight) in float32 or wider, at least 4 V E bytes,
    live from forward to backward. For a chunk of C tokens, forward also needs logits, C V e bytes, and of 16-bit logits
    a float32 copy, 4 C V bytes; under autocast a cast copy of the weight. `hidden` and `weight` are not kept.

    With an `axis` of R ranks (tensor parallelism), rank r has V_r of the weight's V rows, and the tokens i R + r of
    each batch row (`interleaved_shard`). A chunk's hidden states are gathered while the previous chunk is computed, and
    their gradients are summed over ranks. Each rank computes the logits of its V_r rows.

    Args:
        hidden: [B, T, E]; with an axis [B, ceil(T / R), E].
        weight: [V, E], of a linear layer or an embedding; under FSDP2 gathered, as within `forward`. With an axis
            [V_r, E], cut as by `torch.chunk` and DTensor's `Shard(0)`: ceil(V / R) rows per rank until none are left.
        labels: integers [B, T], shifted: `labels[b, t]` is predicted by the hidden state of token t of row b. With an
            axis they are also [B, T], for the tokens of all ranks, and equal on all ranks. Or `LabelTriples`: several
            labels per position, with weights; chunks without labels are not computed.
        bias: [V]; with an axis [V_r].
        ignore: labels with this value are not counted.
        chunk: number of tokens in a chunk, which may extend over several rows; by default `loss_chunk_tokens` of these
            shapes. With an axis it counts the tokens of all ranks, and is rounded down to a multiple of R, at least R.
        z_loss: adds `z_loss * logsumexp(logits)**2` for each valid label, times its weight (PaLM, arXiv 2204.02311).
        backend: "own", or "torch" for `F.linear_cross_entropy` of torch 2.13. In float32 torch's is as exact and as
            fast, but its gradients live as long as the sum. In bfloat16 torch's rounds the sum and d(weight) after
            every chunk: with 1024 chunks of 4 tokens the sum was a third of the exact one.
        axis: a 1-D mesh of R ranks. All ranks make the same call, with gradients for the same inputs.
        vocabulary: V, needed with an axis.

    Bytes sent, all in forward, by each of R ranks for its n = B ceil(T / R) tokens, with w = 4 (8 in float64) and e
    bytes per element in the dtype of matmuls. With triples, chunks without labels send nothing.

        "all_gather"       (R - 1) (n E e + w), and (R - 1) n w if any input requires a gradient
        "reduce_scatter"   (R - 1) 2 n w, and (R - 1) n E e if `hidden` requires a gradient

    Returns:
        The sum of the cross entropies, in nats, a scalar in float32 (float64 for float64), and the count of valid
        labels, an integer scalar on the same device. With no valid label the sum is 0, with zero gradients. For triples
        they are the sum of weight times cross entropy, and the sum of weights in float64.

        With an axis both cover all tokens and are bitwise equal on all ranks. It is one loss with a copy on each rank,
        not R losses: each rank calls backward with the same upstream gradient, and gets the gradients of its own tokens
        and of its own rows of weight and bias. They need no sum over the axis.

    Raises:
        ValueError: `hidden` or `labels` is a DTensor (pass its `to_local()`), shapes or dtypes do not match, labels are
            not integers, `vocabulary` is missing with an axis, the number of rows is not this rank's part of it, a
            label of triples is not below V, the chunk is below 1, or the backend does not support the arguments. Raised
            before any communication. Other labels outside of the vocabulary are reported as by `token_loss`.
    """
    head = ChunkedHead.of(hidden, weight, bias, labels, ignore=ignore, chunk=chunk, axis=axis, vocabulary=vocabulary)
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}; got {backend!r}")
    head.labels.check(head.shard.total_rows)
    flat = hidden.flatten(0, 1)
    if backend == "own":
        return own_linear_loss(flat, weight, bias, head, z_loss), head.labels.count
    is_unsupported = z_loss or not head.shard.alone or isinstance(labels, LabelTriples)
    if is_unsupported or not hasattr(nn, "LinearCrossEntropyOptions"):
        raise ValueError(
            "backend 'torch' needs torch 2.13, one rank, labels [B, T] and no z_loss; got torch "
            f"{torch.__version__}, {head.shard.axis.size} ranks, {type(labels).__name__} and z_loss={z_loss}"
        )
    return torch_linear_loss(flat, weight, bias, head), head.labels.count


def torch_linear_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: ChunkedHead) -> Tensor:
    """Computes the summed loss of hidden [T, E] by `F.linear_cross_entropy`."""
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=head.chunk, chunking_method=None, allow_retain_graph=True)
    matmul_weight, matmul_bias = head.cast(weight, bias)
    total = F.linear_cross_entropy(
        hidden.to(head.dtype),
        matmul_weight,
        head.labels.labels.where(head.labels.weights, -100),
        linear_bias=matmul_bias,
        reduction="sum",
        ignore_index=-100,
        options=options,
    )
    return total.to(head.wide)


@compat.outside_graphs  # traced, the loop would be unrolled into a graph of all chunks
def own_linear_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: ChunkedHead, z_loss: float) -> Tensor:
    """Computes the summed loss of this rank's hidden [t, E], weight [V_r, E] and bias [V_r] chunk by chunk."""

    def loss_and_gradients(needs_grad: Sequence[bool]) -> tuple[Tensor, Sequence[Tensor | None]]:
        gradients = Gradients.empty(hidden, weight, head.wide, needs_grad)
        matmul_weight, matmul_bias = head.cast(weight, bias)
        losses = hidden.new_zeros(len(hidden), dtype=head.wide)
        for tokens, labels, gathered in head.chunks(hidden):
            logits = pad_empty_shard(F.linear(gathered, matmul_weight, matmul_bias))  # [C, V_r]
            # A chunk's logits are freed in forward, so its gradients are computed while they exist, in their memory.
            dlogits = logits if any(needs_grad) else None
            losses[tokens] = cross_entropy_(
                logits.to(head.wide), logits, labels, head.shard, z_loss=z_loss, gradient=dlogits
            )
            if dlogits is not None:
                gradients.add(tokens, dlogits, gathered, matmul_weight, head.shard)
            del logits, dlogits  # frees them before the next chunk's are computed
        return head.shard.total(losses), gradients

    return with_gradients(loss_and_gradients, hidden, weight, bias)


# -- a chunk's loss ---------------------------------------------------------------------------------------------------


def cross_entropy_(
    wide: Tensor,
    logits: Tensor,
    labels: ChunkLabels,
    shard: VocabularyShard,
    *,
    z_loss: float,
    gradient: Tensor | None,
) -> Tensor:
    """Returns the losses [c] of this rank's own tokens: cross entropy plus `z_loss` times the squared log-sum-exp.

    In place: `wide` becomes the softmax, from which the gradient is computed. No other tensor of C V_r elements is
    allocated.

    Args:
        wide: logits [C, V_r] of all ranks' tokens in the dtype of sums, V_r >= 1. Overwritten.
        logits: the same values in the matmul dtype, in which finding the maximum reads fewer bytes. May be `wide`.
        labels: labels of the C tokens, the same on all ranks.
        gradient: [C, V_r], receives d(logits) of the losses of all C tokens, in the dtype of this tensor. May be `wide`
            or `logits`. None if no gradient is needed.

    Bytes sent, with w bytes per element of `wide`: 2 w for each token of the other ranks, kind "reduce_scatter"; with a
    gradient also (R - 1) w for each of the tokens that this rank owns, or for ceil(C / R) tokens if ranks own different
    numbers, kind "all_gather".
    """
    # 1. Each token's label logit and largest logit, before `wide` is overwritten.
    label_logits = labels.by_token(labels.logits_of(wide) * labels.weights)
    peak, peak_columns = logits.max(1, keepdim=True)
    peak = peak.to(wide.dtype)
    if not shard.alone:
        # If all logits of a token on this rank are -inf, softmax would be NaN. So the largest is raised to the lowest
        # finite value: then softmax is 1 there and 0 elsewhere.
        wide.scatter_(1, peak_columns, peak.clamp_(min=torch.finfo(wide.dtype).min))
    # 2. Softmax in place. This is safe, because torch's kernels reduce a token's logits before they write them. On CUDA
    # too: in all kernels of ATen's SoftMax.cu and PersistentSoftmax.cuh (also the newer ForwardReg, Gmem and Fast) a
    # thread block or warp owns a token's logits, a barrier follows the sum, each thread then writes only elements that
    # it reads itself, and no pointer is `__restrict__`.
    torch.softmax(wide, 1, out=wide)
    # 3. Log-sum-exp over this rank's V_r columns: softmax at the maximum is exp(peak - lse). Then over all V columns.
    rank_lse = peak - wide.gather(1, peak_columns).log()
    lse, label_logits = shard.merge(rank_lse, label_logits)
    weights = labels.by_token(labels.weights)
    if gradient is not None:
        # 4. The gradient, of all C tokens. `wide` is the softmax over this rank's columns alone. Times the probability
        # exp(rank_lse - lse) of these columns, it is the softmax over the whole vocabulary. The gradient of
        # z_loss lse^2 is 2 z_loss lse softmax.
        all_lse = shard.gather(lse, len(wide)).wait()
        factor = weights * (1 + 2 * z_loss * all_lse) * (rank_lse - all_lse).exp()
        labels.logits_gradient(wide, factor, gradient)
    weights = shard.own_tokens(weights)
    return (weights * (lse + z_loss * lse.square()) - label_logits).where(weights != 0, 0).squeeze(1)


# -- autograd ---------------------------------------------------------------------------------------------------------

Computation = Callable[[Sequence[bool]], tuple[Tensor, Sequence[Tensor | None]]]
"""From one boolean per input, True if its gradient is needed, to a scalar and the gradients, None where not needed."""


def with_gradients(compute: Computation, *inputs: Tensor | None) -> Tensor:
    """Returns the scalar of a computation with `inputs`. Backward multiplies its gradients by the upstream gradient."""
    # Determined here, because grad mode is off inside of an `autograd.Function`.
    needs_grad = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in inputs]
    return cast(Tensor, cast(Any, SavedGradients).apply(compute, needs_grad, *inputs))


class SavedGradients(torch.autograd.Function):
    """The autograd function of `with_gradients`."""

    @staticmethod
    def forward(ctx: Any, compute: Computation, needs_grad: Sequence[bool], *inputs: Tensor | None) -> Tensor:
        total, gradients = compute(needs_grad)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, *(None if x is None else scale(x, grads[0], dtype) for x, dtype in gradients)


def scale(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `x` times a scalar tensor, in `dtype`, rounded once."""
    # The factor gets x's number of dims, because `mul` would cast a 0-dim factor to the dtype of x first.
    return torch.mul(x, factor.view([1] * x.ndim), out=torch.empty_like(x, dtype=dtype))
