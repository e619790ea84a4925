"""Layers with a state relative to causal attention on one process: processor seconds of forward and backward.

    uv run python benchmarks/states.py                 # 4,096 tokens, 8 heads of 64
    uv run python benchmarks/states.py --tokens 16k
    uv run python benchmarks/states.py --tree          # a prompt of 4k with 16 completions of 256, and 16 sequences

Median ratios to torch's CPU flash attention kernel, layers and attention alternating in one run. Exits with 1 if the
delta rule or ssd takes more than 3 times as long. With `--tree` median ratios of a tree to separate sequences; the
ratio of tokens is their lower bound.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import normalize, scaled_dot_product_attention, softplus

from armillary.attention import AttentionMask
from armillary.data.console.units import count_argument
from armillary.states import gated_delta_rule, ssd

BAR = 3.0
BOUND = ("delta rule", "ssd")
"""Layers with a limit."""

Layer = tuple[Callable[..., Tensor], list[Tensor]]


def layers(tokens: int, heads: int, dim: int) -> dict[str, Layer]:
    """Returns for each name a function and its inputs."""
    q, k, v = (torch.randn(1, tokens, heads, dim) for _ in range(3))
    q, k, beta = normalize(q, dim=-1), normalize(k, dim=-1), torch.rand(1, tokens, heads)
    g, channels = -torch.rand(1, tokens, heads), -torch.rand(1, tokens, heads, dim)
    dt, rates = softplus(torch.randn(1, tokens, heads)), -torch.rand(heads)
    return {
        "attention": (attention, [x.transpose(1, 2).contiguous() for x in (q, k, v)]),
        "delta rule": (lambda *x: gated_delta_rule(*x)[0], [q, k, v, g, beta]),
        "delta rule, a decay for each channel": (lambda *x: gated_delta_rule(*x)[0], [q, k, v, channels, beta]),
        "ssd": (lambda *x: ssd(*x)[0], [v, dt, rates, k, q]),
    }


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def trees(prompt: int, answers: int, answer: int, heads: int, dim: int) -> dict[str, tuple[Layer, Layer]]:
    """Returns for each layer the step of a tree, and the step of sequences that repeat the prompt."""
    ends = [0, *(prompt + i * answer for i in range(answers + 1))]
    mask = AttentionMask.tree(ends, [-1, *[0] * answers])
    packed = layers(ends[-1], heads, dim)
    separate = {name: x for name, (_, x) in layers(prompt + answer, heads, dim).items()}

    def batch(x: Tensor) -> Tensor:
        return x if x.ndim == 1 else x.expand(answers, *x.shape[1:]).contiguous()

    return {
        "delta rule": (
            (lambda *x: gated_delta_rule(*x, mask=mask)[0], packed["delta rule"][1]),
            (lambda *x: gated_delta_rule(*x)[0], [batch(x) for x in separate["delta rule"]]),
        ),
        "ssd": (
            (lambda *x: ssd(*x, mask=mask)[0], packed["ssd"][1]),
            (lambda *x: ssd(*x)[0], [batch(x) for x in separate["ssd"]]),
        ),
    }


def compare_trees(heads: int, dim: int, turns: int) -> None:
    prompt, answers, answer = 4096, 16, 256
    lower_bound = (prompt + answers * answer) / (answers * (prompt + answer))
    for name, (tree, sequences) in trees(prompt, answers, answer, heads, dim).items():
        times = [(seconds(*tree), seconds(*sequences)) for _ in range(turns + 1)][1:]
        ratio, sequence_seconds = median(a / b for a, b in times), median(b for _, b in times)
        tree_seconds = median(a for a, _ in times)
        print(f"{name:40} {tree_seconds:8.3f} s  {ratio:6.3f} of {sequence_seconds:.3f} s; at best {lower_bound:.3f}")


def seconds(function: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    """Returns the processor time of forward and backward."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    start = time.process_time()
    out = function(*leaves)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=count_argument(), default=4096)
    parser.add_argument("--heads", type=count_argument(), default=8)
    parser.add_argument("--dim", type=count_argument(), default=64)
    parser.add_argument("--turns", type=count_argument(), default=5)
    parser.add_argument("--tree", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if options.tree:
        compare_trees(options.heads, options.dim, options.turns)
        return
    measured = layers(options.tokens, options.heads, options.dim)
    times: dict[str, list[float]] = {name: [] for name in measured}
    for turn in range(options.turns + 1):
        for name, layer in measured.items():
            times[name] += [seconds(*layer)] if turn else [seconds(*layer)][:0]  # the first turn warms up
    ratios = {
        name: median(a / b for a, b in zip(of_layer, times["attention"], strict=True))
        for name, of_layer in times.items()
    }
    for name, ratio in ratios.items():
        print(f"{name:40} {median(times[name]):8.3f} s  {ratio:6.2f} of attention")
    sys.exit(any(ratios[name] > BAR for name in BOUND))


if __name__ == "__main__":
    main()
