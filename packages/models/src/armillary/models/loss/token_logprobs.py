"""Log-probabilities of labels, a chunk of tokens at a time, so that logits [T, V] never exist.

Forward keeps one log-sum-exp for each token. The gradient of each label is known only in backward, which therefore
computes each chunk's logits a second time.

Letters: of T tokens t are on this rank. Of a chunk's C tokens c are on this rank. Of the V rows of the head's weight,
one for each token of the vocabulary, V_r are on this rank. Of M labels m are in a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import Axis, start_all_gather
from armillary.core.parts import check_local, compat, phase
from armillary.models.layers.interleaved import pad_to_multiple
from armillary.models.loss.chunk_labels import MultiChunkLabels, gathered_index
from armillary.models.loss.cross_entropy import pad_empty_shard
from armillary.models.loss.linear_chunks import ChunkSpec, Gradients, chunks
from armillary.models.loss.linear_loss import check, loss_chunk_tokens, matmul_dtype
from armillary.models.loss.vocabulary_shard import VocabularyShard


class TokenStatistics(NamedTuple):
    """Statistics of the distribution that predicts each label, from logits divided by the temperature.

    Each has the labels' shape and no gradient. For ignored labels they are 0 and False.
    """

    entropy: Tensor
    """Entropy, in nats."""
    mean_logit: Tensor
    """Mean of the logits over the vocabulary."""
    is_top: Tensor
    """True where no token is more likely than the label."""


class LogprobOptions(TypedDict, total=False):
    """The keyword arguments of `token_logprobs` except `statistics`."""

    bias: Tensor | None
    temperature: float
    ignore: int
    chunk: int | None
    axis: DeviceMesh | Axis | None
    vocabulary: int | None


@overload
def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    positions: Tensor | None = None,
    *,
    statistics: Literal[False] = False,
    **options: Unpack[LogprobOptions],
) -> Tensor: ...


@overload
def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    positions: Tensor | None = None,
    *,
    statistics: Literal[True],
    **options: Unpack[LogprobOptions],
) -> tuple[Tensor, TokenStatistics]: ...


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    positions: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    ignore: int = -100,
    chunk: int | None = None,
    axis: DeviceMesh | Axis | None = None,
    vocabulary: int | None = None,
    statistics: bool = False,
) -> Tensor | tuple[Tensor, TokenStatistics]:
    """Returns the log-probability of each label, from logits `F.linear(hidden, weight, bias) / temperature`.

    Differentiable once, with respect to hidden, weight and bias. Keeps `hidden`, `weight` and one number per token
    until backward; logits exist for one chunk at a time.

    Args:
        hidden: [B, T, E]; with an axis of R ranks [B, ceil(T / R), E], this rank's `interleaved_shard`.
        weight: [V, E]; with an axis this rank's [V_r, E], its `Shard(0)` of the weight.
        labels: integers [B, T], already shifted; with an axis the labels of all ranks' tokens, the same on every rank.
            With `positions`, integers [M].
        positions: integers [M], in any order. `positions[i]` is the token that predicts `labels[i]`: its index among
            the B T tokens, row after row (with an axis, each row is padded to R ceil(T / R) tokens). A position may
            occur several times, where several sequences branch. Chunks without labels are not computed. Best on the
            CPU, because the host reads them.
        bias: [V]; with an axis [V_r].
        temperature: divides the logits.
        ignore: labels with this value are skipped: their log-probability is 0, without a gradient.
        chunk: number of tokens in a chunk, as in `linear_token_loss`.
        axis: a 1-D mesh of R ranks, over which the vocabulary is sharded. All ranks must make the same call.
        vocabulary: V, needed with an axis.
        statistics: True also returns `TokenStatistics`.

    Bytes sent by each of R ranks, for n = B ceil(T / R) local tokens, M labels (R n without positions) and w = 4 (8 in
    float64); chunks without labels send nothing:

        "all_gather", forward        (R - 1) (n E e + (R n + M) w), and with statistics (R - 1) 3 R n w more
        "all_gather", backward       (R - 1) n E e
        "reduce_scatter", backward   (R - 1) n E e if `hidden` requires a gradient

    Returns:
        Log-probabilities in nats, shaped as `labels`, in float32 (float64 for float64). With an axis, every rank gets
        the log-probabilities of all ranks' labels. Every rank must call backward with the same upstream gradient, and
        gets the gradients of its own tokens and of its own rows of weight and bias.

    Raises:
        ValueError: `hidden`, `labels` or `positions` is a DTensor (pass its `to_local()`), shapes or dtypes do not
            match, labels or positions are not integers, a position is outside of the B T tokens, the chunk is below 1,
            the temperature is not above 0, `vocabulary` is missing with an axis, or the number of rows is not this
            rank's part of it. Raised before any communication. Labels outside of the vocabulary are reported as by
            `token_loss`.
    """
    ranks = 1 if axis is None else Axis.of(axis).size
    label_list = LabelList.of(labels, positions, ignore, hidden.shape, ranks)
    check(hidden, weight, (label_list.shape[0], label_list.row_tokens), bias, chunk, ranks)
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: it must be above 0")
    shard, dtype = VocabularyShard.of(len(weight), axis, vocabulary), matmul_dtype(hidden)
    # Raises for labels outside of the vocabulary: `gather` from V zeros checks its indices, on a GPU without a host
    # sync. `expand` makes the V zeros from one element, without memory for the others.
    label_list.labels.new_zeros(1).expand(shard.total_rows).gather(0, label_list.labels.where(label_list.valid, 0))
    tokens, dim = prod(label_list.shape), hidden.shape[-1]
    chunk = chunk or loss_chunk_tokens(tokens, dim, shard.total_rows, dtype.itemsize, ranks)
    spec = LogprobsSpec(label_list, chunk, dtype, shard, temperature, statistics)
    logprobs, *columns = log_probabilities(hidden.flatten(0, 1), weight, bias, spec)
    result = label_list.in_caller_order(logprobs)
    if not statistics:
        return result
    entropy, mean_logit, is_top = (label_list.in_caller_order(x) for x in columns)
    return result, TokenStatistics(entropy, mean_logit, is_top > 0)


@dataclass(frozen=True)
class LabelList:
    """M labels, sorted by the position of the token that predicts them.

    `MultiLabels` are for the loss, which adds up the labels of a token. Here each label has its own result, which is
    returned in the caller's order.

    Args:
        shape: (B, T), the rows and the tokens of each, padded to a multiple of R ranks.
        positions: [M], indices among the B T tokens of `shape`. If the caller passed labels [B, T], M = B T: padding
            has a label too, an ignored one.
        labels: [M].
        valid: bool [M], False for ignored labels.
        host_positions: the positions on the CPU; None for labels [B, T], whose positions are 0, 1, ...
        order: [M], the index of each label in the caller's order; None for labels [B, T].
        ranks: R.
        row_tokens: tokens of a row, without padding.
    """

    shape: tuple[int, int]
    positions: Tensor
    labels: Tensor
    valid: Tensor
    host_positions: Tensor | None
    order: Tensor | None
    ranks: int
    row_tokens: int

    @classmethod
    def of(cls, labels: Tensor, positions: Tensor | None, ignore: int, hidden: torch.Size, ranks: int) -> LabelList:
        """Checks and sorts the labels of a call. `hidden` is the shape of this rank's hidden states."""
        check_local("labels", labels)
        if labels.is_floating_point() or labels.ndim != (2 if positions is None else 1):
            accepted_shape = "[B, T]" if positions is None else "[M] beside positions"
            raise ValueError(f"labels must be integers {accepted_shape}; got {labels.dtype} {tuple(labels.shape)}")
        if positions is None:
            rows, tokens = labels.shape
            padded = pad_to_multiple(labels, ranks, ignore)
            positions = torch.arange(padded.numel(), device=labels.device)
            flat = padded.flatten().long()
            return cls((rows, padded.shape[1]), positions, flat, flat != ignore, None, None, ranks, tokens)
        check_local("positions", positions)
        if positions.is_floating_point() or positions.shape != labels.shape:
            raise ValueError(
                f"positions must be integers like labels {tuple(labels.shape)}; got {positions.dtype} "
                f"{tuple(positions.shape)}"
            )
        if len(hidden) != 3:
            raise ValueError(f"hidden must be [B, T, E]; got {tuple(hidden)}")
        rows, tokens = hidden[0], hidden[1] * ranks
        host = positions.detach().cpu().long()
        if len(host) and not 0 <= int(host.min()) <= int(host.max()) < rows * tokens:
            raise ValueError(
                f"positions run from {int(host.min())} to {int(host.max())}; {rows} rows of {tokens} tokens have 0 to "
                f"{rows * tokens - 1}"
            )
        # Sorted, so that the labels of a chunk of tokens are one slice (`slice_of`).
        order = torch.argsort(host, stable=True)
        host = host[order]
        order, sorted_positions = order.to(labels.device), host.to(labels.device)
        sorted_labels = labels[order].long()
        valid = sorted_labels != ignore
        return cls((rows, tokens), sorted_positions, sorted_labels, valid, host, order, ranks, tokens)

    def slice_of(self, tokens: slice) -> slice:
        """Returns the slice of the M labels that a chunk predicts. The chunk is the slice `tokens` on every rank."""
        # Tokens are interleaved: tokens a..b of all R ranks are the positions a R..b R.
        position_bounds = tokens.start * self.ranks, tokens.stop * self.ranks
        if self.host_positions is None:  # one label for each position
            return slice(*position_bounds)
        return slice(*torch.searchsorted(self.host_positions, torch.tensor(position_bounds)).tolist())

    def may_have_labels(self, chunk: slice) -> bool:
        indices = self.slice_of(chunk)
        return indices.stop > indices.start

    def of_chunk(self, tokens: slice, shard: VocabularyShard) -> ChunkLabelList:
        indices = self.slice_of(tokens)
        chunk_tokens = gathered_index(self.positions[indices], tokens, self.ranks)
        columns, is_local = shard.local_columns(self.labels[indices], self.valid[indices])
        return ChunkLabelList(indices, chunk_tokens, columns, is_local)

    def in_caller_order(self, values: Tensor) -> Tensor:
        """Returns values [M] in the caller's order and shape; 0 where a label is ignored."""
        values = values.where(self.valid, 0)
        if self.order is not None:
            return torch.empty_like(values).index_put((self.order,), values)
        return values.view(self.shape)[:, : self.row_tokens]


