"""Head and token loss in one, a chunk of tokens at a time, so that logits [T, V] never exist.

For 5M tokens of LLaMA-3-8B on 8 ranks, logits would take 157 GiB in bfloat16, and their float32 copy twice as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, prod
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import Axis
from armillary.core.labels import LabelTriples
from armillary.models.dtensors import sums_dtensors
from armillary.models.loss.chunk_labels import OneEach, token_labels
from armillary.models.loss.cross_entropy import scaled
from armillary.models.loss.linear_chunks import LinearLossSpec, loss_and_gradients
from armillary.models.loss.vocabulary_shard import VocabularyShard

Backend = Literal["own", "torch"]


@sums_dtensors
def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor | LabelTriples,
    *,
    bias: Tensor | None = None,
    ignore: int = -100,
    chunk: int | None = None,
    z_loss: float = 0.0,
    backend: Backend = "own",
    axis: DeviceMesh | Axis | None = None,
    vocabulary: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_loss(F.linear(hidden, weight, bias), labels)` without holding the logits; it fits a model's `head`.

    A chunk's logits are computed once, in the dtype of `hidden` (under autocast, in autocast's), and softmax in
    float32. Their gradients are computed right then, in the forward pass, for those inputs alone that require one;
    backward scales them, any number of times (`retain_graph`), but cannot be differentiated itself.

    With e bytes to an element: from forward to backward there live d(hidden), T E e, and d(weight) in float32, 4 V E;
    in forward a chunk's logits and their float32 copy too, chunk V (e + 4). Neither `hidden` nor `weight` is kept.

    With an `axis` of R ranks (tensor parallelism) each has its part of the vocabulary, V_r rows, and of the tokens
    those of its `interleaved_shard`: i R + r of each batch row. Then a chunk's hidden states are gathered, while the
    chunk before is worked on, and their gradients are summed over ranks; of all else what lives is a part.

    Args:
        hidden: [B, T, E]; with an axis [B, ceil(T / R), E].
        weight: [V, E], whole: a linear layer's or an embedding's, under FSDP2 within `forward`; with an axis [V_r, E],
            as `torch.chunk` and DTensor's `Shard(0)` cut it: ceil(V / R) rows each while there are any.
        labels: integers [B, T], shifted already: `labels[b, t]` is what the hidden state of token t of row b predicts.
            With an axis too those of all tokens, the same on all its ranks. Or `LabelTriples` of those tokens, of which
            a position may have several labels, with weights; chunks without any are not computed.
        bias: [V]; with an axis [V_r].
        ignore: the label that is not counted.
        chunk: how many tokens at a time, over all rows; `chunk_rows` of these shapes unless given. With an axis those
            of all ranks together: the multiple of R below, or R.
        z_loss: adds `z_loss * logsumexp(logits)**2` for each valid label (PaLM, arXiv 2204.02311).
        backend: "own", or "torch" for `F.linear_cross_entropy` of torch 2.13. In float32 that is as exact and as fast,
            but keeps its gradients for as long as the sum is kept. In bfloat16 it rounds the sum and d(weight) after
            every chunk: with 1024 chunks the sum came out at a sixth.
        axis: a 1-D mesh of R ranks. All must make the same call, and want gradients of the same inputs.
        vocabulary: V, needed with an axis.

    Bytes sent, all in forward, by each of R ranks for B ceil(T / R) = n tokens of its own, with w = 4, in float64 8:

        "all_gather"       (R - 1) (n E e + w), and (R - 1) n w if any gradient is wanted
        "reduce_scatter"   (R - 1) 2 n w, and (R - 1) n E e if that of `hidden` is

    Returns:
        The sum of the cross entropies, in nats, a scalar in float32 (float64 for float64), and the count of valid
        labels, an integer scalar on the same device. With no valid label the sum is 0, with zero gradients. Of triples
        both count weights: the sum of weight times cross entropy, and the sum of weights, in float64.

        With an axis both are those of all its tokens, to the bit the same on all its ranks. It is one loss of which
        each rank has a copy, not R losses: each rank calls backward with the same upstream gradient, and gets that
        loss's gradient by its own tokens, rows and biases. Nothing is left to be summed over the axis.

    Raises:
        ValueError: shapes or dtypes that do not match, rows that are not this rank's part of `vocabulary`, a chunk
            below 1, a backend that cannot do this. Raised before any communication. A label that is neither below V
            nor `ignore` is left to torch, as in `token_loss`: to look would stall a GPU.
    """
    ranks = 1 if axis is None else Axis.of(axis).size
    label_lookup = token_labels(labels, ignore, ranks)
    check(hidden, weight, label_lookup.shape, bias, chunk, ranks)
    rows = VocabularyShard.of(len(weight), axis, vocabulary)
    run, dtype = backend_named(backend, z_loss, ranks), matmul_dtype(hidden)
    if backend == "torch" and isinstance(labels, LabelTriples):
        raise ValueError(f"torch's takes one label to a token; got {labels}, which backend='own' takes")
    chunk = chunk or chunk_rows(prod(label_lookup.shape), hidden.shape[-1], rows.whole, dtype.itemsize, ranks)
    label_lookup.check(rows)
    spec = LinearLossSpec(label_lookup, chunk, dtype, z_loss, rows)
    return run(hidden.flatten(0, 1), weight, bias, spec), label_lookup.count


