"""Fine-tuning of published weights."""

from __future__ import annotations

from pathlib import Path

from armillary.models import Checkpointing
from armillary.train.config.sections import Config, DataConfig, ModelConfig, OptimizerConfig, SaveConfig, TrainConfig


def finetune(folder: Path = Path("pretrained")) -> Config:
    """A Hugging Face folder (LLaMA, Mistral, Qwen or GPT-2: weights, sizes, tokenizer) on your own documents.

    The folder is `pretrained` here unless `--model.pretrained` names another, `--data.path` your text or token stores.
    Any number of ranks: an 8B needs 8 x H100 80 GB at 32,768 tokens. Documents are packed, and see only themselves.
    Weights are written as a Hugging Face folder again at the end.
    """
    return Config(
        model=ModelConfig(pretrained=folder),
        checkpointing=Checkpointing("attention_output"),
        data=DataConfig(
            sequence_length=32_768,
            global_batch_size=8,
            packing="best_fit",
            documents=True,
            reset_positions=True,
            layout="balanced",
        ),
        optimizer=OptimizerConfig(lr=1e-5, min_lr=1e-6, warmup_steps=20, weight_decay=0.0),
        save=SaveConfig(every=100, export=True),
        train=TrainConfig(steps=500, accumulation=2),
    )