class ChunkLabelList(NamedTuple):
    """The m labels of a chunk.

    Args:
        indices: the slice of the `LabelList` that these labels are.
        tokens: [m], the token that predicts each label: its index in the gathered chunk of C tokens.
        columns: [m], the label's column of this rank's logits; 0 if another rank has it.
        is_local: bool [m], True if this rank has the column.
    """

    indices: slice
    tokens: Tensor
    columns: Tensor
    is_local: Tensor


@dataclass(frozen=True)
class LogprobsSpec(ChunkSpec):
    """The options of a call, and its labels."""

    labels: LabelList
    temperature: float
    statistics: bool

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns a chunk's logits [C, V_r] in the matmul dtype, and a copy in `wide` divided by the temperature."""
        logits = pad_empty_shard(F.linear(hidden, weight, bias))
        return logits, logits.to(self.wide, copy=True).div_(self.temperature)


@compat.outside_graphs  # A trace would unroll the loop over chunks.
def log_probabilities(hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: LogprobsSpec) -> list[Tensor]:
    """Returns log-probabilities [M], and with statistics three more tensors [M]: the fields of `TokenStatistics`."""
    apply = cast(Callable[..., tuple[Tensor, ...]], LogProbabilities.apply)
    return list(apply(hidden, weight, bias, spec))


