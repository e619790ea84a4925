"""Cross entropy and its gradient in the memory of the logits, with or without a sharded vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.models.loss.chunk_labels import ChunkLabels
from armillary.models.loss.vocabulary_shard import VocabularyShard


def pad_empty_shard(logits: Tensor) -> Tensor:
    """Returns logits [C, V_r]; for a rank without rows a column of -inf, which adds 0 to a sum of exponentials."""
    return logits if logits.shape[1] else F.pad(logits, (0, 1), value=-torch.inf)


def cross_entropy_(
    wide: Tensor,
    logits: Tensor,
    labels: ChunkLabels,
    vocabulary: VocabularyShard,
    *,
    z_loss: float,
    gradient: Tensor | None,
) -> Tensor:
    """Returns the losses [c] of this rank's own tokens, with `z_loss` times their squared log-sum-exps.

    In place: `wide` becomes the softmax, which the gradient is computed from, so each of the C V_r logits is read and
    written twice (16 bytes in float32), and no other tensor of that size is allocated.

    Args:
        wide: logits [C, V_r] of all ranks' tokens in the dtype of sums, V_r >= 1. Overwritten.
        logits: the same values in the matmul dtype, in which the maximum reads fewer bytes. May be `wide`.
        labels: labels of the C tokens, the same on all ranks.
        gradient: receives the gradient of the losses of all C tokens, in its own dtype. May be `wide` or `logits`.

    Bytes sent, in a dtype of w bytes: 2 w for each of the other ranks' tokens, kind "reduce_scatter"; with a gradient,
    (R - 1) w for each of this rank's own (or of the largest share), kind "all_gather".
    """
    # 1. The label's logit and the row's maximum, before `wide` is overwritten.
    label_logits, (peak, peak_columns) = labels.logits_of(wide), logits.max(1, keepdim=True)
    peak = peak.to(wide.dtype)
    if not vocabulary.alone:
        # If all of a rank's logits are -inf, softmax would be NaN; with the lowest finite value it is 0s and a 1.
        wide.scatter_(1, peak_columns, peak.clamp_(min=torch.finfo(wide.dtype).min))
    # 2. Softmax in place. Safe, because a row is reduced before its elements are written. On CUDA too: in all kernels
    # of ATen's SoftMax.cu and PersistentSoftmax.cuh (also the newer ForwardReg, Gmem and Fast) a block or warp owns a
    # row, a barrier follows the sum, each thread then writes only elements that it reads itself, and no pointer is
    # `__restrict__`.
    torch.softmax(wide, 1, out=wide)
    # 3. This rank's log-sum-exp, from its softmax at the maximum; then the one over all ranks' rows.
    rank_lse = peak - wide.gather(1, peak_columns).log()
    lse, label_logits = vocabulary.merge(rank_lse, label_logits)
    if gradient is not None:
        # 4. The gradient needs the log-sum-exp of all C tokens; `wide` is softmax over this rank's rows alone, so it is
        # scaled by this rank's share of the probability mass.
        all_lse = vocabulary.gather(lse, len(wide)).wait()
        factor = vocabulary.scale_by_mass(labels.weights * (1 + 2 * z_loss * all_lse), rank_lse, all_lse)
        labels.logits_gradient(wide, factor, gradient)
    weights = vocabulary.own_tokens(labels.weights)
    return (weights * (lse + z_loss * lse.square()) - label_logits).where(weights != 0, 0).squeeze(1)


def scale(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `x` times a scalar, in `dtype`, rounded once: a 0-dim factor would be cast to the dtype of x first."""
    return torch.mul(x, factor.view([1] * x.ndim), out=torch.empty_like(x, dtype=dtype))
