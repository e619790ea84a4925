"""Parallelism of a plain model, applied from outside."""

from armillary.models.parallel.fsdp import ZeroStage, begin_micro_batch, shard_parameters
from armillary.models.parallel.parallelize import parallelize
from armillary.models.parallel.tensor import tensor_parallel
from armillary.models.parameter_shards import local_part

__all__ = [
    "ZeroStage",
    "begin_micro_batch",
    "local_part",
    "parallelize",
    "shard_parameters",
    "tensor_parallel",
]