class LogProbabilities(torch.autograd.Function):
    """Log-probabilities of labels, and statistics. Backward recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: LogprobsSpec
    ) -> tuple[Tensor, ...]:
        matmul_weight, matmul_bias = weight.to(spec.dtype), None if bias is None else bias.to(spec.dtype)
        result_count = 4 if spec.statistics else 1
        results = hidden.new_zeros((result_count, len(spec.labels.labels)), dtype=spec.wide)
        lses = hidden.new_zeros((len(hidden), spec.shard.axis.size), dtype=spec.wide)  # [t, R]
        for tokens, gathered in chunks(hidden, spec.token_slices(), spec.shard, spec.dtype):
            # 1. Logits [C, V_r] of all ranks' tokens of the chunk, over this rank's rows of the vocabulary.
            _, logits = spec.logits(gathered, matmul_weight, matmul_bias)
            # 2. Log-sum-exp [C] over the whole vocabulary, and the results [m] of the chunk's labels.
            labels = spec.labels.of_chunk(tokens, spec.shard)
            lse, *values = chunk_values(logits, len(weight), labels, spec)
            results[:, labels.indices] = torch.stack(values)
            # 3. Keep the log-sum-exps for backward. A chunk has rank 0's tokens, then rank 1's, ...: [C] -> [R, c] ->
            # [c, R].
            lses[tokens] = lse.view(spec.shard.axis.size, -1).T
        ctx.save_for_backward(hidden, weight, bias, lses)
        ctx.spec = spec
        outputs = results.unbind(0)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (hidden, weight, bias, lses), spec = ctx.saved_tensors, cast(LogprobsSpec, ctx.spec)
        gradients = Gradients.empty(hidden, weight, spec.wide, ctx.needs_input_grad[:3])
        matmul_weight, matmul_bias = weight.to(spec.dtype), None if bias is None else bias.to(spec.dtype)
        # d(logits) of a token is the sum over its labels of upstream gradient times (one-hot - softmax) / temperature.
        # `upstream` is negated, because `logits_gradient` computes softmax minus one-hot.
        upstream = -(grads[0] / spec.temperature).where(spec.labels.valid, 0).to(spec.wide)
        with phase("backward"):
            for tokens, gathered in chunks(hidden, spec.token_slices(), spec.shard, spec.dtype):
                buffer, logits = spec.logits(gathered, matmul_weight, matmul_bias)
                labels = spec.labels.of_chunk(tokens, spec.shard)
                # exp(logit - lse), with the lse over the whole vocabulary: this rank's columns of the softmax. The lses
                # [c, R] are transposed back to the chunk's order, [C, 1].
                softmax = logits.sub_(lses[tokens].T.reshape(-1, 1)).exp_()
                add_gradient(tokens, buffer, softmax, upstream, labels, gathered, matmul_weight, spec, gradients)
        results = gradients.hidden, gradients.weight, gradients.bias
        return *(
            None if x is None else x.to(like.dtype) for x, like in zip(results, ctx.saved_tensors[:3], strict=True)
        ), None


def add_gradient(
    tokens: slice,
    buffer: Tensor,
    softmax: Tensor,
    upstream: Tensor,
    labels: ChunkLabelList,
    hidden: Tensor,
    weight: Tensor,
    spec: LogprobsSpec,
    gradients: Gradients,
) -> None:
    """Adds a chunk's gradients to `gradients`. Overwrites `softmax` [C, V_r]; writes d(logits) to `buffer` [C, V_r]."""
    # d(logits) of a token is softmax times the sum of its labels' weights, minus each label's weight at its column.
    weights = upstream[labels.indices]
    total = weights.new_zeros(len(softmax)).index_put_((labels.tokens,), weights, accumulate=True).unsqueeze(1)
    chunk = MultiChunkLabels(total, labels.tokens, labels.columns, weights.where(labels.is_local, 0))
    chunk.logits_gradient(softmax, total, buffer)
    gradients.add(tokens, buffer.narrow(1, 0, len(weight)), hidden, weight, spec.shard)


