"""Tiny transformers models with reproducible random weights, computing in float64, and their inputs."""

from contextlib import contextmanager
from functools import wraps
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from armillary.attention import Ring, Ulysses
from armillary.core.testing import mesh

transformers = pytest.importorskip("transformers")

LENGTH, VOCABULARY, WIDTH, PADDING = 48, 64, 32, 3
IMAGE = 60
"""The image token. An image of the first row spans two shards, and one of the second row three."""
SPANS = ([range(5, 21), range(22, 38)], [range(9, 25)])

# -- configs ----------------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "num_hidden_layers": 2, "pad_token_id": 0}
SMALL |= {"hidden_size": WIDTH, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
TEXT = SMALL | {"head_dim": 8}
WINDOWS = {"layer_types": [SLIDING, FULL, SLIDING], "num_hidden_layers": 3, "sliding_window": 7}
TWO_KINDS = TEXT | {"layer_types": [SLIDING, FULL], "sliding_window": 7}
GEMMA = {"query_pre_attn_scalar": 8}
EXPERTS = {"experts_implementation": "eager"}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "rope_theta": 1e4}
LONGROPE |= {"original_max_position_embeddings": 44}
CAUSAL = {
    "llama": ("Llama", {}),
    "mistral, narrow": ("Mistral", {"sliding_window": 5}),
    "mistral, wider than a shard": ("Mistral", {"sliding_window": 17}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    # Scaling starts at position 44, which one of the four shards has.
    "llama, dynamic": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 44}),
    "phi3, longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 44}),
    "gpt-bigcode, position ids for masks alone": ("GPTBigCode", {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}),
    "qwen2-moe, a window of 0 that no layer has": (
        "Qwen2Moe",
        {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16} | EXPERTS,
    ),
    "gemma2": ("Gemma2", WINDOWS | {"attn_logit_softcapping": 2.0}),
    "gemma3, text": ("Gemma3", WINDOWS | GEMMA),
    "gpt-oss": ("GptOss", WINDOWS | EXPERTS | {"num_local_experts": 4}),
    "llama, bidirectional": ("Llama", {"is_causal": False}),
    "llama4": (
        "Llama4",
        {"intermediate_size_mlp": 32, "num_local_experts": 2, "attention_chunk_size": 7, "attn_scale": 0.7}
        | {"layer_types": ["chunked_attention", FULL], "no_rope_layers": [1, 0], "floor_scale": 5}
        | EXPERTS,
    ),
    "hrm_text": ("HrmText", {"H_cycles": 1, "L_cycles": 1, "L_bp_cycles": [1], "num_hidden_layers": 1}),
}
PATCHES = {"image_size": 8, "patch_size": 2, "hidden_size": 16, "intermediate_size": 16}
PATCHES |= {"num_attention_heads": 2, "num_hidden_layers": 1}
ROPE_3D = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 100.0}}
QWEN_VISION = {"depth": 1, "patch_size": 2, "num_heads": 2, "temporal_patch_size": 1, "spatial_merge_size": 1}
QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
QWEN = {"text_config": SMALL | ROPE_3D, "vision_config": QWEN_VISION} | QWEN_IDS
COUNTING = SMALL | NO_DROPOUT | {"pad_token_id": PADDING, "max_position_embeddings": 96}
PROTEIN = COUNTING | {"mask_token_id": 1, "token_dropout": False}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
THREE = {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR]}
DELTA |= THREE
SPARSE = EXPERTS | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4}
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
STATES = {
    "Qwen3Next": DELTA | SPARSE | {"head_dim": 8, "shared_expert_intermediate_size": 16},
    "Qwen3_5": DELTA | {"head_dim": 8},
    "OlmoHybrid": DELTA | {"linear_num_key_heads": 4},
    "KimiLinear": SPARSE
    | THREE
    | {"linear_num_heads": 4, "linear_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": None}
    | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4},
    "Lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"]},
    "Bamba": MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "GraniteMoeHybrid": MAMBA | THREE | {"num_local_experts": 0},
    "FalconH1": MAMBA | {"mamba_d_ssm": 64},
    "NemotronH": {"layers_block_type": [LINEAR, FULL, "mlp", LINEAR], "mamba_num_heads": 4, "mamba_head_dim": 16}
    | {"n_groups": 2, "ssm_state_size": 8, "chunk_size": 16, "head_dim": 8},
    "Zamba2": {"num_hidden_layers": 3, "layers_block_type": [LINEAR, "hybrid", LINEAR], "mamba_d_state": 8}
    | {"n_mamba_heads": 4, "mamba_headdim": 16, "mamba_ngroups": 2, "chunk_size": 16, "num_key_value_heads": 4},
    "Mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
}
DECODER = {"vocab_size": VOCABULARY, "d_model": WIDTH, "decoder_layers": 2, "decoder_attention_heads": 4}
DECODER |= {"decoder_ffn_dim": 32, "max_position_embeddings": 96, "pad_token_id": PADDING, "dropout": 0.0}
NO_LAYER_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
# Layers with attention of their own: scores in several shapes, with scales before and after the mask.
OWN_ATTENTION = {
    "falcon, one key head": ("FalconForCausalLM", SMALL | NO_LAYER_DROPOUT | {"alibi": False, "multi_query": True}),
    "gptj": ("GPTJForCausalLM", SMALL | {"rotary_dim": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}),
    "codegen": ("CodeGenForCausalLM", SMALL | {"rotary_dim": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}),
    "gpt-neox-japanese": ("GPTNeoXJapaneseForCausalLM", SMALL | NO_LAYER_DROPOUT | {"intermediate_multiple_size": 1}),
    "megatron-bert": ("MegatronBertForMaskedLM", COUNTING),
    "roformer": ("RoFormerForMaskedLM", COUNTING),
    "mvp": ("MvpForCausalLM", DECODER),
    "git": ("GitModel", SMALL | NO_DROPOUT | {"vision_config": PATCHES}),
}
MODELS = {
    **OWN_ATTENTION,
    "bart": ("BartForCausalLM", DECODER),
    **{name: (f"{family}ForCausalLM", TEXT | settings) for name, (family, settings) in CAUSAL.items()},
    **{name: (f"{name}ForCausalLM", SMALL | settings) for name, settings in STATES.items()},
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {"text_config": TWO_KINDS | GEMMA, "vision_config": PATCHES, "mm_tokens_per_image": 16}
        | {"image_token_id": IMAGE},
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": TWO_KINDS
            | {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0, "global_head_dim": 8},
            "image_token_id": IMAGE,
            "video_token_id": 61,
            "audio_token_id": 62,
        },
    ),
    "embedding_gemma": ("Gemma3TextModel", TWO_KINDS | GEMMA | {"use_bidirectional_attention": True}),
    "modernbert": (
        "ModernBertForMaskedLM",
        SMALL | {"num_hidden_layers": 3, "local_attention": 8, "global_attn_every_n_layers": 2},
    ),
    "vit": ("ViTModel", PATCHES | NO_DROPOUT | {"image_size": 14, "hidden_size": WIDTH}),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        QWEN | {"vision_config": QWEN_VISION | {"embed_dim": 16, "hidden_size": WIDTH, "mlp_ratio": 1}},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        QWEN | {"vision_config": QWEN_VISION | {"hidden_size": 16, "out_hidden_size": WIDTH, "intermediate_size": 16}},
    ),
    # Models with position ids by their own rule, and two that count from 0.
    "roberta": ("RobertaForMaskedLM", COUNTING),
    "roberta, decoder": ("RobertaForCausalLM", COUNTING | {"is_decoder": True}),
    "camembert": ("CamembertForCausalLM", COUNTING | {"is_decoder": True}),
    "xlm-roberta": ("XLMRobertaForMaskedLM", COUNTING),
    "xlm-roberta-xl": ("XLMRobertaXLForMaskedLM", COUNTING),
    "xmod": ("XmodForMaskedLM", COUNTING | {"default_language": "en_XX"}),
    "roberta-prelayernorm": ("RobertaPreLayerNormForMaskedLM", COUNTING),
    "data2vec": ("Data2VecTextForMaskedLM", COUNTING),
    "esm": ("EsmForMaskedLM", PROTEIN),
    "esm, rotary": ("EsmForMaskedLM", PROTEIN | {"position_embedding_type": "rotary"}),
    "bert": ("BertForMaskedLM", COUNTING),
}


