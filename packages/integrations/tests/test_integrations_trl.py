"""TRL's SFTTrainer on shards: losses, metrics and weights equal one rank's."""

import pytest
import torch

from armillary.attention import Ring
from armillary.core.testing import mesh, relative_error
from armillary.integrations import ContextParallelTrainer, register_transformers
from armillary.integrations.testing import accelerated

trl = pytest.importorskip("trl")
datasets, tokenizers, transformers = (pytest.importorskip(name) for name in ("datasets", "tokenizers", "transformers"))

VOCABULARY = 64
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
CASES = {
    "packed": {"packing": True, "max_length": 64, "eval_packing": False},
    "padded": {},
    "without padding": {"padding_free": True},
    "smoothed": {"label_smoothing_factor": 0.1},
    "dft": {"loss_type": "dft"},
}


class LongSFTTrainer(ContextParallelTrainer, trl.SFTTrainer):
    pass


def tokenizer():
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>")


def rows(count: int, seed: int):
    """Tokenized rows of 11 to 37 tokens whose first tokens have no labels."""
    draw = torch.Generator().manual_seed(seed)
    conversations = []
    for _ in range(count):
        ids = torch.randint(2, VOCABULARY, (int(torch.randint(11, 38, (), generator=draw)),), generator=draw)
        conversations.append({"input_ids": ids.tolist(), "labels": [-100] * 4 + ids[4:].tolist()})
    return datasets.Dataset.from_list(conversations)


def model(implementation: str, family: str = "Mistral", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **SIZES, **HEADS, **{"sliding_window": 9, "attn_implementation": implementation, **options}
    )
    return getattr(transformers, f"{family}ForCausalLM")(config).double()


def trainer(kind: type, implementation: str, folder, built=None, **changes):
    settings = {"max_steps": 3, "gradient_accumulation_steps": 2, "eval_steps": 3, "logging_steps": 1}
    settings |= {"eval_strategy": "steps", "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    settings |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 3e-3}
    settings |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "max_length": None}
    args = trl.SFTConfig(str(folder), **settings | changes)
    data = {"train_dataset": rows(22, 1), "eval_dataset": rows(5, 2), "processing_class": tokenizer()}
    return kind(built or model(implementation), args, **data)


def train(kind: type, implementation: str, folder, case: str):
    run = trainer(kind, implementation, folder, **CASES[case])
    run.train()
    return run.state.log_history, [p.detach().clone() for p in run.model.parameters()]


def on_ranks(folder, case: str):
    register_transformers(Ring(mesh(ring=4)["ring"]))
    transformers.logging.set_verbosity_error()
    with accelerated():
        mixtral = model("armillary", "Mixtral", num_local_experts=2)
        with pytest.raises(ValueError, match="auxiliary loss is not linear") as refused:
            trainer(LongSFTTrainer, "armillary", folder, built=mixtral, **CASES[case])
        return train(LongSFTTrainer, "armillary", folder, case), str(refused.value)


@pytest.mark.filterwarnings("ignore:.*label_smoothing_factor:FutureWarning")
@pytest.mark.parametrize(
    "case", ["packed", *(pytest.param(case, marks=pytest.mark.long) for case in CASES if case != "packed")]
)
def test_steps_and_metrics_equal_one_rank(worlds, tmp_path, case):
    ranks = worlds(4).run(on_ranks, tmp_path, case)
    with accelerated():
        log, learned = train(trl.SFTTrainer, "sdpa", tmp_path / "one", case)
    for (actual, parameters), refused in ranks:
        assert "router_aux_loss_coef=0.0" in refused
        for sharded, full in zip(actual, log, strict=True):
            measured = {name for name in full if "runtime" in name or "per_second" in name or "flos" in name}
            for name in full.keys() - measured:
                assert sharded[name] == pytest.approx(full[name], rel=1e-6), name
        assert (
            max(relative_error(a, b) for a, b in zip(parameters, learned, strict=True)) < 1e-6
        )  # TRL computes in float32
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= log[0].keys()
