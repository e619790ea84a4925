"""Forwards of layers with attention of their own: each is that of plain attention, or refused."""

import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tiny_models import COUNTING, tokens, transformers
from torch import nn
from transformers.models.megatron_bert.modeling_megatron_bert import MegatronBertSelfAttention

from armillary.attention import ContextParallel, Local
from armillary.core.testing import relative_error

# From scores q kᵀ / sqrt(D), the mask and values to the output.
PLAIN = {
    "scale after the mask": lambda s, m, v: torch.softmax((s * 0.5 + m) / torch.tensor(2.0), -1) @ v,
    "scale of an integer": lambda s, m, v: F.softmax(2 * s + m, dim=-1) @ v,
    "mask first": lambda s, m, v: torch.matmul(torch.softmax(m + s, -1), v),
    "softmax in float32": lambda s, m, v: F.softmax((s + m).float(), dim=-1, dtype=torch.float32).to(v.dtype) @ v,
    "sum of two": lambda s, m, v: torch.softmax(s + m, -1) @ v + torch.softmax(s * 0.5 + m, -1) @ v,
}
OTHER = {
    "less their maximum": lambda s, m, v: torch.softmax(s + m - (s + m).max(-1, keepdim=True)[0], -1) @ v,
    "negative": lambda s, m, v: torch.softmax(-s + m, -1) @ v,
    "negative factor": lambda s, m, v: torch.softmax(s * -1 + m, -1) @ v,
    "no mask": lambda s, m, v: torch.softmax(s, -1) @ v,
    "two masks": lambda s, m, v: torch.softmax(s + m + m, -1) @ v,
    "bias": lambda s, m, v: torch.softmax(s + torch.ones(48, 48) + m, -1) @ v,
    "softcap": lambda s, m, v: torch.softmax(torch.tanh(s) + m, -1) @ v,
    "softmax over queries": lambda s, m, v: torch.softmax(s + m, -2) @ v,
    "log of softmax": lambda s, m, v: torch.log_softmax(s + m, -1).exp() @ v,
    "exp": lambda s, m, v: (s + m).exp() @ v,
    "other weights": lambda s, m, v: (torch.softmax(s + m, -1) * 0.5) @ v,
    "no softmax": lambda s, m, v: (s + m) @ v,
    "transposed": lambda s, m, v: torch.softmax(s.transpose(-1, -2) + m, -1) @ v,
    "keys left out": lambda s, m, v: torch.softmax(s[..., :6] + m, -1) @ v[:, :, :6],
    "trained scale": lambda s, m, v: torch.softmax(s * nn.Parameter(torch.ones(())) + m, -1) @ v,
    "scale by head": lambda s, m, v: torch.softmax(s * torch.ones(4, 1, 1) + m, -1) @ v,
    "filled": lambda s, m, v: torch.softmax((s + m).masked_fill(torch.zeros(48, 48).bool(), -1e9), -1) @ v,
    "another attention beside": lambda s, m, v: F.softmax(v[..., 0], -1)[..., None] * v + torch.softmax(s + m, -1) @ v,
    "parts joined": lambda s, m, v: torch.softmax(torch.cat([s, s], -1)[..., :48] + m, -1) @ v,
    "einsum": lambda s, m, v: torch.einsum("bhts,bhsd->bhtd", torch.softmax(s + m, -1), v),
    "of values alone": lambda s, m, v: v,
}


def forward_of(attend):
    def forward(self, hidden_states, attention_mask=None, **_):
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        q, k, v = (x(hidden_states).view(shape).transpose(1, 2) for x in (self.query, self.key, self.value))
        out = attend(q @ k.transpose(-1, -2) / math.sqrt(shape[-1]), attention_mask, v)
        return out.transpose(1, 2).reshape(hidden_states.shape), torch.softmax  # by which it is recognized

    return forward


@pytest.mark.parametrize("form", [*PLAIN, *OTHER])
def test_other_forms_of_attention_are_refused(form):
    config = transformers.MegatronBertConfig(**COUNTING, is_decoder=True)
    with mock.patch.object(MegatronBertSelfAttention, "forward", forward_of((PLAIN | OTHER)[form])):
        torch.manual_seed(0)
        model = transformers.MegatronBertModel(config, add_pooling_layer=False).eval()
        if form in PLAIN:
            expected = model(tokens()).last_hidden_state
        cp = ContextParallel(Local())
        cp.prepare(model)
        with cp.shard(tokens()) as batch:
            if form in PLAIN:
                out = model(input_ids=batch.ids, position_ids=batch.position_ids).last_hidden_state
                assert relative_error(out.detach(), expected.detach()) < 1e-6
            else:
                with pytest.raises(ValueError, match="MegatronBertSelfAttention computes attention itself"):
                    model(input_ids=batch.ids, position_ids=batch.position_ids)
