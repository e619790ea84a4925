"""Training on one GPU beside a plain loop over a transformers model of the same sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from armillary.models import LlamaConfig
from gpu.arithmetic import RECOMPUTED, step_flops
from gpu.check import Check, Row, Setting, not_run
from gpu.device import Peak
from gpu.model import POLICIES, TINY, Training

ONE_BILLION = LlamaConfig(vocab_size=128_256, dim=2048, layers=16, heads=32, kv_heads=8, hidden_dim=8192)
"""LLaMA-3.2-1B with a head of its own."""
LONG = 100_000
"""A sequence of at least this many tokens is timed once, and runs only with recomputation."""
RECOMPUTING = {"none": False, "attention_output": True}
"""Our policies, and if the plain loop checkpoints its layers."""


class Measured(NamedTuple):
    seconds: float
    gib: float


def lengths(setting: Setting) -> tuple[int, ...]:
    return setting.size((8192, 32_768, 131_072), (40, 64))


def repeats(setting: Setting, length: int) -> int:
    """Timed steps, after one that is not."""
    return 1 if setting.fake or length >= LONG else 3


def cases(setting: Setting) -> list[tuple[str, int]]:
    """(policy, length) of the measurements."""
    return [
        (policy, length)
        for length, policy in product(lengths(setting), RECOMPUTING)
        if length < LONG or RECOMPUTING[policy]
    ]


def check_baseline(setting: Setting) -> Iterator[Row]:
    """Tokens per second, MFU and peak memory by length and recomputation, of our step and of the plain loop."""
    config = setting.size(ONE_BILLION, TINY)
    for policy, length in cases(setting):
        with setting.alone() as mesh:
            own_result = measured(setting, length, partial(our_step, mesh, config, length, policy))
        yield from rows(setting, config, f"ours, {policy}", length, own_result)
        plain_name = "transformers" + ", layers recomputed" * RECOMPUTING[policy]
        if find_spec("transformers") is None:
            yield not_run(f"{plain_name}, {length:,} tokens", "the package transformers is not installed")
            continue
        plain_result = measured(setting, length, partial(plain_step, setting, config, length, RECOMPUTING[policy]))
        yield from rows(setting, config, plain_name, length, plain_result)
        if own_result and plain_result:
            label, source = f"{length:,} tokens: ours, {policy}, over {plain_name}", "a loop with SDPA and autocast"
            yield setting.at_least(f"{label}: tokens/s", plain_result.seconds / own_result.seconds, 1.0, "x", source)
            yield setting.at_most(f"{label}: memory", own_result.gib / plain_result.gib, 1.0, "x", source)


def measured(setting: Setting, length: int, build: Callable[[], Callable[[], Any]]) -> Measured | None:
    """Median seconds of a step, and its peak memory with the model's; None if memory ran out."""
    result: list[float] = []

    def work() -> None:
        step = build()
        result.append(setting.device.seconds(step, repeats(setting, length), 1))

    peak: Peak | None = None
    with suppress(torch.OutOfMemoryError):
        peak = setting.device.peak(work)
    setting.device.clean()  # after the error, which refers to the model, is gone
    return None if peak is None else Measured(result[0], peak.allocated / 2**30)


def rows(setting: Setting, config: LlamaConfig, name: str, length: int, result: Measured | None) -> Iterator[Row]:
    label, peak = f"{name}, {length:,} tokens", setting.device.peak_flops
    if result is None:
        yield Row(label, "out of memory")
        return
    mfu = "" if peak is None else f", MFU {step_flops(config, length) / result.seconds / peak:.1%}"
    yield Row(f"{label}{mfu}", length / result.seconds, "tokens/s")
    yield Row(label, result.gib, "GiB")


def our_step(mesh: DeviceMesh, config: LlamaConfig, length: int, policy: str) -> Callable[[], Any]:
    return Training.on(mesh, config, length, POLICIES[policy]).step


def plain_step(setting: Setting, config: LlamaConfig, length: int, recomputes: bool) -> Callable[[], Any]:
    """A step as most scripts have it: weights in float32, autocast, SDPA, clipping and AdamW."""
    from transformers import LlamaConfig as PlainConfig
    from transformers import LlamaForCausalLM

    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.hidden_dim,
        "max_position_embeddings": 2**20,
    }
    with torch.device(setting.device.torch):
        model: Any = LlamaForCausalLM(PlainConfig(**sizes, tie_word_embeddings=False, attn_implementation="sdpa"))
    model.train()
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(config.vocab_size, (1, length), device=setting.device.torch)

    def step() -> None:
        with torch.autocast(setting.device.type, torch.bfloat16):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def baseline_flops(setting: Setting) -> float:
    """Each case twice: ours and the plain loop's."""
    config = setting.size(ONE_BILLION, TINY)
    return sum(
        2 * (1 + repeats(setting, length)) * step_flops(config, length) * (RECOMPUTED if RECOMPUTING[policy] else 1)
        for policy, length in cases(setting)
    )


CHECKS = (
    Check(
        "baseline",
        "A step beside a plain transformers loop, at 8k, 32k and 128k tokens",
        check_baseline,
        holds="more tokens/s, less memory",
        seconds=130,
        flops=baseline_flops,
    ),
)
