"""Verification of running steps: of the trainer, and of models of transformers under `ContextParallel`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import armillary.train
from armillary.attention import ContextParallel
from armillary.core.testing import mesh
from armillary.train import CheckConfig, Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig, train

TEXT = (Path(armillary.train.__file__).parent,)
CONFIG = Config(
    model=ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48),
    check=CheckConfig(verify_every=2),
)


def trainer_events(folder, parallel, **train_options):
    options = TrainConfig(steps=3, device="cpu", output=folder, **train_options)
    rows = DataConfig(path=TEXT, sequence_length=64, global_batch_size=4, reset_positions=True)
    train(replace(CONFIG, parallel=parallel, train=options, data=rows))
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [x for x in events if x.get("event") == "verified"]


@pytest.mark.parametrize(
    ("parallel", "options"),
    [(ParallelConfig(ring=2, shard=2), {"accumulation": 2}), (ParallelConfig(ring=2, tp=2), {"precision": "bfloat16"})],
)
def test_the_trainer_verifies_its_steps(worlds, tmp_path, parallel, options):
    events = worlds(4).run(trainer_events, tmp_path, parallel, **options)[0]
    assert [x["step"] for x in events] == [1, 2]
    for event in events:
        facts = dict(line.split(": ", 1) for line in event["text"].splitlines())
        head = "not observed" if parallel.tp > 1 else "right"
        assert {name: fact.split(":")[0] for name, fact in facts.items()} == {
            "share of tokens": "right",
            "positions": "right",
            "labels": head,
            "loss": head,
            "equal gradients": "right" if parallel.tp > 1 else "not observed",
            "gradient of the head": head,
            "parameters in use": "right",
        }, event["text"]


def tiny(model_type, **sizes):
    options = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None}
    config = AutoConfig.for_model(model_type, **(options | sizes))
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config)


def cp_step(model_type, sizes, fsdp):
    axes = mesh(ring=torch.distributed.get_world_size())
    cp = ContextParallel("ring", axes)
    model = cp.prepare(tiny(model_type, **sizes))
    if fsdp:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=axes["ring"])
    torch.manual_seed(4)
    ids = torch.randint(3, 64, (2, 48))
    with cp.shard(ids, documents=[0, 10, 31, 48]) as batch, cp.verify(model, batch) as proof:
        loss = cp.loss(model(**batch.inputs).loss, batch)
        loss.backward()
    if not fsdp:
        cp.reduce_gradients(model)
    return proof.report(loss).to_dict()


@pytest.mark.parametrize(
    ("model_type", "sizes", "fsdp"), [("llama", {"tie_word_embeddings": True}, False), ("qwen3", {}, True)]
)
def test_models_of_transformers_raise_no_alarm(worlds, model_type, sizes, fsdp):
    report = worlds(2).run(cp_step, model_type, sizes, fsdp)[1]
    verdicts = {x["name"]: x["verdict"] for x in report["facts"]}
    assert verdicts.pop("equal gradients") == ("not observed" if fsdp else "right")
    assert set(verdicts.values()) == {"right"}, json.dumps(report, indent=1)
