"""Wrong arguments, configs and folders: each is refused by the argument's, field's or file's name and its value."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hub_folders import SMALL, attend, build, edit_config, edit_tensors, split
from latent_models import LATENT, SIZES
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import AttentionMask, Local, Ring, build_attention
from armillary.core import SequenceLayout
from armillary.core.testing import mesh, value_errors
from armillary.models import (
    GPT,
    Checkpointing,
    GPTConfig,
    LabelTriples,
    LinearScaling,
    Llama,
    Llama3Scaling,
    LlamaConfig,
    StateConfig,
    YarnScaling,
    generate,
    initialize,
    linear_argmax,
    linear_token_loss,
    load_pretrained,
    parallelize,
    pretrained_config,
    stream,
    token_logprobs,
    token_loss,
)
from armillary.models.internal import ends_of_text

DEBUG = LlamaConfig.debug()
STATES = StateConfig(heads=4, key_heads=2, key_dim=6, value_dim=5)
LARGE = LlamaConfig(vocab_size=37, dim=32, layers=3, heads=8, kv_heads=4, hidden_dim=48)
HYBRID = replace(LARGE, mixers=("delta_rule", "mamba2", "attention"), states=STATES)
GPT_SMALL = GPTConfig(vocab_size=7, dim=8, layers=1, heads=2, max_positions=32)
IDS = torch.zeros(2, 5, dtype=torch.long)
LABELS = torch.zeros(2, 7, dtype=torch.long)
HIDDEN, WEIGHT = torch.zeros(2, 7, 6), torch.zeros(11, 6)


def apply(policy: str, **options: object) -> None:
    """Applies checkpointing to a model of 7 blocks, which stay as they were."""
    model = Llama(replace(SMALL, layers=7), Local())
    before = [block.run for block in model.model.layers]
    try:
        Checkpointing(policy, **options).apply(model)
    finally:
        assert [block.run for block in model.model.layers] == before


def triples(labels: tuple[int, ...], tokens: int = 7) -> LabelTriples:
    return LabelTriples(torch.arange(3), torch.tensor(labels), torch.ones(3), (2, tokens))


# A function with its other arguments: wrong ones, and a pattern of the error.
CALLS: dict[Callable[..., object], list[tuple[dict[str, object], str]]] = {
    partial(replace, DEBUG, head_dim=0): [
        ({"kv_heads": 3}, "heads=8.*kv_heads=3"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"layers": 0}, "layers=0"),
        ({"heads": 256, "kv_heads": 256}, "dim=128.*heads=256"),
        ({"norm_eps": -1.0}, "norm_eps=-1.0"),
        ({"rope_theta": 0.0}, "rope_theta=0.0"),
        ({"window": 0}, "window=0"),
        ({"window": 5, "window_from": 4}, "window_from=4.*window=5.*layers=4"),
        ({"window": 5, "window_from": 1.5}, "window_from=1.5"),
        ({"window_from": 1}, "window_from=1.*window=None"),
    ],
    partial(replace, HYBRID): [
        ({"mixers": ("delta_rule", "rwkv")}, "rwkv"),
        ({"mixers": ()}, "mixers"),
        ({"mixers": ("delta_rule",) * 5}, "layers=3"),
        ({"mixers": ("attention",)}, "mixers"),
        ({"states": None}, "states=None"),
    ],
    partial(replace, STATES): [({"key_heads": 3}, "key_heads 3")],
    partial(GPTConfig, dim=8, layers=1, heads=2): [
        ({"dim": 10, "heads": 4}, "dim=10.*heads=4"),
        ({"max_positions": 2**70}, "max_positions"),
    ],
    partial(replace, LATENT): [
        ({"kv_heads": 4}, "kv_heads=4.*heads=8"),
        ({"head_dim": 16}, "head_dim=16.*12"),
        ({"window": 5}, "window=5"),
        ({"qk_norm": True}, "qk_norm=True"),
        ({"out_bias": True}, "out_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"mixers": ("mamba2",), "states": STATES}, "states=.*latent"),
    ],
    partial(replace, SIZES): [
        ({"rank": 0}, "rank=0"),
        ({"query_rank": 0}, "query_rank=0"),
        ({"rotary_dim": 3}, "rotary_dim=3"),
        ({"interleaved": 1}, "interleaved=1"),
    ],
    LinearScaling: [({"factor": 0.0}, "LinearScaling.*factor=0.0"), ({"factor": "2"}, "factor='2'")],
    partial(Llama3Scaling, factor=8.0, low_freq_factor=1.0, original_max_position_embeddings=8192): [
        ({"high_freq_factor": 1.0}, "high_freq_factor=1.0.*low_freq_factor=1.0")
    ],
    partial(YarnScaling, factor=4.0, original_max_position_embeddings=4096): [
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings=None"),
        ({"beta_fast": 0.5}, "beta_fast=0.5.*beta_slow=1.0"),
    ],
    YarnScaling(factor=4.0, original_max_position_embeddings=8192).frequencies: [
        ({"head_dim": 64, "theta": 1.0}, "rope_theta=1")
    ],
    DEBUG.flops_per_token: [
        ({"length": 0}, "length=0"),
        ({"length": 11, "mask": AttentionMask(documents=[0, 4, 10])}, "documents.*row 0.*10.*11"),
    ],
    Checkpointing: [
        ({"policy": "all"}, "policy 'all'.*none, layer, attention_output"),
        ({"policy": "none", "offload": True}, "offload=True .* policy 'none'"),
        ({"policy": "none", "inputs": 2}, "inputs 2.*policy 'none'"),
        ({"policy": "layer", "outputs": 2}, "outputs 2.*policy 'attention_output'"),
        ({"policy": "layer", "on_device": 2}, "on_device 2.*offload"),
        ({"policy": "layer", "inputs": 0}, "inputs 0"),
        ({"policy": "attention_output", "outputs": -1}, "outputs -1"),
        ({"policy": "layer", "offload": True, "on_device": -1}, "on_device -1"),
        ({"chunk": 0}, "chunks of 0 tokens"),
    ],
    apply: [
        ({"policy": "layer", "inputs": 8}, "inputs 8.*7"),
        ({"policy": "attention_output", "outputs": 9}, "outputs 9.*7"),
        ({"policy": "layer", "offload": True, "on_device": 8}, "on_device 8.*7"),
        ({"policy": "layer", "offload": True, "inputs": 3, "on_device": 3}, "inputs 3.*on_device 3"),
    ],
    Checkpointing("layer").apply: [
        ({"model": nn.Linear(2, 2)}, "Linear"),
        ({"model": Llama(SMALL, attend)}, "policy 'layer' .*function"),
    ],
    partial(Llama(SMALL), IDS): [
        ({"positions": torch.arange(4)}, r"ids \(2, 5\).*\(4,\)"),
        ({"positions": torch.zeros(3, 5).long()}, r"got \(3, 5\)"),
        ({"positions": torch.arange(5.0)}, "got .* of torch.float32"),
        ({"layout": SequenceLayout.zigzag(10, 2)}, r"positions.*2 shards.*layout.positions\(shard\)"),
    ],
    Llama(SMALL): [({"ids": IDS[0]}, r"ids .*\[B, T\].*\(5,\)")],
    GPT(GPT_SMALL): [({"ids": torch.zeros(1, 33, dtype=torch.long)}, "33 tokens .*32 .*max_positions")],
    token_loss: [
        ({"logits": torch.zeros(2, 3, 7), "labels": LABELS[:, :4]}, r"got \(2, 3, 7\) and \(2, 4\)"),
        ({"logits": HIDDEN[0], "labels": LABELS[0]}, r"labels .*\[B, T\].*\(7,\)"),
    ],
    partial(linear_token_loss, hidden=HIDDEN, weight=WEIGHT, labels=LABELS): [
        ({"hidden": HIDDEN[0]}, r"got \(7, 6\), \(11, 6\), \(2, 7\)"),
        ({"weight": WEIGHT[:, :5]}, r"got \(2, 7, 6\), \(11, 5\), \(2, 7\)"),
        ({"weight": WEIGHT.bfloat16()}, "autocast.*bfloat16"),
        ({"labels": LABELS[:, :6]}, r"\(2, 6\)"),
        ({"labels": LABELS.float()}, "labels.*torch.float32"),
        ({"labels": triples((1, 2, 10), tokens=8)}, r"got \(2, 7, 6\), \(11, 6\), \(2, 8\)"),
        ({"labels": triples((1, 2, 11))}, "label 11.*11"),
        ({"labels": triples((1, 2, 3)), "backend": "torch"}, "LabelTriples|torch 2.13"),
        ({"bias": torch.zeros(1)}, r"\(2, 7\), \(1,\)"),
        ({"chunk": 0}, "chunk.*0"),
        ({"backend": "auto"}, "backend.*own, torch.*'auto'"),
        ({"backend": "torch", "z_loss": 0.5}, "z_loss=0.5"),
        ({"vocabulary": 12}, "vocabulary=12.*11"),
    ],
    partial(LabelTriples, positions=torch.arange(3), labels=torch.arange(3), weights=torch.ones(3), shape=(2, 7)): [
        ({"labels": torch.tensor([1, 2])}, r"\[M\].*\[\(3,\), \(2,\), \(3,\)\]"),
        ({"positions": torch.tensor([0.0, 1, 2])}, "integers.*torch.float32"),
        ({"positions": torch.tensor([0, 1, 14])}, r"positions.*14.*\(2, 7\).*13"),
        ({"labels": torch.tensor([1, 2, -100])}, "label -100"),
        ({"weights": torch.tensor([1.0, -1, 1])}, "weights.*-1"),
        ({"weights": torch.tensor([1.0, torch.inf, 1])}, "weights"),
    ],
    partial(linear_argmax, HIDDEN, WEIGHT): [
        ({"labels": LABELS[:, :4]}, r"hidden.*weight.*\(2, 7, 6\)"),
        ({"labels": triples((1, 2, 3))}, "labels.*LabelTriples"),
    ],
    partial(token_logprobs, HIDDEN, WEIGHT): [
        ({"labels": LABELS.float()}, "labels"),
        ({"labels": LABELS[0, :3]}, "labels"),
        ({"labels": triples((1, 2, 3))}, "labels.*LabelTriples"),
        ({"labels": LABELS[0, :3], "positions": torch.zeros(2).long()}, "positions"),
        ({"labels": LABELS[0, :1], "positions": torch.tensor([14])}, "14"),
        ({"labels": LABELS, "temperature": 0.0}, "temperature"),
        ({"labels": LABELS, "chunk": 0}, "chunk"),
    ],
    partial(stream, Llama(SMALL), ids=IDS, new_tokens=3): [
        ({"ids": IDS[0]}, r"\[B, N\].*\(5,\) of torch.int64"),
        ({"ids": IDS[:, :0]}, r"\(2, 0\)"),
        ({"ids": IDS + 11}, "ids.*11.*10"),
        ({"new_tokens": 0}, "new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": "low"}, "temperature='low'"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"mask": AttentionMask(causal=False)}, "mask="),
        ({"mask": AttentionMask(documents=[0, 4, 5])}, "mask="),
    ],
    partial(stream, ids=IDS): [
        ({"model": GPT(GPT_SMALL), "new_tokens": 28}, "5 .*28 .*max_positions=32"),
        ({"model": Llama(SMALL, attend), "new_tokens": 3}, "attention function.*Local"),
    ],
    partial(generate, Llama(HYBRID), IDS, new_tokens=2): [({"mask": AttentionMask(window=(3, None))}, "window")],
}
ROWS = [(call, wrong, named) for call, rows in CALLS.items() for wrong, named in rows]


@pytest.mark.parametrize(("call", "wrong", "named"), ROWS, ids=[named[:40] for *_, named in ROWS])
def test_calls_are_refused_by_argument_and_value(call, wrong, named):
    with pytest.raises(ValueError, match=named):
        call(**wrong)


# -- folders ---------------------------------------------------------------------------------------------------------


def config(**changes: object) -> Callable[[Path], None]:
    return partial(edit_config, **changes)


def tensors(**changes: Tensor | None) -> Callable[[Path], None]:
    return partial(edit_tensors, **changes)


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def in_two_files(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """Splits the weights into two files, and changes the second or the index."""

    def edit(folder: Path) -> None:
        split(folder)
        change(folder)

    return edit


def head_in(file: object) -> Callable[[Path], None]:
    """Names another file for the head's weight in the index."""

    def edit(folder: Path) -> None:
        (folder / "directory").mkdir()
        index = folder / "model.safetensors.index.json"
        fields = json.loads(index.read_text())
        fields["weight_map"]["lm_head.weight"] = file
        index.write_text(json.dumps(fields))

    return in_two_files(edit)


