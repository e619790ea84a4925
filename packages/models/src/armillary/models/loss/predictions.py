"""Log-probabilities of labels, and the most likely tokens, a chunk of tokens at a time: logits [T, V] never exist.

For log-probabilities, forward keeps one log-sum-exp for each token. The gradient of each label is known only in
backward, which therefore computes each chunk's logits a second time.

Letters: of M labels m are in a chunk; others as in `token_loss.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import Axis
from armillary.core.internal import check_local, compat, phase
from armillary.models.loss.labels import ChunkLabels, VocabularyShard
from armillary.models.loss.token_loss import ChunkedHead, Gradients, pad_empty_shard


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
    check_local("labels", labels)
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: it must be above 0")
    head = ChunkedHead.of(
        hidden, weight, bias, labels, positions=positions, ignore=ignore, chunk=chunk, axis=axis, vocabulary=vocabulary
    )
    head.labels.check(head.shard.total_rows)
    results = log_probabilities(hidden.flatten(0, 1), weight, bias, head, temperature, statistics)
    logprobs, *columns = (head.labels.in_caller_order(x) for x in results)
    if not statistics:
        return logprobs
    entropy, mean_logit, is_top = columns
    return logprobs, TokenStatistics(entropy, mean_logit, is_top > 0)


@compat.outside_graphs  # A trace would unroll the loop over chunks.
def log_probabilities(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, head: ChunkedHead, temperature: float, statistics: bool
) -> tuple[Tensor, ...]:
    """Returns log-probabilities [M], and with statistics three more tensors [M]: the fields of `TokenStatistics`."""
    return cast(Any, LogProbabilities).apply(hidden, weight, bias, head, temperature, statistics)


class LogProbabilities(torch.autograd.Function):
    """Log-probabilities of labels, and statistics. Backward recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: ChunkedHead,
        temperature: float,
        statistics: bool,
    ) -> tuple[Tensor, ...]:
        matmul_weight, matmul_bias = weight.to(head.dtype), None if bias is None else bias.to(head.dtype)
        result_count, ranks = 4 if statistics else 1, head.shard.axis.size
        results = hidden.new_zeros((result_count, len(head.labels.labels)), dtype=head.wide)
        lses = hidden.new_zeros((len(hidden), ranks), dtype=head.wide)  # [t, R]
        for tokens, labels, gathered in head.chunks(hidden):
            # 1. Logits [C, V_r] of all ranks' tokens of the chunk, over this rank's rows of the vocabulary.
            logits = pad_empty_shard(F.linear(gathered, matmul_weight, matmul_bias))
            logits = logits.to(head.wide, copy=True).div_(temperature)
            # 2. Log-sum-exp [C] over the whole vocabulary, and the results [m] of the chunk's labels.
            lse, *values = chunk_values(logits, len(weight), labels, head.shard, statistics)
            results[:, labels.indices] = torch.stack(values)
            # 3. Keep the log-sum-exps for backward. A chunk has rank 0's tokens, then rank 1's, ...: [C] -> [R, c] ->
            # [c, R].
            lses[tokens] = lse.view(ranks, -1).T
            del logits  # frees them before the next chunk's are computed
        ctx.save_for_backward(hidden, weight, bias, lses)
        ctx.head, ctx.temperature = head, temperature
        outputs = results.unbind(0)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *inputs, lses = ctx.saved_tensors
        (hidden, weight, bias), head = inputs, cast(ChunkedHead, ctx.head)
        gradients = Gradients.empty(hidden, weight, head.wide, ctx.needs_input_grad[:3])
        matmul_weight, matmul_bias = weight.to(head.dtype), None if bias is None else bias.to(head.dtype)
        # d(logits) of a token is the sum over its labels of upstream gradient times (one-hot - softmax) / temperature.
        # `upstream` is negated, because `logits_gradient` computes softmax minus one-hot.
        upstream = -(grads[0] / ctx.temperature).where(head.labels.weights, 0).to(head.wide)
        with phase("backward"):
            for tokens, labels, gathered in head.chunks(hidden):
                buffer = pad_empty_shard(F.linear(gathered, matmul_weight, matmul_bias))
                # exp(logit - lse), with the lse over the whole vocabulary: this rank's columns of the softmax. The lses
                # [c, R] are transposed back to the chunk's order, [C, 1].
                softmax = buffer.to(head.wide, copy=True).div_(ctx.temperature)
                softmax.sub_(lses[tokens].T.reshape(-1, 1)).exp_()
                labels = replace(labels, weights=upstream[labels.indices])
                labels.logits_gradient(softmax, labels.by_token(labels.weights), buffer)
                gradients.add(tokens, buffer, gathered, matmul_weight, head.shard)
                del buffer, softmax  # frees them before the next chunk's logits are computed
        results = zip(gradients, inputs, strict=True)
        return *(None if x is None else x.to(like.dtype) for x, like in results), None, None, None


