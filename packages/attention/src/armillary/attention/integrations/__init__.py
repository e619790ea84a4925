"""Attention methods inside models that were written for one device: SDPA calls, and Hugging Face transformers."""

from armillary.attention.integrations.batch import ShardedBatch, shard_batch, whole_loss
from armillary.attention.integrations.sdpa import sdpa_parallel
from armillary.attention.integrations.sequence import sequence
from armillary.attention.integrations.transformers import register_transformers

__all__ = ["ShardedBatch", "register_transformers", "sdpa_parallel", "sequence", "shard_batch", "whole_loss"]
