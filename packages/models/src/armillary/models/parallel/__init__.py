"""Parallelism of a plain model, applied from outside."""

from armillary.models.parallel.fsdp import begin_micro_batch, shard_parameters
from armillary.models.parallel.parallelize import parallelize
from armillary.models.parallel.tensor import tensor_parallel

__all__ = ["begin_micro_batch", "parallelize", "shard_parameters", "tensor_parallel"]
