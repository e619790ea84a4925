"""Losses of post-training, from the log-probabilities of tokens that may be on any rank.

segment_sum.py     sums of per-token values for each sequence, over all ranks
completions.py     the labels of completions in packed trees, and the sequence of each
losses.py          DPO, GRPO and policy gradient
"""

from armillary.attention.post_training.completions import CompletionLabels, completion_labels
from armillary.attention.post_training.losses import SequenceLoss, dpo_loss, grpo_loss, policy_gradient_loss
from armillary.attention.post_training.segment_sum import segment_sum

__all__ = [
    "CompletionLabels",
    "SequenceLoss",
    "completion_labels",
    "dpo_loss",
    "grpo_loss",
    "policy_gradient_loss",
    "segment_sum",
]
