"""The moments of a training step at which a device may hold most, and what it holds then, by category."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from armillary.models.loss.linear_loss import chunk_rows
from armillary.plan.memory.estimate.held import Held
from armillary.plan.memory.estimate.step import MASTER, StepSizes


@dataclass(frozen=True)
class Moments:
    """The moments of a step."""

    step: StepSizes

    def all(self) -> Iterator[tuple[str, Held]]:
        """(what is being computed, what is held) of each."""
        last = self.step.model.layers - 1
        yield "forward: attention", self.forward_attention()
        yield "loss", self.loss()
        yield "loss: backward", self.loss_backward()
        kept = self.step.checkpointing
        again = (
            [] if kept.offload and not kept.prefetch else self.run_again()
        )  # what comes from the host comes one by one
        for i in sorted({0, min(1, last), max(0, last - 1), last, *again}, reverse=True):  # 1 brings back what 0 kept
            yield f"backward: mlp of block {i}", self.backward_rest(i)
            yield f"backward: attention of block {i}", self.backward_attention(i)
            yield f"backward: gradients of block {i}", self.backward_end(i)
        yield "backward: tables", self.tables()
        yield "optimizer", self.state() + Held(gradients=self.shard(self.step.model.all))

    # -- what persists ------------------------------------------------------------------------------------------------

    def shard(self, parameters: float) -> float:
        """Of so many parameters or gradients, what this rank has on its device in float32."""
        return 0 if self.step.on_host else MASTER * parameters / self.step.sharing

    def state(self) -> Held:
        """Master weights, and AdamW's two moments."""
        weights = self.shard(self.step.model.all)
        return Held(parameters=weights, optimizer=2 * weights)

    def always(self) -> Held:
        """What is held from the first block's forward to the last one's backward.

        The root's parameters, ids, labels and positions (8 bytes each), and cosines and sines [T, 1, D / 2].
        """
        step, model = self.step, self.step.model
        batch = 8 * step.tokens * (2 * step.rows + 1)
        rotation = step.tokens * model.head_dim * MASTER if model.gated else 0
        return self.state() + Held(parameters=step.e * model.root, other=batch + rotation)

    def in_backward(self, i: int) -> Held:
        """While block i is differentiated: it and the unit below are gathered, and FSDP sums gradients of that above.

        Their float32 copy, unsharded, is given back when the next ones are summed. A tied table's gradient from the
        head waits for that from the embedding.
        """
        step, model = self.step, self.step.model
        last = i == model.layers - 1
        below = model.block if i else model.table
        summed = MASTER * (model.head if last else model.block)
        done = self.shard(model.head + (model.layers - 1 - i) * model.block)
        tied = step.e * model.vocabulary * model.dim if model.tied else 0
        held = Held(parameters=step.e * (model.block + below), gradients=summed + done + tied)
        return self.always() + held

    # -- what blocks keep ---------------------------------------------------------------------------------------------

    def run_again(self) -> list[int]:
        """The last blocks of segments that are run again."""
        return [segment[-1] for segment in self.step.segments if len(segment) > 1]

    def kept(self, blocks: Sequence[int], host: bool = False) -> Held:
        """Of these blocks from forward on, on the device or on the host: by policy, or all that autograd wants."""
        step = self.step
        if step.checkpointing.policy == "none":
            return (self.kept_before_rest() + self.kept_by_rest()).times(0 if host else len(blocks))
        keeps = [step.keeps[i] for i in blocks if step.keeps[i].host == host]
        return self.checkpoints(sum(keep.x for keep in keeps), sum(keep.attended for keep in keeps))

    def leaving(self, i: int) -> Held:
        """What block i copies to the host: on the device still, until the next block, or the loss, is done."""
        if self.step.checkpointing.policy == "none" or not self.step.keeps[i].host:
            return Held()
        return self.checkpoints(self.step.keeps[i].x, self.step.keeps[i].attended)

    def below(self, i: int) -> Held:
        """What the device holds of the blocks below block i, or below the loss, while that runs forward."""
        return self.kept(range(i)) + (self.leaving(i - 1) if i else Held())

    def made_again(self, blocks: Sequence[int], host: bool = False) -> Held:
        """Of these, what is made and kept when their segment is run again; of its last block, nothing."""
        keeps = [self.step.keeps[i] for i in blocks if i + 1 < len(self.step.keeps) and not self.step.keeps[i + 1].x]
        keeps = [keep for keep in keeps if keep.host == host]
        return self.checkpoints(sum(not keep.x for keep in keeps), sum(not keep.attended for keep in keeps))

    def checkpoints(self, inputs: int, attended: int) -> Held:
        """So many blocks' inputs, and results of attention."""
        return Held(checkpoints=inputs * self.step.x + attended * (self.step.out + self.step.lse))

    def before(self, i: int, host: bool) -> Held:
        """What the device, or the host, holds of blocks when block i is about to be differentiated."""
        first = next((segment.start for segment in self.step.segments if i in segment), i)
        return self.kept(range(i + 1), host) + self.made_again(range(first, i), host)

    def kept_before_rest(self) -> Held:
        """By autograd: x and x normed, and what attention keeps."""
        step = self.step
        return Held(other=2 * step.x, attention=step.kept_attention())

    def kept_by_rest(self) -> Held:
        """By autograd, of what follows attention: out, if attention keeps that of other tokens, and the MLP's tensors.

        These are its input, that normed, and inside: the gate, silu of it, up and their product, or before and after
        GELU.
        """
        step = self.step
        out = step.out if step.ulysses > 1 and not step.projects_in_stages else 0
        mlp = 2 * step.x + (4 if step.model.gated else 2) * step.tensor(step.model.inner)
        return Held(attention=out, mlp=0 if step.checkpointing.tiled else mlp)

    def kept_at(self, i: int) -> Held:
        """When block i is differentiated: with what it takes back or has computed again, and if so asked with what the
        block below has on the host."""
        step, below = self.step, range(i)[-1:]
        if step.checkpointing.policy == "none":
            return self.kept(range(i + 1))
        keep = step.keeps[i]
        held = self.before(i, host=False) + self.checkpoints(not keep.x or keep.host, keep.attended and keep.host)
        return held + (self.kept(below, True) + self.made_again(below, True) if step.checkpointing.prefetch else Held())

    # -- moments ------------------------------------------------------------------------------------------------------

    def forward_attention(self) -> Held:
        """In the last block, or behind the one that copies most to the host. Of the block itself there are x and room
        for the result; a forward gathers into a copy first."""
        step, model = self.step, self.step.model
        most = max(range(model.layers - 1), key=lambda i: sum(self.leaving(i).values()), default=-1)
        below = max((self.below(i) for i in {model.layers - 1, most + 1}), key=lambda held: sum(held.values()))
        attention = step.out + step.lse + step.attention_forward()
        own = Held(parameters=2 * step.e * model.block, checkpoints=step.x, attention=attention)
        return self.always() + below + own

    def loss(self) -> Held:
        """The last block's result, that normed, its gradient, that of the head in float32, and a chunk's logits twice.

        The head has been gathered, and copied from where it was gathered to.
        """
        step, model = self.step, self.step.model
        chunk = chunk_rows(step.rows * step.tokens, model.dim, model.vocabulary, step.e)
        logits = chunk * (model.vocabulary * (step.e + MASTER if step.e < MASTER else step.e) + model.dim * MASTER)
        gradients = step.x + MASTER * model.vocabulary * model.dim
        held = Held(parameters=2 * step.e * model.head, other=2 * step.x, loss=gradients + logits)
        return self.always() + self.below(model.layers) + held

    def loss_backward(self) -> Held:
        """Both gradients once more, scaled and in the compute dtype; the last block is being gathered."""
        step, model = self.step, self.step.model
        table = model.vocabulary * model.dim
        loss = 2 * step.x + (MASTER + step.e) * table
        held = Held(parameters=step.e * (model.head + model.block), other=step.x, loss=loss)
        return self.always() + self.below(model.layers) + held

    def backward_rest(self, i: int) -> Held:
        """What follows attention in block i, where the MLP holds most: dy, dx and dout, and the MLP's tensors."""
        step, model = self.step, self.step.model
        held = self.in_backward(i) + self.kept_at(i) + Held(gradients=step.x)
        last_matrix = step.e * model.inner * model.dim
        if step.checkpointing.policy == "none" and not step.checkpointing.tiled:
            return held + Held(mlp=(2 if model.gated else 1) * step.tensor(model.inner) + last_matrix)
        if step.checkpointing.policy == "none":
            held += Held(gradients=step.x)
        shares = max(self.mlp_of_piece() + last_matrix, step.e * model.rest)
        return held + self.attended(i) + Held(attention=step.out, mlp=step.total * model.rest + shares)

    def mlp_of_piece(self) -> float:
        """A piece where its MLP holds most: x with out added, that normed, the result, and the MLP's tensors.

        Gated: the gate, silu of it and up, and the gradients of their product, of silu and of up. Else: before GELU,
        and gradients after and before it.
        """
        step, inner = self.step, self.step.model.inner
        return step.tensor(3 * step.model.dim + (6 if step.model.gated else 3) * inner, step.piece)

    def attended(self, i: int) -> Held:
        """Out and lse of block i, which is being differentiated, where they are computed again."""
        again = self.step.checkpointing.policy != "none" and not self.step.keeps[i].attended
        return Held(attention=self.step.out + self.step.lse if again else 0)

    def backward_attention(self, i: int) -> Held:
        """Attention of block i where it holds most, after what follows it: dx, dout, and sums of gradients."""
        step = self.step
        if step.checkpointing.policy == "none":
            return self.backward_attention_kept(i)
        held = self.in_backward(i) + self.kept_at(i) + self.attended(i)
        sums = step.total * step.model.rest
        attention = step.out + self.projections_summed() + step.attention_backward()
        return held + Held(gradients=step.x, mlp=sums, attention=attention)

    def projections_summed(self) -> float:
        """Gradients of the projections so far: to queries after the first stage, and to keys after the first round."""
        step, model, stages = self.step, self.step.model, self.step.stages
        queries = model.heads if stages.several else 0
        keys = 2 * model.key_heads if stages.rounds else 0
        return step.total * (queries + keys) * model.head_dim * model.dim

    def backward_attention_kept(self, i: int) -> Held:
        """Likewise under policy "none": of the block, only what comes before `rest` is left."""
        step, model = self.step, self.step.model
        held = self.in_backward(i) + self.kept(range(i)) + self.kept_before_rest()
        projecting = step.x + self.projections_summed() if step.projects_in_stages else 0
        work = projecting + step.attention_backward()
        return held + Held(gradients=step.x + step.e * model.rest, attention=step.out + work)

    def backward_end(self, i: int) -> Held:
        """Block i is done: sums of its parameters' gradients, and the same in the compute dtype."""
        step, model = self.step, self.step.model
        if step.checkpointing.policy == "none":
            return self.in_backward(i) + self.kept(range(i)) + Held(gradients=step.x + step.e * model.block)
        rounded = step.e if step.total != step.e else 0
        grads = Held(gradients=step.x + rounded * model.block, mlp=step.total * model.block)
        return self.in_backward(i) + self.kept_at(i) + self.attended(i) + grads

    def tables(self) -> Held:
        """The embedding's gradient (with it, a tied head's, and positions'), and then its sum in float32."""
        step, model = self.step, self.step.model
        numbers = model.root if model.tied else model.table
        done = self.shard(model.all - numbers)
        first = step.e * numbers * 2 + step.x + MASTER * model.block
        first += step.e * model.vocabulary * model.dim if model.tied else 0
        second = (MASTER + step.e) * numbers
        return self.state() + Held(gradients=done + max(first, second))
