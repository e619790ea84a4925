"""Peak memory of a training step by closed formulas, within a few percent of `simulate`.

`estimate` compares the moments of a step that may be its peak. `Peaks` yields them in the order in which they come: the
forward of the last blocks, the loss, the backward of some blocks, and the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from armillary.models.internal import loss_chunk_tokens
from armillary.plan.memory.latent_sizes import step_sizes
from armillary.plan.memory.simulate import Job
from armillary.plan.memory.tensor_sizes import FLOAT32_BYTES, StepSizes


@dataclass(frozen=True)
class Estimate:
    """Peak bytes of a training step on one rank, of the device's memory and of the host's, each with its categories.

    Args:
        moment: moment of the step at which the device's memory peaks, such as "loss".
        moments: the device's bytes at each moment that may be the peak.
    """

    device: int
    device_breakdown: dict[str, int]
    host: int
    host_breakdown: dict[str, int]
    moment: str
    moments: dict[str, int]


def estimate(job: Job) -> Estimate:
    """Estimates the result of `simulate(job)` by formulas, without tensors.

    The formulas hold for 16 bits, causal masks, zigzag layouts, FlashAttention-2 (`SimulatedFlash`), and numbers of
    heads and tokens that are multiples of the number of ranks. Norms and activations are those of CUDA: RMSNorm saves
    only x for backward, and the backward of silu is one kernel.

    Raises:
        ValueError: the job's attention is not an `AttentionChoice`.
    """
    peaks = Peaks(step_sizes(job))
    moments = {name: sizes.round() for name, sizes in peaks.device()}
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    host = max((sizes.round() for sizes in peaks.host()), key=lambda sizes: sum(sizes.values()))
    return Estimate(
        device=sum(moments[moment].values()),
        device_breakdown=moments[moment],
        host=sum(host.values()),
        host_breakdown=host,
        moment=moment,
        moments={name: sum(sizes.values()) for name, sizes in moments.items()},
    )


class CategoryBytes(dict[str, float]):
    """Bytes by category: `CategoryBytes(attention=a, mlp=b) + CategoryBytes(mlp=c)` adds per category."""

    def __add__(self, other: CategoryBytes) -> CategoryBytes:
        total = CategoryBytes(self)
        for category, size in other.items():
            total[category] = total.get(category, 0) + size
        return total

    def round(self) -> dict[str, int]:
        """Returns bytes rounded to integers, the largest category first, without empty categories."""
        sizes = sorted(((round(size), category) for category, size in self.items()), reverse=True)
        return {category: size for size, category in sizes if size}


@dataclass(frozen=True)
class Peaks:
    """Memory at each moment of a step that may be its peak.

    Blocks are numbered from 0. Block i - 1 is the previous block, whose output block i takes; block i + 1 is the next
    one, whose backward comes earlier.
    """

    step: StepSizes

    def device(self) -> Iterator[tuple[str, CategoryBytes]]:
        """Yields (name of the moment, device memory)."""
        last = self.step.model.layers - 1
        yield "forward: attention", self.forward_attention()
        yield "loss", self.loss()
        yield "loss: backward", self.loss_backward()
        policy = self.step.checkpointing
        # Without prefetch, a recomputed segment fetches its checkpoints from the host one by one, so its last block is
        # no peak.
        segment_ends = [] if policy.offload and not policy.prefetch else self.recomputed_segment_ends()
        # Blocks in whose backward the peak may be: block 0, when most gradients exist; block 1, which also prefetches
        # block 0's checkpoints; and the last blocks, at least one of each mixer, when all checkpoints exist.
        last_blocks = range(max(0, last - len(self.step.mixers)), last + 1)
        for i in sorted({0, min(1, last), *last_blocks, *segment_ends}, reverse=True):
            memory = self.in_backward(i) + self.stored_at(i)
            yield f"backward: mlp of block {i}", memory + self.backward_mlp(i)
            yield f"backward: attention of block {i}", memory + self.backward_attention(i)
            yield f"backward: gradients of block {i}", memory + self.backward_gradients(i)
        yield "backward: tables", self.tables()
        yield "optimizer", self.state() + CategoryBytes(gradients=self.shard(self.step.all_parameters))

    def host(self) -> Iterator[CategoryBytes]:
        """Yields host memory in the backward of the last block and of segments' last blocks, and at the end."""
        step, model = self.step, self.step.model
        # Bytes on this rank per parameter of the model, for each of: master weight, gradient, and AdamW's two moments.
        shard = FLOAT32_BYTES / step.sharing if step.on_host else 0
        state = CategoryBytes(parameters=shard * step.all_parameters, optimizer=2 * shard * step.all_parameters)
        for i in {model.layers - 1, *self.recomputed_segment_ends()}:
            # The gradients of the head and of all blocks after block i are reduced, and copied to the host.
            reduced = CategoryBytes(gradients=shard * (model.head + step.parameters(range(i + 1, model.layers))))
            yield state + self.stored_before(i, host=True) + reduced
        yield state + CategoryBytes(gradients=shard * step.all_parameters)

    # -- persistent state ---------------------------------------------------------------------------------------------

    def shard(self, parameters: float) -> float:
        """Bytes of this rank's float32 shard of a tensor with `parameters` elements; 0 if it is on the host."""
        return 0 if self.step.on_host else FLOAT32_BYTES * parameters / self.step.sharing

    def state(self) -> CategoryBytes:
        """Master weights and AdamW's two moments."""
        weights = self.shard(self.step.all_parameters)
        return CategoryBytes(parameters=weights, optimizer=2 * weights)

    def baseline(self, unreduced_blocks: int | None = None) -> CategoryBytes:
        """Memory that exists from the forward of block 0 to its backward.

        In backward, the gradients of blocks 0 to `unreduced_blocks` - 1 are not reduced yet.
        """
        step, model = self.step, self.step.model
        batch = 8 * step.tokens * (2 * step.rows + 1)  # ids and labels of each row, and positions of all rows together
        rotary_dim = model.latent.rotary_dim if model.latent else model.head_dim
        rotation = step.tokens * rotary_dim * FLOAT32_BYTES if model.gated else 0  # D / 2 cosines and D / 2 sines
        # The state, the root's parameters, ids, labels and positions (int64), and RoPE's cosines and sines.
        memory = self.state() + CategoryBytes(parameters=step.e * model.root, other=batch + rotation)
        if not step.keeps_gradients:
            return memory
        # ZeRO stage 1 with several micro-batches keeps all parameters and earlier gradients, both unsharded.
        reduced = 0
        if unreduced_blocks is not None:
            reduced = model.head + step.parameters(range(unreduced_blocks, model.layers))
        unsharded = CategoryBytes(
            parameters=step.e * (step.all_parameters - model.root),
            gradients=FLOAT32_BYTES * (step.all_parameters - reduced),
        )
        return memory + unsharded

    def kept_gathered(self, blocks: int) -> float:
        """Bytes of embedding and first `blocks` blocks, whose parameters ZeRO stages 1 and 2 keep gathered."""
        step = self.step
        return step.e * (step.parameters(range(blocks)) + step.model.table) if step.zero_stage <= 2 else 0

    def gathered_parameters(self, size: float) -> float:
        """Returns `size`, or 0 if `baseline` counts all parameters as gathered already."""
        return 0 if self.step.keeps_gradients else size

    def in_backward(self, i: int) -> CategoryBytes:
        """Baseline, parameters and gradients of parameters in block i's backward, without activations."""
        step, model = self.step, self.step.model
        # FSDP has gathered the parameters of block i and, by prefetch, of the previous block; under ZeRO stages 1 and 2
        # those of all previous blocks. It reduces the gradients of the next block, whose float32 copy exists until the
        # next reduction.
        last = i == model.layers - 1
        previous_unit = step.at(i - 1).model.block if i else model.table  # the FSDP unit before block 0: the embedding
        reducing_bytes = FLOAT32_BYTES * (model.head if last else step.at(i + 1).model.block)
        reduced_bytes = self.shard(model.head + step.parameters(range(i + 1, model.layers)))
        # A tied table has its gradient from the head already, and keeps it until the embedding adds the other part.
        tied_bytes = step.e * model.vocabulary * model.dim if model.tied else 0
        gathered_bytes = self.kept_gathered(i + 1) or step.e * (step.at(i).model.block + previous_unit)
        gradient_bytes = reducing_bytes + reduced_bytes + tied_bytes
        memory = CategoryBytes(parameters=self.gathered_parameters(gathered_bytes), gradients=gradient_bytes)
        return self.baseline(i + 1) + memory

    # -- tensors stored for backward ----------------------------------------------------------------------------------

    def recomputed_segment_ends(self) -> list[int]:
        """Last block of each segment of several blocks. Such a segment is recomputed from its first block's input."""
        return [segment[-1] for segment in self.step.segments if len(segment) > 1]

    def stored_tensors(self, blocks: Sequence[int], host: bool = False) -> CategoryBytes:
        """Tensors that `blocks` store in forward: checkpoints or, under policy "none", those that autograd saves."""
        step = self.step
        if step.checkpointing.policy == "none":
            saved_tensors = CategoryBytes()
            for sizes, mixer_blocks in step.by_mixer([] if host else blocks):
                # After attention: out, if Ulysses' all-to-all copies it. Otherwise attention and the output projection
                # save the same tensor.
                is_copied = sizes.mixer == "attention" and sizes.ulysses > 1 and not sizes.projects_in_stages
                # The MLP: its input, the normed input, and inside gate, silu(gate), up and the product of the last two;
                # without a gate the tensors before and after GELU.
                inside = (4 if sizes.model.gated else 2) * sizes.tensor(sizes.model.inner)
                mlp = 0 if step.checkpointing.tiled else sizes.x + (sizes.gathered or sizes.x) + inside
                block_tensors = self.saved_to_attention(sizes)
                block_tensors += CategoryBytes(attention=sizes.out if is_copied else 0, mlp=mlp)
                saved_tensors += CategoryBytes({name: len(mixer_blocks) * size for name, size in block_tensors.items()})
            return saved_tensors
        keeps = [step.keeps[i] for i in blocks if step.keeps[i].host == host]
        return self.checkpoints(sum(keep.x for keep in keeps), sum(keep.attention_output for keep in keeps))

    def copies_in_flight(self, i: int) -> CategoryBytes:
        """Checkpoints of block i in flight to the host, until the forward of the next block or the loss is done."""
        if self.step.checkpointing.policy == "none" or not self.step.keeps[i].host:
            return CategoryBytes()
        return self.checkpoints(self.step.keeps[i].x, self.step.keeps[i].attention_output)

    def stored_by_previous(self, i: int) -> CategoryBytes:
        """Tensors of blocks 0 to i - 1 on the device in block i's forward. For the loss, i is the number of blocks."""
        return self.stored_tensors(range(i)) + (self.copies_in_flight(i - 1) if i else CategoryBytes())

    def recomputed_checkpoints(self, blocks: Sequence[int], host: bool = False) -> CategoryBytes:
        """Checkpoints that `blocks` store when their segment is recomputed; the last block of a segment needs none."""
        step, keeps = self.step, self.step.keeps
        # Block i is not the last of its segment if the next block does not keep its input.
        storing_blocks = [i for i in blocks if i + 1 < len(keeps) and not keeps[i + 1].x and keeps[i].host == host]
        without_output = sum(not keeps[i].attention_output for i in storing_blocks if step.at(i).mixer == "attention")
        return self.checkpoints(sum(not keeps[i].x for i in storing_blocks), without_output)

    def checkpoints(self, inputs: int, outputs: int) -> CategoryBytes:
        """Bytes of checkpoints: of `inputs` block inputs, and of `outputs` attention outputs with their lse."""
        return CategoryBytes(checkpoints=inputs * self.step.x + outputs * (self.step.out + self.step.lse))

    def stored_before(self, i: int, host: bool) -> CategoryBytes:
        """Stored tensors of blocks 0 to i, on the device or on the host, when block i's backward begins."""
        first = next((segment.start for segment in self.step.segments if i in segment), i)
        return self.stored_tensors(range(i + 1), host) + self.recomputed_checkpoints(range(first, i), host)

    def saved_to_attention(self, block: StepSizes) -> CategoryBytes:
        """Tensors that autograd saves in a block up to attention: x, the normed x, and the tensors of attention."""
        return CategoryBytes(other=block.x + (block.gathered or block.x), attention=block.kept_attention())

    def stored_at(self, i: int) -> CategoryBytes:
        """Checkpoints on the device in block i's backward: stored, recomputed, or copied back from the host."""
        step = self.step
        if step.checkpointing.policy == "none":
            # Of the previous blocks. Each moment counts those of block i, which backward frees one by one.
            return self.stored_tensors(range(i))
        # Stored on the device, and block i's own ones that were recomputed or copied from the host.
        keep = step.keeps[i]
        memory = self.stored_before(i, host=False)
        memory += self.checkpoints(not keep.x or keep.host, keep.attention_output and keep.host)
        if step.checkpointing.prefetch:  # copies of the previous block's
            previous_block = range(i)[-1:]
            memory += self.stored_tensors(previous_block, host=True)
            memory += self.recomputed_checkpoints(previous_block, host=True)
        return memory

    # -- moments ------------------------------------------------------------------------------------------------------

    def forward_attention(self) -> CategoryBytes:
        """Largest memory of a block at attention's peak in forward."""
        # The last blocks, at least one of each mixer, when most checkpoints exist, and the block after the one that
        # copies the most to the host, because that copy is in flight meanwhile.
        last = self.step.model.layers - 1
        largest_copy = -1  # without offload the block after this one is block 0
        if self.step.checkpointing.offload:
            largest_copy = max(range(last), key=lambda i: sum(self.copies_in_flight(i).values()), default=-1)
        last_blocks = range(max(0, last + 1 - len(self.step.mixers)), last + 1)

        def in_forward(i: int) -> CategoryBytes:
            block = self.step.at(i)
            # Attention's tensors with a buffer for out. Parameters count twice: the all-gather copies them out of its
            # buffer.
            attention = block.out + block.lse + block.attention_forward() + block.gathered
            parameters = self.gathered_parameters(2 * block.e * block.model.block + self.kept_gathered(i))
            memory = CategoryBytes(parameters=parameters, checkpoints=block.x, attention=attention)
            return self.stored_by_previous(i) + memory

        candidates = map(in_forward, {*last_blocks, largest_copy + 1})
        return self.baseline() + max(candidates, key=lambda memory: sum(memory.values()))

    def loss(self) -> CategoryBytes:
        """Memory of the loss, at its peak in a chunk of tokens."""
        step, model = self.step, self.step.model
        chunk = loss_chunk_tokens(step.rows * step.tokens, model.dim, step.tp * model.vocabulary, step.e, step.tp)
        # For each token of the chunk: logits [V], in 16 bits also their float32 copy [V], and a float32 tensor [E].
        logits = chunk * (
            model.vocabulary * (step.e + FLOAT32_BYTES if step.e < FLOAT32_BYTES else step.e)
            + model.dim * FLOAT32_BYTES
        )
        # The gradients of the normed output and, in float32, of the head.
        gradients = step.x + FLOAT32_BYTES * model.vocabulary * model.dim
        # Parameters count twice: the all-gather copies them out of its buffer.
        parameters = 2 * step.e * model.head + self.kept_gathered(model.layers)
        head = CategoryBytes(parameters=self.gathered_parameters(parameters), other=2 * step.x, loss=gradients + logits)
        return self.baseline() + self.stored_by_previous(model.layers) + head

    def loss_backward(self) -> CategoryBytes:
        """Memory when the loss's backward scales its two gradients, while FSDP gathers the last block."""
        step, model = self.step, self.step.model
        table = model.vocabulary * model.dim
        # The gradients of the last block's output and of the head: as forward computed them, and scaled.
        loss = 2 * step.x + (FLOAT32_BYTES + step.e) * table
        last_block = step.at(model.layers - 1).model.block
        parameters = step.e * model.head + (self.kept_gathered(model.layers) or step.e * last_block)
        head = CategoryBytes(parameters=self.gathered_parameters(parameters), other=step.x, loss=loss)
        return self.baseline() + self.stored_by_previous(model.layers) + head

    def backward_mlp(self, i: int) -> CategoryBytes:
        """Memory of block i's backward in the part after attention, at the MLP's peak."""
        block = self.step.at(i)
        model = block.model
        memory = CategoryBytes(gradients=block.x)  # dy, the gradient of the block's output
        weight_gradient = block.e * model.inner * model.dim  # of one weight of the MLP, just computed
        if block.checkpointing.policy == "none" and not block.checkpointing.tiled:
            # Gradients inside the MLP: of gate and up, or of the tensor before GELU.
            mlp = (2 if model.gated else 1) * block.tensor(model.inner) + weight_gradient + block.gathered
            return memory + self.stored_tensors([i]) + CategoryBytes(mlp=mlp)
        if block.checkpointing.policy == "none":
            # gradients: dx, for which checkpoint policies reuse the memory of dy.
            memory += self.stored_tensors([i]) + CategoryBytes(gradients=block.x)
        # A chunk of tokens. Inside the MLP with a gate, 6 tensors: gate, silu(gate), up, and the gradients of their
        # product, of silu(gate) and of up. Without, 3: the one before GELU, and the gradients after and before it.
        step = self.step
        inside = step.tensor((6 if step.model.gated else 3) * step.model.inner, step.tp * step.chunk_tokens)
        # 3 tensors [E]: the residual x + out, its norm, and the output.
        chunk = inside + step.tensor(3 * step.model.dim, step.chunk_tokens) + weight_gradient
        # After the last chunk, all gradients in the compute dtype may be larger.
        chunk = max(chunk, block.e * model.after_attention)
        summed_gradients = block.summed_gradient * model.after_attention
        # attention: dout, and the tensors that a layer with a state recorded for its backward.
        tensors = CategoryBytes(attention=block.out + block.recorded, mlp=summed_gradients + chunk)
        return memory + self.recomputed_output(i) + tensors

    def recomputed_output(self, i: int) -> CategoryBytes:
        """Bytes of out and lse of block i in its backward, if they are recomputed."""
        block = self.step.at(i)
        is_recomputed = block.checkpointing.policy != "none" and not self.step.keeps[i].attention_output
        return CategoryBytes(attention=block.out + block.lse if is_recomputed else 0)

    def backward_attention(self, i: int) -> CategoryBytes:
        """Memory of block i's backward at attention's peak: dx, dout, and gradients of the part after attention."""
        block = self.step.at(i)
        if block.checkpointing.policy == "none":  # the part after attention has freed its tensors
            projections = block.x + block.projection_gradients() if block.projects_in_stages else 0
            attention = block.out + (projections + block.attention_backward)
            gradients = block.x + block.e * block.model.after_attention
            return self.saved_to_attention(block) + CategoryBytes(gradients=gradients, attention=attention)
        after_attention = block.summed_gradient * block.model.after_attention
        attention = block.out + block.recomputed_backward()  # dout, and the tensors of attention's backward
        return self.recomputed_output(i) + CategoryBytes(gradients=block.x, mlp=after_attention, attention=attention)

    def backward_gradients(self, i: int) -> CategoryBytes:
        """Memory at the end of block i's backward: dx, and gradients of all parameters of the block."""
        block = self.step.at(i)
        parameters = block.model.block
        if block.checkpointing.policy == "none":
            return CategoryBytes(gradients=block.x + block.e * parameters)
        # Gradients that chunks summed in float32 are also copied to the compute dtype, in which FSDP2 takes them.
        rounded = block.e if block.summed_gradient != block.e else 0
        gradients = CategoryBytes(gradients=block.x + rounded * parameters, mlp=block.summed_gradient * parameters)
        return self.recomputed_output(i) + gradients

    def tables(self) -> CategoryBytes:
        """Memory at the end of backward: the larger of the embedding's backward and the reduction of its gradient."""
        step, model = self.step, self.step.model
        # A tied table is a part of the root, which is reduced as a whole, with norms and learned positions.
        table_size = model.root if model.tied else model.table
        reduced = self.shard(step.all_parameters - table_size)
        # 1. Parameters and gradient of the table, dx, and block 0's float32 gradients, which are being reduced.
        before_reduction = step.e * table_size * 2 + step.x + FLOAT32_BYTES * step.at(0).model.block
        before_reduction += step.e * model.vocabulary * model.dim if model.tied else 0  # the tied head's gradient
        if step.tp > 1:
            # Each tensor-parallel rank has all learned positions, and its gradient of them is a partial sum. The
            # gradient is copied, and the original still exists.
            unsharded = model.root - (model.vocabulary * model.dim if model.tied else 0)
            before_reduction += step.e * (model.root + 4 * unsharded)
        # 2. The float32 input of the reduce-scatter, the gradient from which it was copied, and under ZeRO stage 1 the
        # gradient of earlier micro-batches.
        reduction = (FLOAT32_BYTES + step.e + (FLOAT32_BYTES if step.keeps_gradients else 0)) * table_size
        return self.state() + CategoryBytes(gradients=reduced + max(before_reduction, reduction))
