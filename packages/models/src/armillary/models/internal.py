# pyright: reportUnusedImport=false
# ruff: noqa: F401
"""Parts of models that the trainer and the planner are built from."""

from typing import TYPE_CHECKING

from armillary.core.internal import imported_at_first_use
from armillary.models import hub
from armillary.models.activation_checkpoint.checkpointed_block import Keep
from armillary.models.activation_checkpoint.offload import simulated_stream
from armillary.models.activation_checkpoint.policy import Policy, best_input_count
from armillary.models.config import one_block
from armillary.models.hub.configs import CONFIG, describe, ends_of_text, parse
from armillary.models.hub.read import parameter_shapes, weight_map
from armillary.models.hub.safetensors import DTYPES, SUFFIX, TensorEntry, open_tensors, split, tensor_bytes
from armillary.models.initialization import meta_model
from armillary.models.layers.projections import HeadProjections
from armillary.models.layers.state_mixers import STATE_MIXERS, Recurrence

if TYPE_CHECKING:
    from armillary.models.loss.token_loss import loss_chunk_tokens

# Modules that need FSDP2 or torch.compile, which take seconds to import, and their names here.
_SLOW_NAMES = {
    "armillary.models.loss.token_loss": ("loss_chunk_tokens",),
}

__getattr__ = imported_at_first_use(__name__, _SLOW_NAMES)
