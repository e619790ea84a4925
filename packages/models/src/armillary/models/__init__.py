"""LLaMA as a plain single-device module: attention is handed in, positions are explicit."""

from armillary.models.checkpoint import Checkpointing
from armillary.models.config import LlamaConfig
from armillary.models.initialize import initialize
from armillary.models.linear_loss import linear_token_loss
from armillary.models.llama import Llama
from armillary.models.loss import token_loss
from armillary.models.tokenwise import tokenwise

__all__ = ["Checkpointing", "Llama", "LlamaConfig", "initialize", "linear_token_loss", "token_loss", "tokenwise"]
