"""Diffusers transformers on 2 or 4 ranks and on one: outputs and gradients of all parameters and inputs."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from armillary.attention import ContextParallel
from armillary.core.testing import mesh, relative_error

pytest.importorskip("diffusers")
from diffusion_models import BUILD, TEXT, Inputs, draw, flux, qwen, sd3, wan

AXES = {"usp": {"ring": 2, "ulysses": 2}, "ulysses": {"ulysses": 4}}
LEARNED = ("hidden_states", "encoder_hidden_states", "encoder_hidden_states_image")
LIMITS = {"flux": 1e-12, "qwen": 1e-12, "sd3": 1e-12, "wan": 2e-6}  # Wan always computes norms in float32


def context_parallel(name: str = "token_ring") -> ContextParallel:
    return ContextParallel(name, mesh(**AXES.get(name, {"ring": dist.get_world_size()})))


def output_and_gradients(model: nn.Module, *calls: Inputs) -> dict[str, Tensor]:
    """The last output, and all gradients of the sum of mean outputs."""
    inputs = [{name: x.clone().requires_grad_() for name, x in each.items() if name in LEARNED} for each in calls]
    outs = [model(**each | learned, return_dict=False)[0] for each, learned in zip(calls, inputs, strict=True)]
    torch.stack([(out * draw(*out.shape)).mean() for out in outs]).sum().backward()
    gradients = {name: p.grad for name, p in [*model.named_parameters(), *inputs[-1].items()]}
    return {"out": outs[-1].detach()} | {name: x for name, x in gradients.items() if x is not None}


def error(model: nn.Module, expected: dict[str, Tensor], *calls: Inputs) -> tuple[float, str]:
    """Largest error of a prepared model with averaged gradients. Compiled graphs return zeros for eager mode's None."""
    actual = output_and_gradients(model, *calls)
    for name, gradient in actual.items():
        if name != "out":
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
    assert not any(actual[name].any() for name in actual.keys() - expected.keys())
    return max((relative_error(actual[name], expected[name]), name) for name in expected)


def checkpointed_error(name: str, method: str) -> tuple[float, str]:
    (model, inputs), full = BUILD[name](), BUILD[name]()
    model.enable_gradient_checkpointing()
    context_parallel(method).prepare(model)
    return error(model, output_and_gradients(*full), inputs)


@pytest.mark.parametrize(
    ("name", "method"), [("flux", "usp"), ("qwen", "ulysses"), ("sd3", "token_ring"), ("wan", "usp")]
)
def test_ranks_equal_one_rank(worlds, name, method):
    assert max(worlds(4).run(checkpointed_error, name, method)) < (LIMITS[name], "")


def error_under_fsdp2() -> tuple[float, str]:
    """Error of Qwen-Image under FSDP2 with gradient checkpointing."""
    (model, inputs), (full, _) = qwen(), qwen()
    model.enable_gradient_checkpointing()
    context_parallel("usp").prepare(model)
    ranks = mesh(**AXES["usp"])["ring", "ulysses"]._flatten("sequence")
    for part in (*model.transformer_blocks, model):
        fully_shard(part, mesh=ranks)
    expected, actual = output_and_gradients(full, inputs), output_and_gradients(model, inputs)
    for name, x in actual.items():
        if name in LEARNED:
            dist.all_reduce(x)
            x /= dist.get_world_size()
        elif name != "out":
            actual[name] = x.full_tensor()
    return max((relative_error(actual[name], expected[name]), name) for name in expected)


def test_under_fsdp2(worlds):
    assert max(worlds(4).run(error_under_fsdp2)) < (LIMITS["qwen"], "")


def error_of_two_lengths() -> tuple[float, str]:
    """Error of a model copy that runs forward on two videos before a backward that recomputes both."""
    (model, inputs), (full, _) = wan(), wan()
    # 28 tokens after 27: some ranks have equally many of both.
    longer = {**inputs, "hidden_states": draw(2, 4, 2, 14, 4)}
    model.enable_gradient_checkpointing()
    context_parallel().prepare(model)
    return error(deepcopy(model), output_and_gradients(full, inputs, longer), inputs, longer)


