"""Searches meshes, attention methods and checkpoint policies for the fastest step that fits into memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import gcd, inf
from pathlib import Path

import torch

from armillary.attention import AttentionShape, CommPlan
from armillary.attention.parts import check_kernel_name, default_margin
from armillary.attention.plans import names
from armillary.core import SequenceLayout
from armillary.models import Checkpointing, LlamaConfig
from armillary.models.parallel import ZeroStage
from armillary.plan.cluster.cluster import Cluster
from armillary.plan.comm_time.state_time import with_states
from armillary.plan.comm_time.step_time import Passes, StepTime, step_bytes, step_time
from armillary.plan.memory import Job
from armillary.plan.memory.estimate import Estimate, estimate
from armillary.plan.memory.room import HOST_RESERVE, RESERVE, Room
from armillary.plan.presets import Bytes, Model, Quantity, amount, byte_amount, cluster_of, is_hybrid, model_of
from armillary.plan.search.candidates import LAYOUTS, POLICIES, Candidate, candidates, divisors, fit_policy, layouts_of
from armillary.plan.search.documents import Rows, mask_of, rows_of_store, sample_rows
from armillary.train.config import Count, Several, check_limits

NEEDED = ("comm_plan", "forward_memory", "backward_memory")
"""Functions of a method's plan that a prediction needs. A search over all methods skips methods without one of them."""
TIE = 1e-3
"""If two step times differ by less than this fraction, the choice with more free memory wins."""


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
    """8xh100, 16xh100-ethernet, 32xa100-40, 8xl20, ..., or a TOML file."""
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
    """

    candidate: Candidate
    job: Job
    time: StepTime
    memory: Estimate
    fits: bool
    mfu: float
    sent_bytes: int


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
    """Evaluates all candidates, and ranks the best choice of each.

    Args:
        progress: called with (candidates done, all candidates).

    Raises:
        ValueError: an unknown name, documents of an invalid store or length, a sequence shorter than its shards,
            arguments that allow no mesh, or reserves that leave no memory.
    """
    # 1. Resolve names.
    check_limits(options)
    check_kernel_name("--kernel", options.kernel)
    if unknown := [name for name in options.attention if name not in names()]:
        raise ValueError(f"--attention {unknown[0]}: no such method; known: {', '.join(names())}")
    cluster, length = cluster_of(options.cluster), amount(options, "tokens")
    model = model_of(options.model, length)
    room = Room.of(cluster, byte_amount(options, "reserve"), byte_amount(options, "host_reserve"))
    # 2. List the candidates: meshes with the methods that use them, and layouts.
    degrees = tensor_parallel_degrees(model, cluster.ranks_per_node)
    replicate = [n for n in divisors(cluster.nodes) if options.rows % n == 0]  # a replica has one or more whole nodes
    documents = documents_of(options, length)
    layouts = layouts_of(is_hybrid(model), documents is not None) or LAYOUTS[:1]
    all_candidates = list(
        candidates(
            model.heads, cluster.ranks, options.rows, options.attention, degrees, replicate, layouts, is_hybrid(model)
        )
    )
    if not options.attention:
        all_candidates = [candidate for candidate in all_candidates if not candidate.attention.method.missing(*NEEDED)]
    if not all_candidates:
        raise ValueError(
            f"no mesh of {cluster.ranks} ranks for --rows {options.rows}, --attention "
            f"{' '.join(options.attention) or 'not set'}"
        )
    # 3. Evaluate each candidate under all policies, with one result of `passes_of`, which has the passes of each.
    choices = list[list[Choice]]()
    for i, candidate in enumerate(all_candidates):
        progress(i, len(all_candidates))
        passes = passes_of(candidate, model, cluster, length, options.rows, options.kernel, documents=documents)
        choices.append(choices_of(candidate, model, cluster, length, options.rows, room, passes, documents))

    # 4. Rank the candidates by their best choice, and evaluate the first candidate under all policies, slow ones too.
    def order(choice: Choice) -> tuple[bool, float]:
        return not choice.fits, choice.time.seconds if choice.fits else room.share(choice.memory)

    choices.sort(key=lambda per_policy: order(best_of(per_policy, room)))
    best = [best_of(per_policy, room) for per_policy in choices]
    first = best[0].candidate
    passes = passes_of(first, model, cluster, length, options.rows, options.kernel, documents=documents)
    policies = choices_of(first, model, cluster, length, options.rows, room, passes, documents, all_policies=True)
    return SearchResult(options, model, cluster, room, length, documents, best, sorted(policies, key=order))


def documents_of(options: SearchOptions, length: int) -> Rows | None:
    """Boundaries of packed documents in each row of a step, or None.

    Raises:
        ValueError: both a store and a mean length, or an invalid one.
    """
    if options.documents is not None and options.document_tokens is not None:
        raise ValueError(
            f"--documents {options.documents} and --document-tokens {options.document_tokens}: give one of them"
        )
    if options.documents is not None:
        return rows_of_store(options.documents, length, options.rows)
    if options.document_tokens is not None:
        return sample_rows(amount(options, "document_tokens"), length, options.rows)
    return None


def tensor_parallel_degrees(model: Model, ranks_per_node: int) -> list[int]:
    """Sizes of the axis `tp`: numbers that divide query heads, key/value heads, a state's key heads and the MLP's
    width.

    They also divide the ranks of a node, because tensor parallelism between nodes is slow.
    """
    width = model.hidden_dim if isinstance(model, LlamaConfig) else 4 * model.dim
    state_heads = model.states.key_heads if is_hybrid(model) and model.states is not None else 0
    return divisors(gcd(model.heads, model.kv_heads, width, state_heads, ranks_per_node))


def passes_of(
    candidate: Candidate,
    model: Model,
    cluster: Cluster,
    length: int,
    rows: int,
    kernel: str | None = None,
    margin: int | None = None,
    documents: Rows | None = None,
    precision: torch.dtype = torch.bfloat16,
) -> Passes:
    """Returns the time of a block's attention in forward and backward, and for a hybrid that of its other mixers.

    The mask is causal, and within documents if there are any.

    Args:
        rows: sequences of a step, over all ranks.
        kernel: name of the kernel; by default the fastest that torch ships.
        margin: multiprocessors that a persistent kernel leaves to NCCL; None: `default_margin`.
        documents: boundaries of documents in each row of a step.
    """
    mesh, method, tp = candidate.mesh, candidate.attention.method, candidate.mesh.tp
    mask = mask_of(documents, rows // mesh.replicas)
    shape = AttentionShape.of(
        method.layout(length, mesh.ring, candidate.layout, mask),
        mask,
        heads=model.heads // tp,
        kv_heads=model.kv_heads // tp,
        head_dim=model.head_dim,
        dtype=precision,
        batch=rows // mesh.replicas,
    )
    # Each group of ring x ulysses ranks runs this plan. Groups along replicate, shard and tp run it at the same time
    # and share the links between nodes. `replicas` is replicate x shard.
    comm_plan = method.comm_plan(shape, mesh.ring, mesh.ulysses)
    margin = default_margin(mesh.ring) if margin is None else margin
    copies = mesh.replicas * tp

    def time(plan: CommPlan) -> Passes:
        return Passes.of(plan, cluster, model.head_dim, copies, length, kernel, margin, stride=tp)

    passes, checkpointed_plan = time(comm_plan), method.checkpointed_comm_plan(shape, mesh.ring, mesh.ulysses)
    if checkpointed_plan is not None:
        passes = replace(passes, checkpointed=time(checkpointed_plan))
    if not is_hybrid(model):
        return passes
    # Outside of attention, ranks on the head axis divide a shard among them.
    layout = shape.layout if mesh.ulysses == 1 else shape.layout.refine(mesh.ulysses)
    states = SequenceLayout.contiguous(length, layout.shards) if candidate.contiguous_states else layout
    return with_states(passes, model, layout, states, cluster, rows // mesh.replicas, tp, precision, mask)


def choices_of(
    candidate: Candidate,
    model: Model,
    cluster: Cluster,
    length: int,
    rows: int,
    room: Room,
    passes: Passes,
    documents: Rows | None = None,
    all_policies: bool = False,
) -> list[Choice]:
    """Evaluates a candidate under all checkpoint policies and ZeRO stages, with the optimizer on device or host.

    Args:
        rows: sequences of a step, over all ranks.
        passes: time of the candidate's attention, from `passes_of`.
        all_policies: False skips policies that are slower than a choice that fits.
    """
    mesh, choices, fastest = candidate.mesh, list[Choice](), inf  # fastest: seconds of the fastest choice that fits
    flops = rows * length * model.flops_per_token(length, mask_of(documents, rows))
    # Without ranks that shard parameters, all ZeRO stages are equal.
    stages: tuple[ZeroStage, ...] = (2, 3) if mesh.shard * mesh.ring * mesh.ulysses > 1 else (3,)
    minimum_seconds = dict[tuple[Checkpointing, bool, int], float]()
    for policy, on_host, zero_stage in product(POLICIES, (False, True), stages):
        job = Job(
            model=model,
            axes=mesh.axes,
            attention=candidate.attention,
            length=length,
            rows=rows // mesh.replicas,
            zero_stage=zero_stage,
            on_host=on_host,
            contiguous_states=candidate.contiguous_states,
        )
        if fastest < inf and not all_policies:
            # Skip a policy whose fastest variant is slower than a choice that fits. The fastest variant has all
            # checkpoints on the device: variants with fewer checkpoints recompute more, and offloading adds copies.
            on_device = Checkpointing(policy.policy, tiled=policy.tiled)
            key = on_device, on_host, zero_stage
            if key not in minimum_seconds:
                minimum_seconds[key] = step_time(replace(job, checkpointing=on_device), passes, cluster).seconds
            if minimum_seconds[key] > (1 + TIE) * fastest:
                continue

        # Cached, because the bisections of `fit_policy` repeat policies.
        @cache
        def memory(checkpointing: Checkpointing, job: Job = job) -> Estimate:
            return estimate(replace(job, checkpointing=checkpointing))

        for checkpointing in fit_policy(policy, model.layers, memory, room):
            job, usage = replace(job, checkpointing=checkpointing), memory(checkpointing)
            time = step_time(job, passes, cluster)
            mfu = flops / (time.seconds * cluster.ranks * cluster.accelerator.flops)
            choice = Choice(candidate, job, time, usage, room.share(usage) <= 1, mfu, max(step_bytes(job, passes)))
            choices.append(choice)
            fastest = min(fastest, time.seconds if choice.fits else inf)
            if checkpointing == policy and choice.fits and time.offload <= TIE * time.seconds:
                break  # all checkpoints fit, and copies cost no time: variants with fewer checkpoints are slower
    return choices


def best_of(choices: list[Choice], room: Room) -> Choice:
    """Returns the fastest choice that fits; of several about equally fast ones (`TIE`), that with most free memory.

    If none fits, returns the choice whose fuller memory is least full; of several with the same need of the host, the
    one that needs the least of the device.
    """
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        return min(choices, key=lambda choice: (room.share(choice.memory), choice.memory.device))
    fastest = min(choice.time.seconds for choice in fitting)
    ties = [choice for choice in fitting if choice.time.seconds <= (1 + TIE) * fastest]
    return min(ties, key=lambda choice: room.share(choice.memory))


def duration(seconds: float) -> str:
    """Formats seconds with at most three digits, such as 2.1 h, 35 s or 120 ms."""
    for unit, size in (("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
