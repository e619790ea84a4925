import os

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from armillary.attention import ContextParallel
from armillary.integrations import ContextParallelTrainer
from armillary.core import build_mesh

device = "cuda" if torch.cuda.is_available() else "cpu"
ranks = int(os.environ["WORLD_SIZE"])


def collate(rows):
    """A tokenizer's collator: padding on the right, without labels."""
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {name: pad_sequence([row[name] for row in rows], True, value) for name, value in fill.items()}


torch.manual_seed(0)
folder = "model"  # any folder or name that from_pretrained takes
rows = [torch.randint(1, 64, (int(torch.randint(60, 120, ())),)) for _ in range(6 * ranks)]
data = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for ids in rows]  # any dataset
cp = ContextParallel("ring", build_mesh(device, ring=ranks))


class LongTrainer(ContextParallelTrainer, Trainer):
    pass


model = AutoModelForCausalLM.from_pretrained(folder)
cp.prepare(model)
args = TrainingArguments(
    "checkpoints",
    per_device_train_batch_size=ranks,  # rows of all ranks together
    gradient_accumulation_steps=2,
    max_steps=3,
    logging_steps=1,
    use_cpu=device == "cpu",
    fsdp=True,
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["MistralDecoderLayer"]},
)
trainer = LongTrainer(model, args, collate, data)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
if torch.distributed.get_rank() == 0:
    print("losses", losses)
    print("norms", norms)
torch.distributed.destroy_process_group()
