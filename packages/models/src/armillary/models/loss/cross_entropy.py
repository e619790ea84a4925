"""Cross entropy and its gradient in the memory of the logits, with or without a sharded vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.models.loss.chunk_labels import ChunkLabels
from armillary.models.loss.vocabulary_shard import VocabularyShard


def pad_empty_shard(logits: Tensor) -> Tensor:
    """Returns logits [C, V_r]. On a rank without rows, a column [C, 1] of -inf: it adds 0 to a sum of exponentials."""
    return logits if logits.shape[1] else F.pad(logits, (0, 1), value=-torch.inf)


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
    label_logits, (peak, peak_columns) = labels.logits_of(wide), logits.max(1, keepdim=True)
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
    if gradient is not None:
        # 4. The gradient, of all C tokens. `wide` is the softmax over this rank's columns alone. Times the probability
        # exp(rank_lse - lse) of these columns, it is the softmax over the whole vocabulary. The gradient of
        # z_loss lse^2 is 2 z_loss lse softmax.
        all_lse = shard.gather(lse, len(wide)).wait()
        factor = shard.scale_by_mass(labels.weights * (1 + 2 * z_loss * all_lse), rank_lse, all_lse)
        labels.logits_gradient(wide, factor, gradient)
    weights = shard.own_tokens(labels.weights)
    return (weights * (lse + z_loss * lse.square()) - label_logits).where(weights != 0, 0).squeeze(1)


def scale(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `x` times a scalar tensor, in `dtype`, rounded once."""
    # The factor gets x's number of dims, because `mul` would cast a 0-dim factor to the dtype of x first.
    return torch.mul(x, factor.view([1] * x.ndim), out=torch.empty_like(x, dtype=dtype))
