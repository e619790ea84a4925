"""TRL's trainers on shards: logs and weights equal TRL's on one rank."""

import pytest
import torch

from armillary.attention import Ring
from armillary.core.testing import mesh, relative_error
from armillary.integrations import (
    ContextParallelDPOTrainer,
    ContextParallelGRPOTrainer,
    ContextParallelRewardTrainer,
    ContextParallelTrainer,
    register_transformers,
)
from armillary.integrations.testing import accelerated

trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
datasets, tokenizers, transformers = (pytest.importorskip(name) for name in ("datasets", "tokenizers", "transformers"))

VOCABULARY = 32
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
GRPO = {
    "clipped": {"loss_type": "grpo", "beta": 0.1, "num_iterations": 2, "epsilon": 0.02, "learning_rate": 0.1},
    "tokens": {"loss_type": "dapo", "top_entropy_quantile": 0.5, "num_generations": 2},
}
DPO = {"gradient_checkpointing": True, "loss_type": ["sigmoid", "ipo"]}
REWARD = {"center_rewards_coefficient": 0.1, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.1}
SFT = {
    "packed": {"packing": True, "max_length": 64, "eval_packing": False},
    "without padding": {"padding_free": True},
    "dft": {"loss_type": "dft"},  # padded
}
MEASURED = ("runtime", "per_second", "flos", "step_time")


class LongSFTTrainer(ContextParallelTrainer, trl.SFTTrainer):
    pass


class LongGRPOTrainer(ContextParallelGRPOTrainer, trl.GRPOTrainer):
    pass


class LongDPOTrainer(ContextParallelDPOTrainer, trl.DPOTrainer):
    pass


class LongRewardTrainer(ContextParallelRewardTrainer, trl.RewardTrainer):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model with a window, in float64, and its tokenizer."""
    path = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, **HEADS, sliding_window=9)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    model.save_pretrained(path)
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(path)
    return path


def tokenized_rows(count: int, seed: int):
    """Rows of 11 to 37 tokens whose first tokens have no labels."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        ids = torch.randint(2, VOCABULARY, (int(torch.randint(11, 38, (), generator=draw)),), generator=draw)
        rows.append({"input_ids": ids.tolist(), "labels": [-100] * 4 + ids[4:].tolist()})
    return datasets.Dataset.from_list(rows)


