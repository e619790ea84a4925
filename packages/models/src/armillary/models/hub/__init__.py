"""Folders that Hugging Face's `transformers` reads and writes: `config.json` and weights as safetensors.

families.py   config.json <-> our configs, for each model_type
rope.py       the part of it that is about RoPE
tensors.py    shapes of our tensors, and their places in the tensors of files
folder.py     names of files, json, atomic writes
read.py       from files into tensors, whole or sharded
write.py      from tensors into files
"""

from armillary.models.hub.configs import describe, read_any_config, read_config
from armillary.models.hub.folder import has_weights
from armillary.models.hub.read import check_weights, fill, read_tensors
from armillary.models.hub.write import MAX_FILE_BYTES, save

__all__ = [
    "MAX_FILE_BYTES",
    "check_weights",
    "describe",
    "fill",
    "has_weights",
    "read_any_config",
    "read_config",
    "read_tensors",
    "save",
]
