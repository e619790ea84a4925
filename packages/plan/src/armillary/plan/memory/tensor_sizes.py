"""Sizes of a training step's tensors on a rank: `Widths` of a model, and `StepSizes` with attention's buffers.

`formulas.py` adds these up to the memory of a step; `time/step_time.py` computes transfers and FLOPs from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import pairwise, starmap
from typing import Any

from torch import float32

from armillary.attention.internal import NamedMethod
from armillary.attention.plans import HeadStages, Sizes, UPipePlan
from armillary.core.internal import chunks
from armillary.models import Checkpointing, GPTConfig, LatentSizes, LlamaConfig, Mixer, StateConfig
from armillary.models.internal import Keep
from armillary.plan.memory.recurrent_memory import LinearBytes, StateMemory, gathered_bytes
from armillary.plan.memory.simulate import Job

# Bytes of an element of master weights, of their gradients, and of AdamW's two moments.
FLOAT32_BYTES = float32.itemsize


@dataclass(frozen=True)
class Widths:
    """Widths of a model's tensors, and parameter counts by FSDP unit (embedding, each block, head, and the root).

    Args:
        inner: width inside the MLP.
        value_dim: Dv.
        latent: sizes of latents, if attention expands keys and values from them.
        gated: True for LLaMA: the MLP has a gate (SwiGLU), and positions are rotations (RoPE). False for GPT.
        head_norms: True if queries and keys have norms.
        block: number of parameters of a block.
        shared_latent: number of these that project to latents, which tensor parallelism replicates.
        after_attention: number of these in the part after attention: output projection, second norm and MLP.
        output_norm: number of parameters of the norm on the delta rule's outputs, which tensor parallelism replicates.
        output_biases: number of parameters of the biases of attention's output projection and the MLP's.
        table, head: numbers of parameters of embedding and head; 0 if they are tied, and so belong to the root.
        root: number of parameters that stay gathered until the end of backward: the last norm, a tied table, and a
            GPT's learned positions.
    """

    dim: int
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    latent: LatentSizes | None
    inner: int
    vocabulary: int
    layers: int
    gated: bool
    head_norms: bool
    block: int
    shared_latent: int
    after_attention: int
    output_norm: int
    output_biases: int
    table: int
    head: int
    root: int

    @classmethod
    @lru_cache(maxsize=64)  # a search estimates thousands of steps of one model
    def of(cls, model: LlamaConfig | GPTConfig, mixer: Mixer = "attention") -> Widths:
        """Returns the widths of a model. Fields of a block, such as `block`, are those of its blocks with `mixer`."""
        llama = isinstance(model, LlamaConfig)
        if llama:
            block = model.block_parameters(mixer)
            blocks = sum(count * model.block_parameters(kind) for kind, count in model.mixer_counts().items())
        else:
            block = replace(model, layers=2).parameters() - replace(model, layers=1).parameters()
            blocks = model.layers * block
        outside_blocks = model.parameters() - blocks
        inner = model.hidden_dim if llama else 4 * model.dim
        states = model.states if llama and mixer != "attention" else None
        latent = model.latent if llama else None
        mixed_width = model.heads * model.value_dim if states is None else states.values
        # Output projection, MLP (SwiGLU has 3 matrices, a GPT's 2), norm (a LayerNorm has 2 E) and biases.
        output_bias = model.out_bias and states is None if llama else True
        mlp_bias = model.mlp_bias if llama else True
        output_biases = model.dim * (output_bias + mlp_bias)
        hidden_layers, norm = (2, model.dim) if llama else (1, 2 * model.dim)  # layers from E to the MLP's width
        after_attention = mixed_width * model.dim + (hidden_layers + 1) * model.dim * inner + norm + output_biases
        after_attention += hidden_layers * inner if mlp_bias else 0
        table = 0 if not llama or model.tied_embeddings else model.vocab_size * model.dim
        return cls(
            dim=model.dim,
            heads=model.heads,
            key_heads=model.kv_heads,
            head_dim=model.head_dim,
            value_dim=model.value_dim,
            latent=latent,
            inner=inner,
            vocabulary=model.vocab_size,
            layers=model.layers,
            gated=llama,
            head_norms=llama and model.qk_norm and states is None,
            block=block,
            shared_latent=latent.shared_parameters(model.dim) if latent else 0,
            after_attention=after_attention,
            output_norm=states.value_dim if states is not None and mixer == "delta_rule" else 0,
            output_biases=output_biases,
            table=table,
            head=table,
            root=outside_blocks - 2 * table,
        )

    def shard(self, ranks: int) -> Widths:
        """Returns the widths of one of `ranks` tensor-parallel ranks.

        Heads, MLP and vocabulary are divided by `ranks`. Learned positions, output biases and norms are replicated,
        except Mamba-2's norm on its outputs.
        """
        if ranks == 1:
            return self
        norm = self.dim if self.gated else 2 * self.dim  # a LayerNorm has a bias
        # Replicated vectors in a block. The second norm and the biases are after attention.
        unsharded_after = norm + self.output_biases
        unsharded_in_block = norm + unsharded_after + self.output_norm + (2 * self.head_dim if self.head_norms else 0)
        unsharded_in_block += self.shared_latent
        table = self.vocabulary * self.dim
        unsharded_root = self.root - (table if self.tied else 0)

        def part(count: int, unsharded: int) -> int:
            return unsharded + (count - unsharded) // ranks

        return replace(
            self,
            heads=self.heads // ranks,
            key_heads=self.key_heads // ranks,
            inner=self.inner // ranks,
            vocabulary=-(-self.vocabulary // ranks),
            block=part(self.block, unsharded_in_block),
            after_attention=part(self.after_attention, unsharded_after),
            table=self.table // ranks,
            head=self.head // ranks,
            root=part(self.root, unsharded_root),
        )

    @property
    def expansion(self) -> int:
        """Number of a block's parameters that expand latents, and are counted with attention's time; 0 without."""
        return 0 if self.latent is None else self.heads * self.latent.key_parameters

    @property
    def outside_blocks(self) -> int:
        """Number of parameters outside of blocks: embedding, learned positions, last norm and head."""
        return self.table + self.head + self.root

    @property
    def tied(self) -> bool:
        return self.head == 0


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
        """Returns the sizes of a job, whose attention must be an `AttentionChoice`."""
        ring, ulysses, tp = (job.axes.get(name, 1) for name in ("ring", "ulysses", "tp"))
        method = job.method
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
            sharing=job.axes.get("shard", 1) * ring * ulysses,
            tp=tp,
            zero_stage=job.zero_stage,
            keeps_gradients=job.zero_stage == 1 and job.micro_batches > 1,
        )
        if not isinstance(job.model, LlamaConfig) or (states := job.model.states) is None:
            return sizes
        # Blocks with a state have the same sizes, except for the widths of their mixer and for the layer itself.
        common: dict[str, Any] = {attribute.name: getattr(sizes, attribute.name) for attribute in fields(StepSizes)}
        state_blocks = dict[Mixer, StateSizes]()
        for mixer in job.model.mixers:
            if mixer != "attention":
                # With a head axis, its ranks divide each zigzag shard into contiguous shards.
                gathered = gathered_bytes(mixer, states, ring * ulysses, zigzag=ulysses == 1)
                common |= {"mixer": mixer, "model": Widths.of(job.model, mixer).shard(tp)}
                state_blocks[mixer] = StateSizes(
                    **common,
                    layer=states,
                    memory=StateMemory.of(mixer, states, job.precision, ring * ulysses > 1),
                    gathered_states=job.rows * gathered,
                )
        return replace(sizes, mixers=job.model.mixers, state_blocks=state_blocks)

    def at(self, i: int) -> StepSizes:
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
        """Bytes of attention's output [B, T, H, Dv]."""
        return self.tensor(self.model.heads * self.model.value_dim)

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
        queries, keys = self.stages.queries, self.stages.keys  # heads per rank
        # After Ulysses' all-to-all a rank has a U-th of the heads, each over U times as many tokens.
        head = self.tensor(self.model.head_dim) * self.ulysses
        lse = self.tensor(1, size=FLOAT32_BYTES) * self.ulysses
        accumulation = max(FLOAT32_BYTES, self.e) / self.e  # bytes of an accumulated element, relative to e
        return Sizes(queries * head, keys * head, queries * lse, accumulation, queries / keys)

    def attention_forward(self) -> float:
        """Attention's memory in forward, with q, k and v."""
        inner = self.method.sequence_plan(self.ring).forward_memory(self.stage_sizes, self.ring)
        # With recomputation, every method runs in UPipe's stages.
        head = self.method.head_plan(self.ulysses) if self.checkpointing.policy == "none" else None
        return (head or UPipePlan()).forward_memory(self.stage_sizes, inner)

    @cached_property
    def attention_backward(self) -> float:
        """Attention's memory in backward, without out and dout of local tokens and the tensors that autograd saved."""
        inner = self.method.sequence_plan(self.ring).backward_memory(self.stage_sizes, self.ring)
        is_saved = self.checkpointing.policy == "none"
        head = self.method.head_plan(self.ulysses) if is_saved else UPipePlan()
        # ring == 1: the head method has no method on the sequence axis inside.
        return inner if head is None else head.backward_memory(self.stage_sizes, inner, self.stages, self.ring == 1)

    def recomputed_backward(self) -> float:
        """Memory of attention's backward under a checkpoint policy, without out, lse and dout."""
        # Under tensor parallelism with the gathered input and its gradient.
        return self.projection_gradients() + self.attention_backward + 2 * self.gathered

    @property
    def recorded(self) -> float:
        """Bytes that autograd records before attention's backward under a checkpoint policy. Attention records none."""
        return 0.0

    def projection_gradients(self) -> float:
        """Gradients of the projections' weights that stages accumulate."""
        model, stages = self.model, self.stages
        # Those of queries exist after the first stage, those of keys and values after the first round: the stages that
        # share key heads.
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
        """Bytes that autograd records when it recomputes the layer: normed input, and its tensors without out."""
        if self.checkpointing.policy == "none":
            return 0.0
        # The normed input is gathered over tensor-parallel ranks, if there are any.
        return self.kept_attention() - self.out + (self.gathered or self.x)

    def kept_attention(self) -> float:
        return self.bytes(self.memory.kept)
