"""Cross entropy and its gradient in the memory of the logits, possibly of a sharded vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.models.loss.chunk_labels import ChunkLabels
from armillary.models.loss.vocabulary_shard import VocabularyShard


def at_least_one(logits: Tensor) -> Tensor:
    """Returns logits [C, V_r]; for a rank without rows [C, 1] of -inf, which count nothing."""
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
    """The losses [c] of this rank's own tokens, with `z_loss` times their squared log-sum-exps.

    Of C V_r logits 16 bytes are read and written in float32, two reads and two writes: `wide` was written, becomes
    softmax, and is read for the gradient. Nothing as large is made.

    Args:
        wide: the logits in the dtype of sums, [C, V_r] of all ranks' tokens, one row at least. Overwritten.
        logits: the same numbers, maybe narrower, whose largest are found with fewer bytes. May be `wide`.
        labels: of the C tokens, the same on all ranks.
        gradient: becomes that of the losses of all C tokens, in its own dtype, if given. May be either of the two.

    Bytes sent, in a dtype of w bytes: 2 w for each of the other ranks' tokens, kind "reduce_scatter"; with a gradient,
    (R - 1) w for each of this rank's own (or of the largest share), kind "all_gather".
    """
    chosen, (peak, top) = labels.chosen(wide), logits.max(1, keepdim=True)
    peak = peak.to(wide.dtype)
    if not vocabulary.alone:
        # A rank whose logits are all -inf weighs nothing: with the least number there softmax is 0 and 1, not NaN.
        wide.scatter_(1, top, peak.clamp_(min=torch.finfo(wide.dtype).min))
    # In place: each row is read, for its peak and sum, before its elements are written one by one. On CUDA too: in all
    # kernels of ATen's SoftMax.cu and PersistentSoftmax.cuh (and in the latest, ForwardReg, Gmem and Fast) a block or a
    # warp has a row, a barrier ends its sum, each thread reads an element again, or has it, and writes it then; and no
    # pointer is `__restrict__`.
    torch.softmax(wide, 1, out=wide)
    part = peak - wide.gather(1, top).log()
    lse, chosen = vocabulary.merged(part, chosen)
    if gradient is not None:
        everyone = vocabulary.gather(lse, len(wide)).wait()
        factor = vocabulary.share(labels.weights * (1 + 2 * z_loss * everyone), part, everyone)
        labels.logits_gradient(wide, factor, gradient)
    weights = vocabulary.own(labels.weights)
    return (weights * (lse + z_loss * lse.square()) - chosen).where(weights != 0, 0).squeeze(1)


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `x` times a scalar, in `dtype`. Only the product is rounded; a 0-dim factor would be too."""
    return torch.mul(x, factor.view([1] * x.ndim), out=torch.empty_like(x, dtype=dtype))
