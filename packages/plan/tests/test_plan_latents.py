"""Models with latent attention: sizes from their files, the price of expansion, choices of the search, and memory."""

import json
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from armillary.attention import AttentionMask, AttentionShape, build_comm_plan
from armillary.core import SequenceLayout
from armillary.models import Checkpointing, LatentSizes, LlamaConfig
from armillary.plan import Cluster
from armillary.plan.arguments import model_of
from armillary.plan.cli import main
from armillary.plan.latent_models import latent_sizes
from armillary.plan.memory import AttentionChoice, Job, estimate, simulate
from armillary.plan.memory.tensor_sizes import Widths
from armillary.plan.search.search import SearchOptions, search
from armillary.plan.time.passes import EXPANSION_PRODUCTS, pair_flops, passes_of
from armillary.plan.time.step_time import step_time

MLA = LatentSizes(rank=512, rotary_dim=64, key_dim=128, value_dim=128, query_rank=1536)
MODEL = LlamaConfig(vocab_size=256, dim=256, layers=2, heads=32, kv_heads=32, hidden_dim=256, latent=MLA)
"""So narrow that attention dominates."""


def step_of(name, axes, model=MODEL, length=2**16, **options):
    attention = AttentionChoice(name, **options)
    return Job(model=model, axes=axes, attention=attention, length=length, checkpointing=Checkpointing("none"))


# -- sizes ------------------------------------------------------------------------------------------------------------

FIELDS = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
FIELDS |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "v_head_dim": 6}
FIELDS |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "max_position_embeddings": 64}
CLASSES = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite",
    "kimi_linear": "KimiLinear",
    "longcat_flash": "LongcatFlash",
    "minicpm3": "MiniCPM3",
    "mistral4": "Mistral4",
    "youtu": "Youtu",
}
"""Classes of transformers by `model_type`."""


def config_of(kind, **fields):
    transformers = pytest.importorskip("transformers")
    layers = {"num_layers": 1} if kind == "longcat_flash" else {}
    fields = {name: value for name, value in FIELDS.items() if not layers or name != "num_hidden_layers"} | fields
    return getattr(transformers, f"{CLASSES[kind]}Config")(**fields, **layers)


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}], ids=["", "one q"])
@pytest.mark.parametrize("kind", CLASSES)
def test_attention_has_the_parameters_of_transformers(kind, changes):
    if kind == "longcat_flash" and "q_lora_rank" in changes:
        return  # its queries always have two projections
    config = config_of(kind, **changes)
    module = import_module(f"transformers.models.{kind}.modeling_{kind}")
    name = f"{CLASSES[kind]}{'MLA' if kind == 'longcat_flash' else 'Attention'}"
    count = sum(x.numel() for x in getattr(module, name)(config, 0).parameters())
    sizes = latent_sizes(config.to_dict())
    assert count == sizes.parameters(32, 4)
    assert (sizes.head_dim, sizes.value_dim, sizes.sent) == (12, 6, 16)


@pytest.mark.parametrize("kind", ["youtu", "minicpm3", "deepseek_v3"])
def test_a_model_of_a_folder_has_the_parameters_of_transformers(kind, tmp_path):
    dense = {"first_k_dense_replace": 2} if kind == "deepseek_v3" else {}
    config = config_of(kind, **dense, attn_implementation="eager")
    config.save_pretrained(tmp_path)
    whole = getattr(pytest.importorskip("transformers"), f"{CLASSES[kind]}ForCausalLM")(config)
    model = model_of(str(tmp_path), 64)
    assert model.parameters() == sum(x.numel() for x in whole.parameters())
    assert (model.heads, model.kv_heads, model.head_dim, model.value_dim) == (4, 4, 12, 6)
    # 6 for each parameter, and for each visible key and head: 2 products of 2 FLOPs in forward, 4 in backward.
    keys = 6 * 2 * 4 * (12 + 6) * (64 + 1) / 2
    lookup = 0 if config.tie_word_embeddings else 64 * 32
    assert model.flops_per_token(64) == pytest.approx(6 * (model.parameters() - lookup) + keys)


def test_tensor_parallelism_shards_heads_and_replicates_projections_to_latents():
    whole, half = Widths.of(MODEL), Widths.of(MODEL).shard(2)
    replicated = MLA.shared_parameters(MODEL.dim) + 2 * MODEL.dim  # and two norms
    assert half.block - replicated == (whole.block - replicated) // 2
    assert half.expansion * 2 == whole.expansion == 32 * 256 * 512


# -- time -------------------------------------------------------------------------------------------------------------