LAST = "model-00002-of-00002.safetensors"
ROPE = {"type": "linear", "factor": 2.0}

# A saved model: edits of its folder, and a pattern of the error of `from_pretrained`.
FOLDERS: dict[Callable[[], Llama | GPT], list[tuple[Callable[[Path], object], str]]] = {
    build: [
        (tensors(**{"model.norm.weight": None}), "model.norm.weight"),
        (tensors(**{"model.extra": torch.zeros(1)}), "model.extra"),
        (tensors(**{"lm_head.weight": torch.zeros(11, 9)}), r"lm_head.weight.*\(11, 9\).*\(11, 8\)"),
        (tensors(**{"lm_head.weight": torch.zeros(11, 8).to(torch.int8)}), "lm_head.weight.*I8.*F64, F32"),
        (tensors(**{f"extra.{i}": torch.zeros(1) for i in range(10)}), "; and 2 more$"),
        (text("config.json", "{"), "config.json"),
        (text("model.safetensors", "not safetensors at all"), "model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor .*index.json"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "pytorch_model.bin.*safe"),
        (in_two_files(lambda folder: (folder / LAST).unlink()), LAST),
        (in_two_files(lambda folder: (folder / LAST).write_bytes((folder / LAST).read_bytes()[:-3])), f"{LAST}.*ncom"),
        (in_two_files(text("model.safetensors.index.json", "{}")), "index.json.*weight_map"),
        (head_in(LAST), f"lm_head.weight.*{LAST}"),
        (head_in("../model-00001-of-00002.safetensors"), "lm_head.weight"),
        (head_in("a\0"), "lm_head.weight"),
        (head_in(None), "lm_head.weight"),
        (head_in("x" * 5000), f"lm_head.weight in {'x' * 5000}"),
        (head_in("directory"), "lm_head.weight in directory"),
        # Sizes that differ from the weights are refused before a model is built.
        (config(hidden_size=10**9), r"embed_tokens.weight is \(11, 8\), not \(11, 1000000000\)"),
        (config(num_attention_heads=10**8), r"self_attn.o_proj.weight is \(8, 12\), not \(8, 600000000\)"),
        (config(num_hidden_layers=10**6), "1000000 layers"),
        (config(num_hidden_layers=3), "model.layers.2.self_attn.q_proj.weight is missing"),
        (config(attention_bias=True), "q_proj.bias is missing"),
        (config(tie_word_embeddings=True), "lm_head.weight is not part of the model"),
        (config(model_type="gemma"), "config.json.*model_type='gemma'.*llama, mistral, qwen2, "),
        (config(model_type="absent"), "model_type=None"),
        (config(model_type="gpt2"), "model_type='gpt2'.*'llama'.*'mistral'.*'qwen2'.*'qwen3'"),
        (config(hidden_act="gelu"), "hidden_act='gelu'.*'silu'.*'swish'.*'llama'"),
        (config(model_type="qwen2", mlp_bias=True), "mlp_bias=True.*False.*'qwen2'"),
        (config(model_type="mistral", attention_bias=True), "attention_bias=True.*False"),
        (config(sliding_window=9), "sliding_window=9.*'llama'"),
        (config(quantization_config={"bits": 4}), "quantization_config={'bits': 4}"),
        (config(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "rope_scaling=.*llama3.*low_freq_factor"),
        (config(rope_scaling=ROPE | {"new": 1}), "'linear'.*new"),
        (config(rope_scaling={"factor": 2.0}), "rope_scaling=.*'default'.*factor"),
        (config(rope_scaling=ROPE | {"type": "dynamic"}), "rope_type.*default.*linear.*llama3.*yarn"),
        (config(partial_rotary_factor=0.5), "partial_rotary_factor.*1"),
        (config(rope_parameters={"full_attention": {"rope_theta": 1.0}}), "full_attention"),
        (config(hidden_size="absent", num_hidden_layers="absent"), "config.json.*hidden_size, num_hidden_lay"),
        (config(num_key_value_heads=3), "config.json: num_attention_heads=2 .*num_key_value_heads=3"),
        (config(layer_types=["full_attention", "sliding_attention"]), "window.*'llama'"),
        (config(layer_types=["sliding_attention", "full_attention"]), "full_attention"),
    ],
    lambda: Llama(LATENT): [
        (config(kv_lora_rank=11), r"kv_a_proj_with_mqa.weight is \(14, 32\), not \(15, 32\)"),
        (config(q_lora_rank=None), "q_a_proj.weight is not part of the model|q_proj.weight is missing"),
        (config(num_key_value_heads=4), "num_key_value_heads=4 .*num_attention_heads=8"),
        (config(attention_bias=True), "attention_bias=True.*False.*'youtu'"),
        (config(mup_base_width=256), "mup_base_width=256 .*1, false or null"),
        (config(use_mup=True), "use_mup=True "),
        (config(embedding_multiplier=12.0), "embedding_multiplier=12.0 "),
    ],
    lambda: GPT(GPT_SMALL): [
        (tensors(**{"transformer.h.0.attn.c_attn.weight": torch.zeros(24, 8)}), r"c_attn.weight.*\(24, 8\).*\(8, 24\)"),
        (config(n_inner=17), "n_inner=17.*n_embd=32"),
        (config(activation_function="relu"), "activation_function='relu'.*'gelu_new'.*'gelu_pytorch_tanh'"),
        (config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True.*False"),
        (config(tie_word_embeddings=False), "tie_word_embeddings=False.*True.*'gpt2'"),
        (config(model_type="qwen3"), "model_type='qwen3'.*'gpt2'"),
    ],
    lambda: Llama(HYBRID): [
        (config(mixers=["delta_rule", 3]), "mixers"),
        (config(mixers=["delta_rule", "attention", "attention"]), "self_attn"),
        (config(states={"heads": 4}), "states"),
        (config(states=vars(STATES) | {"key_dim": 7}), "linear_attn"),
        (config(states=vars(STATES) | {"heads": 0}), "states.heads"),
    ],
}
EDITS = [(make, edit, named) for make, edits in FOLDERS.items() for edit, named in edits]


@pytest.mark.parametrize(("make", "edit", "named"), EDITS, ids=[named[:40] for *_, named in EDITS])
def test_folders_are_refused_by_field_tensor_or_file(tmp_path, make, edit, named):
    model = make()
    model.save_pretrained(tmp_path)
    edit(tmp_path)
    with pytest.raises(ValueError, match=named):
        type(model).from_pretrained(tmp_path)


def on_meta() -> Llama:
    with torch.device("meta"):
        return Llama(SMALL)


def eos(tokens: object) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens}))
        return ends_of_text(folder)

    return read


