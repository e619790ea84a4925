"""Models, inputs and arguments that are refused, by name, and on every rank where several ranks call.

Functions of mask rules and of prepared models with one output per row have tables beside their accepted cases.
"""

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusion_models import TEXT, draw, flux, qwen, sd3, wan
from test_integrations_trainer import LongTrainer, arguments, padded, rows
from tiny_models import (
    LENGTH,
    MAMBA,
    PADDING,
    full_inputs,
    outputs,
    restarting,
    ring,
    tokens,
    transformers,
    usp,
    with_images,
)
from tiny_models import build as tiny_model
from torch import nn

from armillary.attention import AttentionMask, ContextParallel, Local, sdpa_parallel, sequence
from armillary.core import SequenceLayout
from armillary.core.testing import mesh, value_errors
from armillary.integrations import ContextParallelTrainer, register_transformers, share_rows
from armillary.integrations.testing import accelerated
from armillary.integrations.whole_batches import shard_inputs

SHARD = LENGTH // 4
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": PADDING}
SIZES |= {"num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "use_cache": False}
IDS = tokens()


def model(family: str, implementation: str = "armillary", **config: object) -> nn.Module:
    """A tiny model of the class `family`."""
    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, family)
    return kind(kind.config_class(**SIZES | config, attn_implementation=implementation)).train()


# -- one rank --------------------------------------------------------------------------------------------------------


def call(family: str, edit: Callable[[nn.Module], object] = nn.Module.train, config: dict | None = None) -> None:
    """Calls an edited model on whole rows."""
    register_transformers(Local())
    edited = model(family, **config or {})
    edit(edited)
    edited(IDS)


def call_inside(block: Callable[[], object], family: str, implementation: str, tokens: int = LENGTH, **config) -> None:
    with block():
        model(family, implementation, **config)(IDS[:, :tokens])


def prepare(built: nn.Module) -> None:
    ContextParallel(Local()).prepare(built)


def build_and_prepare(family: str, auto: str = "AutoModelForCausalLM") -> None:
    with torch.device("meta"):
        built = getattr(transformers, auto).from_config(getattr(transformers, f"{family}Config")())
    prepare(built)


ROWS_DIFFER = [[0, 5, LENGTH], [0, LENGTH]]


def prepare_and_call(
    family: str, method=None, edit: Callable[[nn.Module], object] = nn.Module.train, documents=None, **config
) -> None:
    """Calls a model whose layers compute attention themselves."""
    built = model(family, "eager", **config)
    edit(built)
    cp = ContextParallel(method or Local())
    cp.prepare(built)
    with cp.shard(IDS, documents=documents) as batch:
        built(input_ids=batch.ids)


def replace_a_layer(bert: nn.Module) -> None:
    bert.encoder.layer[1].attention = nn.Linear(32, 32)


SMALLER = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64}
OTHER_STATES = ("Mamba", "Rwkv", "xLSTM", "Jamba")
ALONE = ("Falcon", "Bloom", "XLM")
OTHER_MIXERS = "{}.*(state along the sequence|layers of kind|attention itself)"


def build(family: str) -> None:
    register_transformers(Local())
    config = getattr(transformers, f"{family}Config")()
    for field, value in SMALLER.items():
        if family not in OTHER_STATES and hasattr(config, field):
            setattr(config, field, value)
    auto_class = transformers.AutoModelForCausalLM if family in OTHER_STATES else transformers.AutoModel
    with torch.device("meta"):
        auto_class.from_config(config, attn_implementation="armillary")


class OwnAttention(nn.Module):
    def forward(self, hidden_states, **_):
        return self.weights(hidden_states) @ hidden_states, None

    def weights(self, x):
        return torch.softmax(x @ x.transpose(1, 2), -1)


def with_attention(attention: nn.Module) -> nn.Module:
    register_transformers(Local())
    built = model("LlamaForCausalLM")
    built.model.layers[1].self_attn = attention
    return built


def cross_attention() -> None:
    register_transformers(Local())
    with sequence(documents=[0, LENGTH]):
        model("BartModel", d_model=32, encoder_layers=1, decoder_layers=1)(IDS, decoder_input_ids=IDS)


def enter(**options: object) -> None:
    with sequence(**options):
        pass


