"""Hugging Face's Trainer and TRL's SFTTrainer on shards: what one rank logs, evaluates, predicts, saves and learns."""

import os
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from armillary.attention import Ring, Ulysses
from armillary.attention.integrations import ContextParallelTrainer, register_transformers
from armillary.core.testing import mesh, relative_error

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

VOCABULARY = 64
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}


def model(implementation: str):
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, **HEADS, sliding_window=9, attn_implementation=implementation)
    return transformers.MistralForCausalLM(config).double()


def rows(count: int, seed: int = 1):
    """Rows of 11 to 37 tokens, whose first ones are a prompt: no labels."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length, prompt = (int(torch.randint(low, high, (), generator=draw)) for low, high in ((11, 38), (0, 6)))
        ids = torch.randint(1, VOCABULARY, (length,), generator=draw)
        made.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(length) < prompt, -100)})
    return made


def padded(batch):
    """What a tokenizer's collator makes: padding on the right."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids, labels = (
        pad([row[name] for row in batch], True, value) for name, value in (("input_ids", 0), ("labels", -100))
    )
    seen = pad([torch.ones_like(row["input_ids"]) for row in batch], True, 0)
    return {"input_ids": ids, "labels": labels, "attention_mask": seen}


class Launched:
    """What torchrun says to accelerate, which keeps it for the process; without ranks, what a lone process knows."""

    def __init__(self):
        ranks = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank()} if dist.is_initialized() else {}
        world = {"WORLD_SIZE": dist.get_world_size(), "LOCAL_WORLD_SIZE": dist.get_world_size()} if ranks else {}
        self.env = patch.dict(
            os.environ, {name: str(n) for name, n in {**ranks, **world, "OMP_NUM_THREADS": 1}.items()}
        )

    def __enter__(self):
        from accelerate.state import AcceleratorState, GradientState

        self.env.start()
        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    def __exit__(self, *_):
        self.env.stop()


def arguments(folder, batch: int, **changes):
    given = {"max_steps": 20, "gradient_accumulation_steps": 2, "eval_steps": 10, "save_steps": 10, "logging_steps": 1}
    given |= {"eval_strategy": "steps", "save_strategy": "steps", "report_to": [], "disable_tqdm": True}
    given |= {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch, "learning_rate": 3e-3}
    given |= {"include_num_input_tokens_seen": "non_padding", "use_cpu": True}
    return transformers.TrainingArguments(str(folder), **given | changes)


def trained(kind: type, implementation: str, folder, batch: int, resume: bool = False, **changes):
    """What is logged, the parameters, and predictions for five more rows."""
    trainer = kind(
        model(implementation), arguments(folder, batch, **changes), padded, rows(22), eval_dataset=rows(4, seed=2)
    )
    trainer.train(resume_from_checkpoint=resume and str(folder / "checkpoint-10"))
    learned = [p.detach().clone() for p in trainer.model.parameters()]
    found = trainer.predict(rows(5, seed=3))
    return trainer.state, learned, found


class LongTrainer(ContextParallelTrainer, transformers.Trainer):
    pass


def on_ranks(folder, shard: int):
    attend = Ring(mesh(shard=2, ring=2)["ring"])
    if shard == 1:
        attend = Ulysses(mesh(ring=2, ulysses=2)["ulysses"], inner=Ring(mesh(ring=2, ulysses=2)["ring"]))
    register_transformers(attend)
    with Launched():
        return [trained(LongTrainer, "armillary", folder, 2 // shard, resume) for resume in (False, True)]


@pytest.mark.parametrize("shard", [1, 2])
def test_x(worlds, tmp_path, shard):
    transformers.logging.set_verbosity_error()
    with Launched():
        one = [trained(transformers.Trainer, "sdpa", tmp_path / "one", 2, resume) for resume in (False, True)]
    ranks = worlds(4).run(on_ranks, tmp_path / "ranks", shard)
    for (state, learned, found), (state1, learned1, found1) in zip(one, ranks[0]):
        for a, b in zip(state.log_history, state1.log_history):
            print({k: (v, b.get(k)) for k, v in a.items() if v != b.get(k)})
        print(max(relative_error(b, a) for a, b in zip(learned, learned1)))
        print(found.metrics, found1.metrics)
        print(state.total_flos, state1.total_flos, state.num_input_tokens_seen)
        seen = found.label_ids != -100
        print(
            found.predictions.shape,
            found1.predictions.shape,
            np.abs(found.predictions - found1.predictions)[seen].max(),
            (found.label_ids == found1.label_ids).all(),
        )
    assert 0