def with_more_layers(folder: Path) -> object:
    edit_config(folder, num_hidden_layers=3)
    return pretrained_config(folder)


class Halved(LinearScaling):
    """A scaling defined by the user."""


def save(**changes: object) -> Callable[[Path], None]:
    return lambda folder: build(replace(SMALL, **changes)).save_pretrained(folder / "new")


# Calls with the folder of `build()`; those that save do not create the folder `new`.
READS_AND_SAVES: list[tuple[Callable[[Path], object], str]] = [
    (with_more_layers, "model.layers.2.self_attn.q_proj.weight is missing"),
    *((eos(tokens), "generation_config.json: eos_token_id=") for tokens in ("text", [1, "2"], {"a": 1}, 1.5, True)),
    (
        lambda folder: load_pretrained(Llama(replace(SMALL, norm_eps=0.1, qkv_bias=True)), folder),
        "norm_eps=0.0001 .* 0.1, qkv_bias=False .* True",
    ),
    (lambda folder: load_pretrained(GPT(GPT_SMALL), folder), "model_type='llama'.*'gpt2'"),
    (lambda folder: load_pretrained(on_meta(), folder), "model.embed_tokens.weight.*to_empty"),
    (lambda _: initialize(on_meta(), seed=0), "model.embed_tokens.weight.*to_empty"),
    (lambda folder: on_meta().save_pretrained(folder / "new"), "model.embed_tokens.weight"),
    (lambda folder: build().save_pretrained(folder / "new", "nowhere"), "source='nowhere'"),
    (lambda folder: build().save_pretrained(folder / "new", dtype=torch.int8), "model.embed_tokens.weight.*torch.int8"),
    (lambda folder: build().save_pretrained(folder / "new", max_file_bytes=0), "max_file_bytes=0"),
    (save(out_bias=True), "no model_type .*out_bias=True.*qwen2: qkv_bias alone"),
    (save(qkv_bias=True, mlp_bias=True), "no model_type .*qkv_bias=True"),
    (save(qk_norm=True, qkv_bias=True), "no model_type .*qk_norm=True"),
    (save(window=3, window_from=1), "no model_type .*window=3"),
    (save(dim=9, head_dim=6, mlp_bias=True), "no model_type .*dim=9"),
    (save(rope_scaling=Halved(factor=2.0)), "rope_scaling=.*LinearScaling, Llama3Scaling"),
]