def build(name: str, implementation: str | None = None, **changes: object) -> nn.Module:
    """A model of `MODELS` in training mode; `implementation` is that of its text part if it has one.

    By default it is ours, but for layers with attention of their own, which `cp.prepare` routes.
    """
    implementation = implementation or ("eager" if name in OWN_ATTENTION else "armillary")
    transformers.logging.set_verbosity_error()
    kind, settings = MODELS[name]
    kind = getattr(transformers, kind)
    if name == "NemotronH":
        settings = {key: value for key, value in settings.items() if key != "num_hidden_layers"}
    config = kind.config_class(**settings | changes)
    parts = dict.fromkeys((part for part in ("text_config", "vision_config") if hasattr(config, part)), "eager")
    config._attn_implementation = parts | {"text_config": implementation} if parts else implementation
    torch.manual_seed(0)
    model = kind(config, **{"add_pooling_layer": False} if name == "vit" else {}).double().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # sinks and key biases would be 0
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise, alpha=0.1 if name in STATES else 0.2)
    return model


@contextmanager
def in_float64():
    """Keeps float64 where models convert to float32. Unlike a torch function mode, it also acts in recomputation."""
    tensor, softmax = torch.Tensor, F.softmax
    originals = tensor.float, tensor.to, tensor.type

    def converted(original):
        def convert(x, *args, **kwargs):
            narrows = original is originals[0] or torch.float32 in (*args, *kwargs.values())
            return x if narrows and x.dtype is torch.float64 else original(x, *args, **kwargs)

        return convert

    with pytest.MonkeyPatch.context() as patch:
        for name, original in zip(("float", "to", "type"), originals, strict=True):
            patch.setattr(tensor, name, converted(original))
        in_own_dtype = wraps(softmax)(lambda x, dim=None, dtype=None, **options: softmax(x, dim=dim, **options))
        patch.setattr(F, "softmax", in_own_dtype)
        yield


