"""Unmodified transformers hybrids: prepared models, documents and trees of layers with a state."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from tiny_models import LENGTH, VOCABULARY, build, in_float64, tokens, transformers

from armillary.attention import AttentionMask, ContextParallel, Local, sequence
from armillary.core.testing import mesh, relative_error
from armillary.integrations import register_transformers

DOCUMENTS = ((0, 2, 21, 30, LENGTH), (0, 31, LENGTH))


class HeadWithoutOptions(transformers.Mamba2PreTrainedModel):
    """A user's model whose forward takes no options; its backbone has the same config."""

    def __init__(self, config):
        super().__init__(config)
        self.backbone = transformers.Mamba2Model(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, VOCABULARY, bias=False)
        self.post_init()

    def forward(self, input_ids, position_ids=None):
        return self.lm_head(self.backbone(input_ids)[0])


def build_user_model():
    whole = build("Mamba2", "eager")
    built = HeadWithoutOptions(whole.config).double().train()
    built.load_state_dict(whole.state_dict())
    return built


def prepared_on_a_shard(users: bool):
    """Loss and gradients of a prepared model whose layers are recomputed in backward."""
    cp = ContextParallel("ring", mesh(ring=2))
    built = cp.prepare(build_user_model() if users else build("Mamba2", "eager"))
    built.gradient_checkpointing_enable({"use_reentrant": False})
    with in_float64():
        with cp.shard(tokens(), documents=DOCUMENTS) as batch:
            # Only the options of the backbone tell it the layout.
            output = built(batch.ids, batch.position_ids) if users else built(**batch.inputs, use_cache=False).loss
            loss = cp.loss(output, batch)
        with cp.shard(tokens()) as batch, torch.no_grad():  # other documents, before backward recomputes the layers
            built(batch.ids, position_ids=batch.position_ids)
        loss.backward()
    cp.reduce_gradients(built)
    return float(loss), [p.grad for p in built.parameters()]


def test_a_prepared_model_need_not_pass_options_to_its_backbone(worlds):
    whole, ids, losses = build("Mamba2", "eager"), tokens(), []
    with in_float64():
        for row, ends in enumerate(DOCUMENTS):
            for a, b in pairwise(ends):
                logits = whole(ids[row : row + 1, a:b], use_cache=False).logits
                losses.append(F.cross_entropy(logits[0, :-1], ids[row, a + 1 : b], reduction="sum"))
        loss = sum(losses) / sum(b - a - 1 for ends in DOCUMENTS for a, b in pairwise(ends))
        loss.backward()
    for users in (False, True):
        for actual, gradients in worlds(2).run(prepared_on_a_shard, users):
            assert abs(actual - loss.item()) < 1e-9 * loss.item(), users
            for (name, parameter), gradient in zip(whole.named_parameters(), gradients, strict=True):
                assert relative_error(gradient, parameter.grad) < 1e-8, (users, name)


def test_paths_of_a_tree_equal_separate_rows():
    register_transformers(Local())
    tree = AttentionMask.tree((0, 20, 31, 40, LENGTH), (-1, 0, 1, 0))
    positions = torch.cat([torch.arange(40), torch.arange(20, 28)]).expand(2, -1)
    ids, alone = tokens(), build("Qwen3Next", "eager")
    with in_float64(), sequence(layout=Local().layout(LENGTH), mask=tree):
        logits = build("Qwen3Next")(ids, use_cache=False, position_ids=positions).logits
    for path in (torch.arange(40), torch.cat([torch.arange(20), torch.arange(40, LENGTH)])):
        with in_float64():
            expected = alone(ids[:, path], use_cache=False).logits
        assert relative_error(logits[:, path], expected) < 1e-9
