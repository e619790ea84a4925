"""Folders of weights: round trips, Hugging Face's names, and every broken folder refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from armillary.models import Llama, LlamaConfig, hub, initialize

SMALL = LlamaConfig(
    vocab_size=11, dim=8, layers=2, heads=2, kv_heads=1, hidden_dim=12, head_dim=6, norm_eps=1e-4, rope_theta=777.0
)
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


def attend(q, k, v, *, mask, layout):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def build(config: LlamaConfig = SMALL, dtype: torch.dtype = torch.float32) -> Llama:
    model = Llama(config, attend).to(dtype)
    initialize(model, seed=1)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build().save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: object) -> None:
    fields = json.loads((folder / "config.json").read_text())
    fields |= changes
    kept = {name: value for name, value in fields.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(kept))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def split(folder: Path) -> None:
    """Two files and an index, as large checkpoints come."""
    tensors = load_file(folder / "model.safetensors")
    names, half = sorted(tensors), len(tensors) // 2
    parts = {"model-00001-of-00002.safetensors": names[:half], "model-00002-of-00002.safetensors": names[half:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def same(a: Llama, b: Llama) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


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


def test_names_and_shapes_are_those_of_hugging_face(folder):
    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == NAMES
    build(replace(SMALL, tied_embeddings=True)).save_pretrained(folder)
    assert load_file(folder / "model.safetensors").keys() == NAMES.keys() - {"lm_head.weight"}


def test_the_config_has_the_names_of_hugging_face(folder):
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


def test_loaded_weights_can_be_trained_and_saved_over_themselves(folder):
    model = Llama.from_pretrained(folder, attend)
    model(torch.arange(6)[None]).logsumexp(-1).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(folder)
    assert same(Llama.from_pretrained(folder, attend), model)
    assert not same(model, build())


def test_an_index_of_several_files_is_read(folder):
    split(folder)
    assert same(Llama.from_pretrained(folder, attend), build())


def test_unrelated_files_are_left_alone_and_nothing_temporary_stays(folder):
    (folder / "tokenizer.json").write_text("{}")
    build(dtype=torch.bfloat16).save_pretrained(folder)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (folder / "tokenizer.json").read_text() == "{}"


def test_a_failed_write_leaves_the_old_file(folder, monkeypatch):
    def fail(tensors, path, metadata):
        path.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(hub, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        build(dtype=torch.bfloat16).save_pretrained(folder)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert same(Llama.from_pretrained(folder, attend), build())


def test_a_model_without_data_is_not_saved(tmp_path):
    with (
        torch.device("meta"),
        pytest.raises(ValueError, match=r"cannot save model.embed_tokens.weight: it has no data"),
    ):
        Llama(SMALL, attend).save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


# -- configs ------------------------------------------------------------------------------------------------------


def test_what_an_older_config_leaves_out_is_what_hugging_face_assumes(folder):
    optional = ["num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings"]
    edit_config(folder, **dict.fromkeys([*optional, "tie_word_embeddings", "hidden_act"], "absent"))
    expected = replace(
        SMALL, kv_heads=2, head_dim=4, norm_eps=1e-6, rope_theta=10_000.0, max_positions=2048, tied_embeddings=False
    )
    assert hub.read_config(folder) == expected


def test_a_newer_config_keeps_theta_among_its_rope_parameters(folder):
    edit_config(folder, rope_theta="absent", rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    assert hub.read_config(folder) == replace(SMALL, rope_theta=5.0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "mistral"}, "model_type='mistral'; only 'llama' is supported"),
        ({"model_type": "absent"}, "model_type=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling=.*llama3.*only unscaled RoPE"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling=.*linear"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling=.*factor"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters=.*yarn"),
        ({"hidden_size": "absent", "num_hidden_layers": "absent"}, "config.json lacks hidden_size, num_hidden_layers"),
        ({"num_key_value_heads": 3}, "config.json: heads=2 is not a multiple of kv_heads=3"),
        ({"hidden_size": "eight"}, "config.json: dim='eight'"),
    ],
)
def test_a_config_of_another_model_is_refused_by_name(folder, change, message):
    edit_config(folder, **change)
    with pytest.raises(ValueError, match=message):
        Llama.from_pretrained(folder, attend)


# -- broken folders -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model.norm.weight": None}, "model.norm.weight is missing"),
        ({"model.extra": torch.zeros(1)}, "model.extra is not part of the model"),
        ({"lm_head.weight": torch.zeros(11, 9)}, r"lm_head.weight is \(11, 9\), not \(11, 8\)"),
        ({"lm_head.weight": torch.zeros(11, 8).to(torch.int8)}, "lm_head.weight is torch.int8, not one of"),
        ({f"extra.{i}": torch.zeros(1) for i in range(10)}, "; and 2 more$"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, change, message):
    edit_tensors(folder, **change)
    with pytest.raises(ValueError, match=message):
        Llama.from_pretrained(folder, attend)


def test_frequencies_of_old_checkpoints_are_passed_over(folder):
    edit_tensors(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)})
    assert same(Llama.from_pretrained(folder, attend), build())


def test_missing_files_are_named(folder):
    split(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"cannot read .*model-00002-of-00002.safetensors"):
        Llama.from_pretrained(folder, attend)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        Llama.from_pretrained(folder, attend)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"cannot read .*config.json"):
        Llama.from_pretrained(folder, attend)


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("config.json", "{", "cannot read .*config.json"),
        ("config.json", "[]", "config.json holds no JSON object"),
        ("model.safetensors", "not safetensors at all", "cannot read .*model.safetensors"),
    ],
)
def test_broken_files_are_named(folder, file, text, message):
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        Llama.from_pretrained(folder, attend)


def test_an_index_without_a_map_is_named(folder):
    split(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index.json lacks weight_map"):
        Llama.from_pretrained(folder, attend)
