"""LLaMA, hybrids and GPT as plain single-device modules: attention is an argument, positions are explicit."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from armillary.core import LabelTriples
from armillary.core.internal import imported_at_first_use
from armillary.models.activation_checkpoint.policy import Checkpointing
from armillary.models.config import GPTConfig, LatentSizes, LlamaConfig, Mixer, StateConfig
from armillary.models.gpt import GPT
from armillary.models.hub.pretrained import load_pretrained
from armillary.models.initialization import initialize, pretrained_config
from armillary.models.layers.interleaved import all_gather_interleaved, interleaved_shard, reduce_scatter_interleaved
from armillary.models.layers.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from armillary.models.layers.token_functions import in_chunks
from armillary.models.llama import Llama
from armillary.models.sample import Sampling, generate, stream

if TYPE_CHECKING:
    from armillary.models.loss.predictions import TokenStatistics, linear_argmax, token_logprobs
    from armillary.models.loss.token_loss import linear_token_loss, token_loss
    from armillary.models.parallel import parallelize, shard_parameters, tensor_parallel

__all__ = [
    "GPT",
    "Checkpointing",
    "GPTConfig",
    "LabelTriples",
    "LatentSizes",
    "LinearScaling",
    "Llama",
    "Llama3Scaling",
    "LlamaConfig",
    "Mixer",
    "RopeScaling",
    "Sampling",
    "StateConfig",
    "TokenStatistics",
    "YarnScaling",
    "__version__",
    "all_gather_interleaved",
    "generate",
    "in_chunks",
    "initialize",
    "interleaved_shard",
    "linear_argmax",
    "linear_token_loss",
    "load_pretrained",
    "parallelize",
    "pretrained_config",
    "reduce_scatter_interleaved",
    "shard_parameters",
    "stream",
    "tensor_parallel",
    "token_logprobs",
    "token_loss",
]

__version__ = version("armillary-models")

# Modules that need FSDP2, DTensor or torch.compile, which take as long to import as torch.
_SLOW_MODULES = {
    "armillary.models.loss.token_loss": ("linear_token_loss", "token_loss"),
    "armillary.models.loss.predictions": ("TokenStatistics", "linear_argmax", "token_logprobs"),
    "armillary.models.parallel": (
        "parallelize",
        "shard_parameters",
        "tensor_parallel",
    ),
}

__getattr__ = imported_at_first_use(__name__, _SLOW_MODULES)
