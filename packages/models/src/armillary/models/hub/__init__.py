"""Hugging Face folders, as `transformers` reads and writes them: `config.json` and safetensors.

pretrained.py  `from_pretrained` and `save_pretrained` of a model, `load_pretrained`
configs.py     from config.json to `LlamaConfig` and `GPTConfig`, and back, by the fields of each model_type
safetensors.py the format of files with tensors
read.py        from files to parameters, full or sharded
write.py       from parameters to files
"""

from armillary.models.hub.configs import describe, read_any_config, read_config
from armillary.models.hub.read import check_weights, fill, has_weights, read_tensors
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
