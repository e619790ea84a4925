"""`StepSizes`: bytes of a training step's tensors on a rank, and of attention's buffers. The terms of `Peaks`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise, starmap

from torch import float32

from armillary.attention.call.token_chunks import chunks
from armillary.attention.planning.memory import HeadStages, Sizes
from armillary.attention.planning.upipe import UPipePlan
from armillary.attention.registry import NamedMethod
from armillary.models import Checkpointing, LlamaConfig
from armillary.models.activation_checkpoint.segments import Keep
from armillary.models.state_config import Mixer, StateConfig
from armillary.plan.memory.estimate.choice import AttentionChoice
from armillary.plan.memory.estimate.widths import Widths
from armillary.plan.memory.simulation.simulate import Job
from armillary.plan.memory.simulation.state_memory import LinearBytes, StateMemory, gathered_bytes

MASTER = float32.itemsize
"""Bytes of a number in master weights, gradients and AdamW's two moments."""


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Bytes of a job's tensors on a rank, in its blocks with attention; `at` returns those of any block.

    Args:
        model: widths of one tensor-parallel rank's part of the model.
        tokens: local tokens T of each of `rows` sequences (B), in attention and inside the MLP.
        e: bytes of an element in the compute dtype.
        sharing: number of ranks that share each parameter (FSDP2): shard x ring x ulysses.
        tp: number of tensor-parallel ranks, which split the T tokens between blocks (sequence parallelism).
        zero_stage: as in `Job`.
        keeps_gradients: ZeRO stage 1 with several micro-batches, which keeps parameters and gradients unsharded.
        mixer: mixer of the blocks that have these sizes.
        mixers: mixers of the blocks, repeated to their number.
        state_blocks: sizes of the blocks of each mixer with a state.
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
    mixer: Mixer = "attention"
    mixers: tuple[Mixer, ...] = ("attention",)
    state_blocks: Mapping[Mixer, StateSizes] = field(default_factory=dict[Mixer, "StateSizes"])

    @classmethod
    def of(cls, job: Job) -> StepSizes:
        if not isinstance(job.attention, AttentionChoice):
            raise ValueError(f"attention={job.attention!r} must be an AttentionChoice, so that its formulas are known")
        axes: Mapping[str, int] = job.axes
        ring, ulysses, tp = (axes.get(name, 1) for name in ("ring", "ulysses", "tp"))
        method = job.attention.method
        method.check_used(method.mesh_axes({"ring": ring, "ulysses": ulysses}))
        sizes = cls(
            model=Widths.of(job.model).shard(tp),
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
        if not isinstance(job.model, LlamaConfig) or job.model.states is None:
            return sizes
        blocks = {
            mixer: StateSizes.for_mixer(sizes, job, job.model, mixer)
            for mixer in job.model.mixers
            if mixer != "attention"
        }
        return replace(sizes, mixers=job.model.mixers, state_blocks=blocks)

    def at(self, i: int) -> StepSizes:
        """Returns the sizes of block i."""
        return self.state_blocks.get(self.mixers[i % len(self.mixers)], self)

    def by_mixer(self, blocks: Sequence[int]) -> list[tuple[StepSizes, Sequence[int]]]:
        """Returns (sizes, indices of the blocks with them) for each mixer in `blocks`."""
        if not self.state_blocks:
            return [(self, blocks)]
        indices = defaultdict[Mixer, list[int]](list)
        for i in blocks:
            indices[self.mixers[i % len(self.mixers)]].append(i)
        return [(self.state_blocks.get(mixer, self), mixer_blocks) for mixer, mixer_blocks in indices.items()]

    def parameters(self, blocks: Sequence[int]) -> int:
        """Number of parameters of these blocks."""
        return sum(len(mixer_blocks) * sizes.model.block for sizes, mixer_blocks in self.by_mixer(blocks))

    @cached_property
    def all_parameters(self) -> int:
        """Number of parameters of the model."""
        return self.parameters(range(self.model.layers)) + self.model.outside_blocks

    def tensor(self, width: float, tokens: int | None = None, size: int | None = None) -> float:
        """Bytes of [B, T, width]; by default of all local tokens, in the compute dtype."""
        return self.rows * (self.tokens if tokens is None else tokens) * width * (self.e if size is None else size)

    @cached_property
    def own_tokens(self) -> int:
        """Local tokens between blocks."""
        return -(-self.tokens // self.tp)

    @cached_property
    def x(self) -> float:
        """Bytes of [B, T, E] between blocks; under tensor parallelism, of this rank's part of the T tokens."""
        return self.tensor(self.model.dim, self.own_tokens)

    @cached_property
    def gathered(self) -> float:
        """Bytes of [B, T, E] gathered over tensor-parallel ranks, the input of attention and MLP; 0 without them."""
        return self.tp * self.x if self.tp > 1 else 0

    @cached_property
    def out(self) -> float:
        """Bytes of attention's output [B, T, H, D]."""
        return self.tensor(self.model.heads * self.model.head_dim)

    @cached_property
    def lse(self) -> float:
        """Bytes of attention's lse [B, T, H], in float32."""
        return self.tensor(self.model.heads, size=MASTER)

    @cached_property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk of the part after attention."""
        return chunks(self.own_tokens, self.checkpointing.chunk)[0].stop

    @property
    def summed_gradient(self) -> int:
        """Bytes of an element of parameter gradients while chunks add to them: float32 if there are several chunks."""
        return self.e if self.chunk_tokens >= self.own_tokens else MASTER

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
        """Checkpoints of each block, unless the policy is "none". Layers with a state keep no output."""
        keeps = self.checkpointing.tensors_by_block(self.model.layers)
        if not self.state_blocks:
            return keeps
        return tuple(
            replace(keep, attention_output=keep.attention_output and self.at(i).mixer == "attention")
            for i, keep in enumerate(keeps)
        )

    @cached_property
    def segments(self) -> tuple[range, ...]:
        """Segments of blocks that are recomputed together: only the first block of each stores its input."""
        firsts = [i for i, keep in enumerate(self.keeps) if keep.x]
        return tuple(starmap(range, pairwise([*firsts, len(self.keeps)])))

    @cached_property
    def stage_sizes(self) -> Sizes:
        """Sizes of attention's tensors in one stage of heads."""
        return self.call(self.stages.queries, self.stages.keys)

    def call(self, queries: int, keys: int) -> Sizes:
        """Sizes for `queries` and `keys` heads per rank; each head has the tokens of all U ranks on the head axis."""
        # After Ulysses' all-to-all a rank has a U-th of the heads, each over U times as many tokens.
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
        inner, head = self.forward(self.stage_sizes), self.method.head_plan(self.ulysses)
        if self.checkpointing.policy == "none" and head is not None:
            return head.forward_memory(self.stage_sizes, inner)
        return UPipePlan().forward_memory(self.stage_sizes, inner)

    @cached_property
    def attention_backward(self) -> float:
        """Attention's memory in backward, without out and dout of local tokens and without autograd's saved tensors."""
        inner, alone = self.backward(self.stage_sizes), self.ring == 1
        if self.checkpointing.policy != "none":
            return UPipePlan().backward_memory(self.stage_sizes, inner, self.stages, alone)
        head = self.method.head_plan(self.ulysses)
        return inner if head is None else head.backward_memory(self.stage_sizes, inner, self.stages, alone)

    def recomputed_backward(self) -> float:
        """Memory of attention's backward under a checkpoint policy, besides out, lse and dout.

        Under tensor parallelism also the gathered input and its gradient.
        """
        return self.projection_gradients() + self.attention_backward + 2 * self.gathered

    @property
    def recorded(self) -> float:
        """Tensors that autograd records for attention's backward under a checkpoint policy: none."""
        return 0.0

    def projection_gradients(self) -> float:
        """Accumulated gradients of projections: of queries after the first stage, of keys after the first round."""
        model, stages = self.model, self.stages
        queries = model.heads if stages.several else 0
        keys = 2 * model.key_heads if stages.rounds else 0  # of keys and of values
        return self.summed_gradient * (queries + keys) * model.head_dim * model.dim

    def kept_attention(self) -> float:
        """Tensors that autograd saves for attention's backward: q, k, v, out and lse.

        Norms of queries and keys also save their inputs.
        """
        if self.projects_in_stages:
            return self.out + self.lse
        x, model = self.stage_sizes, self.model
        norm_inputs = self.out + self.tensor(model.key_heads * model.head_dim) if model.head_norms else 0
        # q and out have the same size, and so have k and v.
        return 2 * x.q + 2 * x.k + x.lse + norm_inputs


@dataclass(frozen=True, kw_only=True)
class StateSizes(StepSizes):
    """Sizes of blocks whose mixer is a layer with a state, which is simulated by itself (`StateMemory`).

    Args:
        layer: sizes of the layer on all tensor-parallel ranks.
        gathered_states: bytes of states and maps that it gathers, likewise.
    """

    layer: StateConfig
    memory: StateMemory
    gathered_states: int

    @classmethod
    def for_mixer(cls, sizes: StepSizes, job: Job, config: LlamaConfig, mixer: Mixer) -> StateSizes:
        """Returns the sizes of the blocks with a mixer, in a model whose blocks with attention have `sizes`."""
        assert config.states is not None
        common = {each.name: getattr(sizes, each.name) for each in fields(StepSizes)}
        common |= {"mixer": mixer, "model": Widths.of(config, mixer).shard(sizes.tp)}
        ranks = sizes.ring * sizes.ulysses
        # Ranks on the head axis cut zigzag shards into contiguous ones.
        gathered = gathered_bytes(mixer, config.states, ranks, zigzag=sizes.ulysses == 1)
        return cls(
            **common,
            layer=config.states,
            memory=StateMemory.of(mixer, config.states, job.precision, ranks > 1),
            gathered_states=sizes.rows * gathered,
        )

    def bytes(self, memory: LinearBytes) -> float:
        """Bytes of all rows. Tensor parallelism shards heads, and so all tensors of the layer."""
        return memory.at(self.rows * self.tokens, self.gathered_states) / self.tp

    @cached_property
    def out(self) -> float:
        return self.tensor(self.layer.values / self.tp)

    @cached_property
    def lse(self) -> float:
        return 0.0

    @property
    def projects_in_stages(self) -> bool:
        return False

    def attention_forward(self) -> float:
        """Memory of the layer in forward, with its normed input and without out."""
        memory = self.memory.recording if self.checkpointing.policy == "none" else self.memory.forward
        return self.bytes(memory) - self.out + (0 if self.gathered else self.x)

    @cached_property
    def attention_backward(self) -> float:
        """Memory of the layer in backward, without out, dout and the tensors that autograd recorded in forward."""
        return self.bytes(self.memory.backward) - self.bytes(self.memory.kept)

    def recomputed_backward(self) -> float:
        return self.recorded + self.attention_backward

    @property
    def recorded(self) -> float:
        """Tensors from the normed input to out, recorded before the backward of the part after attention begins.

        Under policy "none" they are counted among the stored tensors.
        """
        if self.checkpointing.policy == "none":
            return 0.0
        return self.kept_attention() - self.out + (self.gathered or self.x)

    def kept_attention(self) -> float:
        return self.bytes(self.memory.kept)
