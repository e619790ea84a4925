"""Memory of attention with latents: `LatentStepSizes`, and `step_sizes`, the sizes of any job's step.

A block calls attention with q, rotary keys and latents of its tokens. Autograd saves these instead of keys and values,
which exist for one block of attention at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

from armillary.attention import AttentionMask, AttentionShape
from armillary.attention.internal import named_method
from armillary.attention.plans import HeadStages, Sizes, UPipePlan
from armillary.core import SequenceLayout
from armillary.models import LatentSizes, LlamaConfig
from armillary.plan.memory.simulate import Job
from armillary.plan.memory.tensor_sizes import FLOAT32_BYTES, StepSizes

ALL_GATHER = named_method("all_gather")


def step_sizes(job: Job) -> StepSizes:
    """Returns the sizes of a job's step, whose attention must be an `AttentionChoice`."""
    sizes = StepSizes.of(job)
    latent = sizes.model.latent
    if latent is None:
        return sizes
    work = call_shape(job, SequenceLayout.contiguous(sizes.ring, sizes.ring), AttentionMask())
    sent = sizes.method.as_sent(work, sizes.ring, sizes.ulysses, job.checkpointing.policy != "none")
    values = {attribute.name: getattr(sizes, attribute.name) for attribute in fields(StepSizes)}
    return LatentStepSizes(**values, latent=latent, sends_latents=sent.latent is not None)


def call_shape(job: Job, layout: SequenceLayout, mask: AttentionMask) -> AttentionShape:
    """Returns the shape of a job's attention calls, on one tensor-parallel rank; with latents, if the model has them.

    Args:
        layout: layout of the sequence over `ring`.
    """
    model, tp = job.model, job.axes.get("tp", 1)
    latent = model.latent if isinstance(model, LlamaConfig) else None
    return AttentionShape.of(
        layout,
        mask,
        heads=model.heads // tp,
        kv_heads=model.kv_heads // tp,
        head_dim=model.head_dim,
        value_dim=model.value_dim,
        dtype=job.precision,
        batch=job.rows,
        latent=None if latent is None else (latent.rotary_dim, latent.rank),
    )


