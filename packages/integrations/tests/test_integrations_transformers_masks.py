"""Masks read from transformers: images, chunks, bidirectional models and 3-D positions; 4 ranks equal one."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from armillary.attention import AttentionMask, Ring, Ulysses, sequence
from armillary.core import SequenceLayout
from armillary.core.testing import mesh, relative_error
from armillary.integrations import register_transformers

transformers = pytest.importorskip("transformers")

LENGTH, VOCABULARY, WIDTH = 48, 64, 32
IMAGE = 60
"""The image token. An image of the first row spans two shards, and one of the second row three."""
SPANS = ([range(5, 21), range(22, 38)], [range(9, 25)])
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "num_hidden_layers": 2, "pad_token_id": 0}
TEXT |= {"hidden_size": WIDTH, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "head_dim": 8}
PATCHES = {"image_size": 8, "patch_size": 2, "hidden_size": 16, "intermediate_size": 16}
PATCHES |= {"num_attention_heads": 2, "num_hidden_layers": 1}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IDS = {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}


def gemma3():
    text = transformers.Gemma3TextConfig(**TEXT | LAYERS | {"query_pre_attn_scalar": 8})
    config = transformers.Gemma3Config(
        text_config=text, vision_config=PATCHES, mm_tokens_per_image=16, image_token_id=IMAGE
    )
    return transformers.Gemma3ForConditionalGeneration, config


def gemma4():
    text = transformers.Gemma4TextConfig(
        **TEXT | LAYERS | {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0}
    )
    text.global_head_dim = 8
    config = transformers.Gemma4Config(text_config=text, image_token_id=IMAGE, video_token_id=61, audio_token_id=62)
    return transformers.Gemma4ForConditionalGeneration, config


def hrm_text():
    cycles = {"H_cycles": 1, "L_cycles": 1, "L_bp_cycles": [1], "num_hidden_layers": 1, "head_dim": 8}
    return transformers.HrmTextForCausalLM, transformers.HrmTextConfig(**TEXT | cycles)


def llama4():
    sizes = {"intermediate_size_mlp": 32, "num_local_experts": 2, "head_dim": 8, "attention_chunk_size": 7}
    layers = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "floor_scale": 5}
    return transformers.Llama4ForCausalLM, transformers.Llama4TextConfig(
        **TEXT | sizes | layers, attn_scale=0.7, experts_implementation="eager"
    )


def embedding_gemma():
    config = transformers.Gemma3TextConfig(
        **TEXT | LAYERS | {"query_pre_attn_scalar": 8}, use_bidirectional_attention=True
    )
    return transformers.Gemma3TextModel, config


def llama():
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**TEXT, is_causal=False)


def mistral():
    return transformers.MistralForCausalLM, transformers.MistralConfig(**TEXT, sliding_window=6)


def modernbert():
    config = transformers.ModernBertConfig(
        **TEXT | {"num_hidden_layers": 3}, local_attention=8, global_attn_every_n_layers=2
    )
    return transformers.ModernBertForMaskedLM, config


def bert():
    return transformers.BertForMaskedLM, transformers.BertConfig(**TEXT | NO_DROPOUT)


def vit():
    return transformers.ViTModel, transformers.ViTConfig(
        **PATCHES | NO_DROPOUT | {"image_size": 14, "hidden_size": WIDTH}
    )


def qwen2_vl(name: str = "Qwen2VL"):
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 100.0}
    vision = {"depth": 1, "patch_size": 2, "num_heads": 2, "temporal_patch_size": 1, "spatial_merge_size": 1}
    wide = {"embed_dim": 16, "hidden_size": WIDTH, "mlp_ratio": 1}
    wide = wide if name == "Qwen2VL" else {"hidden_size": 16, "out_hidden_size": WIDTH, "intermediate_size": 16}
    config = getattr(transformers, f"{name}Config")(
        text_config=TEXT | {"rope_parameters": rope}, vision_config=vision | wide, **IDS
    )
    return getattr(transformers, f"{name}ForConditionalGeneration"), config


def qwen2_5_vl():
    return qwen2_vl("Qwen2_5_VL")


class InFloat64(TorchFunctionMode):
    """Keeps float64 where models convert to float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float and args[0].dtype is torch.float64:
            return args[0]
        return func(*args, **{k: v for k, v in (kwargs or {}).items() if func is not F.softmax or k != "dtype"})


def built(name: str, implementation: str):
    """A model with reproducible random weights; `implementation` is for its text part if it has one."""
    kind, config = globals()[name]()
    parts = ("text_config", "vision_config") if hasattr(config, "text_config") else ()
    config._attn_implementation = (
        dict.fromkeys(parts, "eager") | {"text_config": implementation} if parts else implementation
    )
    torch.manual_seed(0)
    model = kind(config, **{"add_pooling_layer": False} if name == "vit" else {}).double().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.2)
    return model


