"""`ContextParallel` with unmodified transformers models: loss and gradients equal one rank's."""

import pytest
import torch
from tiny_models import build
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from armillary.attention import ContextParallel
from armillary.core.testing import mesh, relative_error

RANKS = 4


def new_model() -> nn.Module:
    return build("mistral, narrow", "eager")


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(1, 64, (1, 45), generator=torch.Generator().manual_seed(seed))


def expected_step(groups: int) -> tuple[float, list[torch.Tensor]]:
    model = new_model()
    loss = sum(model(ids, labels=ids, use_cache=False).loss for ids in map(tokens, range(groups))) / groups
    loss.backward()
    return float(loss.detach()), [p.grad for p in model.parameters()]


def sharded_step(groups: int, fsdp: bool) -> tuple[float, float]:
    """Relative errors of the loss and largest relative error of a gradient."""
    axes = mesh(shard=groups, ring=RANKS // groups)
    cp = ContextParallel("ring", axes, data="shard" if groups > 1 else ())
    model = cp.prepare(new_model())
    model.gradient_checkpointing_enable()
    model.train()
    if fsdp:
        ranks = init_device_mesh("cpu", (RANKS,))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=ranks)
    group = axes["shard"].get_local_rank() if groups > 1 else 0
    with cp.shard(tokens(group)) as batch:
        loss = cp.loss(model(**batch.inputs).loss, batch)
    cp.shard(tokens(group + 5), documents=[0, 20, 45])  # another batch, before backward recomputes the layers
    loss.backward()
    if not fsdp:
        cp.reduce_gradients(model)
    expected_loss, expected = expected_step(groups)
    gradients = [p.grad.full_tensor() if fsdp else p.grad for p in model.parameters()]
    errors = [relative_error(a, b) for a, b in zip(gradients, expected, strict=True)]
    return abs(float(loss.detach()) - expected_loss) / expected_loss, max(errors)


@pytest.mark.parametrize(("groups", "fsdp"), [(2, True), (1, False)])
def test_loss_and_gradients_equal_one_rank(worlds, groups, fsdp):
    for loss_error, gradient_error in worlds(RANKS).run(sharded_step, groups, fsdp):
        assert loss_error < 1e-6  # Mistral computes norms and loss in float32
        assert gradient_error < 1e-5


def averaging_refusals() -> list[str]:
    """Returns the errors of losses of models whose FSDP2 leaves out parameters, or ranks of the ring."""
    axes = mesh(shard=2, ring=2)
    every, cp = axes._flatten("every"), ContextParallel("ring", axes, data="shard")
    refusals = []
    for ranks, root, reentrant in ((every, False, False), (every, False, True), (axes["shard"], True, True)):
        model = cp.prepare(new_model())
        # Reentrant checkpointing hides the parameters of layers from autograd's graph.
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        for part in (*model.model.layers, *([model] if root else [])):
            fully_shard(part, mesh=ranks)
        with cp.shard(tokens(0)) as batch, pytest.raises(ValueError) as raised:
            cp.loss(model(**batch.inputs).loss, batch)
        refusals.append(str(raised.value))
    return refusals


def test_parameters_averaged_over_other_ranks_are_named(worlds):
    for left_out, left_out_reentrant, without_ring in worlds(RANKS).run(averaging_refusals):
        assert "lm_head.weight" in left_out and "[0, 1, 2, 3]" in left_out
        assert "lm_head.weight" in left_out_reentrant
        assert "model.layers.0.self_attn.q_proj.weight" in without_ring and "[0, 1, 2, 3]" in without_ring
