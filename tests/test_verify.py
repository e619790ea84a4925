"""Verification of running steps: of the trainer, and of models of transformers under `ContextParallel`."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import armillary.train
from armillary.attention import AttentionMask, ContextParallel, Ring
from armillary.check import CheckBatch, StepOutput, verify
from armillary.core.testing import mesh
from armillary.train import (
    CheckConfig,
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    prepare,
    process_group,
    train,
)
from armillary.train.config import check_config
from armillary.train.step import StepResult, train_step
from armillary.train.verification import Verification

NOT = "not observed"
TEXT = (Path(armillary.train.__file__).parent,)
CONFIG = Config(
    model=ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48),
    check=CheckConfig(verify_every=2),
)


def trainer_events(folder, parallel, model=CONFIG.model, data=None, **train_options):
    options = TrainConfig(**{"steps": 3, "device": "cpu", "output": folder} | train_options)
    rows = {"path": TEXT, "sequence_length": 64, "global_batch_size": 4, "reset_positions": True}
    data = DataConfig(**rows | (data or {}))
    train(replace(CONFIG, parallel=parallel, train=options, model=model, data=data))
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [x for x in events if x.get("event") == "verified"]


@pytest.mark.parametrize(
    ("parallel", "options"),
    [(ParallelConfig(ring=2, shard=2), {"accumulation": 2}), (ParallelConfig(ring=2, tp=2), {"precision": "bfloat16"})],
)
def test_the_trainer_verifies_its_steps(worlds, tmp_path, parallel, options):
    events = worlds(4).run(trainer_events, tmp_path, parallel, **options)[0]
    assert [x["step"] for x in events] == [1, 2]
    head = "not observed" if parallel.tp > 1 else "right"
    observed = {
        "same rows": NOT,  # the loader reads this rank's tokens alone
        "share of tokens": "right",
        "positions": "right",
        "labels": head,
        "loss": head,
        "equal gradients": "right" if parallel.tp > 1 else "not observed",
        "gradient of the head": head,
        "parameters in use": "right",
        "windows and softcaps of calls": "right",
    }
    verdicts = [
        {name: fact.split(":")[0] for name, fact in (line.split(": ", 1) for line in event["text"].splitlines())}
        for event in events
    ]
    assert verdicts[1] == observed, events[1]["text"]
    # Probes of a prefix before the first step. Layers under tensor parallelism have a part of a rank's tokens.
    probes = ("attention across shards", "no look-ahead", "same prefix in shorter rows", "loss along the gradient")
    not_observed = dict.fromkeys(("documents", "windows", "sinks and biases"), NOT)
    assert verdicts[0] == observed | dict.fromkeys(probes, head) | not_observed, events[0]["text"]


TIED, GPT2 = replace(CONFIG.model, tied_embeddings=True), ModelConfig(family="gpt", dim=32, layers=2, heads=4)
HYBRID = replace(CONFIG.model, mixers=("mamba2", "attention"))


@pytest.mark.parametrize(
    ("ranks", "parallel", "model", "options"),
    [
        # Hidden states have a half of a shard's tokens, which are odd, and later micro-batches are of the same size.
        (4, ParallelConfig(ring=2, tp=2), TIED, {"data": {"sequence_length": 62}, "accumulation": 2}),
        (2, ParallelConfig(tp=2), GPT2, {}),
        # Layers with a state have contiguous shards, of which others are the longest.
        (3, ParallelConfig(ring=3, contiguous_states=True), HYBRID, {"precision": "float64"}),
    ],
    ids=["tied embeddings beside tp", "gpt", "contiguous states"],
)
def test_right_steps_of_the_trainer_raise_no_alarm(worlds, tmp_path, ranks, parallel, model, options):
    events = worlds(ranks).run(trainer_events, tmp_path, parallel, model, **options)[0]
    assert [x["step"] for x in events] == [1, 2] and all(": wrong" not in x["text"] for x in events)


def losses(verify_every, sequence_length):
    options = TrainConfig(steps=3, device="cpu")
    rows = DataConfig(path=TEXT, sequence_length=sequence_length, global_batch_size=4)
    check = CheckConfig(verify_every=verify_every)
    config = replace(CONFIG, parallel=ParallelConfig(ring=2, zero_stage=1), train=options, data=rows, check=check)
    with process_group(config) as device:
        run = prepare(config, device)
        random_state, verification, reports = torch.get_rng_state(), Verification(run), list[str]()
        results = list[StepResult]()
        for step in (1, 2, 3):
            batches = [next(run.training)]
            results.append(train_step(run, step, batches, verification.of(step, batches)))
            reports.append(str(verification.report))
        assert torch.equal(torch.get_rng_state(), random_state)
    return [(x.loss, x.grad_norm) for x in results], reports[0]


def test_a_verified_run_has_the_same_losses_bit_by_bit(worlds):
    (verified, report), (plain, _) = (worlds(2).run(losses, every, 128)[0] for every in (1, None))
    assert verified == plain and "attention across shards: right" in report
    _, report = worlds(2).run(losses, 1, 16)[0]
    assert "probes: not observed: they cost more than a step" in report


def test_a_run_without_the_package_is_refused(monkeypatch):
    monkeypatch.setattr("armillary.train.config.check.entry_points", lambda group: ())
    with pytest.raises(ValueError, match=r"--check.verify-every 2.*armillary-check"):
        check_config(CONFIG)


def wrong_step():
    options = TrainConfig(steps=3, device="cpu", precision="float64")
    parallel, rows = ParallelConfig(ring=2), DataConfig(path=TEXT, sequence_length=64, global_batch_size=2)
    config = replace(CONFIG, parallel=parallel, train=options, data=rows)
    with process_group(config) as device:
        run = prepare(config, device)
        for module in run.model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)  # an average, where the loss needs a sum
        before = [p.to_local().clone() for p in run.model.parameters()]
        with pytest.raises(RuntimeError) as error:
            batches = [next(run.training)]
            train_step(run, 1, batches, Verification(run).of(1, batches))
        return str(error.value), all(
            torch.equal(a, b.to_local()) for a, b in zip(before, run.model.parameters(), strict=True)
        )


def test_a_wrong_step_ends_before_the_update(worlds):
    errors = worlds(2).run(wrong_step)
    assert errors[0] == errors[1]
    error, unchanged = errors[0]
    assert "gradients are averaged" in error and unchanged


def tiny(model_type, **sizes):
    options = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None}
    config = AutoConfig.for_model(model_type, **(options | sizes))
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config)


def probed(model_type, sizes):
    axes = mesh(ring=torch.distributed.get_world_size())
    cp = ContextParallel("ring", axes)
    model = cp.prepare(tiny(model_type, **sizes))
    for layer in model.model.layers:
        fully_shard(layer, mesh=axes["ring"])
    fully_shard(model, mesh=axes["ring"])

    def loss(model, batch):
        with cp.shard(batch.ids, shift_labels=batch.shifted_labels, documents=batch.documents) as shard:
            return cp.loss(model(**shard.inputs).loss, shard)

    torch.manual_seed(4)
    ids = torch.randint(3, 64, (2, 48))
    report = verify(model, CheckBatch(ids, ids, (0, 10, 41, 48)), loss)
    return report.to_dict(), any(p.grad is not None for p in model.parameters())


def test_probes_of_a_sharded_model_raise_no_alarm(worlds):
    sizes = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
    report, has_gradients = worlds(2).run(probed, "gemma3_text", sizes)[1]
    verdicts = {x["name"]: x["verdict"] for x in report["facts"]}
    # No parameter is replicated, none is of scores, and rows have several documents.
    not_observed = {"equal gradients", "no look-ahead", "sinks and biases"}
    assert {name for name, verdict in verdicts.items() if verdict != "right"} == not_observed, json.dumps(
        report, indent=1
    )
    assert not has_gradients


def step_of_calls(**dropped):
    """Facts of a step whose calls of the method lack options."""
    cp = ContextParallel("ring", mesh(ring=2))
    sizes = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
    model, call = cp.prepare(tiny("gemma2", **sizes, attn_logit_softcapping=3.0)), Ring.__call__

    def without(method, *tensors, mask, **options):
        mask = replace(mask, window=None) if "window" in dropped else mask
        return call(method, *tensors, mask=mask, **(options | {x: None for x in dropped if x in options}))

    batch = cp.shard(torch.arange(96).view(2, 48) % 64)
    with patch.object(Ring, "__call__", without), cp.verify(model, batch) as proof, batch:
        cp.loss(model(**batch.inputs).loss, batch).backward()
        cp.reduce_gradients(model)
    return {x.name: x for x in proof.report().facts}["windows and softcaps of calls"]


def test_windows_and_softcaps_are_seen_in_the_calls_of_a_method(worlds):
    assert worlds(2).run(step_of_calls)[0].verdict == "right"
    softcap, window = (worlds(2).run(step_of_calls, **{name: True})[1] for name in ("softcap", "window"))
    assert softcap.verdict == window.verdict == "wrong"
    assert "layer 0 has softcap None instead of 3" in softcap.detail
    assert "layer 1 has a window of 48 tokens instead of 8" in window.detail and "layer 0" not in window.detail


def probed_beside_other_rows():
    axes = mesh(shard=2, ring=2)
    cp = ContextParallel("ring", axes, data="shard")
    model, group = cp.prepare(tiny("llama")), torch.distributed.get_rank() // 2

    def loss(model, batch):
        with cp.shard(batch.ids, shift_labels=batch.shifted_labels, documents=batch.documents) as shard:
            return StepOutput(cp.loss(model(**shard.inputs).loss, shard), shard.layout.positions(cp.method.shard))

    ids = torch.randint(3, 64, (2, 48), generator=torch.Generator().manual_seed(group))
    documents = ((0, 10, 41, 48), (0, 12, 36, 48))[group]  # those of the second group end with its zigzag shards
    peers = [2 * group, 2 * group + 1]
    return verify(model, CheckBatch(ids, ids, documents), loss, reduce=cp.reduce_gradients, peers=peers).to_dict()


def test_ranks_with_other_rows_run_the_same_probes(worlds):
    reports = worlds(4).run(probed_beside_other_rows)
    assert all(report == reports[0] for report in reports)
    verdicts = {x["name"]: x["verdict"] for x in reports[0]["facts"]}
    probes = {"attention across shards", "documents", "no look-ahead", "windows", "sinks and biases"}
    assert {name for name, verdict in verdicts.items() if verdict != "right"} == probes, json.dumps(
        reports[0], indent=1
    )


def cp_step(model_type, sizes, fsdp):
    axes = mesh(ring=torch.distributed.get_world_size())
    cp = ContextParallel("ring", axes)
    model = cp.prepare(tiny(model_type, **sizes))
    if fsdp:
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


class BlockOfArgument(nn.Module):
    """Attends by a function that is an argument."""

    def __init__(self):
        super().__init__()
        self.heads = nn.Linear(16, 48)

    def forward(self, x, attend):
        q, k, v = self.heads(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return x + attend(q, k, v).flatten(2)


class ModelOfArgument(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(64, 16), nn.Embedding(64, 16), nn.Linear(16, 64)
        self.layers = nn.ModuleList(BlockOfArgument() for _ in range(2))

    def forward(self, ids, position_ids, attend):
        x = self.tokens(ids) + self.positions(position_ids)
        for layer in self.layers:
            x = layer(x, attend)
        return self.head(x)


def step_of_an_argument(**options):
    """A step of a model that has no method but gets `batch.attend`; warnings are errors."""
    cp = ContextParallel("ring", mesh(ring=2))
    torch.manual_seed(4)
    model, ids = ModelOfArgument(), torch.randint(3, 64, (2, 48))
    batch = cp.shard(ids, labels=ids, **options)
    with warnings.catch_warnings(), cp.verify(model, batch) as proof:
        warnings.simplefilter("error")
        loss = cp.loss(model(batch.ids, batch.position_ids, batch.attend), batch)
        loss.backward()
        cp.reduce_gradients(model)
        return proof.report(loss).to_dict()


def test_a_method_that_is_an_argument_of_the_model_is_observed(worlds):
    for options in ({}, {"mask": AttentionMask(window=(7, 0))}):  # without a configuration, any window is right
        report = worlds(2).run(step_of_an_argument, **options)[1]
        assert {x["verdict"] for x in report["facts"]} == {"right"}, json.dumps(report, indent=1)