# -- inputs -----------------------------------------------------------------------------------------------------------


def draw(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(length: int = LENGTH) -> torch.Tensor:
    """ids [2, length] without ids of padding and images."""
    return torch.randint(PADDING + 1, IMAGE, (2, length), generator=torch.Generator().manual_seed(2))


def with_images() -> tuple[torch.Tensor, torch.Tensor]:
    """ids [2, LENGTH] with images, and flags of images."""
    ids = tokens()
    types = torch.zeros_like(ids)
    for row, spans in enumerate(SPANS):
        for span in spans:
            ids[row, span.start : span.stop], types[row, span.start : span.stop] = IMAGE, 1
    return ids, types


def restarting(documents) -> torch.Tensor:
    """Position ids [1 or rows, N] that start at 0 in each document."""
    rows = documents if isinstance(documents[0], tuple) else (documents,)
    return torch.stack([torch.cat([torch.arange(b - a) for a, b in pairwise(r)]) for r in rows])


def full_inputs(name: str, model: nn.Module) -> dict[str, torch.Tensor]:
    """Inputs of the model for whole rows, without positions unless the model has its own in images."""
    if name == "vit":
        return {"pixel_values": draw(2, 3, 14, 14)}
    if name not in ("gemma3", "gemma4", "qwen2_vl", "qwen2_5_vl"):
        inputs = {"input_ids": tokens()}
        if name == "hrm_text":  # one group of tokens in two places of the row
            prefix = (torch.arange(LENGTH) < torch.tensor([[30], [17]])) & ((torch.arange(LENGTH) - 9).abs() > 2)
            inputs["token_type_ids"] = prefix.long()
        return inputs
    ids, types = with_images()
    embeds, images = model.get_input_embeddings()(ids.masked_fill(types == 1, 0)), draw(3, 16, WIDTH)
    if name == "gemma3":
        images = model.get_image_features(draw(3, 3, 8, 8), return_dict=True).pooler_output
    inputs = {"inputs_embeds": embeds.masked_scatter((types == 1)[..., None], images)}
    if name.startswith("qwen"):
        grid = torch.tensor([[1, 4, 4]] * 3)
        return inputs | {"position_ids": model.model.get_rope_index(ids, types, grid)[0]}
    return inputs | {"mm_token_type_ids" if name == "gemma4" else "token_type_ids": types}


def outputs(model: nn.Module, inputs: dict[str, object]) -> torch.Tensor:
    out = model(**inputs) if "pixel_values" in inputs else model(**inputs, use_cache=False)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


# -- methods ----------------------------------------------------------------------------------------------------------


def usp() -> Ulysses:
    """Over 4 ranks."""
    return Ulysses(mesh(ring=2, ulysses=2)["ulysses"], inner=Ring(mesh(ring=2, ulysses=2)["ring"]))


def ring(ranks: int) -> Ring:
    return Ring(mesh(ring=ranks)["ring"])
