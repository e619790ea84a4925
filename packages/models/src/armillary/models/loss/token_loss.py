"""Token losses: of whole logits, and of hidden states in chunks, so that logits [T, V] never exist.

For 5Mi tokens of LLaMA-3-8B on 8 ranks, logits would take 157 GiB per rank in bfloat16, and their float32 copy twice
as much.

Letters: this rank has t of T tokens, c of the C tokens of a chunk, and V_r of the V rows of the head's weight. On one
rank t = T, c = C and V_r = V.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.internal import autocast_enabled
from armillary.core import Axis, LabelTriples, accumulation_dtype
from armillary.core.internal import check_local, compat
from armillary.core.internal import chunks as token_chunks
from armillary.models.layers.projections import add_product
from armillary.models.loss.labels import ChunkLabels, TokenLabels, VocabularyShard

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
    if shard.axis.size == 1 and isinstance(labels, Tensor):  # torch's loss may be differentiated twice
        wide_logits = flat.to(wide)
        total = F.cross_entropy(wide_logits, token_labels.labels, ignore_index=ignore, reduction="sum")
        if z_loss:
            total = total + z_loss * wide_logits.logsumexp(1).square().where(token_labels.weights, 0).sum()
        return total, token_labels.count
    token_labels.check(shard.total_rows)

    needs_grad = logits.requires_grad and torch.is_grad_enabled()
    with torch.no_grad():
        padded_logits = pad_empty_shard(flat)
        # A copy in the dtype of sums, since the caller's logits must stay. `cross_entropy_` overwrites it with the
        # softmax, and then with the gradient.
        buffer = padded_logits.to(wide, copy=True, memory_format=torch.contiguous_format)
        tokens = slice(0, len(flat))
        chunk = token_labels.of_chunk(tokens, token_labels.indices(tokens), shard, wide)
        gradient = buffer if needs_grad else None
        losses = cross_entropy_(buffer, padded_logits, chunk, shard, z_loss=z_loss, gradient=gradient)
        gradient = None if gradient is None else gradient.narrow(1, 0, flat.shape[1])
        total = shard.gather_all(losses.sum()).sum()  # in rank order: bitwise equal on all ranks
    return cast(Any, SavedGradients).apply((total, [gradient]), flat), token_labels.count


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
    is_unsupported = z_loss or head.shard.axis.size > 1 or isinstance(labels, LabelTriples)
    if is_unsupported or not hasattr(nn, "LinearCrossEntropyOptions"):
        raise ValueError(
            "backend 'torch' needs torch 2.13, one rank, labels [B, T] and no z_loss; got torch "
            f"{torch.__version__}, {head.shard.axis.size} ranks, {type(labels).__name__} and z_loss={z_loss}"
        )
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=head.chunk, chunking_method=None, allow_retain_graph=True)
    total = F.linear_cross_entropy(
        flat.to(head.dtype),
        weight.to(head.dtype),
        head.labels.labels.where(head.labels.weights, -100),
        linear_bias=None if bias is None else bias.to(head.dtype),
        reduction="sum",
        ignore_index=-100,
        options=options,
    )
    return total.to(head.wide), head.labels.count


@compat.outside_graphs  # traced, the loop would be unrolled into a graph of all chunks
def own_linear_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: ChunkedHead, z_loss: float) -> Tensor:
    """Computes the summed loss of this rank's hidden [t, E], weight [V_r, E] and bias [V_r] chunk by chunk."""
    needs_grad = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in (hidden, weight, bias)]
    with torch.no_grad():
        gradients = Gradients.empty(hidden, weight, head.wide, needs_grad)
        matmul_weight, matmul_bias = weight.to(head.dtype), None if bias is None else bias.to(head.dtype)
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
        total = head.shard.gather_all(losses.sum()).sum()  # in rank order: bitwise equal on all ranks
    return cast(Any, SavedGradients).apply((total, gradients), hidden, weight, bias)


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
    """
    # 1. Each token's label logit and largest logit, before `wide` is overwritten.
    label_logits = labels.by_token(labels.logits_of(wide) * labels.weights)
    peak, peak_columns = logits.max(1, keepdim=True)
    peak = peak.to(wide.dtype)
    if shard.axis.size > 1:
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
    weights = weights.split(shard.token_counts(len(weights)))[shard.axis.rank]  # this rank's own tokens
    return (weights * (lse + z_loss * lse.square()) - label_logits).where(weights != 0, 0).squeeze(1)


class SavedGradients(torch.autograd.Function):
    """Returns a scalar. Backward multiplies the inputs' gradients, computed before, by the upstream gradient."""

    @staticmethod
    def forward(ctx: Any, results: tuple[Tensor, Sequence[Tensor | None]], *inputs: Tensor | None) -> Tensor:
        total, gradients = results
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Rounded once. The factor gets x's number of dims, because `mul` would cast a 0-dim factor to x's dtype first.
        return None, *(
            None if x is None else torch.mul(x, grads[0].view([1] * x.ndim), out=torch.empty_like(x, dtype=dtype))
            for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )


