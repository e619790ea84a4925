"""Hugging Face folders, as `transformers` reads and writes them: `config.json` and safetensors.

pretrained.py `from_pretrained` and `save_pretrained` of a model, `load_pretrained`
configs.py    from config.json to `LlamaConfig` and `GPTConfig`, and back
families.py   fields and defaults of each model_type
rope.py       RoPE in config.json
tensors.py    the slice of a file's tensor that each parameter is
folder.py     names of files, JSON, atomic replacement
read.py       from files to parameters, full or sharded
write.py      from parameters to files
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
