"""An unmodified Hugging Face model on a packed row that all ranks share.

torchrun --nproc-per-node 4 examples/attention_transformers.py
"""

import os
from itertools import pairwise

import torch
import torch.distributed as dist
from transformers import MistralConfig, MistralForCausalLM

from armillary.attention import build_attention
from armillary.attention.integrations import register_transformers, sequence
from armillary.core import build_mesh

LENGTH, DOCUMENTS = 1000, [0, 130, 700, 1000]
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CONFIG = MistralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, sliding_window=200)


def loss_of(model, ids, labels, positions):
    logits = model(ids, position_ids=positions, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def main():
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    ulysses = 2 if ranks % 2 == 0 else 1
    attend = build_attention("usp", build_mesh("cpu", ring=ranks // ulysses, ulysses=ulysses))
    register_transformers(attend)
    torch.manual_seed(0)
    model = MistralForCausalLM(CONFIG)  # from_pretrained(folder) works the same way

    # Labels are shifted before sharding, and no document predicts the next one.
    ids = torch.randint(256, (1, LENGTH))
    labels = ids.roll(-1, 1)
    labels[:, [end - 1 for end in DOCUMENTS[1:]]] = -100
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(DOCUMENTS)])[None]
    layout = attend.layout(LENGTH)
    model.set_attn_implementation("armillary")
    with sequence(layout=layout):  # the documents are seen from the positions, which restart at 0
        loss = loss_of(model, *(layout.take(x, attend.shard) for x in (ids, labels, positions)))
    loss.backward()
    total, gradient = loss.detach().clone(), model.lm_head.weight.grad.clone()
    dist.all_reduce(total)
    dist.all_reduce(gradient)  # FSDP does this in a real training loop

    model.zero_grad()
    model.set_attn_implementation("sdpa")
    whole = loss_of(model, ids, labels, positions)
    whole.backward()
    for name, got, wanted in (("loss", total, whole), ("gradient", gradient, model.lm_head.weight.grad)):
        error = ((got - wanted).norm() / wanted.norm()).item()
        print(f"rank {dist.get_rank()}: {name} differs from one rank's by {error:.1e}, relatively")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