def price(causal, ranks=64, tokens=64):
    """Returns the FLOPs of expansion over those of attention, times T: in forward, and in forward and backward."""
    layout = SequenceLayout.zigzag(ranks * tokens, ranks)
    sizes = {"heads": 128, "kv_heads": 128, "head_dim": 192, "value_dim": 128, "latent": (64, 512)}
    work = AttentionShape.of(layout, AttentionMask(causal), **sizes, dtype=torch.bfloat16)
    plan, expansion, attention = build_comm_plan("ring", work, ranks), [], []
    passes = zip((plan.forward, plan.backward), EXPANSION_PRODUCTS, pair_flops(192, 128), strict=True)
    for steps, products, flops in passes:
        expansion.append(sum(sum(step.expanded) for step in steps) * products * 2 * MLA.key_parameters)
        attention.append(sum(sum(step.pairs) for step in steps) * flops)
    return tokens * expansion[0] / attention[0], tokens * sum(expansion) / sum(attention)


def test_the_price_of_expansion_has_a_closed_form():
    assert price(causal=False)[0] == pytest.approx(410, rel=0.01)
    assert price(causal=True) == pytest.approx((615, 683), rel=0.01)
    assert price(causal=True)[1] / 14_000 < 0.05


@pytest.mark.parametrize(
    ("name", "axes", "sent", "least", "most"),
    [
        # A ring expands all heads of 1 + 7 * 3 / 4 of 8 shards on average, the busiest rank up to 8.
        ("ring", {"ring": 8}, True, 6.25, 8),
        ("ulysses", {"ulysses": 8}, True, 1, 1),  # an eighth of the heads, of all tokens
        ("token_ring", {"ring": 8}, False, 1, 1),
    ],
)
def test_attention_takes_the_time_of_its_products_and_of_expansion(monkeypatch, name, axes, sent, least, most):
    model, cluster = replace(MODEL, heads=64, kv_heads=64), Cluster.named("8xh100")
    passes, key_parameters = passes_of(step_of(name, axes, model), cluster), MLA.key_parameters
    monkeypatch.setattr(LatentSizes, "key_parameters", 0)
    plain = passes_of(step_of(name, axes, model), cluster)
    assert passes.sends_latents == sent
    device, own_keys = cluster.accelerator, 2**16 // 8 * 64
    for products, phase in zip(EXPANSION_PRODUCTS, ("forward", "backward"), strict=True):
        seconds = getattr(passes, phase).compute - getattr(plain, phase).compute
        keys = seconds * device.flops * device.matmul / (2 * key_parameters * products)
        assert 0.999 * least <= keys / own_keys <= 1.001 * most


def test_projections_do_not_count_the_expansion():
    job, cluster = step_of("ring", {"ring": 4}), Cluster.named("8xh100")
    sizes, device = Widths.of(MODEL), cluster.accelerator
    flops = 6 * MODEL.layers * (sizes.block - sizes.expansion) * 2**16 / 4
    dense = step_time(job, passes_of(job, cluster), cluster).dense
    assert dense == pytest.approx(flops / (device.flops * device.matmul))


def test_the_search_sends_latents_where_they_are_fewer_bytes(tmp_path, capsys):
    config_of("minicpm3", num_attention_heads=32, kv_lora_rank=64).save_pretrained(tmp_path)
    arguments = f"--model {tmp_path} --tokens 64Ki --cluster 8xh100 --attention ring token_ring".split()
    main([*arguments, "--json"])
    choices = json.loads(capsys.readouterr().out)["choices"]
    sends = {(choice["attention"]["name"], choice["sends_latents"]) for choice in choices if choice["axes"]["ring"] > 1}
    assert sends == {("ring", True), ("token_ring", False)}
    assert {choice["command"] for choice in choices} == {None}
    sent = {choice["attention"]["name"]: choice["sent_bytes"] for choice in choices if choice["axes"]["ring"] == 8}
    assert sent["ring"] < sent["token_ring"] / 5
    main(arguments)
    output = capsys.readouterr().out
    assert "ring, latents" in output and "token_ring, latents" not in output and "transformers" in output
    # One latent of 64 + 4 numbers is more than two heads of 12 + 6.
    config_of("youtu", num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=64).save_pretrained(tmp_path)
    few = search(SearchOptions(model=str(tmp_path), tokens="64Ki", cluster="8xh100", attention=("ring",)))
    assert not any(choice.sends_latents for choice in few.choices)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "axes", "policy"),
    [
        # The formulas of all sequence methods are compared with their passes; these are the steps around them.
        ("token_ring", {"ring": 2}, "layer"),
        ("usp", {"ring": 2, "ulysses": 4}, "layer"),
        ("upipe+ring", {"ring": 2, "ulysses": 4}, "none"),
    ],
)
def test_the_estimate_agrees_with_a_simulated_step(name, axes, policy):
    # Norms on the CPU save tensors that CUDA's do not: with small latents they are few.
    model = replace(MODEL, latent=replace(MLA, rank=128, query_rank=None))
    job = replace(step_of(name, axes, model), checkpointing=Checkpointing(policy))
    assert estimate(job).device == pytest.approx(simulate(job).device, rel=0.05)
