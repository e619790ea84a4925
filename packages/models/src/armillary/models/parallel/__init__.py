"""Parallelism of a plain model, applied from outside."""

from armillary.models.parallel.parallelize import ZeroStage, begin_micro_batch, parallelize, shard_parameters
from armillary.models.parallel.tensor_parallelism import tensor_parallel
from armillary.models.parameter_shards import local_part

__all__ = [
    "ZeroStage",
    "begin_micro_batch",
    "local_part",
    "parallelize",
    "shard_parameters",
    "tensor_parallel",
]