def chunk_rows(tokens: int, dim: int, vocabulary: int, itemsize: int = 2, ranks: int = 1) -> int:
    """How many tokens to take at a time, in chunks as equal as can be.

    Logits and their float32 copy are allowed 64 MiB or, where that is more, half of what `hidden` [tokens, dim] and
    `weight` [vocabulary, dim] take, which are there anyway: 683 tokens of 8192 for LLaMA-3-8B, 4148 of 655360. Smaller
    chunks would cost time, since each reads the weight and adds to all of its gradient.

    With several ranks, each has a part of the tokens and of the vocabulary. Beside the logits are then what is sent
    and received of a chunk: its hidden states and the next one's, their gradient before and after.
    """
    budget = max(2**26, (tokens + vocabulary) * dim * itemsize // (2 * ranks))
    wide = 4 if itemsize < 4 else 0
    exchanged = 4 * dim * itemsize if ranks > 1 else 0
    chunks = ceil(tokens * (ceil(vocabulary / ranks) * (itemsize + wide) + exchanged) / budget)
    return max(1, ceil(tokens / max(1, chunks)))


LossBackend = Callable[[Tensor, Tensor, Tensor | None, LinearLossSpec], Tensor]
"""From hidden [T, E], weight [V, E] and bias [V] to the sum."""


def with_torch(hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearLossSpec) -> Tensor:
    """Computes the sum by `F.linear_cross_entropy`."""
    labels = cast(OneEach, spec.labels)
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=spec.chunk, chunking_method=None, allow_retain_graph=True)
    total = F.linear_cross_entropy(
        hidden.to(spec.dtype),
        weight.to(spec.dtype),
        labels.labels.flatten().long(),
        linear_bias=None if bias is None else bias.to(spec.dtype),
        reduction="sum",
        ignore_index=labels.ignore,
        options=options,
    )
    return total.to(spec.wide)


@torch.compiler.disable  # Traced, it would be a graph of all chunks, one after the other.
def with_own(hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearLossSpec) -> Tensor:
    """Computes the sum by our own code, in `linear_chunks`."""
    # Asked here, because inside a Function grad mode is off.
    wanted = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in (hidden, weight, bias)]
    return cast(Tensor, LinearLoss.apply(hidden, weight, bias, spec, wanted))


class LinearLoss(torch.autograd.Function):
    """The sum, whose gradients are computed in forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearLossSpec, wanted: Sequence[bool]
    ) -> Tensor:
        total, gradients = loss_and_gradients(hidden, weight, bias, spec, wanted)
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if x is None else scaled(x, grads[0], dtype) for x, dtype in saved), None, None


def backend_named(name: str, z_loss: float, ranks: int) -> LossBackend:
    """Returns the function of a backend.

    Raises:
        ValueError: torch's backend without `F.linear_cross_entropy`, or with options that it lacks.
    """
    if name not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}; got {name!r}")
    if name == "torch" and (z_loss or ranks > 1 or not hasattr(nn, "LinearCrossEntropyOptions")):
        raise ValueError(
            "torch's has no z_loss, and needs torch 2.13 and one rank; "
            f"got {z_loss}, torch {torch.__version__} and {ranks} ranks"
        )
    return with_torch if name == "torch" else cast(LossBackend, with_own)


def matmul_dtype(hidden: Tensor) -> torch.dtype:
    """Returns the dtype of `hidden`, unless autocast lowers it, as it does all but float64."""
    lowered = autocasts(hidden) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(hidden.device.type) if lowered else hidden.dtype


def autocasts(x: Tensor) -> bool:
    """True if autocast is on for the device of `x`; the meta device, which would raise, has none."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def check(
    hidden: Tensor, weight: Tensor, tokens: tuple[int, ...], bias: Tensor | None, chunk: int | None, ranks: int
) -> None:
    """Refuses arguments that do not fit together, as far as can be seen without waiting for a GPU."""
    rows = (*hidden.shape[:1], *(n * ranks for n in hidden.shape[1:-1]))
    expected = rows, (weight.shape[0], hidden.shape[-1]), weight.shape[:1]
    got = tokens, weight.shape, weight.shape[:1] if bias is None else bias.shape
    if hidden.ndim != 3 or got != expected:
        over = f"B, ceil(T / {ranks}), E], of this rank's part of V: weight [V" if ranks > 1 else "B, T, E], weight [V"
        tensors = [x.shape for x in (hidden, weight)], [tokens], [] if bias is None else [bias.shape]
        shapes = ", ".join(str(tuple(shape)) for part in tensors for shape in part)
        raise ValueError(f"hidden [{over}, E], labels [B, T] and bias [V] are needed; got {shapes}")
    dtypes = [x.dtype for x in (hidden, weight, bias) if x is not None]
    if not autocasts(hidden) and len({*dtypes}) > 1:
        raise ValueError(f"hidden, weight and bias need one dtype outside of autocast; got {dtypes}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"a chunk must be 1 token at least; got {chunk}")
