"""`StepSizes`: bytes of a training step's tensors on a rank, and of attention's buffers. `Peaks` adds them up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise, starmap

from torch import float32

from armillary.attention.plans import HeadStages, NamedMethod, Sizes, UPipePlan
from armillary.core.parts import chunks
from armillary.models import Checkpointing, LlamaConfig, Mixer, StateConfig
from armillary.models.parts import Keep
from armillary.plan.memory.estimate.choice import AttentionChoice
from armillary.plan.memory.estimate.widths import Widths
from armillary.plan.memory.simulation.simulate import Job
from armillary.plan.memory.simulation.state_memory import LinearBytes, StateMemory, gathered_bytes

FLOAT32_BYTES = float32.itemsize
"""Bytes of an element of master weights, of their gradients, and of AdamW's two moments."""


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Bytes of a job's tensors on a rank, in blocks with attention. `at` returns the sizes of any block.

    Properties and methods return bytes, unless their docstring says otherwise.

    Args:
        model: widths of the part of the model that one tensor-parallel rank has.
        tokens: local tokens T of each of `rows` sequences (B), in attention and inside the MLP.
        e: bytes of an element in the compute dtype.
        sharing: number of ranks over which FSDP2 shards each parameter: shard x ring x ulysses.
        tp: number of tensor-parallel ranks, which divide the T tokens among them between attention and MLP (sequence
            parallelism).
        zero_stage: as in `Job`.
        keeps_gradients: True for ZeRO stage 1 with several micro-batches. It keeps all parameters and gradients
            unsharded.
        mixer: mixer of the blocks that have these sizes.
        mixers: the mixer of each block; a shorter tuple repeats.
        state_blocks: for each mixer with a state, the sizes of its blocks.
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
        """Returns the sizes of a job.

        Raises:
            ValueError: the job's attention is not an `AttentionChoice`.
        """
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
            tokens=-(-job.length // (ring * ulysses)),  # of the largest shard
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
        """Returns (sizes, the indices among `blocks` with these sizes) for each mixer."""
        if not self.state_blocks:
            return [(self, blocks)]
        indices = defaultdict[Mixer, list[int]](list)
        for i in blocks:
            indices[self.mixers[i % len(self.mixers)]].append(i)
        return [(self.state_blocks.get(mixer, self), mixer_blocks) for mixer, mixer_blocks in indices.items()]

    def parameters(self, blocks: Sequence[int]) -> int:
        """Number of parameters of `blocks`."""
        return sum(len(mixer_blocks) * sizes.model.block for sizes, mixer_blocks in self.by_mixer(blocks))

    @cached_property
    def all_parameters(self) -> int:
        """Number of parameters of one tensor-parallel rank's part of the model, before FSDP2 shards them."""
        return self.parameters(range(self.model.layers)) + self.model.outside_blocks

    def tensor(self, width: float, tokens: int | None = None, size: int | None = None) -> float:
        """Bytes of [B, T, width]. T is `tokens`, or all local tokens; an element has `size` bytes, or `e`."""
        return self.rows * (self.tokens if tokens is None else tokens) * width * (self.e if size is None else size)

    @cached_property
    def own_tokens(self) -> int:
        """Number of local tokens between blocks: a tensor-parallel rank has a part of T."""
        return -(-self.tokens // self.tp)

    @cached_property
    def x(self) -> float:
        """Bytes of a block's input [B, T, E]; under tensor parallelism, of this rank's part of the T tokens."""
        return self.tensor(self.model.dim, self.own_tokens)

    @cached_property
    def gathered(self) -> float:
        """Bytes of the input of attention or MLP, gathered over tensor-parallel ranks; 0 without tensor parallelism."""
        return self.tp * self.x if self.tp > 1 else 0

    @cached_property
    def out(self) -> float:
        """Bytes of attention's output [B, T, H, D]."""
        return self.tensor(self.model.heads * self.model.head_dim)

    @cached_property
    def lse(self) -> float:
        """Bytes of attention's lse [B, T, H], in float32."""
        return self.tensor(self.model.heads, size=FLOAT32_BYTES)

    @cached_property
    def chunk_tokens(self) -> int:
        """Number of tokens in a chunk of the part after attention."""
        return chunks(self.own_tokens, self.checkpointing.chunk)[0].stop

    @property
    def summed_gradient(self) -> int:
        """Bytes of an element of parameter gradients to which chunks add: float32 if there are several chunks."""
        return self.e if self.chunk_tokens >= self.own_tokens else FLOAT32_BYTES

    @cached_property
    def stages(self) -> HeadStages:
        """Stages of heads, as UPipe runs them; one stage for other methods."""
        return self.method.stages(self.model.heads, self.model.key_heads, self.ulysses)

    @property
    def projects_in_stages(self) -> bool:
        """True if attention saves only out and lse, and computes the projections again in backward."""
        return self.method.head is not None and self.method.head.plan.projects_in_stages

    @cached_property
    def keeps(self) -> tuple[Keep, ...]:
        """The checkpoints that each block keeps, unless the policy is "none". Layers with a state keep no output."""
        keeps = self.checkpointing.tensors_by_block(self.model.layers)
        if not self.state_blocks:
            return keeps
        return tuple(
            replace(keep, attention_output=keep.attention_output and self.at(i).mixer == "attention")
            for i, keep in enumerate(keeps)
        )

    @cached_property
    def segments(self) -> tuple[range, ...]:
        """Segments of blocks that are recomputed together. Only the first block of a segment stores its input."""
        firsts = [i for i, keep in enumerate(self.keeps) if keep.x]
        return tuple(starmap(range, pairwise([*firsts, len(self.keeps)])))

    @cached_property
    def stage_sizes(self) -> Sizes:
        """Sizes of attention's tensors in one stage of heads."""
        queries, keys = self.stages.queries, self.stages.keys  # heads per rank
        # After Ulysses' all-to-all a rank has a U-th of the heads, each over U times as many tokens.
        head = self.tensor(self.model.head_dim) * self.ulysses
        lse = self.tensor(1, size=FLOAT32_BYTES) * self.ulysses
        accumulation = max(FLOAT32_BYTES, self.e) / self.e  # bytes of an accumulated element, relative to e
        return Sizes(queries * head, keys * head, queries * lse, accumulation, queries / keys)

    def forward(self) -> float:
        """Memory of the method on the sequence axis in forward, for one stage of heads."""
        return self.method.sequence_plan(self.ring).forward_memory(self.stage_sizes, self.ring)

    def backward(self) -> float:
        """Memory of the method on the sequence axis in backward, for one stage of heads."""
        return self.method.sequence_plan(self.ring).backward_memory(self.stage_sizes, self.ring)

    def attention_forward(self) -> float:
        """Attention's memory in forward, with q, k and v. With recomputation, every method runs in UPipe's stages."""
        inner, head = self.forward(), self.method.head_plan(self.ulysses)
        if self.checkpointing.policy == "none" and head is not None:
            return head.forward_memory(self.stage_sizes, inner)
        return UPipePlan().forward_memory(self.stage_sizes, inner)

    @cached_property
    def attention_backward(self) -> float:
        """Attention's memory in backward, without out and dout of local tokens and the tensors that autograd saved."""
        inner, alone = self.backward(), self.ring == 1  # alone: there is no method on the sequence axis
        if self.checkpointing.policy != "none":
            return UPipePlan().backward_memory(self.stage_sizes, inner, self.stages, alone)
        head = self.method.head_plan(self.ulysses)
        return inner if head is None else head.backward_memory(self.stage_sizes, inner, self.stages, alone)

    def recomputed_backward(self) -> float:
        """Memory of attention's backward under a checkpoint policy, without out, lse and dout."""
        # Under tensor parallelism with the gathered input and its gradient.
        return self.projection_gradients() + self.attention_backward + 2 * self.gathered

    @property
    def recorded(self) -> float:
        """Bytes that autograd records before attention's backward under a checkpoint policy. Attention records none."""
        return 0.0

    def projection_gradients(self) -> float:
        """Gradients of the projections' weights that stages accumulate.

        Those of queries exist after the first stage. Those of keys and values exist after the first round: the stages
        that share key heads.
        """
        model, stages = self.model, self.stages
        queries = model.heads if stages.has_several_stages else 0
        keys = 2 * model.key_heads if stages.has_several_rounds else 0  # key heads and value heads
        return self.summed_gradient * (queries + keys) * model.head_dim * model.dim

    def kept_attention(self) -> float:
        """Tensors that autograd saves for attention's backward: q, k, v, out, lse, inputs of query and key norms."""
        if self.projects_in_stages:
            return self.out + self.lse
        x, model = self.stage_sizes, self.model
        norm_inputs = self.out + self.tensor(model.key_heads * model.head_dim) if model.head_norms else 0
        # q and out have equal sizes, and so have k and v.
        return 2 * x.q + 2 * x.k + x.lse + norm_inputs


@dataclass(frozen=True, kw_only=True)
class StateSizes(StepSizes):
    """Sizes of blocks whose mixer is a layer with a state. Its memory comes from a simulation of the layer alone.

    Args:
        layer: sizes of the layer on all tensor-parallel ranks together.
        memory: the simulated memory of the layer.
        gathered_states: bytes of states and maps that the layer gathers, on all tensor-parallel ranks together.
    """

    layer: StateConfig
    memory: StateMemory
    gathered_states: int

    @classmethod
    def for_mixer(cls, sizes: StepSizes, job: Job, config: LlamaConfig, mixer: Mixer) -> StateSizes:
        """Returns the sizes of the blocks with `mixer`, in a model whose blocks with attention have `sizes`."""
        assert config.states is not None
        common = {attribute.name: getattr(sizes, attribute.name) for attribute in fields(StepSizes)}
        common |= {"mixer": mixer, "model": Widths.of(config, mixer).shard(sizes.tp)}
        ranks = sizes.ring * sizes.ulysses
        # With a head axis, its ranks divide each zigzag shard into contiguous shards.
        gathered = gathered_bytes(mixer, config.states, ranks, zigzag=sizes.ulysses == 1)
        return cls(
            **common,
            layer=config.states,
            memory=StateMemory.of(mixer, config.states, job.precision, ranks > 1),
            gathered_states=sizes.rows * gathered,
        )

    def bytes(self, memory: LinearBytes) -> float:
        """Returns the bytes for all rows. Tensor parallelism shards heads, and so all tensors of the layer."""
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
        """Memory of the layer in forward, with the normed input and without out."""
        memory = self.memory.recording if self.checkpointing.policy == "none" else self.memory.forward
        return self.bytes(memory) - self.out + (0 if self.gathered else self.x)

    @cached_property
    def attention_backward(self) -> float:
        """Memory of the layer in backward, without out, dout and the tensors that autograd saved in forward."""
        return self.bytes(self.memory.backward) - self.bytes(self.memory.kept)

    def recomputed_backward(self) -> float:
        return self.recorded + self.attention_backward

    @property
    def recorded(self) -> float:
        """Bytes that autograd records when it recomputes the layer, before the part after attention runs backward.

        These are the normed input and the layer's tensors without out. Under policy "none" they are stored tensors.
        """
        if self.checkpointing.policy == "none":
            return 0.0
        # The normed input is gathered over tensor-parallel ranks, if there are any.
        return self.kept_attention() - self.out + (self.gathered or self.x)

    def kept_attention(self) -> float:
        return self.bytes(self.memory.kept)
