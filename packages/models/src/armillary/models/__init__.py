"""LLaMA and GPT as plain single-device modules: attention is handed in, positions are explicit."""

from armillary.models.checkpoint import Checkpointing
from armillary.models.config import GPTConfig, LlamaConfig
from armillary.models.decoding import Decoding
from armillary.models.generate import generate, stream
from armillary.models.gpt import GPT
from armillary.models.initialize import initialize
from armillary.models.linear_loss import linear_token_loss
from armillary.models.llama import Llama
from armillary.models.loss import token_loss
from armillary.models.parallel import parallelize, shard_parameters, tensor_parallel
from armillary.models.predictions import linear_predictions
from armillary.models.pretrained import load_pretrained, pretrained_config
from armillary.models.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from armillary.models.sampling import Sampling
from armillary.models.tokenwise import in_pieces

__all__ = [
    "GPT",
    "Checkpointing",
    "Decoding",
    "GPTConfig",
    "LinearScaling",
    "Llama",
    "Llama3Scaling",
    "LlamaConfig",
    "RopeScaling",
    "Sampling",
    "YarnScaling",
    "generate",
    "in_pieces",
    "initialize",
    "linear_predictions",
    "linear_token_loss",
    "load_pretrained",
    "parallelize",
    "pretrained_config",
    "shard_parameters",
    "stream",
    "tensor_parallel",
    "token_loss",
]