def text(tokens: int, seed: int) -> str:
    ids = torch.randint(2, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{i}" for i in ids.tolist())


def reward(completion_ids, **_):
    """Reward: the number of even tokens, which differs between completions of a prompt."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def rollout(prompts, trainer):
    """Deterministic completions that depend on the index of a row among the rows of all groups."""
    groups = getattr(trainer, "groups", None)
    first = len(prompts) * (groups.index if groups else 0)
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    completions = [
        [
            2 + (7 * sum(row) + 3 * (first + i) + j * (i + first + 1)) % (VOCABULARY - 2)
            for j in range(3 + (first + i) % 4)
        ]
        for i, row in enumerate(ids)
    ]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


COMMON = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
COMMON |= {"learning_rate": 2e-2, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "optim": "sgd"}
COMMON |= {"dataloader_pin_memory": False}


def trainer(kind: type, folder, output, implementation: str, model=None, **changes):
    loaded = {"attn_implementation": implementation, "dtype": torch.float64}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    load = transformers.AutoModelForCausalLM.from_pretrained
    if issubclass(kind, trl.SFTTrainer):
        options = COMMON | {"gradient_accumulation_steps": 2, "eval_steps": 2, "eval_strategy": "steps"}
        options |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_length": None}
        data = {"train_dataset": tokenized_rows(22, 1), "eval_dataset": tokenized_rows(5, 2)}
        args = trl.SFTConfig(str(output), **options | changes)
        return kind(model or load(folder, **loaded), args, **data, processing_class=tokenizer)
    if issubclass(kind, trl.GRPOTrainer):
        options = COMMON | {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6}
        functions = {"rollout_func": rollout} if changes.pop("rollout", False) else {}
        args = trl.GRPOConfig(str(output), model_init_kwargs=loaded, **options | changes)
        prompts = datasets.Dataset.from_list([{"prompt": text(5 + 3 * i, i)} for i in range(6)])
        return kind(str(folder), reward, args, prompts, processing_class=tokenizer, **functions)
    if issubclass(kind, trl.RewardTrainer):
        args = trl.RewardConfig(str(output), **COMMON | {"per_device_train_batch_size": 3, "max_length": 20} | changes)
        pairs = [{"chosen": text(5 + i, i), "rejected": text(12 - 2 * i, 9 + i), "margin": 0.1 * i} for i in range(6)]
        torch.manual_seed(1)  # for the weights of the head
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **loaded)
        data = datasets.Dataset.from_list(pairs)
        return kind(model, args, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    args = trl.DPOConfig(str(output), **COMMON | {"per_device_train_batch_size": 3, "beta": 0.5} | changes)
    rows = [
        {"prompt": text(4 + i, i), "chosen": " " + text(3 + i, 10 + i), "rejected": " " + text(9 - i, 20 + i)}
        for i in range(6)
    ]
    policy, reference = load(folder, **loaded), load(folder, **loaded)
    with torch.no_grad():
        reference.lm_head.weight.add_(policy.lm_head.weight.roll(1, 0), alpha=0.1)
    data = datasets.Dataset.from_list(rows)
    return kind(policy, reference, args, train_dataset=data, processing_class=tokenizer)


def train(kind: type, folder, output, implementation: str, **changes):
    run = trainer(kind, folder, output, implementation, **changes)
    run.train()
    return run.state.log_history, [p.detach().clone() for p in run.model.parameters()]


def on_ranks(folder, output, cases: list):
    register_transformers(Ring(mesh(ring=2)["ring"]), "sharded")
    with accelerated():
        return [train(kind, folder, output / str(i), "sharded", **changes) for i, (kind, changes) in enumerate(cases)]


def in_groups(folder, output):
    """Results with two groups of two ranks, which share the completions of a prompt."""
    register_transformers(Ring(mesh(shard=2, ring=2)["ring"]), "in groups")
    with accelerated():
        return train(LongGRPOTrainer, folder, output, "in groups", num_generations=8, rollout=True)


PREFERENCES = {
    "reference equal to the policy": {},
    "new adapter": {"adapter": "new", "loss_type": ["sigmoid", "ipo"], "ld_alpha": 0.5},
    "trained adapter": {"adapter": "trained", "gradient_checkpointing": True},
    "precomputed": {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 3, "eval_strategy": "steps"},
}


def prefer(kind: type, folder, output, implementation: str, rows: int, adapter: str = "", **changes):
    """Trains a policy, or its adapter, by preferences; the reference is the policy before training."""
    policy, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation=implementation, dtype=torch.float64
        )
        for _ in range(2)
    )
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=adapter != "trained")
    if adapter == "trained":
        torch.manual_seed(2)
        policy = peft.get_peft_model(policy, lora)
    options = COMMON | {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows, "eval_steps": 2}
    args = trl.DPOConfig(str(output), **options | {"learning_rate": 0.1} | changes)
    run = kind(
        policy,
        None if adapter or args.precompute_ref_log_probs else reference,
        args,
        train_dataset=preferences(range(8), output / "train" if args.precompute_ref_log_probs else None),
        eval_dataset=preferences(range(8, 12), output / "eval" if args.precompute_ref_log_probs else None),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        peft_config=lora if adapter == "new" else None,
    )
    run.train()
    return run.state.log_history, [p.detach().clone() for p in run.model.parameters()]


def preferences(seeds: range, path=None):
    """Rows in memory, or in a folder, where TRL keeps log-probabilities of the reference for all ranks."""
    rows = [
        {"prompt": text(4 + i, i), "chosen": " " + text(3 + i, 10 + i), "rejected": " " + text(13 - i, 20 + i)}
        for i in seeds
    ]
    data = datasets.Dataset.from_list(rows)
    if path is None:
        return data
    if not path.exists():
        data.save_to_disk(str(path))
    return datasets.load_from_disk(str(path))


def prefer_in_groups(folder, outputs: dict):
    """Results with two groups of two ranks, which share rows."""
    register_transformers(Ring(mesh(shard=2, ring=2)["ring"]), "in groups")
    with accelerated():
        return {
            name: prefer(LongDPOTrainer, folder, outputs[name], "in groups", 2, **changes)
            for name, changes in PREFERENCES.items()
        }


def check(actual, expected, name: str):
    # Sums in float32, in another order.
    tolerance = {"rel": 1e-6} if name.startswith("sft") else {"rel": 2e-6, "abs": 5e-6}
    for sharded, full in zip(actual[0], expected[0], strict=True):
        for key in full:
            if not any(word in key for word in MEASURED):
                assert sharded[key] == pytest.approx(full[key], **tolerance), (name, key)
    assert max(relative_error(a, b) for a, b in zip(actual[1], expected[1], strict=True)) < 1e-6, name


def test_steps_and_metrics_equal_one_rank(worlds, folder, tmp_path):
    cases = {f"sft, {name}": (LongSFTTrainer, trl.SFTTrainer, changes) for name, changes in SFT.items()}
    cases |= {f"grpo, {name}": (LongGRPOTrainer, trl.GRPOTrainer, changes) for name, changes in GRPO.items()}
    cases |= {"dpo": (LongDPOTrainer, trl.DPOTrainer, DPO), "reward": (LongRewardTrainer, trl.RewardTrainer, REWARD)}
    ranks = worlds(2).run(on_ranks, folder, tmp_path, [(kind, changes) for kind, _, changes in cases.values()])
    for i, (name, (_, kind, changes)) in enumerate(cases.items()):
        with accelerated():
            expected = train(kind, folder, tmp_path / f"one{i}", "sdpa", **changes)
        for results in ranks:
            check(results[i], expected, name)
    logs = {name: log for name, (log, _) in zip(cases, ranks[0], strict=True)}
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= logs["sft, packed"][0].keys()
    assert logs["grpo, clipped"][1]["clip_ratio/region_mean"] > 0 and "rewards/margins" in logs["dpo"][0]
    assert "eval_loss" in logs["reward"][1] and "margin" in logs["reward"][0]


def test_completions_of_a_prompt_may_be_in_several_groups(worlds, folder, tmp_path):
    results = worlds(4).run(in_groups, folder, tmp_path / "groups")
    with accelerated():
        options = {"num_generations": 8, "per_device_train_batch_size": 8, "rollout": True}
        expected = train(trl.GRPOTrainer, folder, tmp_path / "one", "sdpa", **options)
    for rank in results:
        check(rank, expected, "groups")


def test_every_reference_of_dpo_equals_that_of_one_rank(worlds, folder, tmp_path):
    outputs = {name: tmp_path / f"groups{i}" for i, name in enumerate(PREFERENCES)}
    for path in outputs.values():
        preferences(range(8), path / "train"), preferences(range(8, 12), path / "eval")
    ranks = worlds(4).run(prefer_in_groups, folder, outputs)
    for i, (name, changes) in enumerate(PREFERENCES.items()):
        with accelerated():
            expected = prefer(trl.DPOTrainer, folder, tmp_path / f"one{i}", "sdpa", 4, **changes)
        for results in ranks:
            check(results[name], expected, name)
            first = results[name][0][0]
            # To the bit: the sign of a rounding error would decide which accuracy is logged.
            assert first["rewards/chosen"] == first["rewards/rejected"] == first["rewards/accuracies"] == 0, name
        assert expected[0][1]["rewards/margins"] != 0, name  # the policy has left the reference


def refusals(folder, output) -> list[str]:
    register_transformers(Ring(mesh(ring=2)["ring"]), "sharded")
    config = transformers.MixtralConfig(**SIZES, **HEADS, num_local_experts=2, attn_implementation="sharded")
    mixtral, messages = transformers.MixtralForCausalLM(config), []
    with accelerated():
        for kind, changes in (
            (LongSFTTrainer, {"model": mixtral}),
            (LongGRPOTrainer, {"log_completions": True}),
            (LongGRPOTrainer, {"per_device_train_batch_size": 6, "num_generations": 4}),
            (LongDPOTrainer, {"precompute_ref_log_probs": True}),
        ):
            with pytest.raises(ValueError) as raised:
                trainer(kind, folder, output, "sharded", **changes)
            messages.append(str(raised.value))
    return messages


def test_unsupported_settings_are_refused(worlds, folder, tmp_path):
    for messages in worlds(2).run(refusals, folder, tmp_path):
        named = ("router_aux_loss_coef=0.0", "log_completions", "num_generations=4", "precompute_ref_log_probs")
        assert all(name in message for name, message in zip(named, messages, strict=True)), messages
