"""Saving: transformers' files and index, tokenizer files, and failed saves."""

import json
from pathlib import Path

import pytest
import torch
from hub_folders import SMALL, attend, build, edit_config, same
from safetensors.torch import load_file

from armillary.models import GPT, GPTConfig, Llama, initialize
from armillary.models.hub import write as files

GPT_SMALL = GPTConfig(vocab_size=13, dim=8, layers=2, heads=2, max_positions=16)
LIMIT = 600
"""Bytes of a file, enough for several tensors of SMALL, and slightly too few for the largest."""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def gpt() -> GPT:
    model = GPT(GPT_SMALL)
    initialize(model, 0)
    return model


@pytest.mark.parametrize("limit", [200, LIMIT, 10**6])
def test_files_and_index_equal_those_of_transformers(tmp_path, limit):
    """transformers orders the tensors of a block differently, so the expected index comes from its own save."""
    hub = pytest.importorskip("huggingface_hub")
    model = build()
    model.save_pretrained(tmp_path, max_file_bytes=limit)
    expected = hub.split_torch_state_dict_into_shards(dict(model.state_dict()), max_shard_size=limit)
    actual = {path.name: set(load_file(path)) for path in tmp_path.glob("*.safetensors")}
    assert actual == {file: set(tensors) for file, tensors in expected.filename_to_tensors.items()}
    assert (len(actual) > 1) == expected.is_sharded == (tmp_path / files.INDEX).exists() == (limit < 10**4)
    if expected.is_sharded:
        index = json.loads((tmp_path / files.INDEX).read_text())
        assert index == {"metadata": expected.metadata, "weight_map": expected.tensor_to_filename}
    if limit != LIMIT:
        return
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    reference.save_pretrained(tmp_path / "theirs", max_shard_size=limit)
    assert same(Llama.from_pretrained(tmp_path / "theirs"), model)


def test_only_a_file_of_one_tensor_exceeds_the_limit(tmp_path):
    build().save_pretrained(tmp_path, max_file_bytes=LIMIT)
    for path in tmp_path.glob("*.safetensors"):
        tensors = load_file(path)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= LIMIT or len(tensors) == 1


@pytest.mark.parametrize(
    "model, first, second", [(build, LIMIT, 10**6), (gpt, 10**6, LIMIT), (gpt, LIMIT, 300), (build, 300, LIMIT)]
)
def test_a_save_removes_the_previous_weights(tmp_path, model, first, second):
    model().save_pretrained(tmp_path, max_file_bytes=first)
    (tmp_path / "model-00001-of-00077.safetensors.partial").write_text("of a save that was killed")
    (tmp_path / "notes.safetensors").write_text("somebody else's")
    model().save_pretrained(tmp_path, max_file_bytes=second)
    model().save_pretrained(tmp_path / "fresh", max_file_bytes=second)
    assert names(tmp_path) - {"notes.safetensors", "fresh"} == names(tmp_path / "fresh")
    assert same(type(model()).from_pretrained(tmp_path), model())


@pytest.mark.parametrize("failing", ["model-00002", "tokenizer.json", "config.json"])
def test_a_failed_save_leaves_the_old_folder(tmp_path, monkeypatch, failing):
    build().save_pretrained(tmp_path / "old", max_file_bytes=LIMIT)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    plainly = files.write_partial

    def full(path, pieces):
        plainly(path, pieces)
        if path.name.startswith(failing):
            raise OSError("disk full")

    monkeypatch.setattr(files, "write_partial", full)
    with pytest.raises(OSError, match="disk full"):
        build(dtype=torch.bfloat16).save_pretrained(tmp_path / "old", tmp_path / "source", max_file_bytes=500)
    assert {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before


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


# -- tokenizer files ----------------------------------------------------------------------------------------------

TOKENIZER = {"tokenizer.json": "{1}", "tokenizer.model": "2", "chat_template.jinja": "3", "generation_config.json": "4"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    build().save_pretrained(folder)
    edit_config(folder, bos_token_id=1, eos_token_id=[2, 3], pad_token_id=0, initializer_range=0.01, rope_theta=9.0)
    for name, text in TOKENIZER.items():
        (folder / name).write_text(text)
    (folder / "pytorch_model.bin").write_text("not taken along")
    return folder


def described(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())


def test_tokenizer_and_special_tokens_are_copied(tmp_path, source):
    Llama.from_pretrained(source, attend).save_pretrained(tmp_path / "new")
    assert names(tmp_path / "new") == {"config.json", "model.safetensors", *TOKENIZER}
    assert all((tmp_path / "new" / name).read_text() == text for name, text in TOKENIZER.items())
    fields = described(tmp_path / "new")
    field_names = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
    assert [fields[name] for name in field_names] == [1, [2, 3], 0, 0.01]
    assert fields["rope_theta"] == 9.0


def test_another_source_changes_no_weight(tmp_path, source):
    build().save_pretrained(tmp_path / "new", source)
    assert names(tmp_path / "new") == {"config.json", "model.safetensors", *TOKENIZER}
    assert described(tmp_path / "new")["rope_theta"] == SMALL.rope_theta
    assert described(tmp_path / "new")["bos_token_id"] == 1


def test_a_source_may_have_been_removed_or_be_the_folder_itself(tmp_path, source):
    model = Llama.from_pretrained(source, attend)
    model.save_pretrained(source)
    assert names(source) == {"config.json", "model.safetensors", "pytorch_model.bin", *TOKENIZER}
    assert described(source)["eos_token_id"] == [2, 3]
    source.rename(tmp_path / "moved")
    model.save_pretrained(tmp_path / "new")
    assert names(tmp_path / "new") == {"config.json", "model.safetensors"}
    assert described(tmp_path / "new")["bos_token_id"] is None


# -- dtypes -------------------------------------------------------------------------------------------------------


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


# -- GPT-2's files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefixed", [True, False])
def test_gpt2_is_read_with_and_without_its_prefix_and_with_old_buffers(tmp_path, prefixed):
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    gpt().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["transformer.h.0.attn.c_attn.weight"].shape == (8, 24)
    reference = transformers.GPT2LMHeadModel(transformers.AutoConfig.from_pretrained(tmp_path))
    assert tensors.keys() == reference.state_dict().keys() - {"lm_head.weight"}
    for i in range(2):
        tensors[f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
        tensors[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    names_in_file = {name: name if prefixed else name.removeprefix("transformer.") for name in tensors}
    save_file({names_in_file[name]: tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert same(GPT.from_pretrained(tmp_path), gpt())


@pytest.mark.parametrize("index", ["[]", '{"weight_map": [1]}', '{"weight_map": {"a": 5}}', "nothing"])
def test_a_broken_index_is_replaced(tmp_path, index):
    (tmp_path / files.INDEX).write_text(index)
    (tmp_path / "notes.safetensors").write_text("of somebody else")
    build().save_pretrained(tmp_path)
    assert same(Llama.from_pretrained(tmp_path, attend), build())
    assert not (tmp_path / files.INDEX).exists() and (tmp_path / "notes.safetensors").exists()