def shard_counting_from(padding_idx: int) -> None:
    cp = ContextParallel(Local())
    cp.padding_idx = padding_idx
    cp.shard(torch.tensor([[4, 5, 3]]))


def loss_of(local_loss: object) -> None:
    cp = ContextParallel(Local())
    cp.loss(local_loss, cp.shard(torch.zeros(2, 6, dtype=torch.long)))


class SquaredLossTrainer(transformers.Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) ** 2


class LongSquaredLossTrainer(ContextParallelTrainer, SquaredLossTrainer):
    pass


def trainer(
    kind: type = LongTrainer,
    built: Callable[..., nn.Module] = model,
    loss: Callable[..., object] | None = None,
    **settings: object,
) -> None:
    register_transformers(Local())
    options = {"compute_loss_func": loss} if loss else {}
    with accelerated():
        kind(built("MistralForCausalLM"), arguments("out", **settings), padded, rows(2), rows(2), **options)


def mixtral_with_routers(_: str) -> nn.Module:
    return model("MixtralForCausalLM", output_router_logits=True, **ROUTERS)


def padding(*mask: int) -> dict[str, object]:
    return {"attention_mask": torch.tensor([mask] * 2)}


SIX = torch.arange(12).view(2, 6)
ROUTERS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
MIXERS = (nn.Conv1d(32, 32, 3, padding=2), nn.LSTM(32, 32))