@pytest.mark.parametrize(("call", "named"), READS_AND_SAVES, ids=[named[:40] for _, named in READS_AND_SAVES])
def test_reads_and_saves_are_refused(tmp_path, call, named):
    build().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=named):
        call(tmp_path)
    assert not (tmp_path / "new").exists()


def test_learned_positions_are_as_many_as_in_the_folder(tmp_path):
    GPT(GPT_SMALL).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"transformer.wpe.weight.*\(32, 8\).*\(40, 8\)"):
        load_pretrained(GPT(replace(GPT_SMALL, max_positions=40)), tmp_path)


# -- ranks -----------------------------------------------------------------------------------------------------------


class Adapted(nn.Linear):
    """A linear layer with an adapter: replacing its class would drop the adapter."""


def wrapped() -> GPT:
    model = GPT(GPT_SMALL)
    model.transformer.h[0] = checkpoint_wrapper(model.transformer.h[0])
    return model


def adapted() -> Llama:
    model = Llama(LARGE)
    model.model.layers[1].self_attn.q_proj = Adapted(32, 32, bias=False)
    return model


def state_of(model: Llama | GPT) -> tuple[dict[str, type], bool | None]:
    types = {name: type(module) for name, module in model.named_modules()}
    return types, getattr(getattr(model, "model", None), "contiguous_states", None)


