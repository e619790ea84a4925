"""Small models, and edits that break their folders."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from armillary.models import Llama, LlamaConfig, initialize

SMALL = LlamaConfig(
    vocab_size=11, dim=8, layers=2, heads=2, kv_heads=1, hidden_dim=12, head_dim=6, norm_eps=1e-4, rope_theta=777.0
)


def attend(q, k, v, *, mask, layout):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def build(config: LlamaConfig = SMALL, dtype: torch.dtype = torch.float32) -> Llama:
    model = Llama(config, attend).to(dtype)
    initialize(model, seed=1)
    return model


def edit_config(folder: Path, **changes: object) -> None:
    fields = json.loads((folder / "config.json").read_text())
    fields |= changes
    present = {name: value for name, value in fields.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(present))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def split(folder: Path) -> None:
    """Rewrites a folder as two weight files and an index."""
    tensors = load_file(folder / "model.safetensors")
    names, half = sorted(tensors), len(tensors) // 2
    tensor_names = {"model-00001-of-00002.safetensors": names[:half], "model-00002-of-00002.safetensors": names[half:]}
    for file, file_names in tensor_names.items():
        save_file({name: tensors[name] for name in file_names}, folder / file)
    weight_map = {name: file for file, file_names in tensor_names.items() for name in file_names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def same(a: Llama, b: Llama) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