# -- the head in chunks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChunkedHead:
    """The checked arguments of a call that are no differentiable tensors."""

    labels: TokenLabels  # of the tokens of all ranks
    shard: VocabularyShard
    chunk: int  # tokens of all ranks
    dtype: torch.dtype  # of the matmuls
    wide: torch.dtype  # of sums

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor | LabelTriples,
        *,
        ignore: int,
        axis: DeviceMesh | Axis | None,
        vocabulary: int | None,
        positions: Tensor | None = None,
        chunk: int | None = None,
    ) -> ChunkedHead:
        """Checks a call, and chooses chunk and dtype. Needs no device sync, except to read `positions` on a device."""
        check_local("hidden", hidden)
        ranks = 1 if axis is None else Axis.of(axis).size
        # 1. Labels. Positions count the tokens of the hidden states.
        if isinstance(labels, LabelTriples) or positions is None:
            token_labels = TokenLabels.of(labels, ignore, ranks)
        elif hidden.ndim != 3:
            raise ValueError(f"hidden must be [B, T, E]; got {tuple(hidden.shape)}")
        else:
            shape = hidden.shape[0], hidden.shape[1] * ranks
            token_labels = TokenLabels.at_positions(labels, positions, ignore, shape, ranks)
        # 2. Shapes and dtypes.
        (rows, row_tokens), dim = token_labels.shape, hidden.shape[-1]
        expected = (rows, ceil(row_tokens / ranks)), (len(weight), dim), weight.shape[:1]
        if (
            hidden.ndim != 3
            or (hidden.shape[:-1], weight.shape, weight.shape[:1] if bias is None else bias.shape) != expected
        ):
            hidden_shape = f"[B, ceil(T / {ranks}), E], with this rank's rows of V:" if ranks > 1 else "[B, T, E],"
            shapes = [hidden.shape, weight.shape, token_labels.shape, *([] if bias is None else [bias.shape])]
            raise ValueError(
                f"hidden {hidden_shape} weight [V, E], labels [B, T] and bias [V] are needed; "
                f"got {', '.join(str(tuple(shape)) for shape in shapes)}"
            )
        dtypes = [x.dtype for x in (hidden, weight, bias) if x is not None]
        if not autocast_enabled(hidden) and len({*dtypes}) > 1:
            raise ValueError(f"hidden, weight and bias need one dtype outside of autocast; got {dtypes}")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk must be at least 1 token; got {chunk}")
        # 3. This rank's part of the vocabulary, the dtype and the chunk. Autocast applies to all dtypes but float64.
        shard, dtype = VocabularyShard.of(len(weight), axis, vocabulary), hidden.dtype
        if autocast_enabled(hidden) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(hidden.device.type)
        tokens = rows * hidden.shape[1] * ranks
        chunk = chunk or loss_chunk_tokens(tokens, dim, shard.total_rows, dtype.itemsize, ranks)
        return cls(token_labels, shard, chunk, dtype, torch.promote_types(dtype, torch.float32))

    def chunks(self, hidden: Tensor) -> Generator[tuple[slice, ChunkLabels, Tensor]]:
        """Yields each chunk with labels: slice of this rank's tokens, labels, hidden states [C, E] of all ranks."""
        ranks = self.shard.axis.size
        slices = token_chunks(len(hidden), max(1, self.chunk // ranks)) if len(hidden) else []
        indices = [(tokens, self.labels.indices(tokens)) for tokens in slices]
        # The host knows, without a device sync, which chunks have a label on any rank.
        labelled = [(tokens, labels) for tokens, labels in indices if labels.stop > labels.start]
        gathers = (self.shard.gather(hidden[tokens], ranks * len(hidden[tokens]), self.dtype) for tokens, _ in labelled)
        next_gather = next(gathers, None)  # starts the first all-gather
        for tokens, labels in labelled:
            current = next_gather
            next_gather = next(gathers, None)  # in flight while the caller works on the current chunk
            assert current is not None
            yield tokens, self.labels.of_chunk(tokens, labels, self.shard, self.wide), current.wait()


def loss_chunk_tokens(tokens: int, dim: int, vocabulary: int, itemsize: int = 2, ranks: int = 1) -> int:
    """Returns the default number of tokens in a chunk of the loss. Chunks are as equal as possible.

    For LLaMA-3-8B, 8192 tokens are in chunks of 683, and 655360 in chunks of 4148.
    """
    # A chunk's logits and their float32 copy may take 64 MiB, or half of the bytes of a rank's part of `hidden` and
    # `weight`, whichever is more. Smaller chunks cost time: each one reads the weight and adds to its full gradient.
    budget = max(2**26, (tokens + vocabulary) * dim * itemsize // (2 * ranks))
    wide_itemsize = 4 if itemsize < 4 else 0  # the float32 copy of 16-bit logits
    logits_bytes = ceil(vocabulary / ranks) * (itemsize + wide_itemsize)  # per token
    # Per token, four tensors [dim] are in flight: the hidden states of this chunk and of the next, and their gradient
    # before and after its reduction.
    exchanged_bytes = 4 * dim * itemsize if ranks > 1 else 0
    chunks = ceil(tokens * (logits_bytes + exchanged_bytes) / budget)
    return max(1, ceil(tokens / max(1, chunks)))


def pad_empty_shard(logits: Tensor) -> Tensor:
    """Returns logits [C, V_r]. On a rank without rows, a column [C, 1] of -inf: it adds 0 to a sum of exponentials."""
    return logits if logits.shape[1] else F.pad(logits, (0, 1), value=-torch.inf)


class Gradients(NamedTuple):
    """Gradients of hidden [t, E] in its dtype, and of weight [V_r, E] and bias [V_r] in the dtype of sums.

    A field is None if its gradient is not needed.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def empty(cls, hidden: Tensor, weight: Tensor, wide: torch.dtype, needs_grad: Sequence[bool]) -> Gradients:
        return cls(
            torch.zeros_like(hidden) if needs_grad[0] else None,
            torch.zeros_like(weight, dtype=wide) if needs_grad[1] else None,
            weight.new_zeros(len(weight), dtype=wide) if needs_grad[2] else None,
        )

    def add(self, tokens: slice, dlogits: Tensor, hidden: Tensor, weight: Tensor, shard: VocabularyShard) -> None:
        """Adds a chunk's gradients, from d(logits) [C, V_r] and the hidden states [C, E] of all ranks' tokens."""
        # Without rows, d(logits) are [C, 1] (`pad_empty_shard`).
        dlogits = dlogits.narrow(1, 0, len(weight))
        # The reduce-scatter over ranks is in flight while the weight's gradient is computed.
        write = None if self.hidden is None else shard.scatter(dlogits @ weight, self.hidden[tokens])
        if self.bias is not None:
            self.bias.add_(dlogits.sum(0, dtype=self.bias.dtype))
        if self.weight is not None:
            add_product(self.weight, dlogits, hidden)
        if write is not None:
            write()
