"""Diffusers transformers on 4 ranks and on one: outputs and gradients of all parameters and inputs."""

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

RANKS = 4
AXES = {"usp": {"ring": 2, "ulysses": 2}, "ulysses": {"ulysses": 4}}
LEARNED = ("hidden_states", "encoder_hidden_states", "encoder_hidden_states_image")
LIMITS = {"flux": 1e-12, "qwen": 1e-12, "sd3": 1e-12, "wan": 2e-6}  # Wan always computes norms in float32


def context_parallel(name: str = "token_ring") -> ContextParallel:
    return ContextParallel(name, mesh(**AXES.get(name, {"ring": RANKS})))


def output_and_gradients(model: nn.Module, *calls: Inputs) -> dict[str, Tensor]:
    """The last output, and all gradients of the sum of mean outputs."""
    inputs = [
        {name: x.clone().requires_grad_() for name, x in arguments.items() if name in LEARNED} for arguments in calls
    ]
    outs = [
        model(**arguments | learned, return_dict=False)[0] for arguments, learned in zip(calls, inputs, strict=True)
    ]
    torch.stack([(out * draw(*out.shape)).mean() for out in outs]).sum().backward()
    gradients = {name: p.grad for name, p in [*model.named_parameters(), *inputs[-1].items()]}
    return {"out": outs[-1].detach()} | {name: x for name, x in gradients.items() if x is not None}


def error(model: nn.Module, expected: dict[str, Tensor], *calls: Inputs) -> tuple[float, str]:
    """Largest error of a prepared model with averaged gradients. Compiled graphs return zeros for eager mode's None."""
    actual = output_and_gradients(model, *calls)
    for name, gradient in actual.items():
        if name != "out":
            dist.all_reduce(gradient)
            gradient /= RANKS
    assert not any(actual[name].any() for name in actual.keys() - expected.keys())
    return max((relative_error(actual[name], expected[name]), name) for name in expected)


def errors(name: str, methods: list[str]) -> list[tuple[float, str]]:
    """Errors by method; every second method runs with gradient checkpointing."""
    expected, results = output_and_gradients(*BUILD[name]()), []
    for i, kind in enumerate(methods):
        model, inputs = BUILD[name]()
        if i % 2:
            model.enable_gradient_checkpointing()
        context_parallel(kind).prepare(model)
        results.append(error(model, expected, inputs))
    return results


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("flux", ["token_ring", "usp"]),
        ("qwen", ["token_ring", "ulysses"]),
        ("sd3", ["token_ring", "ring"]),
        ("wan", ["token_ring", "usp"]),
    ],
)
def test_ranks_equal_one_rank(worlds, name, methods):
    for actual in worlds(RANKS).run(errors, name, methods):
        assert max(actual) < (LIMITS[name], ""), actual


@pytest.mark.long
@pytest.mark.parametrize("name", BUILD)
def test_ranks_equal_one_rank_with_other_methods(worlds, name):
    methods = ["ring", "ring", "ulysses", "ulysses", "usp", "all_gather", "wallfacer", "token_ring"]
    for actual in worlds(RANKS).run(errors, name, methods):
        assert max(actual) < (LIMITS[name], ""), actual


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
            x /= RANKS
        elif name != "out":
            actual[name] = x.full_tensor()
    return max((relative_error(actual[name], expected[name]), name) for name in expected)


def test_under_fsdp2(worlds):
    assert max(worlds(RANKS).run(error_under_fsdp2)) < (1e-12, "")


def error_of_two_lengths() -> tuple[float, str]:
    """Error of a model copy that runs forward on two videos before a backward that recomputes both."""
    (model, inputs), (full, _) = wan(), wan()
    longer = {
        **inputs,
        "hidden_states": draw(2, 4, 2, 14, 4),
    }  # 28 tokens after 27: some ranks have equally many of both
    model.enable_gradient_checkpointing()
    context_parallel().prepare(model)
    return error(deepcopy(model), output_and_gradients(full, inputs, longer), inputs, longer)


def test_recomputed_blocks_use_the_length_of_their_forward(worlds):
    assert max(worlds(RANKS).run(error_of_two_lengths)) < (LIMITS["wan"], "")


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
        lambda: {
            "controlnet_block_samples": [draw(2, 25, 64)],
            "controlnet_single_block_samples": [draw(2, 25, 64)],
        },
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
    "no text is seen": (qwen, {}, lambda: {"encoder_hidden_states_mask": torch.zeros(2, 9)}),
}


def error_of_variant(name: str) -> tuple[float, str]:
    build, config, extra_inputs = VARIANTS[name]
    (model, inputs), (full, _) = build(**config), build(**config)
    inputs |= extra_inputs()
    context_parallel().prepare(model)
    return error(model, output_and_gradients(full, inputs), inputs)


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_inputs_and_configs(worlds, name):
    assert max(worlds(RANKS).run(error_of_variant, name)) < (2e-6, "")


def compiled_error(name: str, whole_model: bool) -> tuple[float, str]:
    """Error of Qwen-Image over two calls with equal shapes and other padding."""
    (model, inputs), (full, _) = BUILD[name](), BUILD[name]()
    context_parallel().prepare(model)
    if whole_model:
        model.compile(backend="aot_eager")
    else:
        model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    result = error(model, output_and_gradients(full, inputs), inputs)
    if name != "qwen":
        return result
    model.zero_grad(), full.zero_grad()
    inputs["encoder_hidden_states_mask"] = inputs["encoder_hidden_states_mask"].flip(0)
    return max(result, error(model, output_and_gradients(full, inputs), inputs))


@pytest.mark.long
@pytest.mark.parametrize(("name", "whole_model"), [("flux", False), ("flux", True), ("qwen", False), ("wan", False)])
def test_compiled(worlds, name, whole_model):
    assert max(worlds(RANKS).run(compiled_error, name, whole_model)) < (LIMITS[name], "")
