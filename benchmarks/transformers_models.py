"""Tiny random text models of every family in transformers, on 4 ranks and on one: right, refused or unlike.

    uv run python benchmarks/transformers_models.py                    # all families: about 25 minutes on two cores
    uv run python benchmarks/transformers_models.py --families mistral roberta mamba

Each family runs as a causal language model, else as a masked one, else without a head, in six ways: prepared by
`ContextParallel`, comparing logits and gradients of all ranks; the same with its `loss`; with position ids from 0; with
labels that are not shifted, which must be refused; without position ids; and with "sdpa" inside `sdpa_parallel`.

`right`: equal to one rank, which computes its position ids itself. `refused`: the same ValueError on all ranks.
`unlike`: anything else (wrong numbers, another exception, disagreeing ranks), for which the command exits with 1. `not
built`: transformers itself cannot run the family with the sizes below, or it has too many parameters.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as auto

from armillary.attention import ContextParallel, Ring, sdpa_parallel
from armillary.check.architecture import InFloat64
from armillary.core.testing import World, mesh, relative_error
from armillary.integrations import register_transformers
from armillary.integrations.transformers.models import padding_idx_of

RANKS, LENGTH, VOCABULARY = 4, 64, 64
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "n_inner", "embedding_size", "intermediate_size"), 32),
    **dict.fromkeys(("ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim", "sliding_window", "window_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "pad_token_id"), 2),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), 1),
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "max_position_embeddings": 256,
    "n_positions": 256,
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    "attention_chunk_size": 20,
    "sliding_window": 20,
}
UNSET = ("sliding_window", "head_dim", "vocab_size")
"""Fields that get their size even if their default is None."""
OWN: dict[str, dict[str, Any]] = {
    "esm": {"pad_token_id": 2, "mask_token_id": 1, "token_dropout": False},
    "xmod": {"default_language": "en_XX"},
}
"""Fields that a family requires."""
STILL = ("dropout", "pdrop", "layerdrop", "jitter")
"""Parts of the names of fields that must be 0."""
LIMIT = 1e-4
"""Limit of relative errors: some models round to float32 internally."""
WAYS = ("armillary", "loss", "from 0", "labels alone", "no positions", "sdpa")
AFTER = WAYS[1:-1]
"""Ways that are skipped if the first is refused."""
WITH_LABELS = ("loss", "labels alone")
"""Ways that are skipped for models without a head."""
MOST = 50_000_000
"""Largest number of parameters: families that these sizes do not shrink are not built."""


def families() -> list[str]:
    """Returns the families whose tokens are one sequence."""
    with_head = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    return sorted(with_head | set(filter(takes_tokens, auto.MODEL_MAPPING_NAMES)))


def takes_tokens(family: str) -> bool:
    try:
        config = transformers.CONFIG_MAPPING[family]()
    except Exception:  # a family without defaults, e.g. one composed of two models
        return False
    return hasattr(config, "vocab_size") and not getattr(config, "is_encoder_decoder", False)


def head_of(family: str) -> Any:
    """Returns the Auto class that builds the family."""
    if family in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return transformers.AutoModelForCausalLM
    if family in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return transformers.AutoModelForMaskedLM
    return transformers.AutoModel


def config_of(family: str) -> Any:
    """A config of few, narrow layers with the family's defaults for everything except sizes."""
    config_class = transformers.CONFIG_MAPPING[family]
    fields = vars(config_class())
    still = {k: 0.0 for k, v in fields.items() if any(part in k for part in STILL) and isinstance(v, float)}
    small = {k: v for k, v in SIZES.items() if k in fields and (fields[k] is not None or k in UNSET)}
    if "kv_lora_rank" in small:  # each head has its own keys, computed from shared latents
        small["num_key_value_heads"] = small["num_attention_heads"]
    return config_class(**small | still | OWN.get(family, {}))


def model_of(family: str, implementation: str) -> nn.Module:
    """A model without pooler and with reproducible random weights, also for those initialized to 0."""
    config, head = config_of(family), head_of(family)
    with torch.device("meta"):
        size = sum(p.numel() for p in head.from_config(config).parameters())
    if size > MOST:
        raise NotImplementedError(f"{size:,} parameters are too many")
    torch.manual_seed(0)
    options = {"attn_implementation": implementation, "experts_implementation": "eager"}
    built = head.from_config(config, **options).double()
    for module in built.modules():
        if type(getattr(module, "pooler", None)).__name__.endswith("Pooler"):
            module.pooler = None
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.1)
    return built.train()


Answer = tuple[Tensor, list[Tensor | None]] | str
"""Logits or a loss, and gradients; or the error."""


def ids_of() -> Tensor:
    return torch.randint(3, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(2))


