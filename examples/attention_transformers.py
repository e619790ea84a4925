"""An unmodified Hugging Face model with its own loss, on a packed row sharded over all ranks.

torchrun --nproc-per-node 4 examples/attention_transformers.py
"""

import os
from itertools import pairwise

import torch
import torch.distributed as dist
from transformers import MistralConfig, MistralForCausalLM

from armillary.attention import ContextParallel
from armillary.core import build_mesh

LENGTH, DOCUMENTS = 1000, [0, 130, 700, 1000]
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CONFIG = MistralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, sliding_window=200)


def errors(ranks):
    """Returns the relative errors of the loss and of a gradient, compared with one rank."""
    ulysses = 2 if ranks % 2 == 0 else 1
    cp = ContextParallel("usp", build_mesh("cpu", ring=ranks // ulysses, ulysses=ulysses))
    torch.manual_seed(0)
    model = MistralForCausalLM(CONFIG)  # from_pretrained(folder) works the same way
    ids = torch.randint(256, (1, LENGTH))

    # 1. On all ranks, each with its shard of the row.
    cp.prepare(model)
    with cp.shard(ids, documents=DOCUMENTS) as batch:
        loss = cp.loss(model(**batch.inputs).loss, batch)  # the mean over all ranks' labels, equal on every rank
    loss.backward()
    cp.reduce_gradients(model)  # not needed with FSDP2 or DDP, which reduce gradients themselves
    gradient = model.lm_head.weight.grad.clone()

    # 2. On this rank alone, with the whole row.
    model.zero_grad()
    model.set_attn_implementation("sdpa")
    # The first token of a document is not a label: the last token of the document before cannot predict it.
    labels = ids.index_fill(1, torch.tensor(DOCUMENTS[:-1]), -100)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(DOCUMENTS)])[None]
    full_loss = model(ids, position_ids=positions, labels=labels, use_cache=False).loss
    full_loss.backward()
    pairs = (loss.detach(), full_loss.detach()), (gradient, model.lm_head.weight.grad)
    return [((actual - expected).norm() / expected.norm()).item() for actual, expected in pairs]


def main():
    loss, gradient = errors(int(os.environ.get("WORLD_SIZE", "1")))
    print(f"rank {dist.get_rank()}: loss differs from one rank's by {loss:.1e}, gradient by {gradient:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
