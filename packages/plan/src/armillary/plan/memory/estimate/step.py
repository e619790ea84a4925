"""A training step in numbers: what tensors of each kind take on a rank, and how its attention goes about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import float32

from armillary.attention.memory import Sizes
from armillary.attention.methods import all_gather, local, ring, token_ring, upipe, wallfacer
from armillary.core.chunks import chunks
from armillary.models import Checkpointing
from armillary.plan.memory.estimate.choice import AttentionChoice
from armillary.plan.memory.estimate.stages import HeadStages
from armillary.plan.memory.estimate.widths import Widths
from armillary.plan.memory.simulate import Job

MASTER = float32.itemsize
"""Bytes of a number in master weights, in gradients, and in each of the two moments that AdamW keeps."""


@dataclass(frozen=True)
class StepSizes:
    """What a job comes to on a rank. Sizes of tensors are in bytes.

    Args:
        tokens: T, of the rank; of `rows` sequences, B.
        e: bytes of an element in forward and backward.
        sharing: ranks that parameters are sharded over.
    """

    model: Widths
    attention: AttentionChoice
    checkpointing: Checkpointing
    on_host: bool
    tokens: int
    rows: int
    e: int
    ring: int
    ulysses: int
    sharing: int

    @classmethod
    def of(cls, job: Job) -> StepSizes:
        if not isinstance(job.attention, AttentionChoice):
            raise ValueError(
                f"attention {job.attention!r} can be anything; to be estimated it must be an AttentionChoice"
            )
        axes: Mapping[str, int] = job.axes
        ring, ulysses = axes.get("ring", 1), axes.get("ulysses", 1)
        return cls(
            model=Widths.of(job.model),
            attention=job.attention,
            checkpointing=job.checkpointing,
            on_host=job.on_host,
            tokens=-(-job.length // (ring * ulysses)),
            rows=job.rows,
            e=job.precision.itemsize,
            ring=ring,
            ulysses=ulysses,
            sharing=axes.get("shard", 1) * ring * ulysses,
        )

    def tensor(self, width: float, tokens: int | None = None, size: int | None = None) -> float:
        """[B, T, width], of all tokens and in the compute dtype unless told otherwise."""
        return self.rows * (self.tokens if tokens is None else tokens) * width * (self.e if size is None else size)

    @property
    def x(self) -> float:
        """[B, T, E]."""
        return self.tensor(self.model.dim)

    @property
    def out(self) -> float:
        """[B, T, H, D]."""
        return self.tensor(self.model.heads * self.model.head_dim)

    @property
    def lse(self) -> float:
        """[B, T, H], in float32."""
        return self.tensor(self.model.heads, size=MASTER)

    @property
    def piece(self) -> int:
        """Tokens that what follows attention is run on at once."""
        return chunks(self.tokens, self.checkpointing.chunk)[0].stop

    @property
    def total(self) -> int:
        """Bytes of a number in sums of parameters' gradients: wide where there are several pieces to sum."""
        return self.e if self.piece >= self.tokens else MASTER

    @property
    def stages(self) -> HeadStages:
        """The stages in which heads come."""
        every = -(-self.model.heads // self.ulysses) * self.ulysses
        wanted = self.attention.heads_per_stage or self.ulysses if self.attention.head == "upipe" else every
        return HeadStages.of(self.model.heads, self.model.key_heads, self.ulysses, min(wanted, every))

    def call(self, queries: int, keys: int) -> Sizes:
        """What attention is about with so many heads of each rank of the head axis: of all its tokens, so U times."""
        head = self.tensor(self.model.head_dim) * self.ulysses
        lse = self.tensor(1, size=MASTER) * self.ulysses
        return Sizes(queries * head, keys * head, queries * lse, max(MASTER, self.e) / self.e, queries / keys)

    def forward(self, x: Sizes) -> float:
        """Of the method on the sequence axis."""
        ranks = self.ring
        match self.attention.sequence:
            case "ring":
                return ring.forward_memory(x, ranks)
            case "token_ring":
                return token_ring.forward_memory(x, ranks)
            case "wallfacer":
                return wallfacer.forward_memory(x, ranks, self.attention.team_of(ranks))
            case "all_gather":
                return all_gather.forward_memory(x, ranks)
            case _:
                return local.forward_memory(x)

    def backward(self, x: Sizes) -> float:
        """Likewise."""
        ranks, keys = self.ring, ring.keys_go_round(x)
        match self.attention.sequence:
            case "ring":
                return ring.backward_memory(x, ranks, keys)
            case "token_ring":
                return token_ring.backward_memory(x, ranks)
            case "wallfacer":
                return wallfacer.backward_memory(x, ranks, self.attention.team_of(ranks), keys)
            case "all_gather":
                return all_gather.backward_memory(x, ranks)
            case _:
                return local.backward_memory(x)

    def staged_forward(self) -> float:
        """A stage of UPipe, or of any method as blocks run it that keep x, out and lse alone: q, k and v too."""
        stage = self.stages
        x = self.call(stage.queries, stage.keys)
        return upipe.forward_memory(x, self.forward(x))

    def staged_backward(self) -> float:
        """Likewise, besides out and dout: q, k and v, and what the stages before have left."""
        stage = self.stages
        x = self.call(stage.queries, stage.keys)
        wide = self.attention.sequence != "local" and self.ring > 1
        return upipe.backward_memory(x, self.backward(x), self.ulysses, stage.turns, stage.several, wide)

    def whole_backward(self) -> float:
        """Where autograd has kept q, k, v, out and lse: dout of this rank's heads, and what the method needs."""
        stage = self.stages
        x = self.call(stage.queries, stage.keys)
        return (x.q if self.ulysses > 1 else 0) + self.backward(x)

    def kept_attention(self) -> float:
        """What attention's backward wants, where autograd has its way: q, k, v, out and lse.

        Norms of queries and keys keep what these were before.
        """
        if self.attention.head == "upipe":
            return self.out + self.lse
        x, model = self.call(self.stages.queries, self.stages.keys), self.model
        before = self.out + self.tensor(model.key_heads * model.head_dim) if model.head_norms else 0
        return 2 * x.q + 2 * x.k + x.lse + before