def tokens():
    """Returns (ids, image flags)."""
    ids = torch.randint(1, 60, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    types = torch.zeros_like(ids)
    for row, spans in enumerate(SPANS):
        for span in spans:
            ids[row, span.start : span.stop], types[row, span.start : span.stop] = IMAGE, 1
    return ids, types


def full_inputs(name: str, model, documents=None) -> dict[str, torch.Tensor]:
    """Inputs of the model for the full sequence, with images."""
    generator = torch.Generator().manual_seed(3)
    (ids, types), positions = tokens(), restarting(documents or (0, LENGTH))
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 14, 14, generator=generator, dtype=torch.float64)}
    if name in ("llama4", "embedding_gemma", "llama", "mistral", "modernbert", "bert"):
        return {"input_ids": ids, "position_ids": positions}
    if name == "hrm_text":  # one group of tokens in two places of the row
        prefix = (torch.arange(LENGTH) < torch.tensor([[30], [17]])) & ((torch.arange(LENGTH) - 9).abs() > 2)
        return {"input_ids": ids, "token_type_ids": prefix.long(), "position_ids": positions}
    embeds = model.get_input_embeddings()(ids.masked_fill(types == 1, 0))
    if name == "gemma3":
        pixels = torch.randn(3, 3, 8, 8, generator=generator, dtype=torch.float64)
        images = model.get_image_features(pixels, return_dict=True).pooler_output
    else:
        images = torch.randn(3, 16, WIDTH, generator=generator, dtype=torch.float64)
    embeds = embeds.masked_scatter((types == 1)[..., None], images)
    if name.startswith("qwen"):
        grid = torch.tensor([[1, 4, 4]] * 3)
        return {"inputs_embeds": embeds, "position_ids": model.model.get_rope_index(ids, types, grid)[0]}
    types_name = "mm_token_type_ids" if name == "gemma4" else "token_type_ids"
    return {"inputs_embeds": embeds, types_name: types, "position_ids": positions}


def restarting(documents):
    """Position ids [1 or rows, LENGTH] that start at 0 in each document."""
    rows = documents if isinstance(documents[0], tuple) else (documents,)
    return torch.stack([torch.cat([torch.arange(b - a) for a, b in pairwise(r)]) for r in rows])


