"""Times forward and backward of one block of the model on a candidate's mesh; for a hybrid, of one period of blocks."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.attention import AttentionMask
from armillary.core import SequenceLayout, world_size
from armillary.models import GPT, Llama, initialize, linear_token_loss
from armillary.models.parts import one_block
from armillary.plan.presets import is_hybrid
from armillary.plan.search.candidates import Candidate
from armillary.plan.tune.measurements import Measurement
from armillary.train import Config
from armillary.train.config import check_config, model_config
from armillary.train.parts import (
    batch_mask,
    choose_axes,
    kernel_with_sm_margin,
    load_rows,
    mesh_of,
    open_stores,
    precision,
    shard_model,
)

VOCABULARY = 256
"""Vocabulary of the measured model. It is small, because embedding and loss take the same time for all candidates."""


@dataclass
class Bench:
    """A model of few blocks, sharded as the trainer does it, with this rank's tokens and labels [B, T]."""

    model: Llama | GPT
    tokens: Tensor
    labels: Tensor
    positions: Tensor
    layout: SequenceLayout
    mask: AttentionMask

    @classmethod
    def of(cls, config: Config, candidate: Candidate, device: torch.device) -> Bench:
        """Builds the model. Every rank must call it.

        Raises:
            ValueError: the model, the rows or the length do not allow the candidate. Every rank raises.
        """
        # 1. The mesh and the method of the candidate.
        config = candidate.apply_to(config)
        check_config(config)
        axes, dtype = choose_axes(config, world_size()), precision(config, device)
        mesh = mesh_of(config, device, axes)
        # 2. The model: one block, or for a hybrid one period of the blocks that it repeats.
        block = model_config(config.model, VOCABULARY, config.data.sequence_length)
        block = replace(block, layers=len(block.mixers)) if is_hybrid(block) else one_block(block)
        block = replace(block, vocab_size=VOCABULARY)
        model, attention = shard_model(block, config, mesh, dtype)
        attention.kernel = kernel_with_sm_margin(config, block, dtype, device, axes["ring"])
        # 3. Random tokens. With documents, the layout and the mask are those of the run's first batch.
        layout, mask = attention.layout(config.data.sequence_length, config.data.layout), AttentionMask()
        if config.data.documents:
            replica = mesh["replicate"].get_local_rank() * mesh["shard"].size() + mesh["shard"].get_local_rank()
            stores = open_stores(config.data, config.model.pretrained)
            batch = load_rows(config, stores, attention, replica)[0].batch(0)
            layout, mask = batch.layout, batch_mask(batch.documents, batch.parents, config.data.documents)
        model.to_empty(device="cpu" if config.optimizer.cpu_offload else device)
        initialize(model, config.train.seed)
        positions = layout.positions(attention.shard).to(device)
        # All labels take the same time, so shifted tokens are good enough.
        tokens = torch.randint(VOCABULARY, (config.rows_per_batch, len(positions)), device=device)
        return cls(model, tokens, tokens.roll(1, dims=1), positions, layout, mask)

    def step(self) -> None:
        """Runs forward and backward."""
        head = partial(linear_token_loss, labels=self.labels)
        mask = self.mask
        total, count = self.model(self.tokens, positions=self.positions, mask=mask, layout=self.layout, head=head)
        (total / count).backward()
        self.model.zero_grad()

    def seconds(self) -> float:
        """Runs a step and returns its seconds on this rank. All ranks start together."""
        device = self.tokens.device
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        self.step()
        synchronize(device)
        return time.perf_counter() - start


def measure(config: Config, candidate: Candidate, device: torch.device, iterations: int) -> Measurement:
    """Times `iterations` steps of a candidate, after a warm-up. Every rank must call it; all return the same values.

    Raises:
        ValueError: as `Bench.of`.
    """
    free_memory(device)
    bench = Bench.of(config, candidate, device)
    bench.step()  # the warm-up: allocates, compiles and opens connections
    seconds = [bench.seconds() for _ in range(iterations)]
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    *seconds, peak = slowest_rank([*seconds, float(memory)], device)
    return Measurement(candidate, median(seconds), min(seconds), memory=int(peak) if memory else None)


def compare(config: Config, candidates: Sequence[Candidate], device: torch.device, rounds: int) -> list[float]:
    """Returns the median seconds of each candidate. Their steps alternate, so that noise affects all alike."""
    free_memory(device)
    benches = [Bench.of(config, candidate, device) for candidate in candidates]
    for bench in benches:
        bench.step()  # the warm-up
    seconds: list[list[float]] = [[] for _ in benches]
    # Each round starts with another candidate, so that none is always the first.
    for i in range(rounds):
        for j in range(len(benches)):
            turn = (i + j) % len(benches)
            seconds[turn].append(benches[turn].seconds())
    return [median(slowest_rank(samples, device)) for samples in seconds]


def slowest_rank(values: list[float], device: torch.device) -> list[float]:
    """Returns each value's maximum over all ranks."""
    maxima = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(maxima, dist.ReduceOp.MAX)
    return maxima.tolist()


def free_memory(device: torch.device) -> None:
    """Frees the memory of earlier candidates and resets the statistics of peak memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has finished its kernels."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
