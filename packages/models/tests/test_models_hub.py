"""Weight folders: round trips, Hugging Face's names, and several files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hub_folders import SMALL, attend, build, edit_tensors, same, split
from safetensors.torch import load_file

from armillary.models import Llama, pretrained_config
from armillary.models.parts import tensor_bytes

NAMES = {
    "model.embed_tokens.weight": (11, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (11, 8),
    **{f"model.layers.{i}.self_attn.q_proj.weight": (12, 8) for i in range(2)},
    **{f"model.layers.{i}.self_attn.k_proj.weight": (6, 8) for i in range(2)},
    **{f"model.layers.{i}.self_attn.v_proj.weight": (6, 8) for i in range(2)},
    **{f"model.layers.{i}.self_attn.o_proj.weight": (8, 12) for i in range(2)},
    **{f"model.layers.{i}.mlp.{kind}_proj.weight": (12, 8) for i in range(2) for kind in ("gate", "up")},
    **{f"model.layers.{i}.mlp.down_proj.weight": (8, 12) for i in range(2)},
    **{f"model.layers.{i}.input_layernorm.weight": (8,) for i in range(2)},
    **{f"model.layers.{i}.post_attention_layernorm.weight": (8,) for i in range(2)},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("config", [SMALL, replace(SMALL, tied_embeddings=True)], ids=["untied", "tied"])
def test_a_round_trip_keeps_config_bits_and_dtype(tmp_path, config, dtype):
    model = build(config, dtype)
    model.save_pretrained(tmp_path / "new" / "folder")
    loaded = Llama.from_pretrained(tmp_path / "new" / "folder", attend)
    ids = torch.arange(6)[None]
    assert loaded.config == config
    assert same(loaded, model)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert torch.equal(loaded(ids), model(ids))


def test_files_equal_those_of_the_safetensors_library():
    tensors = {
        "b": torch.arange(3.0),
        "a": torch.arange(4.0)[::2],
        "empty": torch.empty(0, 2),
        "scalar": torch.tensor(7),
    }
    tensors |= {"half": torch.arange(5, dtype=torch.bfloat16), "byte": torch.arange(5, dtype=torch.uint8)}
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    content = b"".join(tensor_bytes(tensors, {"format": "pt"}))
    assert content == safetensors.torch.save(contiguous, {"format": "pt"})


def test_names_and_shapes_equal_hugging_faces(folder):
    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == NAMES
    build(replace(SMALL, tied_embeddings=True)).save_pretrained(folder)
    assert load_file(folder / "model.safetensors").keys() == NAMES.keys() - {"lm_head.weight"}


def test_config_fields_have_hugging_faces_names(folder):
    fields = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "rms_norm_eps": 1e-4,
        "rope_theta": 777.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    assert {name: fields[name] for name in expected} == expected


def test_loaded_weights_can_be_trained_and_saved_to_the_same_folder(folder):
    model = Llama.from_pretrained(folder, attend)
    model(torch.arange(6)[None]).logsumexp(-1).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(folder)
    assert same(Llama.from_pretrained(folder, attend), model)
    assert not same(model, build())


def test_an_index_of_several_files_is_read(folder):
    split(folder)
    assert same(Llama.from_pretrained(folder, attend), build())


def test_saving_keeps_unrelated_files_and_removes_temporary_ones(folder):
    (folder / "tokenizer.json").write_text("{}")
    build(dtype=torch.bfloat16).save_pretrained(folder)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (folder / "tokenizer.json").read_text() == "{}"


def test_a_failed_write_leaves_the_old_file(folder, monkeypatch):
    def fail(tensors, metadata):
        yield b"half"
        raise OSError("disk full")

    monkeypatch.setattr("armillary.models.hub.write.tensor_bytes", fail)
    with pytest.raises(OSError, match="disk full"):
        build(dtype=torch.bfloat16).save_pretrained(folder)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert same(Llama.from_pretrained(folder, attend), build())


def test_rope_frequencies_in_old_folders_are_ignored(folder):
    edit_tensors(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)})
    assert same(Llama.from_pretrained(folder, attend), build())


def test_a_folder_without_weights_has_the_sizes_of_its_config(folder):
    (folder / "model.safetensors").unlink()
    assert pretrained_config(folder) == SMALL