def split_model(model: Llama | GPT, over: DeviceMesh | None = None, method: str = "", **options: object) -> None:
    """Calls `parallelize`, over tp 2 and ulysses 2 by default. A refused model is unchanged."""
    over = over or mesh(tp=2, ulysses=2)
    before = state_of(model)
    attention = {"attention": build_attention(method, over)} if method else {}
    try:
        parallelize(model, over, **attention | options)
    finally:
        assert state_of(model) == before


def split_states(kind: str = "zigzag", mask: AttentionMask | None = None, **states: int) -> None:
    over = mesh(tp=2, ring=2)
    attend = build_attention("ring", over)
    model, layout = Llama(replace(HYBRID, states=replace(STATES, **states))), attend.layout(12, kind)
    parallelize(model, over, attention=attend, precision=None)
    model(torch.zeros(1, 6, dtype=torch.long), positions=layout.positions(attend.shard), layout=layout, mask=mask)


def vocabulary_loss(rows: int, vocabulary: int | None = 10, labels: tuple[int, int] = (1, 4), **options) -> None:
    """The loss of a shard of the vocabulary; each rank has half of the tokens."""
    axis, hidden, weight = mesh(ring=2, tp=2)["tp"], torch.zeros(1, 2, 3), torch.zeros(rows, 3)
    linear_token_loss(hidden, weight, torch.zeros(labels).long(), axis=axis, vocabulary=vocabulary, **options)


