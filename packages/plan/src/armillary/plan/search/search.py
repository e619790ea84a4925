"""Searches meshes, attention methods and checkpoint policies for the fastest step that fits into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import gcd, inf
from pathlib import Path

from armillary.attention.internal import check_kernel_name, names
from armillary.data.console import byte_quantity
from armillary.models import Checkpointing, LlamaConfig
from armillary.models.parallel import ZeroStage
from armillary.plan.arguments import (
    Bytes,
    Model,
    Quantity,
    amount,
    cluster_of,
    duration,
    is_hybrid,
    model_of,
)
from armillary.plan.cluster import Cluster
from armillary.plan.latent_models import trainer_reads
from armillary.plan.memory import Estimate, Job
from armillary.plan.memory.room import HOST_RESERVE, POLICIES, RESERVE, Room, fit_policy
from armillary.plan.search.candidates import (
    LAYOUTS,
    Candidate,
    Rows,
    candidates,
    divisors,
    layouts_of,
    mask_of,
    rows_of_store,
    sample_rows,
)
from armillary.plan.time.passes import Passes, passes_of, window_of
from armillary.plan.time.step_time import StepTime, step_bytes, step_time
from armillary.train.config import Count, Several, check_limits

# Functions of a method's plan that a prediction needs. A search over all methods skips methods without one of them.
NEEDED = ("comm_plan", "forward_memory", "backward_memory")
# If two step times differ by less than this fraction, the choice with more free memory wins.
TIE = 1e-3


@dataclass(frozen=True)
class SearchOptions:
    """Finds the fastest way to train a model on a cluster. Uses formulas, so it needs no GPU.

    Four ways to start:
      # all meshes and methods on 16 GPUs
      armillary-plan search --model llama3-8b --cluster 16xh100-ethernet --tokens 256Ki
      # write the best choice to a file for armillary-train --config
      armillary-plan search --cluster 8xh100 --tokens 128Ki --out planned.toml
      # rows of packed documents: compares layouts too
      armillary-plan search --tokens 128Ki --document-tokens 2Ki
      # only two methods, with a plot
      armillary-plan search --tokens 1M --attention usp upipe --plot best.png

    Exit code 1: nothing fits.
    """

    model: str = "llama3-8b"
    """llama3-8b, llama3-70b, llama2-7b, qwen3-32b, hybrid-8b, gpt-3b, gpt-7b, debug, or a Hugging Face folder."""
    cluster: str = "8xh100"
    """8xh100, 16xh100-ethernet, 4xh100, 2x4xh100 (2 nodes of 4), 8xl20, ..., or a TOML file."""
    tokens: Quantity = "128Ki"
    """Sequence length."""
    rows: Count = 1
    """Sequences per step, over all ranks."""
    attention: Several[str] = ()
    """Methods to search, named as for --parallel.attention; by default all."""
    documents: Path | None = None
    """Token store. Its documents are packed into rows, and attention is within documents. Compares layouts too."""
    document_tokens: Quantity | None = None
    """In place of a store: mean length of documents, whose lengths are drawn from a lognormal distribution."""
    kernel: str | None = None
    """Attention kernel, named as for --parallel.kernel; by default the fastest that torch ships."""
    best: Count = 10
    """Number of choices to show."""
    reserve: Bytes = RESERVE
    """Memory of each device that is reserved for CUDA, NCCL and fragmentation."""
    host_reserve: Bytes = HOST_RESERVE
    """Memory of each node that is reserved for the system."""
    plot: Path | None = None
    """PNG file to write: a plot of the best choices."""
    out: Path | None = None
    """TOML file to write: the best choice, for armillary-train --config."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Choice:
    """Predicted time and memory of a candidate with a checkpoint policy, a ZeRO stage and a place for the optimizer.

    Args:
        job: one rank's step. Has the checkpoint policy (`checkpointing`), `zero_stage` and `on_host`.
        time: predicted seconds of a step.
        memory: predicted memory of a step.
        fits: True if the memory suffices.
        mfu: the model's FLOPs over the cluster's peak FLOPs in the predicted time.
        sent_bytes: bytes that the busiest rank sends in a step for attention and recurrent states, and for moving
            hidden states between the layouts of a hybrid.
        sends_latents: True if attention sends latents instead of keys and values.
    """

    candidate: Candidate
    job: Job
    time: StepTime
    memory: Estimate
    fits: bool
    mfu: float
    sent_bytes: int
    sends_latents: bool = False


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Args:
        options: the command's options. `model`, `cluster`, `room`, `length` and `documents` are what they resolve to.
        documents: boundaries of documents in each row of a step, or None.
        choices: the best choice of each candidate. Choices that fit come first, ordered by step time; the others are
            ordered by memory.
        policies: the candidate of the first choice under every checkpoint policy, in the same order.
    """

    options: SearchOptions
    model: Model
    cluster: Cluster
    room: Room
    length: int
    documents: Rows | None = None
    choices: list[Choice] = field(default_factory=list[Choice])
    policies: list[Choice] = field(default_factory=list[Choice])

    @property
    def fitting(self) -> list[Choice]:
        """Choices that fit, fastest first."""
        return [choice for choice in self.choices if choice.fits]

    def reason(self, choice: Choice) -> str:
        """Explains why a choice is not the first: it does not fit, or parts of its step take longer."""
        if not choice.fits:
            return f"does not fit: {self.room.comparison(choice.memory)}"
        best = self.fitting[0].time
        parts = best.parts()
        difference = choice.time.seconds - best.seconds
        slower = sorted(
            ((part - parts[name], name) for name, part in choice.time.parts().items() if part > parts[name]),
            reverse=True,
        )
        if difference <= 0 or not slower:
            return "as fast"
        # At most three parts, each with more than a tenth of the difference.
        causes = [f"{name} +{duration(seconds)}" for seconds, name in slower if seconds > difference / 10][:3]
        return f"{choice.time.seconds / best.seconds - 1:.1%} slower: {', '.join(causes)}"


def search(options: SearchOptions, progress: Callable[[int, int], None] = lambda _done, _total: None) -> SearchResult:
    """Evaluates all candidates, and ranks the best choice of each. `progress` takes (candidates done, all)."""
    # 1. Resolve names.
    check_limits(options)
    check_kernel_name("--kernel", options.kernel)
    check_methods(options.attention)
    cluster, length, rows = cluster_of(options.cluster), amount(options, "tokens"), options.rows
    model = model_of(options.model, length)
    if options.out is not None and not trainer_reads(options.model):
        raise ValueError(f"--out {options.out}: armillary-train does not read --model {options.model}; leave it out")
    room = Room.of(cluster, amount(options, "reserve", byte_quantity), amount(options, "host_reserve", byte_quantity))
    documents = None
    if options.documents is not None and options.document_tokens is not None:
        raise ValueError(
            f"--documents {options.documents} and --document-tokens {options.document_tokens}: give one of them"
        )
    if options.documents is not None:
        documents = rows_of_store(options.documents, length, rows)
    elif options.document_tokens is not None:
        documents = sample_rows(amount(options, "document_tokens"), length, rows)
    # 2. List the candidates: meshes with the methods that use them, and layouts.
    degrees = tensor_parallel_degrees(model, cluster.ranks_per_node)
    replicate = [n for n in divisors(cluster.nodes) if rows % n == 0]  # a replica has one or more whole nodes
    layouts = layouts_of(is_hybrid(model), documents is not None) or LAYOUTS[:1]
    meshes = candidates(
        model.heads, cluster.ranks, rows, options.attention, degrees, replicate, layouts, is_hybrid(model)
    )
    # A method that is named raises if its plan lacks functions.
    all_candidates = [
        candidate for candidate in meshes if options.attention or not candidate.attention.method.missing(*NEEDED)
    ]
    if not all_candidates:
        named = " ".join(options.attention) or "not set"
        raise ValueError(f"no mesh of {cluster.ranks} ranks for --rows {rows}, --attention {named}")
    # 3. Evaluate each candidate under all policies.
    flops = rows * length * model.flops_per_token(length, mask_of(documents, rows))

    def evaluate(candidate: Candidate, all_policies: bool = False) -> list[Choice]:
        job = Job(
            model=model,
            axes=candidate.mesh.axes,
            attention=candidate.attention,
            length=length,
            rows=rows // candidate.mesh.replicas,
            contiguous_states=candidate.contiguous_states,
        )
        mask = mask_of(documents, job.rows)
        passes = passes_of(job, cluster, candidate.layout, options.kernel, mask=mask)
        return choices_of(candidate, job, passes, cluster, room, flops, all_policies)

    choices = list[list[Choice]]()
    for i, candidate in enumerate(all_candidates):
        progress(i, len(all_candidates))
        choices.append(evaluate(candidate))

    # 4. Rank the candidates by their best choice, and evaluate the first candidate under all policies, slow ones too.
    def order(choice: Choice) -> tuple[bool, float]:
        return not choice.fits, choice.time.seconds if choice.fits else room.share(choice.memory)

    best = sorted((best_of(per_policy, room) for per_policy in choices), key=order)
    policies = sorted(evaluate(best[0].candidate, all_policies=True), key=order)
    return SearchResult(options, model, cluster, room, length, documents, best, policies)


def check_methods(names_of_methods: Sequence[str]) -> None:
    """Raises ValueError for a name of `--attention` that is no method."""
    if unknown := [name for name in names_of_methods if name not in names()]:
        raise ValueError(f"--attention {unknown[0]}: no such method; known: {', '.join(names())}")


def tensor_parallel_degrees(model: Model, ranks_per_node: int) -> list[int]:
    """Sizes of the axis `tp`: numbers that divide query heads, key/value heads, a state's key heads and the MLP's
    width.

    They also divide the ranks of a node, because tensor parallelism between nodes is slow.
    """
    width = model.hidden_dim if isinstance(model, LlamaConfig) else 4 * model.dim
    state_heads = model.states.key_heads if is_hybrid(model) and model.states is not None else 0
    return divisors(gcd(model.heads, model.kv_heads, width, state_heads, ranks_per_node))


def choices_of(
    candidate: Candidate,
    job: Job,
    passes: Passes,
    cluster: Cluster,
    room: Room,
    flops: float,
    all_policies: bool = False,
) -> list[Choice]:
    """Evaluates a candidate under all checkpoint policies and ZeRO stages, with the optimizer on device or host.

    Args:
        job: the candidate's step, with any policy.
        passes: time of the candidate's attention, from `passes_of`.
        flops: the model's FLOPs of a step, over all ranks.
        all_policies: False skips policies that are slower than a choice that fits.
    """
    mesh, choices, fastest = candidate.mesh, list[Choice](), inf  # fastest: seconds of the fastest choice that fits
    # Without ranks that shard parameters, all ZeRO stages are equal.
    stages: tuple[ZeroStage, ...] = (2, 3) if mesh.shard * mesh.ring * mesh.ulysses > 1 else (3,)
    minimum_seconds = dict[tuple[Checkpointing, bool, int], float]()
    for policy, on_host, zero_stage in product(POLICIES, (False, True), stages):
        placed = replace(job, zero_stage=zero_stage, on_host=on_host)
        if fastest < inf and not all_policies:
            # Skip a policy whose fastest variant is slower than a choice that fits. The fastest variant has all
            # checkpoints on the device: variants with fewer checkpoints recompute more, and offloading adds copies.
            on_device = Checkpointing(policy.policy, tiled=policy.tiled)
            key = on_device, on_host, zero_stage
            if key not in minimum_seconds:
                minimum_seconds[key] = step_time(replace(placed, checkpointing=on_device), passes, cluster).seconds
            if minimum_seconds[key] > (1 + TIE) * fastest:
                continue

        for stored, usage in fit_policy(policy, placed, room):
            time = step_time(stored, passes, cluster)
            mfu = flops / (time.seconds * cluster.ranks * cluster.accelerator.flops)
            sent, fits = max(step_bytes(stored, passes)), room.share(usage) <= 1
            sends_latents = passes.at("attention", window_of(job.model, 0), stored.checkpointing.policy).sends_latents
            choice = Choice(candidate, stored, time, usage, fits, mfu, sent, sends_latents)
            choices.append(choice)
            fastest = min(fastest, time.seconds if choice.fits else inf)
            if stored.checkpointing == policy and choice.fits and time.offload <= TIE * time.seconds:
                break  # all checkpoints fit, and copies cost no time: variants with fewer checkpoints are slower
    return choices


def best_of(choices: list[Choice], room: Room) -> Choice:
    """Returns the fastest choice that fits; of several about equally fast ones (`TIE`), that with most free memory."""
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        # Of several with the same need of the host, the one that needs the least of the device.
        return min(choices, key=lambda choice: (room.share(choice.memory), choice.memory.device))
    fastest = min(choice.time.seconds for choice in fitting)
    ties = [choice for choice in fitting if choice.time.seconds <= (1 + TIE) * fastest]
    return min(ties, key=lambda choice: room.share(choice.memory))