# A function with its other arguments: wrong ones, and a pattern of the error.
CALLS: dict[Callable[..., object], list[tuple[dict[str, object], str]]] = {
    partial(ContextParallel(Local()).shard, SIX): [
        ({"labels": torch.zeros(2, 5)}, "one shape"),
        ({"labels": np.zeros((2, 6))}, "labels.*ndarray"),
        ({"position_ids": torch.zeros(3, 6)}, r"position_ids \(3, 6\)"),
        ({"position_ids": [0, 1]}, "position_ids.*list"),
        ({"layout": SequenceLayout.contiguous(5, 1)}, "attend.layout"),
        ({"layout": SequenceLayout.contiguous(6, 2)}, "2 shards"),
        ({"layout": "zigzag"}, "layout.*'zigzag'.*SequenceLayout"),
        ({"documents": [0, 5]}, "end at 5"),
        ({"documents": [[0, 6]]}, "1 rows"),
        ({"labelled": 0}, "labelled=0"),
        ({"labelled": 2.5}, "labelled=2.5"),
        ({"labelled": float("nan")}, "labelled=nan"),
        ({"labelled": "9"}, "labelled='9'"),
        (padding(1, 1, 0, 1, 1, 1), "2 to 2"),
        (padding(0, 1, 0, 1, 1, 1), "2 to 2"),
        (padding(0, 1, 1, 1, 1, 1), "0 to 0"),
        (padding(1, 1, 1, 1, 2, 2), "attention_mask has 2"),
        (padding(1, 1), r"attention_mask \(2, 2\) for ids \(2, 6\)"),
        (padding(1, 1, 1, 1, 1, 0) | {"shift_labels": SIX}, "hides have labels"),
        (padding(1, 1, 1, 1, 1, 1) | {"position_ids": SIX[:1] % 3}, "attention_mask"),
    ],
    ContextParallel(Local()).shard: [({"ids": torch.zeros(6)}, "whole batch"), ({"ids": [[1, 2]]}, "ids.*list")],
    shard_counting_from: [({"padding_idx": 3}, "padding_idx=3"), ({"padding_idx": -1}, "padding_idx=-1")],
    partial(shard_inputs, ContextParallel(Local())): [
        ({"inputs": {"input_ids": SIX[0], "position_ids": SIX[0]}}, r"ids \(6,\)")
    ],
    **{
        function: [({argument: wrong}, "not a method|method='ring'") for wrong in (None, "ring", Local)]
        for function, argument in ((register_transformers, "attend"), (sdpa_parallel, "attend"))
    },
    ContextParallel: [({"method": wrong}, "not a method|method='ring'") for wrong in (None, "ring", Local)],
    loss_of: [
        ({"local_loss": wrong}, r"share is a|floating-point|logits \(1,\)")
        for wrong in (1.0, None, np.float32(1), torch.tensor(1), torch.ones(1))
    ],
    enter: [({"layout": "zigzag"}, "SequenceLayout")],
    build: [({"family": family}, OTHER_MIXERS.format(family)) for family in (*OTHER_STATES, *ALONE)],
    build_and_prepare: [
        ({"family": "xLSTM"}, OTHER_MIXERS.format("xLSTM")),
        *(
            ({"family": family, "auto": "AutoModel"}, f"{family}.*{named}")
            for family, named in (
                ("Flava", "image_model.*layers of tokens"),
                ("FNet", "interface"),
                ("XLM", "interface"),
            )
        ),
    ],
    prepare_and_call: [
        ({"family": "BloomModel", "n_head": 4}, "BloomAttention.*adds a bias"),
        ({"family": "MptModel", "d_model": 32, "n_heads": 4, "n_layers": 1}, "no tensor"),
        ({"family": "MPNetModel"}, "MPNetSelfAttention.*adds a Tensor"),
        ({"family": "GPTNeoModel", "attention_types": [[["global"], 2]]}, r"GPTNeoSelfAttention.*\(where\)"),
        ({"family": "FalconModel", "alibi": True}, "no tensor"),
        ({"family": "MegatronBertModel", "attention_probs_dropout_prob": 0.1}, "MegatronBertSelfAttention.*dropout"),
        ({"family": "MegatronBertModel", "edit": replace_a_layer}, "layers .1. have no attention"),
        ({"family": "NystromformerModel"}, "counts positions from 2"),
        (
            {"family": "MvpForCausalLM", "d_model": 32, "decoder_attention_heads": 4, "documents": ROWS_DIFFER},
            "row to row",
        ),
    ],
    cross_attention: [({}, "mask of cross-attention")],
    lambda attention: with_attention(attention)(IDS): [
        ({"attention": OwnAttention()}, r"layers.1.self_attn \(OwnAttention\)")
    ],
    lambda attention: prepare(with_attention(attention)): [
        ({"attention": OwnAttention()}, r"layers.1.self_attn \(OwnAttention\)"),
        ({"attention": nn.MultiheadAttention(32, 4)}, r"layers.1.self_attn \(MultiheadAttention\)"),
    ],
    partial(call, "LlamaForCausalLM"): [
        (
            {"edit": lambda llama, mixer=mixer: llama.model.layers[1].add_module("mixer", mixer)},
            rf"LlamaModel.layers.1.mixer \({type(mixer).__name__}\)",
        )
        for mixer in MIXERS
    ],
    call: [
        ({"family": "DogeForCausalLM"}, "no tensor"),
        (
            {
                "family": "Gemma3ForCausalLM",
                "config": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7},
                "edit": lambda gemma: setattr(gemma.model.layers[1].self_attn, "sliding_window", 4),
            },
            "sliding_window=4",
        ),
    ],
    partial(call_inside, lambda: sequence(documents=[0, 5, LENGTH]), "LlamaForCausalLM"): [
        ({"implementation": "sdpa"}, "`sequence` block"),
        ({"implementation": "eager"}, "`sequence` block"),
    ],
    # Mistral passes no mask, because its window is longer than the input, as it would be longer than a shard.
    partial(call_inside, lambda: sdpa_parallel(Local()), "MistralForCausalLM", tokens=8, sliding_window=17): [
        ({"implementation": "sdpa"}, "MistralConfig"),
        ({"implementation": "eager"}, "MistralConfig"),
        ({"implementation": "flex_attention"}, "MistralConfig"),
    ],
    trainer: [
        ({"kind": LongSquaredLossTrainer}, "SquaredLossTrainer.compute_loss"),
        ({"built": partial(model, implementation="sdpa")}, "attends by 'sdpa'"),
        ({"built": mixtral_with_routers}, "auxiliary loss is not linear"),
        ({"loss": print}, "override compute_loss in a class with takes_shards"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True"),
        ({"torch_compile": True}, "torch_compile=True"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True"),
    ],
}
ROWS = [(function, wrong, named) for function, wrongs in CALLS.items() for wrong, named in wrongs]


@pytest.mark.parametrize(("function", "wrong", "named"), ROWS, ids=[named[:40] for *_, named in ROWS])
def test_calls_are_refused_by_name(monkeypatch, tmp_path, function, wrong, named):
    monkeypatch.chdir(tmp_path)  # a trainer makes its folder
    with pytest.raises(ValueError, match=named):
        function(**wrong)


DOORS = {
    "transformers": [
        *(lambda: register_transformers(Local()), lambda: prepare(model("LlamaModel", "eager"))),
        LongTrainer,
    ],
    "trl": [type("LongSFTTrainer", (ContextParallelTrainer,), {"__module__": "trl"})],
    "accelerate": [lambda: share_rows(None, ContextParallel(Local()))],
    "diffusers": [lambda: prepare(flux()[0])],
}


@pytest.mark.parametrize(("library", "door"), [(name, door) for name, doors in DOORS.items() for door in doors])
def test_other_releases_are_refused_with_the_versions_that_are_tested(monkeypatch, tmp_path, library, door):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("armillary.integrations.versions.version", {library: "0.9.0"}.get)
    with pytest.raises(ValueError, match=rf"{library} 0\.9\.0 .*>="):
        door()


# -- four ranks ------------------------------------------------------------------------------------------------------


def on_shard(x: object, shard: SimpleNamespace) -> object:
    """The value of an input on this rank, if it depends on it."""
    return x(shard) if callable(x) else x


def call_shard(
    family: str,
    method: str = "usp",
    kind: str = "contiguous",
    config: dict | None = None,
    edit: Callable[[nn.Module], object] = nn.Module.train,
    options: dict | None = None,
    **changes: object,
) -> None:
    """Calls a model on this rank's shard.

    Args:
        options: arguments of `sequence`, the layout by default.
        changes: inputs, or functions that return them from the shard's rank, ids and positions; None leaves one out.
    """
    attend = usp() if method == "usp" else ring(4)
    register_transformers(attend)
    layout = attend.layout(LENGTH, kind)
    positions = layout.positions(attend.shard)[None]
    shard = SimpleNamespace(rank=attend.shard, positions=positions, ids=layout.take(IDS, attend.shard))
    inputs = {"input_ids": shard.ids, "position_ids": positions} | changes
    built = model(family, **config or {})
    edit(built)
    with sequence(**{"layout": layout} | (options or {})):
        built(**{name: on_shard(x, shard) for name, x in inputs.items() if x is not None})


def call_multimodal(name: str, mask: AttentionMask | None = None, block=nullcontext, **changes: object) -> None:
    """Calls a model of `tiny_models` on this rank's shard."""
    attend = usp()
    register_transformers(attend)
    layout, model = attend.layout(LENGTH), tiny_model(name)
    inputs = {
        key: layout.take(x, attend.shard, dim=2 if x.ndim == 3 and x.shape[0] == 3 else 1)
        for key, x in ({"position_ids": restarting((0, LENGTH))} | full_inputs(name, model)).items()
    }
    shard = SimpleNamespace(rank=attend.shard, positions=layout.positions(attend.shard)[None], layout=layout)
    inputs = {key: on_shard(x, shard) for key, x in (inputs | changes).items() if x is not None}
    with block(), sequence(layout=layout, mask=mask):
        outputs(model, inputs)


def other_blocks(block_sequence_ids, **arguments):
    """Gemma 3's masks with blocks that do not follow from the token types."""
    mask = transformers.masking_utils.create_causal_mask(**arguments, block_sequence_ids=block_sequence_ids + 1)
    return {"full_attention": mask, "sliding_attention": mask}


def with_other_blocks():
    modeling = sys.modules["transformers.models.gemma3.modeling_gemma3"]
    return mock.patch.object(modeling, "create_masks_for_vision_model", other_blocks)


def call_batch(family: str, without: str = "", config: dict | None = None, **changes: object) -> None:
    """Computes the loss of a batch's shard in the model."""
    attend = usp()
    register_transformers(attend)
    with ContextParallel(attend).shard(IDS) as batch:
        inputs = {name: x for name, x in (batch.inputs | changes).items() if name != without}
        model(family, **config or {})(**inputs)


def classify_tokens() -> None:
    cp = ContextParallel("ring", mesh(ring=4))
    classifier = cp.prepare(model("LlamaForSequenceClassification", "eager"))
    with cp.shard(IDS) as batch:
        assert classifier(**batch.inputs).loss is None
    with cp.shard(IDS, shift_labels=IDS) as batch:
        classifier(**batch.inputs, shift_labels=batch.labels)


def types_on_one_rank(shard: SimpleNamespace) -> torch.Tensor:
    types = shard.layout.take(with_images()[1], shard.rank)
    return types if shard.rank == 1 else torch.zeros_like(types)


@torch.no_grad()
def diffuse(build: Callable = flux, edit: Callable[[nn.Module], object] = nn.Module.train, **changes: object) -> None:
    """Calls an edited model after `prepare`."""
    model, inputs = build()
    ContextParallel("token_ring", mesh(ring=4)).prepare(model, compare=False)
    edit(model)
    model(**inputs | changes)


def diffuse_unequal(change: Callable[[nn.Module, dict, int], object]) -> None:
    model, inputs = flux()
    change(model, inputs, dist.get_rank())
    ContextParallel("usp", mesh(ring=2, ulysses=2)).prepare(model)
    model(**inputs)


def prepare_twice() -> None:
    cp, (model, _) = ContextParallel("token_ring", mesh(ring=4)), flux()
    cp.prepare(cp.prepare(model, compare=False), compare=False)


def prepare_another_class() -> None:
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(num_layers=1, num_attention_heads=2, attention_head_dim=8)
    ContextParallel("token_ring", mesh(ring=4)).prepare(model)


def checkpoint_around_the_model(model: nn.Module) -> None:
    model.blocks[0](draw(2, 7, 64), draw(2, 7, TEXT), draw(2, 6, 64), None)


def set_ip_adapter(model: nn.Module) -> None:
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    model.transformer_blocks[0].attn.set_processor(FluxIPAdapterAttnProcessor(64, TEXT))


def enable_cache(model: nn.Module) -> None:
    from diffusers import FirstBlockCacheConfig

    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))


