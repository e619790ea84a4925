"""`Peaks`: device memory, by category, at each moment of a training step that may be its peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from armillary.models.loss.linear_loss import loss_chunk_tokens
from armillary.plan.memory.estimate.category_bytes import CategoryBytes
from armillary.plan.memory.estimate.step import MASTER, StepSizes


@dataclass(frozen=True)
class Peaks:
    """Device memory at each moment of a step that may be its peak."""

    step: StepSizes

    def all(self) -> Iterator[tuple[str, CategoryBytes]]:
        """Yields (name of the moment, device memory)."""
        last = self.step.model.layers - 1
        yield "forward: attention", self.forward_attention()
        yield "loss", self.loss()
        yield "loss: backward", self.loss_backward()
        policy = self.step.checkpointing
        # Without prefetch, a recomputed segment fetches its checkpoints from the host one by one, so it is no peak.
        segment_ends = [] if policy.offload and not policy.prefetch else self.recomputed_segment_ends()
        # Candidates: block 0, when most gradients exist; block 1, which also prefetches block 0's checkpoints; and the
        # last blocks, one of each mixer at least, when all checkpoints exist.
        last_blocks = range(max(0, last - len(self.step.mixers)), last + 1)
        for i in sorted({0, min(1, last), *last_blocks, *segment_ends}, reverse=True):
            memory = self.in_backward(i) + self.stored_at(i)
            yield f"backward: mlp of block {i}", memory + self.backward_mlp(i)
            yield f"backward: attention of block {i}", memory + self.backward_attention(i)
            yield f"backward: gradients of block {i}", memory + self.backward_gradients(i)
        yield "backward: tables", self.tables()
        yield "optimizer", self.state() + CategoryBytes(gradients=self.shard(self.step.all_parameters))

    # -- persistent state ---------------------------------------------------------------------------------------------

    def shard(self, parameters: float) -> float:
        """Bytes of this rank's float32 shard of `parameters` numbers, if it is on the device."""
        return 0 if self.step.on_host else MASTER * parameters / self.step.sharing

    def state(self) -> CategoryBytes:
        """Master weights and AdamW's two moments."""
        weights = self.shard(self.step.all_parameters)
        return CategoryBytes(parameters=weights, optimizer=2 * weights)

    def baseline(self, unreduced_blocks: int | None = None) -> CategoryBytes:
        """Memory from the first block's forward to the last one's backward.

        State, the root's parameters, ids, labels and positions (8 bytes each), cosines and sines [T, 1, D / 2]. Under
        ZeRO stage 1 with several micro-batches all parameters, and gradients of earlier micro-batches, unsharded.

        Args:
            unreduced_blocks: in backward, blocks whose gradients are not reduced yet.
        """
        step, model = self.step, self.step.model
        batch = 8 * step.tokens * (2 * step.rows + 1)  # int64: ids and labels of each row, positions of all
        rotation = step.tokens * model.head_dim * MASTER if model.gated else 0  # D / 2 cosines and D / 2 sines
        memory = self.state() + CategoryBytes(parameters=step.e * model.root, other=batch + rotation)
        if not step.keeps_gradients:
            return memory
        reduced = 0
        if unreduced_blocks is not None:
            reduced = model.head + step.parameters(range(unreduced_blocks, model.layers))
        unsharded = CategoryBytes(
            parameters=step.e * (step.all_parameters - model.root), gradients=MASTER * (step.all_parameters - reduced)
        )
        return memory + unsharded

    def kept_gathered(self, blocks: int) -> float:
        """Bytes of parameters that ZeRO stage 2 keeps gathered: the embedding's and the first `blocks` blocks'."""
        step = self.step
        return step.e * (step.parameters(range(blocks)) + step.model.table) if step.zero_stage <= 2 else 0

    def gathered_parameters(self, size: float) -> float:
        """Bytes of gathered parameters, unless `baseline` counts all of them."""
        return 0 if self.step.keeps_gradients else size

    def in_backward(self, i: int) -> CategoryBytes:
        """FSDP's memory in block i's backward.

        FSDP has gathered block i and, by prefetch, the block below it; under ZeRO stage 2 all blocks below. Meanwhile
        it reduces the gradients of the block above, whose unsharded float32 copy is freed by the next reduction. A tied
        table keeps its gradient from the head until the one from the embedding exists.
        """
        step, model = self.step, self.step.model
        last = i == model.layers - 1
        unit_below = step.at(i - 1).model.block if i else model.table  # FSDP units: the embedding is below block 0
        reducing = MASTER * (model.head if last else step.at(i + 1).model.block)
        reduced = self.shard(model.head + step.parameters(range(i + 1, model.layers)))
        tied = step.e * model.vocabulary * model.dim if model.tied else 0
        gathered = self.kept_gathered(i + 1) or step.e * (step.at(i).model.block + unit_below)
        memory = CategoryBytes(parameters=self.gathered_parameters(gathered), gradients=reducing + reduced + tied)
        return self.baseline(i + 1) + memory

    # -- tensors stored for backward ----------------------------------------------------------------------------------

    def recomputed_segment_ends(self) -> list[int]:
        """Last blocks of segments with more than one block, which are recomputed from the first one's input."""
        return [segment[-1] for segment in self.step.segments if len(segment) > 1]

    def stored_tensors(self, blocks: Sequence[int], host: bool = False) -> CategoryBytes:
        """Tensors that `blocks` store in forward, on device or host: checkpoints, or autograd's under policy "none"."""
        step = self.step
        if step.checkpointing.policy == "none":
            saved = CategoryBytes()
            for sizes, mixer_blocks in step.by_mixer([] if host else blocks):
                saved += (self.saved_to_attention(sizes) + self.saved_after_attention(sizes)).times(len(mixer_blocks))
            return saved
        keeps = [step.keeps[i] for i in blocks if step.keeps[i].host == host]
        return self.checkpoints(sum(keep.x for keep in keeps), sum(keep.attention_output for keep in keeps))

    def copies_in_flight(self, i: int) -> CategoryBytes:
        """Checkpoints of block i in flight to the host: on the device until the next block, or the loss, is done."""
        if self.step.checkpointing.policy == "none" or not self.step.keeps[i].host:
            return CategoryBytes()
        return self.checkpoints(self.step.keeps[i].x, self.step.keeps[i].attention_output)

    def stored_below(self, i: int) -> CategoryBytes:
        """Stored tensors of all blocks below block i, or below the loss, on the device during its forward."""
        return self.stored_tensors(range(i)) + (self.copies_in_flight(i - 1) if i else CategoryBytes())

    def recomputed_checkpoints(self, blocks: Sequence[int], host: bool = False) -> CategoryBytes:
        """Checkpoints that `blocks` store when their segment is recomputed; the last block of a segment needs none."""
        step, keeps = self.step, self.step.keeps
        recomputed = [i for i in blocks if i + 1 < len(keeps) and not keeps[i + 1].x and keeps[i].host == host]
        without_output = sum(not keeps[i].attention_output for i in recomputed if step.at(i).mixer == "attention")
        return self.checkpoints(sum(not keeps[i].x for i in recomputed), without_output)

    def checkpoints(self, inputs: int, outputs: int) -> CategoryBytes:
        """Checkpoints of `inputs` block inputs and `outputs` attention outputs."""
        return CategoryBytes(checkpoints=inputs * self.step.x + outputs * (self.step.out + self.step.lse))

    def stored_before(self, i: int, host: bool) -> CategoryBytes:
        """Stored tensors of all blocks, on the device or on the host, when block i's backward begins."""
        first = next((segment.start for segment in self.step.segments if i in segment), i)
        return self.stored_tensors(range(i + 1), host) + self.recomputed_checkpoints(range(first, i), host)

    def saved_to_attention(self, step: StepSizes) -> CategoryBytes:
        """Tensors that autograd saves up to attention in a block: x, its norm, and attention's own."""
        return CategoryBytes(other=step.x + (step.gathered or step.x), attention=step.kept_attention())

    def saved_after_attention(self, step: StepSizes) -> CategoryBytes:
        """Tensors that autograd saves after attention in a block: out, unless attention saves it too, and the MLP's.

        The MLP's are its input, the input's norm, and gate, silu(gate), up and their product; without a gate, the
        tensors before and after GELU.
        """
        is_copied = step.mixer == "attention" and step.ulysses > 1 and not step.projects_in_stages
        out = step.out if is_copied else 0
        mlp = step.x + (step.gathered or step.x) + (4 if step.model.gated else 2) * step.tensor(step.model.inner)
        return CategoryBytes(attention=out, mlp=0 if step.checkpointing.tiled else mlp)

    def stored_at(self, i: int) -> CategoryBytes:
        """Stored, fetched, recomputed and prefetched tensors on the device in block i's backward.

        Under policy "none" those of the blocks below: block i releases its own tensors one by one.
        """
        step, block_below = self.step, range(i)[-1:]
        if step.checkpointing.policy == "none":
            return self.stored_tensors(range(i))
        keep = step.keeps[i]
        memory = self.stored_before(i, host=False) + self.checkpoints(
            not keep.x or keep.host, keep.attention_output and keep.host
        )
        return memory + (
            self.stored_tensors(block_below, True) + self.recomputed_checkpoints(block_below, True)
            if step.checkpointing.prefetch
            else CategoryBytes()
        )

    # -- moments ------------------------------------------------------------------------------------------------------

    def forward_attention(self) -> CategoryBytes:
        """Attention in the last block of each mixer, or in the block after the one that copies the most to the host.

        The block holds x and a buffer for its output. Its parameters count twice: the all-gather copies them out of its
        buffer.
        """
        last = self.step.model.layers - 1
        # The block with the largest copy to the host, which is in flight beside the next block. -1 selects block 0.
        largest_copy = -1
        if self.step.checkpointing.offload:
            largest_copy = max(range(last), key=lambda i: sum(self.copies_in_flight(i).values()), default=-1)
        last_blocks = range(max(0, last + 1 - len(self.step.mixers)), last + 1)
        candidates = (self.stored_below(i) + self.in_forward(i) for i in {*last_blocks, largest_copy + 1})
        return self.baseline() + max(candidates, key=lambda memory: sum(memory.values()))

    def in_forward(self, i: int) -> CategoryBytes:
        """Memory of block i in its forward, at attention's peak."""
        step = self.step.at(i)
        attention = step.out + step.lse + step.attention_forward() + step.gathered
        parameters = self.gathered_parameters(2 * step.e * step.model.block + self.kept_gathered(i))
        return CategoryBytes(parameters=parameters, checkpoints=step.x, attention=attention)

    def loss(self) -> CategoryBytes:
        """The last block's output, its norm and gradient, the head's float32 gradient, and a chunk's logits twice.

        The head's parameters count twice: the all-gather copies them out of its buffer.
        """
        step, model = self.step, self.step.model
        chunk = loss_chunk_tokens(step.rows * step.tokens, model.dim, step.tp * model.vocabulary, step.e, step.tp)
        # Of each token: logits and their float32 copy, both [V], and one float32 tensor [E].
        logits = chunk * (model.vocabulary * (step.e + MASTER if step.e < MASTER else step.e) + model.dim * MASTER)
        gradients = step.x + MASTER * model.vocabulary * model.dim
        parameters = 2 * step.e * model.head + self.kept_gathered(model.layers)
        head = CategoryBytes(parameters=self.gathered_parameters(parameters), other=2 * step.x, loss=gradients + logits)
        return self.baseline() + self.stored_below(model.layers) + head

    def loss_backward(self) -> CategoryBytes:
        """Copies of both gradients, scaled and in the compute dtype; the last block is being gathered."""
        step, model = self.step, self.step.model
        table = model.vocabulary * model.dim
        loss = 2 * step.x + (MASTER + step.e) * table
        last_block = step.at(model.layers - 1).model.block
        parameters = step.e * model.head + (self.kept_gathered(model.layers) or step.e * last_block)
        head = CategoryBytes(parameters=self.gathered_parameters(parameters), other=step.x, loss=loss)
        return self.baseline() + self.stored_below(model.layers) + head

    def backward_mlp(self, i: int) -> CategoryBytes:
        """Memory of block i's backward after attention, at the MLP's peak: dy, dx, dout and the MLP's tensors."""
        step = self.step.at(i)
        model = step.model
        memory = CategoryBytes(gradients=step.x)
        last_matrix = step.e * model.inner * model.dim  # the gradient of one weight of the MLP, just computed
        if step.checkpointing.policy == "none" and not step.checkpointing.tiled:
            mlp = (2 if model.gated else 1) * step.tensor(model.inner) + last_matrix + step.gathered
            return memory + self.stored_tensors([i]) + CategoryBytes(mlp=mlp)
        if step.checkpointing.policy == "none":
            memory += self.stored_tensors([i]) + CategoryBytes(gradients=step.x)
        chunk = max(self.mlp_chunk() + last_matrix, step.e * model.after_attention)
        return (
            memory
            + self.recomputed_output(i)
            + CategoryBytes(
                attention=step.out + step.recorded, mlp=step.summed_gradient * model.after_attention + chunk
            )
        )

    def mlp_chunk(self) -> float:
        """A chunk of tokens at the MLP's peak: the residual x + out, its norm, the output, and the MLP's tensors.

        Gated: gate, silu(gate), up, and the gradients of their product, of silu and of up. Otherwise: the tensor before
        GELU, and the gradients after and before it.
        """
        step, inner = self.step, self.step.model.inner
        inside = step.tensor((6 if step.model.gated else 3) * inner, step.tp * step.chunk_tokens)
        return inside + step.tensor(3 * step.model.dim, step.chunk_tokens)

    def recomputed_output(self, i: int) -> CategoryBytes:
        """Out and lse of block i in its backward, if they are recomputed."""
        step = self.step.at(i)
        recomputed = step.checkpointing.policy != "none" and not self.step.keeps[i].attention_output
        return CategoryBytes(attention=step.out + step.lse if recomputed else 0)

    def backward_attention(self, i: int) -> CategoryBytes:
        """Memory of attention's backward in block i, at its peak: dx, dout, and gradients of later layers."""
        step = self.step.at(i)
        if step.checkpointing.policy == "none":
            return self.backward_saved_attention(i)
        accumulated = step.summed_gradient * step.model.after_attention
        attention = step.out + step.recomputed_backward()
        return self.recomputed_output(i) + CategoryBytes(gradients=step.x, mlp=accumulated, attention=attention)

    def backward_saved_attention(self, i: int) -> CategoryBytes:
        """`backward_attention` under policy "none": the part after attention has freed its tensors."""
        step = self.step.at(i)
        projections = step.x + step.projection_gradients() if step.projects_in_stages else 0
        attention = step.out + (projections + step.attention_backward)
        gradients = step.x + step.e * step.model.after_attention
        return self.saved_to_attention(step) + CategoryBytes(gradients=gradients, attention=attention)

    def backward_gradients(self, i: int) -> CategoryBytes:
        """Memory at the end of block i's backward: gradients of its parameters, and a copy in the compute dtype."""
        step = self.step.at(i)
        model = step.model
        if step.checkpointing.policy == "none":
            return CategoryBytes(gradients=step.x + step.e * model.block)
        # Gradients that chunks summed in float32 are rounded to the compute dtype for FSDP2.
        rounded = step.e if step.summed_gradient != step.e else 0
        grads = CategoryBytes(gradients=step.x + rounded * model.block, mlp=step.summed_gradient * model.block)
        return self.recomputed_output(i) + grads

    def tables(self) -> CategoryBytes:
        """Gradient of the embedding, with a tied head's and the positions'; then its float32 reduction."""
        step, model = self.step, self.step.model
        table_size = model.root if model.tied else model.table
        reduced = self.shard(step.all_parameters - table_size)
        # Parameters and gradient of the table, dx, and block 0's float32 gradients, which are being reduced.
        before_reduction = step.e * table_size * 2 + step.x + MASTER * step.at(0).model.block
        before_reduction += step.e * model.vocabulary * model.dim if model.tied else 0  # the tied head's gradient
        if step.tp > 1:
            # The gradient of positions, which each rank has whole, is a partial sum: copied, and still beside them.
            unsharded = model.root - (model.vocabulary * model.dim if model.tied else 0)
            before_reduction += step.e * (model.root + 4 * unsharded)
        # The float32 input of the reduce-scatter, and the gradient that it was copied from.
        reduction = (MASTER + step.e + (MASTER if step.keeps_gradients else 0)) * table_size
        return self.state() + CategoryBytes(gradients=reduced + max(before_reduction, reduction))
