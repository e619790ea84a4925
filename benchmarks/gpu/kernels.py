"""Attention kernels: errors against float64, and speed compared with published figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.attention import AttentionMask, Local, reference_attention
from armillary.attention.internal import Inputs, Kernel, efficiency
from armillary.attention.kernels import KERNELS, Cudnn, Dense, Scores
from armillary.core import SequenceLayout
from armillary.core.testing import relative_error
from gpu.arithmetic import BACKWARD, FORWARD, attention_flops, causal_pairs
from gpu.check import WARMUP, Check, Row, Setting, correct

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""q [B, T, H, D], k and v [B, S, K, D], dout [B, T, H, D]."""

LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
"""Limits of relative errors against float64. For 16-bit dtypes they are three roundings."""
SOURCE = "float64, relative to the norm"


class Shape(NamedTuple):
    """Shape of one call; by default as many keys as queries."""

    tokens: int
    head_dim: int
    mask: AttentionMask
    batch: int = 1
    heads: int = 32
    key_heads: int = 8
    keys: int | None = None

    def tensors(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensors:
        torch.manual_seed(seed)
        keys = self.tokens if self.keys is None else self.keys
        q, dout = (
            torch.randn(self.batch, self.tokens, self.heads, self.head_dim, dtype=dtype, device=device)
            for _ in range(2)
        )
        k, v = (
            torch.randn(self.batch, keys, self.key_heads, self.head_dim, dtype=dtype, device=device) for _ in range(2)
        )
        return q, k, v, dout


def shapes(setting: Setting) -> dict[str, Shape]:
    """Shapes by name: all head dims, then masks, packed documents and single queries."""
    tokens = setting.size(1024, 24)
    last_tokens = (0, 1, tokens // 5, tokens // 2 + 3, tokens - 7, tokens)
    masks = {
        "full": AttentionMask(causal=False),
        "causal": AttentionMask(),
        "window": AttentionMask(window=(tokens // 8, 0)),
        "band": AttentionMask(causal=False, window=(tokens // 4, 3)),
        "packed documents": AttentionMask(documents=last_tokens),
    }
    heads, dims = setting.size((32, 8), (4, 1)), setting.size((64, 128, 256), (128,))
    by_name = {f"D {dim}, {name}": Shape(tokens, dim, masks[name], 1, *heads) for dim in dims for name in masks}
    by_name["D 128, one query"] = Shape(1, 128, masks["full"], 1, *heads, keys=tokens)
    by_name["D 128, batch 3, as many key heads"] = Shape(tokens // 2, 128, masks["causal"], 3, 8, 8)
    return by_name


def kernel_results(kernel: Kernel, mask: AttentionMask, tensors: Tensors) -> dict[str, Tensor]:
    """out, lse and gradients of one kernel, through the public call."""
    *inputs, dout = tensors
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    layouts = [SequenceLayout.contiguous(x.shape[1], 1) for x in (q, k)]
    crossed = {} if q.shape[1] == k.shape[1] else {"key_layout": layouts[1]}
    out, lse = Local()(q, k, v, mask=mask, layout=layouts[0], kernel=kernel, return_lse=True, **crossed)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def exact(mask: AttentionMask, tensors: Tensors) -> dict[str, Tensor]:
    """out, lse and gradients of the float64 reference."""
    *inputs, dout = (x.double() for x in tensors)
    q, k, v = (x.requires_grad_() for x in inputs)
    out, lse = reference_attention(q, k, v, mask=mask, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def usable(setting: Setting, dtype: torch.dtype, dim: int, mask: AttentionMask) -> list[Kernel]:
    """The kernels that support these inputs on this device."""
    x = torch.empty(1, 1, 1, dim, dtype=dtype, device=setting.device.torch)
    inputs = Inputs.of(x, x, None, mask)
    return [kernel for kernel in KERNELS if kernel.refuses(inputs) is None]


def check_kernels(setting: Setting) -> Iterator[Row]:
    for dtype in setting.size((torch.bfloat16, torch.float16, torch.float32), (torch.bfloat16,)):
        for name, shape in shapes(setting).items():
            if dtype != torch.bfloat16 and "D 128" not in name:
                continue
            tensors = shape.tensors(dtype, setting.device.torch)
            expected = exact(shape.mask, tensors)
            for kernel in usable(setting, dtype, shape.head_dim, shape.mask):
                label = f"{kernel.name}, {str(dtype).removeprefix('torch.')}, {name}"
                yield error_row(label, partial(kernel_results, kernel, shape.mask, tensors), expected, LIMITS[dtype])
    yield from check_large(setting)


def error_row(label: str, run: Callable[[], dict[str, Tensor]], expected: dict[str, Tensor], limit: float) -> Row:
    """The largest relative error and its tensor. A kernel that raises counts as wrong."""
    try:
        tensors = run()
    except (RuntimeError, ValueError) as error:
        return Row(label, f"{type(error).__name__}: {error}".splitlines()[0], "", f"at most {limit:.2g}", SOURCE, False)
    error, tensor = max((relative_error(tensors[name], expected[name]), name) for name in expected)
    return correct(f"{label}: {tensor}", error, limit, SOURCE)


def large_sizes(setting: Setting) -> tuple[int, int, int]:
    """Tokens of the sequence and of the whole batch, the window, and the tokens of a row of the batch."""
    return setting.size((2**31 // (32 * 128) + 4096, 1023, 2048), (60, 7, 4))


def check_large(setting: Setting) -> Iterator[Row]:
    """Sequences and batches of more than 2^32 elements: their last tokens compared with a small call."""
    tokens, window, short = large_sizes(setting)
    windowed, causal = AttentionMask(window=(window, 0)), AttentionMask()
    tail, heads = setting.size(512, 16), setting.size((32, 8), (4, 1))
    long = Shape(tokens, 128, windowed, 1, *heads)
    near = (slice(-1, None), slice(-tail - window, None))
    yield from last_tokens_rows(setting, "one sequence", long, near, tail)
    rows = Shape(short, 128, causal, tokens // short, *heads)
    yield from last_tokens_rows(setting, "a batch", rows, (slice(-1, None), slice(None)), short)


def last_tokens_rows(setting: Setting, name: str, shape: Shape, near: tuple[slice, slice], tail: int) -> Iterator[Row]:
    """Errors of the last tokens of the last row; only tokens in `near` are visible to them or see them."""
    tensors = shape.tensors(torch.bfloat16, setting.device.torch)
    q, k, v, dout = (x[near] for x in tensors)
    expected = {name: x[:, -tail:] for name, x in exact(shape.mask, (q, k, v, dout)).items()}
    for kernel in usable(setting, torch.bfloat16, 128, shape.mask):
        inputs = Inputs.of(q, v, None, shape.mask)
        if kernel.drawback(inputs) or kernel.name == "dense":  # quadratic time, or a window cut into several calls
            continue
        label = f"{kernel.name}, bfloat16, {tensors[0].numel():,} elements of q in {name}"
        yield error_row(
            label, partial(last_tokens, kernel, shape.mask, tensors, tail), expected, LIMITS[torch.bfloat16]
        )
        setting.device.clean()


def last_tokens(kernel: Kernel, mask: AttentionMask, tensors: Tensors, tail: int) -> dict[str, Tensor]:
    """The results of `kernel_results` for the last `tail` tokens of the last row."""
    return {name: x[-1:, -tail:].clone() for name, x in kernel_results(kernel, mask, tensors).items()}


NEAR = 0.9
"""A kernel below this fraction of its published figure is called wrongly, or the figure does not apply to this GPU."""


def check_throughput(setting: Setting) -> Iterator[Row]:
    """Throughput at 32k tokens; the planner's table should have these fractions of the peak."""
    tokens = setting.size(32_768, 64)
    for kernel in usable(setting, torch.bfloat16, 128, AttentionMask()):
        if kernel.name == "dense" and not setting.fake:
            continue
        for name, band, pairs in (
            ("full", (None, None), tokens**2),
            ("causal", (None, 0), tokens * (tokens + 1) // 2),
        ):
            yield from throughput_rows(setting, kernel, name, band, Shape(tokens, 128, AttentionMask()), pairs)


def throughput_rows(
    setting: Setting, kernel: Kernel, name: str, band: tuple[int | None, int | None], shape: Shape, pairs: int
) -> Iterator[Row]:
    """Throughput of forward and backward of one call with `pairs` visible pairs."""
    q, k, v, dout = shape.tensors(torch.bfloat16, setting.device.torch)
    scores = Scores(shape.head_dim**-0.5)
    out, lse = kernel.forward(q, k, v, band, scores)
    work = {
        "forward": (4, partial(kernel.forward, q, k, v, band, scores)),
        "backward": (10, partial(kernel.backward, dout, q, k, v, out, lse, band, scores)),
    }
    efficiency_name = "cudnn" if setting.fake else kernel.name
    peak, published = setting.device.peak_flops, efficiency(efficiency_name, setting.device.capability)
    for way, (factor, call) in work.items():
        rate = factor * pairs * shape.heads * shape.head_dim / setting.device.seconds(call, setting.size(10, 1))
        of_peak = "" if peak is None else f", {rate / peak:.1%} of peak"
        label = f"{kernel.name}, {way} {name}, {shape.tokens:,} tokens{of_peak}"
        bar = None if published is None else published.backward if way == "backward" else getattr(published, name)
        if bar is None or peak is None or (way, name) == ("backward", "causal"):  # no published figure
            yield Row(label, rate / 1e12, "TFLOP/s", source="" if published is None else published.source)
        else:
            yield setting.at_least(
                label, rate / 1e12, NEAR * bar * peak / 1e12, "TFLOP/s", f"{NEAR} x {published.source}"
            )


# -- graphs of cuDNN ---------------------------------------------------------------------------------------------------


THREADS_TOKENS = 4096


def check_cudnn_threads(setting: Setting) -> Iterator[Row]:
    """Times of the first call of a shape in this thread and in another thread, like that of backward."""
    q, k, v, _ = Shape(setting.size(THREADS_TOKENS, 16), 128, AttentionMask()).tensors(
        torch.bfloat16, setting.device.torch
    )
    kernel: Kernel = Dense() if setting.fake else Cudnn()

    def call() -> float:
        setting.device.synchronize()
        began = time.perf_counter()
        kernel.forward(q, k, v, (None, 0), Scores(128**-0.5))
        setting.device.synchronize()
        return time.perf_counter() - began

    first, second = call(), call()
    with ThreadPoolExecutor(1) as other:
        first_elsewhere, second_elsewhere = other.submit(call).result(), other.submit(call).result()
    yield Row("this thread's first call, second", f"{1e3 * first:.3g}, {1e3 * second:.3g}", "ms")
    yield Row("another thread's first call, second", f"{1e3 * first_elsewhere:.3g}, {1e3 * second_elsewhere:.3g}", "ms")
    built = first_elsewhere - second_elsewhere
    ratio = built / max(first - second, 1e-6)
    yield setting.at_most(
        "what the other's first takes more, over this one's", ratio, 0.3, "", "graphs shared by threads"
    )


FLOAT64 = 16
"""An H100's peak in 16 bits over that in float64."""


def kernels_flops(setting: Setting) -> float:
    """Every shape in three dtypes by every kernel and by the reference, and the last tokens of two large tensors."""
    every = [*shapes(setting).values()]
    pairs = sum(each.batch * each.tokens * (each.keys or each.tokens) * each.heads * each.head_dim for each in every)
    small = 3 * (FORWARD + BACKWARD) * pairs * (len(KERNELS) + FLOAT64)
    tokens, window, short = large_sizes(setting)
    heads = setting.size(32, 4)
    large = attention_flops(tokens * (window + 1) + tokens * short, heads=heads)
    last = setting.size(512, 16)
    reference = attention_flops((last + window) ** 2 + short**2, heads=heads)
    return small + len(KERNELS) * large + FLOAT64 * reference


def throughput_flops(setting: Setting) -> float:
    """Forward and backward of every kernel, full and causal, and a forward before them."""
    tokens = setting.size(32_768, 64)
    calls = setting.size(10 + WARMUP, 1 + WARMUP)
    pairs = tokens**2 + causal_pairs(tokens)
    return len(KERNELS) * (calls * attention_flops(pairs) + attention_flops(pairs, FORWARD))


def threads_flops(setting: Setting) -> float:
    """Four forward passes, full in a rehearsal's dense kernel."""
    return 4 * attention_flops(setting.size(THREADS_TOKENS, 16) ** 2, FORWARD)


CHECKS = (
    Check(
        "kernels",
        "Attention kernels against float64",
        check_kernels,
        holds="errors of three roundings at most",
        seconds=120,
        flops=kernels_flops,
    ),
    Check(
        "throughput",
        "TFLOP/s of attention kernels",
        check_throughput,
        holds="90% of the published figures",
        seconds=75,
        flops=throughput_flops,
    ),
    Check(
        "cudnn-threads",
        "cuDNN's graphs in autograd's thread",
        check_cudnn_threads,
        holds="not built again there",
        seconds=25,
        flops=threads_flops,
    ),
)