def upstream(width: int) -> Tensor:
    return torch.randn(1, LENGTH, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def error_answer(error: Exception) -> str:
    return f"{'ValueError' if isinstance(error, ValueError) else type(error).__name__}: {error}"


def outputs(family: str, built: nn.Module, inputs: dict[str, Any]) -> Any:
    uncached = {"use_cache": False} if head_of(family) is transformers.AutoModelForCausalLM else {}
    return built(**inputs, **uncached)


def hidden_or_logits(out: Any) -> Tensor:
    """Returns the logits, or the hidden states of a model without a head, [1, T, width]."""
    x = out.logits if "logits" in out else out[0]
    if x.ndim != 3:
        raise NotImplementedError(f"an output of shape {tuple(x.shape)}")
    return x


def on_one_rank(family: str, way: str) -> Answer:
    """Results on one rank, with the position ids that the model computes."""
    try:
        built = model_of(family, "eager")
        with InFloat64():
            x = hidden_or_logits(outputs(family, built, {"input_ids": ids_of()}))
            if way == "loss":
                x = nn.functional.cross_entropy(x[0, :-1], ids_of()[0, 1:])
        x.backward(None if way == "loss" else upstream(x.shape[2]))
    except Exception as error:
        return error_answer(error)
    return x.detach(), [p.grad for p in built.parameters()]


def on_a_shard(family: str, way: str) -> Answer:
    """Local logits and gradients; or the global loss, and gradients to average over ranks."""
    attend = Ring(mesh(ring=RANKS)["ring"])
    cp = ContextParallel(attend)
    register_transformers(attend)
    try:
        built = model_of(family, "sdpa" if way == "sdpa" else "armillary")
        cp.padding_idx = None if way == "from 0" else padding_idx_of(built)
        layout = attend.layout(LENGTH, "contiguous")
        batch = cp.shard(ids_of(), layout=layout)
        inputs = batch.inputs if way == "loss" else {"input_ids": batch.ids, "position_ids": batch.position_ids}
        if way == "labels alone":
            inputs["labels"] = batch.ids
        elif way == "no positions":
            del inputs["position_ids"]
        with batch, sdpa_parallel(attend) if way == "sdpa" else nullcontext(), InFloat64():
            out = outputs(family, built, inputs)
            x = cp.loss(out.loss, batch) if way == "loss" else hidden_or_logits(out)
        x.backward(None if way == "loss" else layout.take(upstream(x.shape[2]), attend.shard))
    except Exception as error:
        return error_answer(error)
    return x.detach(), [p.grad for p in built.parameters()]


def verdict(expected: Answer, answers: list[Answer], way: str) -> tuple[str, str]:
    """Returns (verdict, reason)."""
    errors = {answer for answer in answers if isinstance(answer, str)}
    if isinstance(expected, str) and not all(error.startswith("ValueError") for error in errors or {""}):
        return "not built", expected
    if errors:
        message = " | ".join(sorted(errors))
        same_message = len(errors) == 1 and all(isinstance(answer, str) for answer in answers)
        return ("refused" if same_message and message.startswith("ValueError") else "unlike"), message
    first = answers[0][0] if way == "loss" else torch.cat([answer[0] for answer in answers], 1)
    forward, worst = relative_error(first, expected[0]), 0.0
    for gradient, *summands in zip(expected[1], *(answer[1] for answer in answers), strict=True):
        if gradient is not None and gradient.norm() > 1e-9:
            total = sum((x for x in summands if x is not None), torch.zeros_like(gradient))
            total = total / RANKS if way == "loss" else total
            worst = max(worst, relative_error(total, gradient))
    right = max(forward, worst) < LIMIT and way != "labels alone"
    return ("right" if right else "unlike"), f"forward {forward:.1e}, gradients {worst:.1e}"


def verdicts(
    run: Callable[[str, str], list[Answer]], family: str, ways: Sequence[str] = WAYS
) -> Iterator[tuple[str, str, str]]:
    """Yields (way, verdict, reason) for each way of running a family.

    Args:
        run: calls `on_a_shard(family, way)` on each of RANKS ranks.
    """
    first = ""
    for way in ways:
        if head_of(family) is transformers.AutoModel and way in WITH_LABELS:
            continue
        if first == "not built" or (first == "refused" and way in AFTER):
            continue
        answer, reason = verdict(on_one_rank(family, way), run(family, way), way)
        first = first or answer
        yield way, answer, reason


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", help="default: all")
    options = parser.parse_args()
    quiet()
    counts: Counter[str] = Counter()
    with World(RANKS) as world:
        world.run(quiet)
        for family in options.families or families():
            for way, answer, reason in verdicts(partial(world.run, on_a_shard), family):
                counts[answer] += 1
                print(f"{family:24} {way:14} {answer:9} {reason[:200]}".replace("\n", " "), flush=True)
    print(dict(counts))
    sys.exit(bool(counts["unlike"]))


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    main()
