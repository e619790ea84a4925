"""Parallelism of a plain model, applied from outside."""

from armillary.models.parallel.fsdp import shard_parameters
from armillary.models.parallel.parallelize import parallelize
from armillary.models.parallel.tensor import tensor_parallel

__all__ = ["parallelize", "shard_parameters", "tensor_parallel"]
