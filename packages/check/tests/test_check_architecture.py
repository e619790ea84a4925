"""`armillary-check`: tiny copies of architectures, right and wrong models, and exit codes."""

import json
import platform
import re
from getpass import getuser
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from armillary.attention import AttentionMask, AttentionShape, build_comm_plan  # noqa: E402
from armillary.check import check_architecture  # noqa: E402
from armillary.check.architecture import document_boundaries, new_model  # noqa: E402
from armillary.check.cli import main  # noqa: E402
from armillary.check.mechanisms import mechanisms_of, missing_layers  # noqa: E402
from armillary.check.tiny import build, check_size, load_config, tiny_config  # noqa: E402
from armillary.core import SequenceLayout  # noqa: E402
from armillary.integrations import shards_states  # noqa: E402

QWEN = {"model_type": "qwen3", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN |= {"head_dim": 128, "num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936}
QWEN |= {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}


def folder(tmp_path, **config) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_a_tiny_copy_keeps_kinds_of_layers_heads_and_windows(tmp_path):
    config = tiny_config(load_config(folder(tmp_path, **QWEN)), 64)
    assert config.num_attention_heads / config.num_key_value_heads == 4
    assert config.layer_types == ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    assert config.num_hidden_layers == 4
    assert 1 < config.sliding_window < 32
    assert config.hidden_size < 256
    # Kinds of layers of other models, and kinds that are lists of layers.
    for model_type, kind in (
        ("gemma3_text", "sliding_attention"),
        ("gpt_oss", "sliding_attention"),
        ("llama4_text", "chunked_attention"),
        ("qwen3_next", "linear_attention"),
    ):
        config = tiny_config(load_config(model_type), 64)
        assert set(config.layer_types) == {kind, "full_attention"}
        assert len(config.layer_types) == config.num_hidden_layers <= 8
    for settings, field in (
        ({"model_type": "llama4_text", "interleave_moe_layer_step": 2}, "moe_layers"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [5]}, "mlp_only_layers"),
    ):
        config = load_config(folder(tmp_path, **settings))
        kinds = [
            {
                (x.layer_types[i] if "layer_types" in vars(x) else "", i in getattr(x, field))
                for i in range(x.num_hidden_layers)
            }
            for x in (config, tiny_config(config, 64))
        ]
        assert kinds[0] == kinds[1] and len(kinds[0]) > 1
    # Four ranks can share the heads.
    for heads, key_heads in ((3, 1), (7, 1), (9, 3), (71, 1)):
        sizes = {"hidden_size": 64 * heads, "num_attention_heads": heads, "num_key_value_heads": key_heads}
        config = tiny_config(load_config(folder(tmp_path, model_type="llama", **sizes)), 64)
        assert config.num_attention_heads % 4 == 0
        assert config.num_attention_heads // config.num_key_value_heads == min(heads // key_heads, 8)


LAST_TOKENS = [int(SequenceLayout.zigzag(64, 4).positions(shard).max()) for shard in range(4)]


def test_rotary_scaling_starts_within_the_sequence_and_beyond_some_shards(tmp_path):
    rope = {"rope_type": "longrope", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "rope_theta": 10000.0}
    sizes = {"hidden_size": 3072, "num_attention_heads": 32, "original_max_position_embeddings": 4096}
    config = tiny_config(load_config(folder(tmp_path, model_type="phi3", rope_scaling=rope, **sizes)), 64)
    assert min(LAST_TOKENS) < config.original_max_position_embeddings < max(LAST_TOKENS)
    assert len(config.rope_parameters["long_factor"]) == config.hidden_size // config.num_attention_heads // 2
    dynamic = folder(tmp_path, model_type="llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert min(LAST_TOKENS) < tiny_config(load_config(dynamic), 64).max_position_embeddings < max(LAST_TOKENS)


def test_copies_of_right_models_are_right(worlds):
    documents = {"tokens": 64, "documents": document_boundaries(64)}
    variants = ("recompute", "two micro-batches")
    for model_type, options in {
        "gemma3_text": {"ring": 2, "ulysses": 2, "variants": variants} | documents,
        "mixtral": {"ring": 2, "variants": ()} | documents,
        "mamba2": {"ring": 2, "variants": ("recompute",), "tokens": 32, "documents": document_boundaries(32)},
        "clip_text_model": {"ring": 2, "variants": (), "tokens": 16},  # pools in its own forward
    }.items():
        report = check_architecture(model_type, worlds=worlds, **options)
        report.assert_right()
        assert not (report.notes or report.unexercised) or model_type == "clip_text_model", report


def test_text_parts_that_only_their_file_knows_are_built():
    config = load_config("emu3").get_text_config(decoder=True)
    model = new_model(tiny_config(config, 64))
    assert model.config.num_attention_heads == 8 and logits(model, torch.zeros(1, 64).long()).shape == (1, 64, 64)


def test_sizes_of_the_parts_of_a_config_fit_its_model(tmp_path):
    def run(source):
        model = new_model(tiny_config(load_config(source).get_text_config(decoder=True), 64))
        return model.config, model(torch.zeros(1, 64).long(), use_cache=False)[0]

    config, _ = run("dbrx")  # heads of keys in a part of the config
    assert config.n_heads == 2 * config.attn_config.kv_n_heads
    config, _ = run("zamba2")  # hybrid layers share weights
    assert config.layer_types.count("hybrid") == 2
    config, _ = run("pocket_tts")  # the model's width in a part, under another name
    assert config.flow_head_config.condition_dim == config.hidden_size < 64
    # Ids [B, T, 1 + C] and [B C, T] of codebooks.
    assert run("kyutai_speech_to_text")[1].shape[:2] == (1, 64) and run("musicgen")[1].shape == (4, 64, 64)
    # Heads of a layer, which have their own rotary part.
    source = folder(tmp_path, model_type="dots3_note_text", use_dsa=False, num_hidden_layers=8)
    mechanisms = mechanisms_of(tiny_config(load_config(source), 64), new_model, logits, 64)
    assert all(mechanisms.values()) and set(mechanisms) >= {"rope by layer", "window", "latents"}


STATES = ("mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2", "kimi_linear", "olmo_hybrid")
STATES += ("lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_text")


def test_tiny_copies_have_layers_with_a_state():
    for model_type in STATES:
        config = tiny_config(load_config(model_type), 64)
        check_size(config)
        with torch.device("meta"):
            model = build(config)
        assert any(shards_states(type(module)) for module in model.modules()), model_type


def logits(model, ids) -> torch.Tensor:
    return model(ids, use_cache=False).logits


EXERCISED = {
    "gpt_oss": ("window", "rope scaling", "sinks", "router"),
    "gemma2": ("window", "softcap"),
    "gemma3n_text": ("rope by layer", "shared keys"),
    "llama4_text": ("chunks", "rope by layer", "router"),
    "deepseek_v3": ("router", "latents"),
    "qwen3_next": ("states", "router"),
}


@pytest.mark.parametrize("model_type", EXERCISED)
def test_copies_exercise_the_mechanisms_of_their_architecture(model_type):
    mechanisms = mechanisms_of(tiny_config(load_config(model_type), 64), new_model, logits, 64)
    assert all(mechanisms.values()) and set(mechanisms) >= {"other shards", "documents", *EXERCISED[model_type]}


def test_mechanisms_that_change_nothing_are_not_exercised(tmp_path):
    config = tiny_config(load_config("gpt_oss"), 64)
    config.sliding_window, config.rope_parameters = 64, config.rope_parameters | {"factor": 1.0}
    mechanisms = mechanisms_of(config, new_model, logits, 64)
    assert not mechanisms["window"] and "rope scaling" not in mechanisms and mechanisms["sinks"]

    def with_absent_sinks(config):
        model = new_model(config)
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(-1e9)
        return model

    assert not mechanisms_of(config, with_absent_sinks, logits, 64)["sinks"]
    # A layer of the model's file that no layer of this copy is.
    without_states = transformers.Lfm2Config(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    assert [x.__name__ for x in missing_layers(new_model(tiny_config(without_states, 64)))] == ["Lfm2ShortConv"]


def test_a_right_result_names_what_it_does_not_cover(worlds, capsys):
    assert outcome(worlds, "laguna", "--ring", "2") == 0  # no layer of its default config has a window
    text = capsys.readouterr().out
    assert re.search("^Exercised: other shards, .*router", text, re.MULTILINE)
    assert re.search("^RIGHT, without .*window", text, re.MULTILINE)


def test_selections_of_keys_are_refused_though_no_default_layer_has_them(worlds, capsys):
    assert outcome(worlds, "minimax_m3_vl_text") == 2
    assert "Indexer" in capsys.readouterr().err


def test_documents_end_with_the_sequence():
    assert all(document_boundaries(tokens)[-1] == tokens for tokens in (2, 4, 5, 64))


def outcome(worlds, *argv) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(argv, worlds)
    return exit_.value.code


NOT_CHECKED = [
    (["mamba", "--ring", "2"], "linear_attention"),
    (["hubert"], "no token ids, but input_values"),
    (["tvp"], "pixel_values"),
    (["gemma4_assistant"], "keys of another model"),
    (["nothing"], "nothing"),
    (["llama", "--ring", "3", "--tokens", "2"], "tokens=2"),
    (["llama", "--ranks", "3"], "--ranks"),
    (["llama", "--compile"], "--compile"),
    (["lama"], "llama"),
    (["own_check:missing"], "missing"),
    (["own_check:right", "--ring", "2"], "--ring"),
    (["llama", "--verify"], "--verify"),
    (["own_check:Model", "--verify", "--ranks", "2"], "Model"),
    (["llama", "--tokens", "many"], "--tokens"),
    (["llama", "--ring", "0"], "--ring"),
    (["broken_step:build"], "ZeroDivisionError"),
]


def test_models_that_cannot_be_checked_exit_with_2_and_one_line(worlds, capsys, monkeypatch, tmp_path):
    (tmp_path / "broken_step.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    for argv, named in NOT_CHECKED:
        assert outcome(worlds, *argv) == 2, argv
        errors = capsys.readouterr().err.splitlines()
        assert named in errors[-1] and sum("armillary-check: plain" not in line for line in errors) == 1, argv
    assert outcome(worlds, folder(tmp_path, model_type="llama", hidden_size="many")) == 2
    assert "hidden_size" in capsys.readouterr().err
    # Code in a folder is not executed.
    ran = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(ran)!r}, 'w')")
    source = folder(tmp_path, model_type="mystery", auto_map={"AutoConfig": "code.Config"})
    assert outcome(worlds, source) == 2
    assert not ran.exists()


def test_user_defined_steps_are_checked(worlds, capsys, monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    assert outcome(worlds, "own_check:right", "--ranks", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["right"]
    assert outcome(worlds, "own_check:forgotten", "--ranks", "2", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert [x["mistake"] for x in report["diagnoses"]] == ["not_reduced"]
    assert set(report["runs"]["plain"]["wrong"]) == {"embed.weight", "head.weight", "head.bias"}


def test_user_defined_steps_are_verified(worlds, capsys, monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    assert outcome(worlds, "own_check:right", "--verify", "--ranks", "2") == 0
    assert "equal gradients: right" in capsys.readouterr().out
    assert outcome(worlds, "own_check:forgotten", "--verify", "--ranks", "2", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == 1 and not report["right"]
    assert {x["name"] for x in report["facts"] if x["verdict"] == "wrong"} >= {"equal gradients"}


def test_report_for_an_issue_has_bytes_and_nothing_private(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret-of-mine")
    main(["--report", "--ring", "2", "--ulysses", "2", "--tokens", "4096"])
    text = capsys.readouterr().out
    work = AttentionShape.of(
        SequenceLayout.zigzag(4096, 2), AttentionMask(), heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16
    )
    plan = build_comm_plan("usp", work, ring=2, ulysses=2)
    for axis in ("ring", "ulysses"):
        sent = ", ".join(f"{plan.bytes(rank, phase='backward', axis=axis):,}" for rank in range(4))
        assert re.search(rf"backward bytes +{sent} by rank, on {axis}", text)
    assert version("armillary-core") in text and torch.__version__.split("+")[0] in text
    private = (platform.node(), str(Path.home()), str(Path.cwd()), getuser(), "secret-of-mine")
    assert not [word for word in private if word in text and word not in ("", "root")]


@pytest.mark.parametrize("arguments", [[], ["--report", "llama"], ["--report", "--method", "ulysses", "--ring", "3"]])
def test_wrong_arguments_of_a_report_exit_with_2(worlds, arguments):
    assert outcome(worlds, *arguments) == 2
