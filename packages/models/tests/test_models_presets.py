"""Presets: parameter counts equal the module's, transformers' and the published ones."""

import json

import pytest
import torch

from armillary.models import GPT, GPTConfig, Llama, LlamaConfig
from armillary.models.parts import hub

PRESETS = {
    "debug": (LlamaConfig.debug, 804_224),
    "llama2_7b": (LlamaConfig.llama2_7b, 6_738_415_616),
    "llama3_8b": (LlamaConfig.llama3_8b, 8_030_261_248),
    "llama31_8b": (LlamaConfig.llama31_8b, 8_030_261_248),
    "llama3_70b": (LlamaConfig.llama3_70b, 70_553_706_496),
    "mistral_7b": (LlamaConfig.mistral_7b, 7_241_732_096),
    "qwen3_32b": (LlamaConfig.qwen3_32b, 32_762_123_264),
    "gpt2": (GPTConfig.gpt2, 124_439_808),
    "gpt2_medium": (GPTConfig.gpt2_medium, 354_823_168),
    "gpt2_large": (GPTConfig.gpt2_large, 774_030_080),
    "gpt2_xl": (GPTConfig.gpt2_xl, 1_557_611_200),
    "wallfacer_3b": (GPTConfig.wallfacer_3b, 2_626_613_248),
    "wallfacer_7b": (GPTConfig.wallfacer_7b, 6_654_210_048),
}


def on_meta(config: LlamaConfig | GPTConfig) -> Llama | GPT:
    with torch.device("meta"):
        return Llama(config) if isinstance(config, LlamaConfig) else GPT(config)


@pytest.mark.parametrize("preset", PRESETS)
def test_parameter_counts_match_publications_and_the_module(preset):
    build, published = PRESETS[preset]
    config = build()
    counted = sum(parameter.numel() for parameter in on_meta(config).parameters())
    assert config.parameters() == published == counted


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_survives_saving_and_loading(preset, tmp_path):
    config = PRESETS[preset][0]()
    (tmp_path / "config.json").write_text(json.dumps(hub.describe(config, torch.bfloat16)))
    assert hub.read_config(tmp_path, type(config)) == config


@pytest.mark.parametrize("preset", ["debug", "mistral_7b", "qwen3_32b", "gpt2"])
def test_parameters_match_transformers(preset, tmp_path):
    """One preset per family; `test_models_hub_parity` compares the tensors of all options."""
    transformers = pytest.importorskip("transformers")
    config = PRESETS[preset][0]()
    (tmp_path / "config.json").write_text(json.dumps(hub.describe(config, torch.bfloat16)))
    reference = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(reference)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameters()
