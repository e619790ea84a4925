"""Runs `armillary.check.verify` on right models in their real step: none may be reported as wrong.

    python benchmarks/verify_models.py                       # all, with a report
    python benchmarks/verify_models.py --only gpt_oss llama  # cases whose name has one of these, without a report

Each case is a tiny random copy of an architecture of transformers under `ContextParallel`, with packed documents.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from report import write
from torch import nn

from armillary.attention import ContextParallel
from armillary.check import CheckBatch, StepOutput, error_line, verify
from armillary.check.architecture import document_boundaries
from armillary.check.tiny import VOCABULARY, load_config, model_class, tiny_config
from armillary.core.testing import RankFailed, Worlds, mesh

TOKENS, ROWS, WINDOW = 96, 2, 8
MODELS = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "phi3",
    "olmo2",
    "cohere2",
    "granite",
    "starcoder2",
    "stablelm",
    "opt",
    "gpt_oss",
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "deepseek_v3",
    "mamba2",
    "bamba",
    "qwen3_next",
    "smollm3",
    "glm4",
    "ernie4_5_moe",
    "exaone4",
    "modernbert-decoder",
    "granitemoe",
    "lfm2",
    "olmo3",
    "seed_oss",
    "llama4_text",
    "mimo_v2_flash",
    "phi",
    "apertus",
    "diffllama",
    "falcon_h1",
    "minicpm3",
    "nanochat",
]
VARIANTS = {
    "fsdp": "llama gemma3_text gpt_oss qwen3_moe bamba",
    "tp": "llama qwen3",
    "checkpointing": "llama gemma2 qwen3_moe olmo2",
    "compile": "llama qwen2",
    "bfloat16": "llama gemma3_text mixtral gpt_oss deepseek_v3 bamba",
    "lora": "llama qwen3 mixtral",
    "usp": "llama gemma3_text gpt_oss qwen3_next",
    "one document": "llama mistral gpt_oss mamba2",
    "autocast": "llama olmoe",
}


@dataclass(frozen=True)
class Case:
    model_type: str
    variant: str = ""

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.model_type, self.variant)))


def cases() -> list[Case]:
    variants = [Case(model, variant) for variant, models in VARIANTS.items() for model in models.split()]
    return [*map(Case, MODELS), *variants]


def verify_case(case: Case) -> dict[str, Any]:
    """Verifies one model on the ranks of a world; returns the report."""
    torch.manual_seed(1)
    ranks, variant = dist.get_world_size(), case.variant
    sizes = {"usp": {"ring": 2, "ulysses": 2}, "tp": {"ring": 2, "tp": 2}}.get(variant, {"ring": ranks})
    axes = mesh(**sizes)
    cp = ContextParallel("usp" if variant == "usp" else "ring", axes)
    model: Any = cp.prepare(new_model(case, axes))
    is_sharded = variant in ("fsdp", "tp")
    if is_sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer, mesh=axes["ring"])
        fully_shard(model, mesh=axes["ring"])
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS))
    labels = ids.clone()
    labels[:, 1 : TOKENS // 3 : 2] = -100
    batch = CheckBatch(ids, labels, None if variant == "one document" else document_boundaries(TOKENS))

    def loss(model: nn.Module, rows: CheckBatch) -> StepOutput:
        with cp.shard(rows.ids, shift_labels=rows.shifted_labels, documents=rows.documents) as shard:
            with torch.autocast("cpu", torch.bfloat16, enabled=variant == "autocast"):
                output = model(**shard.inputs, use_cache=False)
            return StepOutput(cp.loss(output.loss, shard), shard.layout.positions(cp.method.shard))

    peers = [rank for rank in range(ranks) if variant != "tp" or rank % 2 == dist.get_rank() % 2]
    return verify(model, batch, loss, reduce=None if is_sharded else cp.reduce_gradients, peers=peers).to_dict()


def new_model(case: Case, axes: Any) -> nn.Module:
    config = tiny_config(load_config(case.model_type).get_text_config(decoder=True), TOKENS)
    if getattr(config, "sliding_window", None):
        config.sliding_window = WINDOW  # ends inside documents
    model = model_class(config)._from_config(config, attn_implementation="eager")
    if case.variant == "bfloat16":
        model.bfloat16()
    elif case.variant == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(target_modules="all-linear", lora_dropout=0.0, init_lora_weights=False)
        )
    elif case.variant == "checkpointing":
        model.gradient_checkpointing_enable()
        model.train()
    elif case.variant == "compile":
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    elif case.variant == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan = {
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        for layer in model.model.layers:
            parallelize_module(layer, axes["tp"], plan)
    return model


def row_of(case: Case, worlds: Worlds) -> dict[str, Any]:
    try:
        report = worlds(4 if case.variant in ("usp", "tp") else 2).run(verify_case, case, timeout=180.0)[0]
    except RankFailed as failure:
        reason = error_line(failure)
        return {"case": case.name, "verdict": "failed", "facts right": "-", "wrong": reason, "not observed": "-"}
    names = {
        verdict: [x["name"] for x in report["facts"] if x["verdict"] == verdict]
        for verdict in ("right", "wrong", "not observed")
    }
    return {
        "case": case.name,
        "verdict": "right" if report["right"] else "wrong" if report["exit_code"] == 1 else "not observed",
        "facts right": f"{len(names['right'])} of {len(report['facts'])}",
        "wrong": ", ".join(names["wrong"]),
        "not observed": ", ".join(names["not observed"]),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="parts of names of cases")
    options = parser.parse_args(argv)
    chosen = [case for case in cases() if not options.only or any(part in case.name for part in options.only)]
    worlds, rows = Worlds(), list[dict[str, Any]]()
    for case in chosen:
        rows.append(row_of(case, worlds))
        print(rows[-1], flush=True)
    worlds.close()
    wrong = [row["case"] for row in rows if row["verdict"] == "wrong"]
    failed = [row["case"] for row in rows if row["verdict"] == "failed"]
    print(f"{len(rows)} cases, {len(wrong)} false alarms {wrong}, {len(failed)} failed {failed}")
    if not options.only:
        title = "Verification of right models"
        write("verify", title, rows, [f"{len(rows)} cases, {len(wrong)} false alarms, {len(failed)} failed."])


if __name__ == "__main__":
    main()