def logits_loss(rows: int, vocabulary: int | None = 10) -> None:
    axis = mesh(ring=2, tp=2)["tp"]
    token_loss(torch.zeros(1, 4, rows), torch.zeros(1, 4).long(), axis=axis, vocabulary=vocabulary)


ON_RANKS: list[tuple[Callable[[], object], str]] = [
    (lambda: split_model(Llama(replace(LARGE, heads=3, kv_heads=3, head_dim=8))), "heads 3 .*2 .*'tp'"),
    (lambda: split_model(Llama(replace(LARGE, heads=4, kv_heads=1))), "kv_heads 1 .*2 "),
    (lambda: split_model(Llama(replace(LARGE, hidden_dim=49))), "MLP width 49 .*2 "),
    (
        lambda: split_model(Llama(replace(LARGE, heads=2, kv_heads=2)), method="ulysses"),
        "1 query heads .*2 .*'ulysses'",
    ),
    (lambda: split_model(Llama(LARGE), mesh(tp=2, ulysses=2)["tp"]), "tp"),
    (lambda: split_model(Llama(LARGE), attention=Ring(mesh(tp=2, ulysses=2)["tp"])), "'tp'"),
    (lambda: split_model(wrapped()), "transformer.h.0.ln_1"),
    (lambda: split_model(adapted()), "model.layers.1.self_attn.q_proj .*Adapted.*Linear"),
    (lambda: split_model(Llama(LARGE), zero_stage=4), "zero_stage=4"),
    (
        lambda: split_model(
            Llama(LARGE, attend), mesh(ring=4), checkpointing=Checkpointing("layer"), contiguous_states=True
        ),
        "'layer' needs an armillary method",
    ),
    (lambda: split_states(heads=2, key_heads=1), "states.key_heads 1"),
    (lambda: vocabulary_loss(4), r"rank \d of 2 on axis 'tp' has 5 of vocabulary=10 rows.*got 4"),
    (lambda: logits_loss(4), r"rank \d of 2 on axis 'tp' has 5 of vocabulary=10 rows.*got 4"),
    (lambda: vocabulary_loss(5, None), "vocabulary.* axis 'tp' of 2 ranks"),
    (lambda: vocabulary_loss(5, labels=(1, 2)), r"T / 2\), E\].*got \(1, 2, 3\), \(5, 3\), \(1, 2\)"),
    (lambda: vocabulary_loss(5, labels=(1, 5)), r"got \(1, 2, 3\), \(5, 3\), \(1, 5\)"),  # as passed, not padded
    (lambda: vocabulary_loss(5, backend="torch"), "2 ranks"),
    (lambda: vocabulary_loss(5, bias=torch.zeros(10)), r"\(1, 4\), \(10,\)"),
]
IN_A_LAYER: list[tuple[Callable[[], object], str]] = [
    (lambda: split_states("striped"), "relayout"),
    (lambda: split_states(mask=AttentionMask(window=(3, 0))), "window"),
]


def messages_on_ranks() -> list[str]:
    messages = value_errors([call for call, _ in ON_RANKS])
    for call, _ in IN_A_LAYER:
        with pytest.raises(ValueError) as raised:
            call()
        messages.append(str(raised.value))
    return messages


def test_calls_are_refused_on_every_rank(worlds):
    for messages in worlds(4).run(messages_on_ranks):
        for (_, named), message in zip([*ON_RANKS, *IN_A_LAYER], messages, strict=True):
            assert re.search(named, message), (named, message)