@dataclass(frozen=True, kw_only=True)
class LatentStepSizes(StepSizes):
    """Sizes of a job whose blocks have latent attention.

    Args:
        latent: the sizes of latents.
        sends_latents: True if attention sends latents, False if keys are expanded before.
    """

    latent: LatentSizes
    sends_latents: bool

    @property
    def has_head_axis(self) -> bool:
        """True if ranks exchange tokens for heads."""
        return self.method.head is not None and self.ulysses > 1

    @property
    def runs_in_stages(self) -> bool:
        """True if attention projects hidden states in stages: UPipe, and every method under a checkpoint policy."""
        return self.projects_in_stages or self.checkpointing.policy != "none"

    @cached_property
    def rotates_latents(self) -> bool:
        """True if the ring has this rank's own latents, and gathers those of the head axis at each step."""
        return self.sends_latents and self.ring > 1 and self.method.sequence_plan(self.ring).rotates_latents

    @property
    def rotates_gathered(self) -> bool:
        """True if it does so during attention (USP)."""
        return self.rotates_latents and self.has_head_axis and not self.runs_in_stages

    @property
    def keeps_latents(self) -> bool:
        """True if a rank keeps the latents of all nodes for all stages, as an all-gather does for its one call."""
        return self.rotates_latents and self.runs_in_stages

    @cached_property
    def stages(self) -> HeadStages:
        """Stages of heads. Latents are sent once, so that all stages are one round."""
        stages = super().stages
        count = -(-self.model.heads // (self.ulysses * stages.queries))
        return stages._replace(stages_per_round=count, has_several_rounds=False) if self.sends_latents else stages

    @cached_property
    def stage_sizes(self) -> Sizes:
        stages, latent, x = self.stages, self.latent, super().stage_sizes
        # Bytes of one number of each token, after Ulysses' all-to-all.
        number = self.tensor(1) * self.ulysses
        expanded = stages.keys * number * (latent.head_dim + latent.value_dim) / 2
        x = replace(x, k=expanded, value_ratio=latent.value_dim / latent.head_dim)
        if not self.sends_latents:
            return x
        sent = number * latent.sent
        x = replace(x, k=sent / 2, expanded=expanded, expansion=self.expansion(stages.keys) * self.ulysses)
        return replace(x, k=sent / 2 / self.ulysses, gathered=sent) if self.rotates_gathered else x

    def expansion(self, heads: int) -> float:
        """Bytes of expanded k and v of some heads of T tokens. The part of k without position exists twice."""
        return self.tensor(heads * (2 * self.latent.head_dim - self.latent.rotary_dim + self.latent.value_dim))

    @property
    def own_inputs(self) -> float:
        """Bytes of q, rotary keys and latents of this rank's tokens. In stages, only q of a stage exists."""
        queries = 0 if self.runs_in_stages else self.model.heads * self.latent.head_dim
        return self.tensor(queries + self.latent.sent)

    def attention_forward(self) -> float:
        """Attention's memory in forward, with q, rotary keys and latents."""
        memory = super().attention_forward()
        if self.keeps_latents:
            inner = ALL_GATHER.sequence_plan(self.ring).forward_memory(self.stage_sizes, self.ring)
            memory = UPipePlan().forward_memory(replace(self.stage_sizes, k=0), inner)
        if self.runs_in_stages and not self.sends_latents:  # stages project to keys of their own heads
            return memory
        expansion = 0 if self.sends_latents else self.expansion(self.model.heads)
        if self.has_head_axis:  # beside the tensors that the rank receives
            return memory + self.own_inputs + expansion
        return memory + expansion - (0 if self.sends_latents else 2 * self.stage_sizes.k)

    @cached_property
    def attention_backward(self) -> float:
        """As in `StepSizes`, with the float32 gradient of the expansion's weight."""
        heads, latent, w = self.model.heads, self.latent, self.stage_sizes.w
        memory = super().attention_backward
        if self.keeps_latents:
            x, inner = (
                self.stage_sizes,
                ALL_GATHER.sequence_plan(self.ring).backward_memory(self.stage_sizes, self.ring),
            )
            memory = UPipePlan().backward_memory(replace(x, k=0), inner, self.stages, alone=False)
        memory += FLOAT32_BYTES * self.model.expansion
        q = self.tensor(heads * latent.head_dim)
        if self.sends_latents:  # stages add to gradients of latents in float32
            return memory + (w * self.tensor(latent.sent) if self.runs_in_stages else 0)
        if self.has_head_axis or self.runs_in_stages:
            return memory  # Ulysses has saved the expanded keys that it received; stages have keys of their own heads
        # The keys of this rank's tokens are expanded again. At the end their gradients, which are in float32 unless one
        # kernel computed them, are joined without positions, and rounded.
        w = w if self.ring > 1 else 1
        grads = q + w * self.tensor(heads * (latent.head_dim + latent.value_dim))
        joined = (w + (w > 1)) * self.tensor(heads * (latent.head_dim - latent.rotary_dim + latent.value_dim))
        return self.expansion(heads) + max(memory, grads + joined)

    def projection_gradients(self) -> float:
        """Gradients of the projections to queries that stages accumulate; `attention_backward` has the expansion's."""
        width = self.latent.head_dim * (self.latent.query_rank or self.model.dim)
        return self.summed_gradient * self.model.heads * width if self.stages.has_several_stages else 0

    def kept_attention(self) -> float:
        """Tensors that autograd saves for attention's backward, and for that of the projections to latents."""
        if self.projects_in_stages:
            return super().kept_attention()
        x = self.stage_sizes
        # The low-rank queries before and after their norm, and the projection to latents and rotary keys.
        low_rank = self.tensor(2 * (self.latent.query_rank or 0) + self.latent.sent)
        if not self.has_head_axis:
            return self.own_inputs + self.out + self.lse + low_rank
        # Ulysses saves what it has received, and the call its own rotary keys and latents.
        received = 0 if self.rotates_gathered else 2 * x.k
        return x.q + x.out + x.lse + received + self.tensor(self.latent.sent) + low_rank