def test_recomputed_blocks_use_the_length_of_their_forward(worlds):
    assert max(worlds(4).run(error_of_two_lengths)) < (LIMITS["wan"], "")


# -- variants ----------------------------------------------------------------------------------------------------------

VARIANTS = {
    "timesteps of tokens": (wan, {}, lambda: {"timestep": 1000 * draw(2, 27).abs()}),
    "a first image": (
        wan,
        {"image_dim": 14, "added_kv_proj_dim": 64},
        lambda: {"encoder_hidden_states": draw(2, 512, TEXT), "encoder_hidden_states_image": draw(2, 5, 14)},
    ),
    "controlnet of Flux": (
        flux,
        {},
        lambda: {key: [draw(2, 25, 64)] for key in ("controlnet_block_samples", "controlnet_single_block_samples")},
    ),
    "ids of rows": (flux, {}, lambda: {"img_ids": draw(2, 25, 3).expand(2, 25, 3), "txt_ids": torch.zeros(2, 7, 3)}),
    "controlnet of Qwen, images given": (
        qwen,
        {"zero_cond_t": True},
        lambda: {"controlnet_block_samples": [draw(2, 26, 64)]},
    ),
    "controlnet of SD3, layers left out": (
        sd3,
        {},
        lambda: {"block_controlnet_hidden_states": [draw(2, 15, 64)], "skip_layers": [0]},
    ),
    "layers of an image": (qwen, {"use_layer3d_rope": True}, dict),
    "no mask": (qwen, {}, lambda: {"encoder_hidden_states_mask": None}),
    "less text than ranks": (
        qwen,
        {},
        lambda: {"encoder_hidden_states": draw(2, 1, TEXT), "encoder_hidden_states_mask": None},
    ),
    "less text than ranks, masked in one row": (
        qwen,
        {},
        lambda: {"encoder_hidden_states": draw(2, 1, TEXT), "encoder_hidden_states_mask": torch.tensor([[0], [1]])},
    ),
    "no text": (flux, {}, lambda: {"encoder_hidden_states": draw(2, 0, TEXT), "txt_ids": torch.zeros(0, 3)}),
    "no text is seen": (qwen, {}, lambda: {"encoder_hidden_states_mask": torch.zeros(2, 9)}),
}


def errors_of_variants() -> dict[str, tuple[float, str]]:
    errors = {}
    for name, (build, config, extra_inputs) in VARIANTS.items():
        (model, inputs), (full, _) = build(**config), build(**config)
        inputs |= extra_inputs()
        context_parallel().prepare(model)
        errors[name] = error(model, output_and_gradients(full, inputs), inputs)
    return errors


def test_variants_of_inputs_and_configs(worlds):
    for errors in worlds(2).run(errors_of_variants):
        for name, actual in errors.items():
            assert actual < (2e-6 if VARIANTS[name][0] is wan else 1e-11, ""), name


def compiled_error() -> tuple[float, str]:
    """Error of Qwen-Image with compiled blocks over two calls with equal shapes and other padding."""
    (model, inputs), (full, _) = qwen(), qwen()
    for whole in (model, full):
        del whole.transformer_blocks[1:]
    context_parallel().prepare(model)
    model.compile_repeated_blocks(backend="eager", fullgraph=True)
    result = error(model, output_and_gradients(full, inputs), inputs)
    model.zero_grad(), full.zero_grad()
    inputs["encoder_hidden_states_mask"] = inputs["encoder_hidden_states_mask"].flip(0)
    return max(result, error(model, output_and_gradients(full, inputs), inputs))


def test_compiled(worlds):
    assert max(worlds(2).run(compiled_error)) < (LIMITS["qwen"], "")
