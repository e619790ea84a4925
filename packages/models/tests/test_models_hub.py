"""Weight folders on one rank: round trips, files and index, tokenizer files, failed and killed saves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hub_folders import SMALL, attend, build, edit_config, edit_tensors, same
from hybrid_models import HYBRID
from safetensors.torch import load_file, save_file

from armillary.models import GPT, GPTConfig, Llama, initialize, pretrained_config
from armillary.models.hub import write as files
from armillary.models.internal import tensor_bytes

GPT_SMALL = GPTConfig(vocab_size=13, dim=8, layers=2, heads=2, max_positions=16)
LIMIT = 600
"""Bytes of a file, enough for several tensors of SMALL, and slightly too few for the largest."""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def described(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())


def gpt() -> GPT:
    model = GPT(GPT_SMALL)
    initialize(model, 0)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build().save_pretrained(tmp_path)
    return tmp_path


ROUND_TRIPS = {
    "untied": (SMALL, torch.float32),
    "tied": (replace(SMALL, tied_embeddings=True), torch.bfloat16),
    "hybrid": (replace(HYBRID, layers=5, qk_norm=True, window=9, window_from=3), torch.float64),
}


@pytest.mark.parametrize(("config", "dtype"), ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_a_round_trip_keeps_config_bits_and_dtype(tmp_path, config, dtype):
    model, ids = build(config, dtype), torch.arange(6)[None]
    model.save_pretrained(tmp_path / "new" / "folder")
    loaded = Llama.from_pretrained(tmp_path / "new" / "folder", attend)
    assert loaded.config == config and same(loaded, model)
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


def test_loaded_weights_can_be_trained_and_saved_to_the_same_folder(folder):
    model = Llama.from_pretrained(folder, attend)
    model(torch.arange(6)[None]).logsumexp(-1).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(folder)
    assert same(Llama.from_pretrained(folder, attend), model)
    assert not same(model, build())


def test_old_and_incomplete_folders_are_read(folder):
    """Old folders have RoPE's frequencies. A folder without weights has the sizes of its config."""
    edit_tensors(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)})
    assert same(Llama.from_pretrained(folder, attend), build())
    (folder / "model.safetensors").unlink()
    assert pretrained_config(folder) == SMALL


# -- files and index --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [200, LIMIT, 10**6])
def test_files_and_index_equal_those_of_transformers(tmp_path, limit):
    """transformers orders the tensors of a block differently, so the expected index comes from its own save."""
    hub = pytest.importorskip("huggingface_hub")
    model = build()
    model.save_pretrained(tmp_path, max_file_bytes=limit)
    expected = hub.split_torch_state_dict_into_shards(dict(model.state_dict()), max_shard_size=limit)
    tensors = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    assert {file: set(of_file) for file, of_file in tensors.items()} == {
        file: set(of_file) for file, of_file in expected.filename_to_tensors.items()
    }
    for of_file in tensors.values():
        assert len(of_file) == 1 or sum(tensor.nbytes for tensor in of_file.values()) <= limit
    assert (len(tensors) > 1) == expected.is_sharded == (tmp_path / files.INDEX).exists() == (limit < 10**4)
    if expected.is_sharded:
        index = json.loads((tmp_path / files.INDEX).read_text())
        assert index == {"metadata": expected.metadata, "weight_map": expected.tensor_to_filename}
    if limit == LIMIT:
        reference = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(tmp_path)
        reference.save_pretrained(tmp_path / "theirs", max_shard_size=limit)
        assert same(Llama.from_pretrained(tmp_path / "theirs"), model)


@pytest.mark.parametrize("model, first, second", [(gpt, 10**6, LIMIT), (build, LIMIT, 10**6), (build, 300, LIMIT)])
def test_a_save_removes_the_previous_weights_and_nothing_else(tmp_path, model, first, second):
    model().save_pretrained(tmp_path, max_file_bytes=first)
    (tmp_path / "model-00001-of-00077.safetensors.partial").write_text("of a save that was killed")
    others = {"notes.safetensors": "somebody else's", "tokenizer.json": "{}"}
    for name, text in others.items():
        (tmp_path / name).write_text(text)
    model().save_pretrained(tmp_path, max_file_bytes=second)
    model().save_pretrained(tmp_path / "fresh", max_file_bytes=second)
    assert names(tmp_path) - {*others, "fresh"} == names(tmp_path / "fresh")
    assert all((tmp_path / name).read_text() == text for name, text in others.items())
    assert same(type(model()).from_pretrained(tmp_path), model())


def test_a_broken_index_is_replaced(tmp_path):
    for index in ("[]", '{"weight_map": [1]}', '{"weight_map": {"a": 5}}', "nothing"):
        (tmp_path / files.INDEX).write_text(index)
        (tmp_path / "notes.safetensors").write_text("of somebody else")
        build().save_pretrained(tmp_path)
        assert same(Llama.from_pretrained(tmp_path, attend), build()), index
        assert not (tmp_path / files.INDEX).exists() and (tmp_path / "notes.safetensors").exists()


@pytest.mark.parametrize("failing", ["model-00002", "tokenizer.json", "config.json"])
def test_a_failed_save_leaves_the_old_folder(tmp_path, monkeypatch, failing):
    build().save_pretrained(tmp_path / "old", max_file_bytes=LIMIT)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    before, plainly = contents(tmp_path / "old"), files.write_partial

    def full(path, pieces):
        plainly(path, pieces)
        if path.name.startswith(failing):
            raise OSError("disk full")

    monkeypatch.setattr(files, "write_partial", full)
    with pytest.raises(OSError, match="disk full"):
        build(dtype=torch.bfloat16).save_pretrained(tmp_path / "old", tmp_path / "source", max_file_bytes=500)
    assert contents(tmp_path / "old") == before


