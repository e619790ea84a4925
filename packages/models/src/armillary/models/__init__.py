"""LLaMA as a plain single-device module: attention is handed in, positions are explicit."""

from armillary.models.config import LlamaConfig
from armillary.models.initialize import initialize
from armillary.models.llama import Llama
from armillary.models.loss import token_loss

__all__ = ["Llama", "LlamaConfig", "initialize", "token_loss"]
