"""Loading refuses a broken folder and names the wrong file, field or tensor."""

import json
from pathlib import Path

import pytest
import torch
from hub_folders import SMALL, attend, build, edit_config, edit_tensors, same, split

from armillary.models import GPT, GPTConfig, Llama, load_pretrained, pretrained_config
from armillary.models.parts import ends_of_text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model.norm.weight": None}, "model.norm.weight"),
        ({"model.extra": torch.zeros(1)}, "model.extra"),
        ({"lm_head.weight": torch.zeros(11, 9)}, r"lm_head.weight.*\(11, 9\).*\(11, 8\)"),
        ({"lm_head.weight": torch.zeros(11, 8).to(torch.int8)}, "lm_head.weight.*I8.*F64, F32"),
        ({f"extra.{i}": torch.zeros(1) for i in range(10)}, "; and 2 more$"),
    ],
)
def test_mismatched_tensors_are_named(folder, change, message):
    edit_tensors(folder, **change)
    with pytest.raises(ValueError, match=message):
        Llama.from_pretrained(folder, attend)


def test_rope_frequencies_in_old_folders_are_ignored(folder):
    edit_tensors(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)})
    assert same(Llama.from_pretrained(folder, attend), build())


def test_missing_files_are_named(folder):
    split(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors"):
        Llama.from_pretrained(folder, attend)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"model.safetensors.*model.safetensors.index.json"):
        Llama.from_pretrained(folder, attend)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json"):
        Llama.from_pretrained(folder, attend)


SIZES = [
    ({"hidden_size": 10**9}, r"embed_tokens.weight is \(11, 8\), not \(11, 1000000000\)"),
    ({"vocab_size": 10**15}, r"embed_tokens.weight is \(11, 8\), not \(1000000000000000, 8\)"),
    ({"intermediate_size": 10**9}, r"layers.0.mlp.gate_proj.weight is \(12, 8\), not \(1000000000, 8\)"),
    ({"head_dim": 10**8}, r"layers.1.self_attn.q_proj.weight is \(12, 8\), not \(200000000, 8\)"),
    ({"num_attention_heads": 10**8}, r"layers.1.self_attn.o_proj.weight is \(8, 12\), not \(8, 600000000\)"),
    ({"num_hidden_layers": 10**6}, "1000000 layers"),
    ({"num_hidden_layers": 10**10}, "10000000000 layers"),
    ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight is missing"),
    ({"num_hidden_layers": 1}, "model.layers.1.self_attn.q_proj.weight is not part of the model"),
    ({"vocab_size": 10**17}, "vocab_size=100000000000000000"),
    ({"hidden_size": 2**70}, f"hidden_size={2**70}"),
    ({"attention_bias": True}, "q_proj.bias is missing"),
    ({"tie_word_embeddings": True}, "lm_head.weight is not part of the model"),
]


@pytest.mark.parametrize("change, message", SIZES, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("read", [Llama.from_pretrained, pretrained_config])
def test_sizes_that_differ_from_the_weights_are_refused_before_a_model_is_built(folder, read, change, message):
    edit_config(folder, **change)
    with pytest.raises(ValueError, match=message):
        read(folder)


def test_a_folder_without_weights_has_the_sizes_of_its_config(folder):
    (folder / "model.safetensors").unlink()
    assert pretrained_config(folder) == SMALL
    with pytest.raises(ValueError, match=r"neither model.safetensors nor"):
        Llama.from_pretrained(folder)


@pytest.mark.parametrize("tokens", ["text", [1, "2"], {"a": 1}, 1.5, [None], True])
def test_eos_ids_must_be_integers(folder, tokens):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens}))
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id="):
        ends_of_text(folder)


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("config.json", "{", "config.json"),
        ("config.json", "[]", "config.json"),
        ("model.safetensors", "not safetensors at all", "model.safetensors"),
    ],
)
def test_broken_files_are_named(folder, file, text, message):
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        Llama.from_pretrained(folder, attend)


def test_an_index_without_a_weight_map_is_named(folder):
    split(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index.json.*weight_map"):
        Llama.from_pretrained(folder, attend)


def test_any_truncated_file_is_named(folder):
    split(folder)
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors.*incomplete"):
        Llama.from_pretrained(folder, attend)


def test_a_tensor_missing_from_its_indexed_file_is_named(folder):
    split(folder)
    index = folder / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    first, second = sorted(set(fields["weight_map"].values()))
    fields["weight_map"] |= {"lm_head.weight": second}
    index.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"lm_head.weight.*model-00002-of-00002.safetensors"):
        Llama.from_pretrained(folder, attend)
    for outside in ("../" + first, 7, "..", "", ".", "a\0", None, [first]):
        fields["weight_map"] |= {"lm_head.weight": outside}
        index.write_text(json.dumps(fields))
        with pytest.raises(ValueError, match=r"lm_head.weight"):
            Llama.from_pretrained(folder, attend)
    for absent in ("x" * 5000, "directory"):
        (folder / "directory").mkdir(exist_ok=True)
        fields["weight_map"] |= {"lm_head.weight": absent}
        index.write_text(json.dumps(fields))
        with pytest.raises(ValueError, match=rf"has lm_head.weight in {absent}, and there is no such file"):
            Llama.from_pretrained(folder, attend)


def test_a_folder_of_pickles_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin.*safetensors"):
        Llama.from_pretrained(folder, attend)


def test_a_refused_folder_changes_no_weight(folder):
    edit_tensors(folder, **{"model.norm.weight": None})
    model = build()
    with pytest.raises(ValueError, match=r"model.norm.weight"):
        load_pretrained(model, folder)
    assert same(model, build())


def test_errors_name_gpt2_tensors_like_the_file(tmp_path):
    GPT(GPTConfig(vocab_size=7, dim=8, layers=1, heads=2)).save_pretrained(tmp_path)
    edit_tensors(tmp_path, **{"transformer.h.0.attn.c_attn.weight": torch.zeros(24, 8)})
    with pytest.raises(ValueError, match=r"transformer.h.0.attn.c_attn.weight.*\(24, 8\).*\(8, 24\)"):
        GPT.from_pretrained(tmp_path)
