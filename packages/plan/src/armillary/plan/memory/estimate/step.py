"""Sizes of a training step's tensors on a rank, and the memory of its attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, starmap

from torch import float32

from armillary.attention.call.token_chunks import chunks
from armillary.attention.planning.memory import HeadStages, Sizes
from armillary.attention.planning.upipe import UPipePlan
from armillary.attention.registry import NamedMethod
from armillary.models import Checkpointing
from armillary.models.activation_checkpoint.segments import Keep
from armillary.plan.memory.estimate.choice import AttentionChoice
from armillary.plan.memory.estimate.widths import Widths
from armillary.plan.memory.simulation.simulate import Job

MASTER = float32.itemsize
"""Bytes of a number in master weights, gradients and AdamW's two moments."""


@dataclass(frozen=True)
class StepSizes:
    """Sizes of a job's tensors on a rank, in bytes.

    Args:
        model: widths of one tensor-parallel rank's part of the model.
        tokens: local tokens T of each of `rows` sequences (B), in attention and inside the MLP.
        e: bytes of an element in the compute dtype.
        sharing: number of ranks that parameters are sharded over.
        tp: number of tensor-parallel ranks, which split the T tokens between blocks (sequence parallelism).
        zero_stage: as in `Job`.
        keeps_gradients: ZeRO stage 1 with several micro-batches, which keeps parameters and gradients unsharded.
    """

    model: Widths
    method: NamedMethod
    checkpointing: Checkpointing
    on_host: bool
    tokens: int
    rows: int
    e: int
    ring: int
    ulysses: int
    sharing: int
    tp: int
    zero_stage: int
    keeps_gradients: bool

    @classmethod
    def of(cls, job: Job) -> StepSizes:
        if not isinstance(job.attention, AttentionChoice):
            raise ValueError(f"attention={job.attention!r} must be an AttentionChoice, so that its formulas are known")
        axes: Mapping[str, int] = job.axes
        ring, ulysses, tp = (axes.get(name, 1) for name in ("ring", "ulysses", "tp"))
        method = job.attention.method
        method.check_used(method.mesh_axes({"ring": ring, "ulysses": ulysses}))
        return cls(
            model=Widths.of(job.model).sharded(tp),
            method=method,
            checkpointing=job.checkpointing,
            on_host=job.on_host,
            tokens=-(-job.length // (ring * ulysses)),
            rows=job.rows,
            e=job.precision.itemsize,
            ring=ring,
            ulysses=ulysses,
            sharing=axes.get("shard", 1) * ring * ulysses,
            tp=tp,
            zero_stage=job.zero_stage,
            keeps_gradients=job.zero_stage == 1 and job.micro_batches > 1,
        )

    def tensor(self, width: float, tokens: int | None = None, size: int | None = None) -> float:
        """Bytes of [B, T, width]; by default of all local tokens, in the compute dtype."""
        return self.rows * (self.tokens if tokens is None else tokens) * width * (self.e if size is None else size)

    @property
    def own_tokens(self) -> int:
        """Local tokens between blocks."""
        return -(-self.tokens // self.tp)

    @property
    def x(self) -> float:
        """Bytes of [B, T, E] between blocks; under tensor parallelism, of this rank's part of the T tokens."""
        return self.tensor(self.model.dim, self.own_tokens)

    @property
    def gathered(self) -> float:
        """Bytes of [B, T, E] gathered over tensor-parallel ranks, the input of attention and MLP; 0 without them."""
        return self.tp * self.x if self.tp > 1 else 0

    @property
    def out(self) -> float:
        """Bytes of attention's output [B, T, H, D]."""
        return self.tensor(self.model.heads * self.model.head_dim)

    @property
    def lse(self) -> float:
        """Bytes of attention's lse [B, T, H], in float32."""
        return self.tensor(self.model.heads, size=MASTER)

    @cached_property
    def piece(self) -> int:
        """Chunk size in tokens of the part after attention."""
        return chunks(self.own_tokens, self.checkpointing.chunk)[0].stop

    @property
    def total(self) -> int:
        """Bytes of a number in accumulated parameter gradients: float32 if there are several chunks."""
        return self.e if self.piece >= self.own_tokens else MASTER

    @cached_property
    def stages(self) -> HeadStages:
        """Stages of heads, as UPipe runs them; one stage for other methods."""
        return self.method.stages(self.model.heads, self.model.key_heads, self.ulysses)

    @property
    def projects_in_stages(self) -> bool:
        """True if attention saves only out and lse, and projects again in backward."""
        return self.method.head is not None and self.method.head.plan.projects_in_stages

    @cached_property
    def keeps(self) -> tuple[Keep, ...]:
        """Checkpoints of each block, unless the policy is "none"."""
        return self.checkpointing.kept_by_blocks(self.model.layers)

    @cached_property
    def segments(self) -> tuple[range, ...]:
        """Segments of blocks that are recomputed together: only the first block of each stores its input."""
        firsts = [i for i, keep in enumerate(self.keeps) if keep.x]
        return tuple(starmap(range, pairwise([*firsts, len(self.keeps)])))

    @property
    def attended(self) -> Sizes:
        """Sizes of attention's tensors in one stage of heads."""
        return self.call(self.stages.queries, self.stages.keys)

    def call(self, queries: int, keys: int) -> Sizes:
        """Sizes for `queries` and `keys` heads per rank; each head has the tokens of all U ranks on the head axis."""
        head = self.tensor(self.model.head_dim) * self.ulysses
        lse = self.tensor(1, size=MASTER) * self.ulysses
        return Sizes(queries * head, keys * head, queries * lse, max(MASTER, self.e) / self.e, queries / keys)

    def forward(self, x: Sizes) -> float:
        """Forward memory of the method on the sequence axis."""
        return self.method.sequence_plan(self.ring).forward_memory(x, self.ring)

    def backward(self, x: Sizes) -> float:
        """Backward memory of the method on the sequence axis."""
        return self.method.sequence_plan(self.ring).backward_memory(x, self.ring)

    def attention_forward(self) -> float:
        """Attention's memory in forward, with q, k and v. With recomputation, every method runs in UPipe's stages."""
        inner, head = self.forward(self.attended), self.method.head_plan(self.ulysses)
        if self.checkpointing.policy == "none" and head is not None:
            return head.forward_memory(self.attended, inner)
        return UPipePlan().forward_memory(self.attended, inner)

    def attention_backward(self) -> float:
        """Attention's memory in backward, without out and dout of local tokens and without autograd's saved tensors."""
        inner, alone = self.backward(self.attended), self.ring == 1
        if self.checkpointing.policy != "none":
            return UPipePlan().backward_memory(self.attended, inner, self.stages, alone)
        head = self.method.head_plan(self.ulysses)
        return inner if head is None else head.backward_memory(self.attended, inner, self.stages, alone)

    def kept_attention(self) -> float:
        """Tensors that autograd saves for attention's backward: q, k, v, out and lse.

        Norms of queries and keys also save their inputs.
        """
        if self.projects_in_stages:
            return self.out + self.lse
        x, model = self.attended, self.model
        before = self.out + self.tensor(model.key_heads * model.head_dim) if model.head_norms else 0
        return 2 * x.q + 2 * x.k + x.lse + before
