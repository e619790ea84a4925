"""A block of the model on a candidate's mesh, and the seconds that its forward and backward take."""

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
from armillary.core import SequenceLayout
from armillary.core.mesh import world_size
from armillary.models import GPT, Llama, initialize, linear_token_loss
from armillary.models.config import one_block
from armillary.plan.search.candidates import Candidate
from armillary.train.build import mesh_of, precision, shard_model
from armillary.train.config import Config
from armillary.train.config.check import check
from armillary.train.kernels import kernel_with_margin
from armillary.train.model import model_config
from armillary.train.parallel import choose_axes

VOCABULARY = 256
"""Tokens that the measured model knows. Embedding and loss cost all candidates the same, and are kept small."""


@dataclass(frozen=True)
class Timing:
    """What a candidate takes, on the rank where that is most.

    Args:
        seconds, least: of forward and backward of a block: the median over passes, and the fastest.
        memory: bytes of the device; None on the CPU.
    """

    seconds: float
    least: float
    memory: int | None = None


@dataclass
class Bench:
    """One block as the trainer would have it, with tokens and labels [B, T] of this rank."""

    model: Llama | GPT
    tokens: Tensor
    labels: Tensor
    positions: Tensor
    layout: SequenceLayout

    @classmethod
    def of(cls, config: Config, candidate: Candidate, device: torch.device) -> Bench:
        """Every rank must call it.

        Raises:
            ValueError: the candidate does not fit the model, the rows or the length; on every rank.
        """
        config = replace(config, parallel=replace(config.parallel, **candidate.parallel))
        check(config)
        axes = choose_axes(config, world_size())
        mesh = mesh_of(config, device, axes)
        sizes = one_block(model_config(config.model, VOCABULARY, config.data.sequence_length))
        sizes = replace(sizes, vocab_size=VOCABULARY)
        model, attention = shard_model(sizes, config, mesh, precision(config, device))
        attention.kernel = kernel_with_margin(config, sizes, precision(config, device), device, axes["ring"])
        layout = attention.layout(config.data.sequence_length, config.data.layout)
        model.to_empty(device="cpu" if config.optimizer.cpu_offload else device)
        initialize(model, config.train.seed)
        positions = layout.positions(attention.shard).to(device)
        tokens = torch.randint(VOCABULARY, (config.rows_per_batch, len(positions)), device=device)
        return cls(model, tokens, tokens.roll(1, dims=1), positions, layout)

    def step(self) -> None:
        """Forward and backward."""
        head = partial(linear_token_loss, labels=self.labels)
        mask = AttentionMask()
        total, count = self.model(self.tokens, positions=self.positions, mask=mask, layout=self.layout, head=head)
        (total / count).backward()
        self.model.zero_grad()

    def seconds(self) -> float:
        """Of a step that all ranks begin together, here."""
        device = self.tokens.device
        dist.barrier()
        wait_for(device)
        began = time.perf_counter()
        self.step()
        wait_for(device)
        return time.perf_counter() - began


def measure(config: Config, candidate: Candidate, device: torch.device, iterations: int) -> Timing:
    """Of so many passes, after one that does not count. Every rank must call it; all get the same.

    Raises:
        ValueError: as `Bench.of`.
    """
    forget(device)
    bench = Bench.of(config, candidate, device)
    bench.step()
    seconds = [bench.seconds() for _ in range(iterations)]
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    *seconds, most = largest([*seconds, float(memory)], device)
    return Timing(median(seconds), min(seconds), int(most) if memory else None)


def compare(config: Config, candidates: Sequence[Candidate], device: torch.device, rounds: int) -> list[float]:
    """Seconds of several candidates, interleaved, so that noise hits all of them; each round starts with another."""
    forget(device)
    benches = [Bench.of(config, candidate, device) for candidate in candidates]
    for bench in benches:
        bench.step()
    found: list[list[float]] = [[] for _ in benches]
    for i in range(rounds):
        for j in range(len(benches)):
            turn = (i + j) % len(benches)
            found[turn].append(benches[turn].seconds())
    return [median(largest(seconds, device)) for seconds in found]


def largest(values: list[float], device: torch.device) -> list[float]:
    """Of each value, that of the rank where it is largest."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def forget(device: torch.device) -> None:
    """Frees cached memory of earlier candidates, and resets peak statistics."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def wait_for(device: torch.device) -> None:
    """Waits for the device's queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
