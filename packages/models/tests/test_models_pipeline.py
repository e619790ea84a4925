"""Pipeline stages of torch.distributed.pipelining with context parallelism inside: equal to one rank."""

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from armillary.attention import AttentionMask, build_attention
from armillary.core import SequenceLayout
from armillary.core.testing import mesh, relative_error
from armillary.models import Llama, LlamaConfig, initialize
from armillary.models.block import Context

CONFIG = LlamaConfig(vocab_size=37, dim=32, layers=4, heads=8, kv_heads=4, hidden_dim=48, head_dim=8)
ROWS, N, STAGES = 4, 48, 2
DOCUMENTS = AttentionMask(documents=[0, 11, 30, N])


class Stage(nn.Module):
    """A pipeline stage with every other block; the first stage has the embedding, the last the head."""

    def __init__(self, model: Llama, stage: int, layout: SequenceLayout, shard: int) -> None:
        super().__init__()
        per_stage = CONFIG.layers // STAGES
        decoder, blocks = model.model, range(stage * per_stage, (stage + 1) * per_stage)
        self.blocks = nn.ModuleDict({str(i): decoder.layers[i] for i in blocks})
        self.embed = decoder.embed_tokens if stage == 0 else None
        self.norm, self.head = (decoder.norm, model.lm_head) if stage == STAGES - 1 else (None, None)
        positions = layout.positions(shard)
        self.context = Context(len(positions), decoder.rotation(positions, torch.float64), DOCUMENTS, layout)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x, self.context.for_block(block))
        return x if self.norm is None else self.head(self.norm(x))


def model_and_batch(attention=None) -> tuple[Llama, Tensor, Tensor]:
    """Returns (model, ids, labels), unsharded and equal on every rank."""
    model = Llama(CONFIG, attention).double()
    initialize(model, seed=0)
    ids = torch.randint(CONFIG.vocab_size, (ROWS, N + 1), generator=torch.Generator().manual_seed(1))
    return model, ids[:, :-1], ids[:, 1:]


def micro_batch_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """This micro-batch's contribution to the mean over all labels."""
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / (ROWS * N)


def on_one_rank() -> tuple[float, dict[str, Tensor]]:
    """Returns (loss, gradients)."""
    model, ids, labels = model_and_batch()
    loss = micro_batch_loss(model(ids, mask=DOCUMENTS), labels)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def in_stages(attention: str, axes: Mapping[str, int], micro_batches: int) -> tuple[float, float, set[str]]:
    """Returns (global loss, largest gradient error of this stage, names of its parameters)."""
    over = mesh(pipe=STAGES, **axes)
    attend = build_attention(attention, over)
    model, ids, labels = model_and_batch(attend)
    layout, pipe = attend.layout(N), over["pipe"]
    last = pipe.get_local_rank() == STAGES - 1
    stage = Stage(model, pipe.get_local_rank(), layout, attend.shard)
    tokens = layout.sizes[attend.shard]
    rows = ROWS // micro_batches
    hidden, logits = (
        torch.empty(rows, tokens, width, dtype=torch.float64, requires_grad=True)
        for width in (CONFIG.dim, CONFIG.vocab_size)
    )
    # With example inputs and outputs, torch does not run the stage to infer their shapes.
    pipeline_stage = PipelineStage(
        stage,
        pipe.get_local_rank(),
        STAGES,
        torch.device("cpu"),
        input_args=hidden if pipe.get_local_rank() else ids[:rows, :tokens],
        output_args=logits if last else hidden,
        group=pipe.get_group(),
    )
    losses: list[Tensor] = []
    schedule = ScheduleGPipe(pipeline_stage, micro_batches, loss_fn=micro_batch_loss, scale_grads=False)
    inputs = () if pipe.get_local_rank() else (layout.take(ids, attend.shard),)
    schedule.step(*inputs, target=layout.take(labels, attend.shard) if last else None, losses=losses)
    loss = torch.stack([loss.detach() for loss in losses]).sum() if last else torch.zeros((), dtype=torch.float64)
    dist.all_reduce(loss)
    expected, owned, errors = on_one_rank()[1], set[str](), list[float]()
    parameters = {id(parameter) for parameter in stage.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in parameters:
            for axis in axes:  # ranks of a stage have other tokens, so gradients are summed
                dist.all_reduce(parameter.grad, group=over[axis].get_group())
            errors.append(relative_error(parameter.grad, expected[name]))
            owned.add(name)
    return loss.item(), max(errors), owned


@pytest.mark.parametrize(("attention", "axes"), [("ring", {"ring": 2}), ("upipe", {"ulysses": 2})])
def test_stages_with_context_parallelism_equal_one_rank(worlds, attention, axes):
    expected, gradients = on_one_rank()
    actual = worlds(STAGES * 2).run(in_stages, attention, axes, 2)
    assert all(loss == pytest.approx(expected, rel=1e-12) for loss, _, _ in actual)
    assert max(error for _, error, _ in actual) < 1e-11
    first, last = actual[0][2], actual[-1][2]
    assert first | last == set(gradients) and not first & last