def set_backend(model: nn.Module) -> None:
    for block in model.transformer_blocks:
        block.attn.processor._attention_backend = "flex"


def set_of(path: str, name: str, value: object) -> Callable[[nn.Module], None]:
    return lambda model: setattr(model.get_submodule(path), name, value)


class TopIndexer(nn.Module):
    pass


HYBRID = MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]}
llama, mistral = partial(call_shard, "LlamaForCausalLM"), partial(call_shard, "MistralForCausalLM")
bert = partial(call_shard, "BertForMaskedLM", kind="zigzag")
zigzag = partial(call_shard, kind="zigzag", options={"documents": (0, LENGTH)})
bamba = partial(call_shard, "BambaForCausalLM", "ring", kind="zigzag", config=HYBRID)
PROTEIN = {"mask_token_id": 1, "token_dropout": False}
MOBILE = {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32, "num_feedforward_networks": 1}
DECODER = {"is_decoder": True, "d_model": 32, "decoder_layers": 1, "encoder_layers": 1, "decoder_ffn_dim": 32}
DECODER |= {"decoder_attention_heads": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "dropout": 0.0}
WHISPER = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4}
NEXT = "layout.positions(attend.shard)"
RESTARTS = {"documents": [0, 5, LENGTH]}

# Calls on four ranks, and words of the error, which is the same on all ranks.
ON_RANKS: list[tuple[Callable[[], object], str]] = [
    # On one rank only: a mask, a longer shard, fewer positions.
    (
        lambda: llama(attention_mask=lambda s: torch.tensor([s.rank != 2] + [True] * (SHARD - 1)).expand(2, -1).long()),
        "attention_mask hides tokens",
    ),
    (
        lambda: llama(
            input_ids=lambda s: IDS[:, : SHARD + (s.rank == 1)],
            position_ids=lambda s: torch.arange(SHARD + (s.rank == 1))[None],
        ),
        "12 tokens; the model was given 13",
    ),
    (
        lambda: llama(position_ids=lambda s: s.positions[:, :1] if s.rank == 1 else s.positions),
        "shard 1 has 12 tokens and 1 position ids",
    ),
    (lambda: llama(attention_mask=torch.ones(2, LENGTH)), "no KV cache"),
    (lambda: llama(attention_mask=torch.zeros(2, 1, SHARD, SHARD)), "of its own"),
    (lambda: llama(options={"layout": None}), "sequence(layout=attend.layout(length))"),
    (lambda: llama(options={"layout": SequenceLayout.contiguous(LENGTH, 3)}), "3 shards"),
    (lambda: llama(input_ids=IDS, position_ids=None), "layout.take"),
    (lambda: llama(position_ids=None), NEXT),
    (lambda: llama(position_ids=None, options={"documents": [0, LENGTH]}), NEXT),
    (lambda: llama(position_ids=lambda s: s.positions + 3 * (s.positions > 30)), NEXT),
    (lambda: llama(position_ids=lambda s: s.positions + 37 * (s.positions >= 20)), NEXT),
    (lambda: llama(position_ids=lambda s: s.positions + 1), NEXT),
    (
        lambda: llama(position_ids=torch.arange(SHARD)[None], options=RESTARTS),
        "at position 12 of row 0 has position id 0, which is not beyond",
    ),
    (
        lambda: llama(position_ids=lambda s: s.positions - 2 * (s.positions > 30), options=RESTARTS),
        "at position 31 of row 0 has position id 29, which is not beyond",
    ),
    (
        lambda: llama(position_ids=lambda s: s.positions - (s.positions > 30).long(), options=RESTARTS),
        "at position 31 of row 0 has position id 30, which is not beyond",
    ),
    (lambda: llama(cu_seq_lens_q=torch.tensor([0, SHARD])), "end at 12; the sequence has 48 tokens"),
    (lambda: llama(config={"attention_dropout": 0.1}), "attention_dropout=0"),
    (lambda: llama(edit=lambda m: m.set_attn_implementation("armillary"), output_attentions=True), "output_attentions"),
    (lambda: llama(position_bias=torch.zeros(1)), "position_bias"),
    (lambda: mistral(config={"sliding_window": 0}), "sliding_window=0"),
    (lambda: llama(edit=set_of("model.layers.0.self_attn", "is_causal", False)), "its mask is causal"),
    # Masks, and positions of images.
    (lambda: mistral(options={"mask": AttentionMask(causal=False)}), "has causal=False, but the model is causal"),
    (lambda: bert(options={"mask": AttentionMask()}), "has causal=True, but the model is bidirectional"),
    (lambda: bert(position_ids=None), "as if they were the first of the sequence"),
    (lambda: bert(position_ids=torch.arange(SHARD)[None]), "not beyond those of the tokens before it"),
    (lambda: call_shard("BertModel", kind="zigzag"), "BertModel returns pooler_output"),
    (lambda: call_multimodal("modernbert", position_ids=None), "transformers does not look for documents"),
    (lambda: call_multimodal("llama4", AttentionMask()), "chunks of 7"),
    (lambda: call_multimodal("gemma3", block=with_other_blocks), "numbers blocks of tokens"),
    (lambda: call_multimodal("qwen2_vl", position_ids=None), "which are not beyond"),
    (lambda: call_multimodal("qwen2_vl", position_ids=lambda s: s.positions), "M-RoPE"),
    (
        lambda: call_multimodal(
            "qwen2_vl",
            inputs_embeds=None,
            input_ids=lambda s: s.layout.take(with_images()[0], s.rank),
            position_ids=lambda s: s.positions,
            mm_token_type_ids=types_on_one_rank,
        ),
        "M-RoPE",
    ),
    # Models with position ids by their own rule, and without position ids.
    (lambda: zigzag("RobertaForMaskedLM"), "padding_idx=3"),
    (lambda: zigzag("RobertaForMaskedLM", position_ids=None), "padding_idx=3"),
    (lambda: zigzag("EsmForMaskedLM", config=PROTEIN), "padding_idx=3"),
    (lambda: zigzag("EsmForMaskedLM", config=PROTEIN | {"token_dropout": True}), "token_dropout=False"),
    (lambda: zigzag("MobileBertForMaskedLM", config=MOBILE), "trigram_input=False"),
    (
        lambda: llama(edit=lambda llama: llama.model.layers[1].self_attn.add_module("top", TopIndexer())),
        "layers.1.self_attn.top (TopIndexer) selects keys",
    ),
    # No module of it takes position ids.
    (lambda: prepare_and_call("BloomModel", usp(), n_head=4), "BloomModel.forward takes no position_ids"),
    # Outside of a batch.
    (lambda: zigzag("BartForCausalLM", config=DECODER), "BartDecoder.forward takes no position_ids"),
    # Layers with a state.
    (lambda: bamba(position_ids=lambda s: s.positions % 30), "position_ids"),
    (lambda: bamba(kind="striped"), "relayout"),
    (lambda: bamba(use_cache=True), "use_cache"),
    # Losses.
    (lambda: call_batch("LlamaForCausalLM", "shift_labels"), "the loss of a shard needs shift_labels"),
    (lambda: call_batch("LlamaForCausalLM", "num_items_in_batch"), "the loss of a shard needs num_items_in_batch"),
    (lambda: call_batch("MixtralForCausalLM", config=ROUTERS | {"output_router_logits": True}), "router_logits=True"),
    (lambda: call_batch("MixtralForCausalLM", config=ROUTERS, output_router_logits=True), "output_router_logits=True"),
    (lambda: call_batch("WhisperForCausalLM", config=WHISPER), "WhisperForCausalLM returns loss"),
    (classify_tokens, "labels [2, 12]"),
    # diffusers
    (lambda: diffuse_unequal(lambda m, inputs, rank: inputs["timestep"].add_(rank)), "timestep (ranks [0]"),
    (
        lambda: diffuse_unequal(lambda m, x, rank: x.update(hidden_states=x["hidden_states"][:, rank:])),
        "hidden_states (ranks [0]",
    ),
    (lambda: diffuse_unequal(lambda m, _, rank: m.proj_out.bias.data.add_(rank)), "proj_out.bias (ranks [0]"),
]