def chunk_values(logits: Tensor, rows: int, labels: ChunkLabelList, spec: LogprobsSpec) -> list[Tensor]:
    """Returns the log-sum-exps [C] over the whole vocabulary, log-probabilities [m], and statistics [m] if requested.

    Args:
        logits: [C, V_r], or [C, 1] of -inf for a rank without rows.
        rows: V_r.
    """
    # 1. Over this rank's rows of the vocabulary.
    label_logits = logits[labels.tokens, labels.columns].where(labels.is_local, 0)
    vectors = [logits.logsumexp(1), label_logits]
    if spec.statistics:
        probabilities = logits.softmax(1)
        # `where` drops NaN: a rank without rows has NaN probabilities, and 0 times -inf is NaN for masked logits.
        mean_logits = (probabilities * logits).where(probabilities > 0, 0).sum(1)
        vectors += [mean_logits, logits.narrow(1, 0, rows).sum(1), logits.amax(1)]
    # 2. Over the whole vocabulary: each vector of all ranks, [R, C] or [R, m]. One rank has a label's logit, others 0.
    lses, label_logits, *statistics = gather_vectors(vectors, spec.shard)
    lse, label_logit = lses.logsumexp(0), label_logits.sum(0)
    values = [lse, label_logit - lse[labels.tokens]]
    if spec.statistics:
        mean_logits, sums, largest = statistics
        rank_probability = (lses - lse).exp()  # [R, C], the probability that the next token is one of a rank's rows
        entropy = lse - (mean_logits * rank_probability).sum(0)  # -sum p log p, with log p = logit - lse
        mean_logit, top = sums.sum(0) / spec.shard.total_rows, largest.amax(0)
        is_top = (label_logit >= top[labels.tokens]).to(lse.dtype)
        values += [entropy[labels.tokens], mean_logit[labels.tokens], is_top]
    return values


def gather_vectors(vectors: Sequence[Tensor], shard: VocabularyShard) -> list[Tensor]:
    """Gathers each vector [n] from all ranks: [R, n], in rank order. All vectors travel in one message."""
    joined = torch.cat(list(vectors)).unsqueeze(0)
    if not shard.alone:
        joined = start_all_gather(joined, shard.axis, [1] * shard.axis.size, 0).wait()
    return list(joined.split([len(vector) for vector in vectors], 1))