@pytest.mark.parametrize("limit", [LIMIT, 10**6])
def test_a_save_killed_during_its_commit_is_never_read_as_a_mixture(tmp_path, monkeypatch, limit):
    """After each step the folder is the old one, the new one, or refused."""
    old, new = build(), build()
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(1)
    replace_by_partial = files.replace_by_partial
    for killed_at in range(8):
        old.save_pretrained(tmp_path, max_file_bytes=LIMIT)
        steps = iter(range(100))

        def rename_or_die(path, steps=steps, killed_at=killed_at):
            if next(steps) == killed_at:
                raise KeyboardInterrupt
            replace_by_partial(path)

        monkeypatch.setattr(files, "replace_by_partial", rename_or_die)
        with pytest.raises(KeyboardInterrupt):
            new.save_pretrained(tmp_path, max_file_bytes=limit)
            raise KeyboardInterrupt
        monkeypatch.setattr(files, "replace_by_partial", replace_by_partial)
        try:
            loaded = Llama.from_pretrained(tmp_path, attend)
        except ValueError:
            continue
        assert same(loaded, old) or same(loaded, new)


@pytest.mark.parametrize("killed_at", range(3))
def test_a_killed_save_leaves_no_new_folder_and_the_next_one_completes_it(tmp_path, monkeypatch, killed_at):
    steps, replace_by_partial, model = iter(range(100)), files.replace_by_partial, build()

    def rename_or_die(path):
        if next(steps) == killed_at:
            raise KeyboardInterrupt
        replace_by_partial(path)

    monkeypatch.setattr(files, "replace_by_partial", rename_or_die)
    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(tmp_path / "new", max_file_bytes=LIMIT)
    assert not (tmp_path / "new").exists()
    model.save_pretrained(tmp_path / "new", max_file_bytes=LIMIT)
    assert same(Llama.from_pretrained(tmp_path / "new", attend), model) and len(list(tmp_path.iterdir())) == 1


# -- tokenizer files --------------------------------------------------------------------------------------------------

TOKENIZER = {"tokenizer.json": "{1}", "tokenizer.model": "2", "chat_template.jinja": "3", "generation_config.json": "4"}


def test_tokenizer_and_special_tokens_are_copied_from_the_source(tmp_path):
    source = tmp_path / "source"
    build().save_pretrained(source)
    edit_config(source, bos_token_id=1, eos_token_id=[2, 3], pad_token_id=0, initializer_range=0.01, rope_theta=9.0)
    for name, text in TOKENIZER.items():
        (source / name).write_text(text)
    (source / "pytorch_model.bin").write_text("not taken along")
    model, saved_names = Llama.from_pretrained(source, attend), {"config.json", "model.safetensors", *TOKENIZER}

    model.save_pretrained(tmp_path / "copy")
    assert names(tmp_path / "copy") == saved_names
    assert all((tmp_path / "copy" / name).read_text() == text for name, text in TOKENIZER.items())
    fields = described(tmp_path / "copy")
    field_names = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "rope_theta")
    assert [fields[name] for name in field_names] == [1, [2, 3], 0, 0.01, 9.0]

    build().save_pretrained(tmp_path / "other", source)  # another source changes no weight and no size
    assert names(tmp_path / "other") == saved_names
    assert described(tmp_path / "other")["rope_theta"] == SMALL.rope_theta
    assert described(tmp_path / "other")["bos_token_id"] == 1

    model.save_pretrained(source)  # the folder itself
    assert names(source) == {"pytorch_model.bin", *saved_names}
    assert described(source)["eos_token_id"] == [2, 3]
    source.rename(tmp_path / "moved")
    model.save_pretrained(tmp_path / "without")
    assert names(tmp_path / "without") == {"config.json", "model.safetensors"}
    assert described(tmp_path / "without")["bos_token_id"] is None


# -- dtypes and GPT-2's files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [build, gpt])
def test_weights_are_rounded_on_saving_and_loading(tmp_path, model):
    full = model()
    full.save_pretrained(tmp_path / "small", dtype=torch.bfloat16)
    full.save_pretrained(tmp_path / "large")
    saved = type(full).from_pretrained(tmp_path / "small")
    read = type(full).from_pretrained(tmp_path / "large", dtype=torch.bfloat16)
    assert same(saved, read) and same(saved, model().bfloat16())
    assert described(tmp_path / "small")["torch_dtype"] == "bfloat16"
    assert described(tmp_path / "large")["torch_dtype"] == "float32"


def test_gpt2_is_read_with_and_without_its_prefix_and_with_old_buffers(folder):
    gpt().save_pretrained(folder)
    # Copies: in old versions of safetensors they are the bytes of the file, which is written again below.
    tensors = {name: x.clone() for name, x in load_file(folder / "model.safetensors").items()}
    assert tensors["transformer.h.0.attn.c_attn.weight"].shape == (8, 24)
    for i in range(2):
        tensors[f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
        tensors[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    for prefix in ("transformer.", ""):
        renamed = {name.replace("transformer.", prefix): tensor for name, tensor in tensors.items()}
        save_file(renamed, folder / "model.safetensors")
        assert same(GPT.from_pretrained(folder), gpt()), prefix