def chunk_values(
    logits: Tensor, rows: int, labels: ChunkLabels, shard: VocabularyShard, statistics: bool
) -> list[Tensor]:
    """Returns the log-sum-exps [C] over the whole vocabulary, log-probabilities [m], and statistics [m] on request."""
    # 1. Over this rank's rows of the vocabulary. Logits are [C, V_r], or [C, 1] of -inf on a rank without rows.
    vectors = [logits.logsumexp(1), labels.logits_of(logits)]
    if statistics:
        probabilities = logits.softmax(1)
        # `where` drops NaN: a rank without rows has NaN probabilities, and 0 times -inf is NaN for masked logits.
        mean_logits = (probabilities * logits).where(probabilities > 0, 0).sum(1)
        vectors += [mean_logits, logits.narrow(1, 0, rows).sum(1), logits.amax(1)]
    # 2. Over the whole vocabulary: each vector of all ranks, [R, C] or [R, m]. One rank has a label's logit, others 0.
    lses, label_logits, *further = shard.gather_all(torch.cat(vectors)).split([len(x) for x in vectors], 1)
    lse, label_logit = lses.logsumexp(0), label_logits.sum(0)
    values = [lse, label_logit - lse[labels.tokens]]
    if statistics:
        mean_logits, sums, largest = further
        rank_probability = (lses - lse).exp()  # [R, C], the probability that the next token is one of a rank's rows
        entropy = lse - (mean_logits * rank_probability).sum(0)  # -sum p log p, with log p = logit - lse
        mean_logit, top = sums.sum(0) / shard.total_rows, largest.amax(0)
        is_top = (label_logit >= top[labels.tokens]).to(lse.dtype)
        values += [entropy[labels.tokens], mean_logit[labels.tokens], is_top]
    return values


@torch.no_grad()
def linear_argmax(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore: int = -100,
    axis: DeviceMesh | Axis | None = None,
    vocabulary: int | None = None,
) -> Tensor:
    """Returns the token with the largest logit at each position with a label, `ignore` elsewhere: int64 [B, T].

    Can be passed as a model's `head`. Logits are computed only at positions with a label, `loss_chunk_tokens` at a
    time. Of several tokens with the largest logit, the first is taken. Arguments as in `linear_token_loss`; with an
    axis the result is the same on all its ranks.

    Bytes sent by each of R ranks, kind "all_gather": (R - 1) n E e for its n tokens, and (R - 1) 16 for each label.

    Raises:
        ValueError: `hidden` or `labels` is a DTensor (pass its `to_local()`), shapes or dtypes do not match, labels are
            not integers, `vocabulary` is missing with an axis, or the number of rows is not this rank's part of it.
            Raised before any communication.
    """
    check_local("labels", labels)
    head = ChunkedHead.of(hidden, weight, None, labels, ignore=ignore, axis=axis, vocabulary=vocabulary)
    tokens = [labels.new_empty(0, dtype=torch.int64)]
    for _, chunk, gathered in head.chunks(hidden.flatten(0, 1)):
        # 1. The largest of this rank's logits, at positions with a label; -inf on a rank without rows.
        best = pad_empty_shard(F.linear(gathered[chunk.tokens[chunk.weights != 0]], weight)).max(1)
        # 2. The largest of all ranks'. float64 represents token ids exactly.
        candidates = torch.stack([best.values.double(), (best.indices + head.shard.first).double()])
        values, ids = head.shard.gather_all(candidates).unbind(1)  # [R, m] each
        tokens.append(ids.gather(0, values.argmax(0, keepdim=True)).squeeze(0).long())
    return torch.full_like(labels, ignore, dtype=torch.int64).masked_scatter(labels != ignore, torch.cat(tokens))