def outputs(model, inputs) -> torch.Tensor:
    out = model(**inputs) if "pixel_values" in inputs else model(**inputs, use_cache=False)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def upstream(like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


CASES = [
    ("gemma3", "zigzag", None),
    ("gemma3", "striped", (0, 13, 30, LENGTH)),
    ("gemma4", "contiguous", None),
    ("hrm_text", "zigzag", None),
    ("llama4", "zigzag", None),
    ("llama4", "contiguous", ((0, 20, LENGTH), (0, 3, 33, LENGTH))),
    ("embedding_gemma", "zigzag", None),
    ("llama", "contiguous", ((0, 20, LENGTH), (0, 3, 33, LENGTH))),
    ("modernbert", "striped", (0, 13, 30, LENGTH)),
    ("bert", "zigzag", None),
    ("vit", "contiguous", None),
    ("qwen2_vl", "zigzag", None),
    ("qwen2_5_vl", "contiguous", None),
]


def usp():
    return Ulysses(mesh(ring=2, ulysses=2)["ulysses"], inner=Ring(mesh(ring=2, ulysses=2)["ring"]))


def on_a_shard(name: str, kind: str, documents):
    attend = usp()
    register_transformers(attend)
    model = built(name, "armillary")
    length = 50 if name == "vit" else LENGTH
    layout = attend.layout(length, kind)
    with InFloat64():
        inputs = full_inputs(name, model, documents)
        if name == "vit":
            model.embeddings.register_forward_hook(lambda module, inputs, out: layout.take(out, attend.shard))
        else:
            inputs = {
                key: layout.take(x, attend.shard, dim=2 if x.ndim == 3 and x.shape[0] == 3 else 1)
                for key, x in inputs.items()
            }
        with sequence(layout=layout, documents=documents):
            out = outputs(model, inputs)
    out.backward(layout.take(upstream(torch.empty(2, length, out.shape[-1])), attend.shard))
    return out.detach(), {key: p.grad for key, p in model.named_parameters()}


def on_one_rank(name: str, documents):
    """Outputs and gradients of eager attention, one document at a time."""
    model = built(name, "eager")
    with InFloat64():
        inputs = full_inputs(name, model, documents)
        if documents is None:
            out = outputs(model, inputs)
        else:
            rows = documents if isinstance(documents[0], tuple) else (documents, documents)
            out = torch.cat([outputs_of_documents(name, model, inputs, row, ends) for row, ends in enumerate(rows)])
    out.backward(upstream(out))
    return out.detach(), {key: p.grad for key, p in model.named_parameters()}


def outputs_of_documents(name: str, model, inputs, row: int, ends) -> torch.Tensor:
    """Outputs one document at a time, but packed rows for Llama 4, which scales queries by position in the row."""
    row_inputs = {key: x[min(row, len(x) - 1)][None] for key, x in inputs.items()}
    if name == "llama4":
        return outputs(model, row_inputs | {"position_ids": restarting(ends)})
    return torch.cat([outputs(model, {key: x[:, a:b] for key, x in row_inputs.items()}) for a, b in pairwise(ends)], 1)


def results_on_a_shard():
    return [on_a_shard(*case) for case in CASES]


def test_shards_equal_one_rank(worlds):
    for (name, kind, documents), *ranks in zip(CASES, *worlds(4).run(results_on_a_shard), strict=True):
        expected, gradients = on_one_rank(name, documents)
        outs, local_gradients = zip(*ranks, strict=True)
        layout = getattr(SequenceLayout, kind)(expected.shape[1], 2).refine(2)
        errors = {"out": relative_error(layout.join(outs), expected)}
        for key, gradient in gradients.items():
            summands = [
                gradients_of_rank[key] for gradients_of_rank in local_gradients if gradients_of_rank[key] is not None
            ]
            if gradient is None or gradient.norm() < 1e-11:  # e.g. of key biases, whose local gradients cancel
                assert not summands or sum(summands).norm() < 1e-11, (name, key)
            else:
                errors[key] = relative_error(sum(summands), gradient)
        print(name, kind, documents, max(errors.values()))
        assert max(errors.values()) < 1e-9, (name, kind, documents, errors)


# -- explicit masks --------------------------------------------------------------------------------------------------

TREE = AttentionMask.tree((0, 11, 20, 33, LENGTH), (-1, 0, 0, 2))


def results_of_a_tree():
    """Local logits and gradients of completions of one prompt, in layers with a window."""
    attend = usp()
    register_transformers(attend)
    layout, model, (ids, _) = attend.layout(LENGTH), built("mistral", "armillary"), tokens()
    inputs = {"input_ids": ids, "position_ids": TREE.positions(LENGTH)[None]}
    with sequence(layout=layout, mask=TREE), InFloat64():
        out = outputs(model, {name: layout.take(x, attend.shard) for name, x in inputs.items()})
    out.backward(layout.take(upstream(torch.empty(2, LENGTH, VOCABULARY)), attend.shard))
    return out.detach(), [p.grad for p in model.parameters()]


def test_an_explicit_mask_is_used_with_the_window_of_each_layer(worlds):
    model, (ids, _), positions = built("mistral", "eager"), tokens(), torch.arange(LENGTH)
    hidden = ~TREE.narrow(5).visible(positions, positions)  # windows count along the path
    added = torch.zeros(2, 1, LENGTH, LENGTH, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    with InFloat64():
        inputs = {"input_ids": ids, "position_ids": TREE.positions(LENGTH)[None], "attention_mask": added}
        expected = outputs(model, inputs)
    expected.backward(upstream(expected))
    outs, local_gradients = zip(*worlds(4).run(results_of_a_tree), strict=True)
    assert relative_error(SequenceLayout.zigzag(LENGTH, 2).refine(2).join(outs), expected.detach()) < 1e-9
    for parameter, *summands in zip(model.parameters(), *local_gradients, strict=True):
        assert relative_error(sum(summands), parameter.grad) < 1e-9


def logits_of_text():
    """Local logits of a row without images, with its position ids [1, T] and [3, 1, T]."""
    attend = usp()
    register_transformers(attend)
    layout, model, (ids, _) = attend.layout(LENGTH), built("qwen2_vl", "armillary"), tokens()
    positions = layout.positions(attend.shard)[None]
    results = []
    for position_ids in (positions, positions.expand(3, 2, -1)):
        with sequence(layout=layout), InFloat64():
            results.append(
                outputs(model, {"input_ids": layout.take(ids % 60, attend.shard), "position_ids": position_ids})
            )
    return [logits.detach() for logits in results]


def test_text_needs_one_position_id_per_token(worlds):
    with InFloat64():
        expected = outputs(built("qwen2_vl", "eager"), {"input_ids": tokens()[0] % 60}).detach()
    for shards in zip(*worlds(4).run(logits_of_text), strict=True):
        assert relative_error(SequenceLayout.zigzag(LENGTH, 2).refine(2).join(shards), expected) < 1e-9
