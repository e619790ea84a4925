"""config.json: defaults, refused fields, and configs that no Hugging Face family can express."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hub_folders import SMALL, attend, build, edit_config

from armillary.models import GPT, GPTConfig, LinearScaling, Llama, Llama3Scaling, YarnScaling
from armillary.models.hub.families import FAMILIES, GPT_FIELDS, HYBRID
from armillary.models.parts import ends_of_text, parse


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build().save_pretrained(tmp_path)
    return tmp_path


REQUIRED = {
    "vocab_size": 11,
    "hidden_size": 64,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "intermediate_size": 12,
}
STATES = {
    "mixers": ["delta_rule", "attention"],
    "states": {"heads": 4, "key_heads": 2, "key_dim": 3, "value_dim": 5, "conv_width": 4},
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("extra", [{}, {"use_sliding_window": True}, {"num_key_value_heads": None}], ids=str)
def test_absent_fields_have_the_defaults_of_transformers(kind, extra):
    transformers = pytest.importorskip("transformers")
    if kind in ("llama", "mistral") and "use_sliding_window" in extra:
        extra = {}
    if kind == "mistral" and "num_key_value_heads" in extra:
        pytest.skip("transformers refuses it")
    reference = getattr(transformers, {"llama": "Llama", "mistral": "Mistral"}.get(kind, kind.title()) + "Config")
    expected = reference(**REQUIRED, **extra)
    config = parse({"model_type": kind, **REQUIRED, **extra})
    assert config.norm_eps == expected.rms_norm_eps
    assert config.rope_theta == expected.rope_parameters["rope_theta"]
    assert config.kv_heads == expected.num_key_value_heads
    assert config.head_dim == (getattr(expected, "head_dim", None) or 2)
    assert config.max_positions == expected.max_position_embeddings
    assert config.tied_embeddings == expected.tie_word_embeddings
    assert config.window == getattr(expected, "sliding_window", None)
    first = getattr(expected, "max_window_layers", 0) if config.window else 0
    assert config.window_from == first


def test_a_gpt2_config_without_sizes_is_the_smallest_model():
    assert parse({"model_type": "gpt2"}) == GPTConfig.gpt2()


@pytest.mark.parametrize(
    "rope, theta, scaling",
    [
        ({}, 10_000.0, None),
        ({"rope_theta": 5.0}, 5.0, None),
        ({"rope_theta": 5.0, "rope_scaling": None}, 5.0, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, 5.0, None),
        ({"rope_theta": 6.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, 5.0, None),
        ({"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2}}, 5.0, LinearScaling(factor=2)),
        (
            {"rope_parameters": LLAMA3 | {"rope_theta": 5.0}},
            5.0,
            Llama3Scaling(**{name: value for name, value in LLAMA3.items() if name != "rope_type"}),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": None}, "max_position_embeddings": 99},
            10_000.0,
            YarnScaling(factor=4.0, original_max_position_embeddings=99),
        ),
        (
            {
                "rope_scaling": {"rope_type": "yarn", "factor": None},
                "original_max_position_embeddings": 50,
                "max_position_embeddings": 100,
            },
            10_000.0,
            YarnScaling(factor=2.0, original_max_position_embeddings=50),
        ),
    ],
)
def test_rope_is_read_in_both_forms(rope, theta, scaling):
    config = parse({"model_type": "llama", **REQUIRED, **rope})
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "gemma"}, "config.json.*model_type='gemma'.*llama, mistral, qwen2, "),
        ({"model_type": "absent"}, "model_type=None"),
        ({"model_type": "gpt2"}, "model_type='gpt2'.*'llama'.*'mistral'.*'qwen2'.*'qwen3'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*'silu'.*'swish'.*'llama'"),
        ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias=True.*False.*'qwen2'"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias=True.*False"),
        ({"sliding_window": 9}, "sliding_window=9.*'llama'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling=.*llama3.*low_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "rope_scaling=.*linear.*factor=-2.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "new": 1}}, "'linear'.*new"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling=.*'default'.*factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type.*default.*linear.*llama3.*yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor.*1"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        ({"hidden_size": "absent", "num_hidden_layers": "absent"}, "config.json.*hidden_size, num_hidden_lay"),
        ({"num_key_value_heads": 3}, "config.json: num_attention_heads=2 .*num_key_value_heads=3"),
        ({"hidden_size": "eight"}, "config.json: hidden_size='eight'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "window.*'llama'"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "full_attention"),
        ({"layer_types": ["full_attention"]}, "full_attention"),
    ],
)
def test_an_unsupported_field_is_named(folder, change, message):
    edit_config(folder, **change)
    with pytest.raises(ValueError, match=message):
        Llama.from_pretrained(folder, attend)


HOSTILE = [
    *(math.nan, math.inf, -math.inf, -1, 0, 0.5, 1e-320, 1e300, 10**9, 10**15, 2**63, 10**400),
    *("text", "", [], [1], ["full_attention"], {}, {"a": 1}, True, False),
]
NUMBERS = ("vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps", "rope_theta", "num_key_value_heads")
ROPES = {
    "linear": {"factor": 2.0},
    "llama3": {name: value for name, value in LLAMA3.items() if name != "rope_type"},
    "yarn": {
        "factor": 2.0,
        "original_max_position_embeddings": 50,
        "attention_factor": 1.5,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
}


def refusal(fields: dict) -> str | None:
    """Returns the reason for refusing `fields`, or None for a valid config."""
    try:
        config = parse(fields)
    except ValueError as error:
        assert "\n" not in str(error)
        return str(error)
    assert all(math.isfinite(x) for x in vars(config).values() if isinstance(x, (int, float)))
    return None


@pytest.mark.parametrize("kind", FAMILIES)
def test_any_value_of_a_field_is_read_or_refused_with_its_name(kind):
    """Whatever config.json contains, no other exception is raised, and no value takes much time or memory."""
    family = FAMILIES[kind]
    field_names = {"model_type", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "max_window_layers"}
    field_names |= {"use_sliding_window", "layer_types", "n_inner", "partial_rotary_factor"}
    plain = {"model_type": kind, **(REQUIRED if kind != "gpt2" else {}), **(STATES if kind == HYBRID else {})}
    field_names |= {*STATES} if kind == HYBRID else set()
    assert refusal(plain) is None
    for name in {*family.fields, *family.computed, *field_names}:
        for value in HOSTILE:
            for window_option in ({}, {"use_sliding_window": True}) if kind.startswith("qwen") else ({},):
                reason = refusal({**plain, **window_option, name: value})
                assert reason is None or name in reason, (name, value, reason)
    for name in (*NUMBERS, "sliding_window") if kind == "mistral" else NUMBERS if kind != "gpt2" else GPT_FIELDS:
        for value in (math.nan, math.inf, "text", "4", [1], {"a": 1}, -1, 10**400):
            assert name in (refusal({**plain, name: value}) or ""), (name, value)


@pytest.mark.parametrize("kind", ROPES)
def test_any_number_of_a_rope_scaling_is_refused_or_gives_finite_frequencies(kind):
    for name in [*ROPES[kind], "original_max_position_embeddings", "rope_theta"]:
        for value in [*HOSTILE, 1]:
            rope = {"rope_type": kind, **ROPES[kind], name: value}
            fields = {"model_type": "llama", **REQUIRED, "rope_scaling": rope}
            reason = refusal(fields)
            assert reason is None or name in reason
            if reason is None:
                config = parse(fields)
                frequencies = config.rope_scaling.frequencies(config.head_dim, config.rope_theta)
                assert frequencies.isfinite().all() and math.isfinite(config.rope_scaling.amplitude)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_inner": 17}, "n_inner=17.*n_embd=32"),
        ({"activation_function": "relu"}, "activation_function='relu'.*'gelu_new'.*'gelu_pytorch_tanh'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True.*False"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False.*True.*'gpt2'"),
        ({"model_type": "llama", **REQUIRED}, "model_type='llama'.*'gpt2'"),
    ],
)
def test_an_unsupported_field_of_gpt2_is_named(tmp_path, change, message):
    GPT(GPTConfig(vocab_size=7, dim=8, layers=1, heads=2)).save_pretrained(tmp_path)
    edit_config(tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        GPT.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"out_bias": True},
        {"qkv_bias": True, "mlp_bias": True},
        {"qk_norm": True, "mlp_bias": True},
        {"qk_norm": True, "qkv_bias": True},
        {"window": 3, "window_from": 1},
        {"window": 3, "mlp_bias": True},
        {"dim": 9, "head_dim": 6, "mlp_bias": True},
    ],
    ids=str,
)
def test_a_config_that_no_family_can_express_is_not_written(tmp_path, change):
    name, value = next(iter(change.items()))
    with pytest.raises(ValueError, match=f"no model_type .*{name}={value}.*qwen2: qkv_bias alone"):
        build(replace(SMALL, **change)).save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


class Halved(LinearScaling):
    """A scaling defined by the user."""


def test_a_scaling_without_a_name_is_not_written(tmp_path):
    config = replace(SMALL, rope_scaling=Halved(factor=2.0))
    with pytest.raises(ValueError, match=r"rope_scaling=.*LinearScaling, Llama3Scaling"):
        build(config).save_pretrained(tmp_path / "new")


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ('{"eos_token_id": [2, 7]}', '{"eos_token_id": 3}', [2, 7]),
        ('{"temperature": 1}', '{"eos_token_id": 3}', [3]),
        (None, '{"eos_token_id": null}', None),
        (None, None, None),
    ],
)
def test_eos_ids_of_the_generation_config_take_precedence(tmp_path, generation, config, ends):
    for name, text in {"generation_config.json": generation, "config.json": config}.items():
        if text is not None:
            (tmp_path / name).write_text(text)
    assert ends_of_text(tmp_path) == ends
