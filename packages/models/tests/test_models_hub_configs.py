"""config.json: defaults, both forms of RoPE, and any value of any field."""

import math
from pathlib import Path

import pytest
from hub_folders import build

from armillary.models import GPTConfig, LatentSizes, LinearScaling, Llama3Scaling, YarnScaling
from armillary.models.hub.configs import FAMILIES, GPT_FIELDS, HYBRID, LATENT, LATENT_FIELDS
from armillary.models.internal import ends_of_text, parse


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


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        *((kind, {}) for kind in ("llama", "mistral", "qwen2", "qwen3")),
        *((kind, {"use_sliding_window": True}) for kind in ("qwen2", "qwen3")),
        ("llama", {"num_key_value_heads": None}),  # transformers refuses it for Mistral
        ("qwen3", {"num_key_value_heads": None}),
        ("youtu", {"num_key_value_heads": 32}),
        ("youtu", {"num_key_value_heads": 32, "q_lora_rank": None, "rope_interleave": None}),
    ],
    ids=str,
)
def test_absent_fields_have_the_defaults_of_transformers(kind, extra):
    transformers = pytest.importorskip("transformers")
    reference = getattr(transformers, {"llama": "Llama", "mistral": "Mistral"}.get(kind, kind.title()) + "Config")
    expected = reference(**REQUIRED, **extra)
    config = parse({"model_type": kind, **REQUIRED, **extra})
    assert config.norm_eps == expected.rms_norm_eps
    assert config.rope_theta == expected.rope_parameters["rope_theta"]
    assert config.kv_heads == expected.num_key_value_heads
    assert config.rotary_dim == (getattr(expected, "head_dim", None) or 2)
    assert config.head_dim == (getattr(expected, "qk_head_dim", None) or config.rotary_dim)
    if config.latent is not None:
        sizes = {LATENT_FIELDS[name]: getattr(expected, name) for name in LATENT_FIELDS}
        assert config.latent == LatentSizes(**sizes | {"interleaved": bool(expected.rope_interleave)})
    assert config.max_positions == expected.max_position_embeddings
    assert config.tied_embeddings == expected.tie_word_embeddings
    assert config.window == getattr(expected, "sliding_window", None)
    first = getattr(expected, "max_window_layers", 0) if config.window else 0
    assert config.window_from == first


def test_factors_of_one_are_read():
    assert refusal({"model_type": "llama", **REQUIRED, "mup_scale": 1.0, "use_mup": False, "scale_emb": None}) is None


def test_a_gpt2_config_without_sizes_is_the_smallest_model():
    assert parse({"model_type": "gpt2"}) == GPTConfig.gpt2()


@pytest.mark.parametrize(
    "rope, theta, scaling",
    [
        ({}, 10_000.0, None),
        ({"rope_theta": 5.0, "rope_scaling": None}, 5.0, None),
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
    plain |= {"num_key_value_heads": REQUIRED["num_attention_heads"]} if kind == LATENT else {}
    field_names |= {*STATES} if kind == HYBRID else {*LATENT_FIELDS} if kind == LATENT else set()
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