BEFORE_COMMUNICATION: list[tuple[Callable[[], object], str]] = [
    (prepare_another_class, "PixArtTransformer2DModel cannot be sharded; of diffusers' transformers, Flux"),
    (prepare_twice, "prepared already"),
    (lambda: diffuse(edit=set_of("", "_parallel_config", "set")), "under diffusers' enable_parallelism too"),
    (lambda: diffuse(edit=set_ip_adapter), "has the processor FluxIPAdapterAttnProcessor"),
    (lambda: diffuse(edit=enable_cache), "FBCHeadBlockHook on transformer_blocks.0"),
    (lambda: diffuse(edit=set_of("transformer_blocks.0.attn.to_out.1", "p", 0.1)), "attn.to_out.1 has dropout 0.1"),
    (lambda: diffuse(edit=set_of("", "proj_out", nn.Identity())), "proj_out was replaced after cp.prepare"),
    (lambda: diffuse(edit=set_backend), "flex_attention ran in transformer_blocks.0.attn"),
    (lambda: diffuse(wan, checkpoint_around_the_model), "outside of the model's forward"),
    (lambda: diffuse(joint_attention_kwargs={"attention_mask": 1}), "joint_attention_kwargs has attention_mask"),
    (lambda: diffuse(hidden_states=draw(2, 3, 8)), "3 tokens of the image on 4 ranks"),
    (lambda: diffuse(txt_ids=torch.zeros(8, 3)), "with 8 tokens of the text, which has 7"),
    (lambda: diffuse(wan, timestep=torch.ones(2, 1)), "a tensor (2, 1) with 1 tokens of the image, which has 27"),
    (lambda: diffuse(qwen, encoder_hidden_states_mask=torch.arange(18).view(2, 9)), "hides text before text"),
    (lambda: diffuse(qwen, encoder_hidden_states_mask=torch.ones(2, 8)), "a mask (2, 8) for 9 tokens of the text"),
    (lambda: diffuse(sd3, encoder_hidden_states=None), "encoder_hidden_states is a NoneType"),
]


def messages_on_ranks() -> list[str]:
    messages = value_errors([call for call, _ in BEFORE_COMMUNICATION])
    for call, named in ON_RANKS:
        with pytest.raises(ValueError, match=re.escape(named)) as raised:
            call()
        messages.append(str(raised.value))
    return messages


def test_calls_are_refused_on_every_rank(worlds):
    for (_, named), *messages in zip(
        [*BEFORE_COMMUNICATION, *ON_RANKS], *worlds(4).run(messages_on_ranks, timeout=300), strict=True
    ):
        assert named in messages[0], (named, messages)
        assert len(set(messages)) == 1, messages
