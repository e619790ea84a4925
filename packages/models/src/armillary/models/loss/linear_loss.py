"""Head and token loss in one, a chunk of tokens at a time, so that logits [T, V] never exist.

For 5Mi tokens of LLaMA-3-8B on 8 ranks, logits would take 157 GiB per rank in bfloat16, and their float32 copy twice
as much.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.parts import autocast_enabled
from armillary.core import Axis, LabelTriples
from armillary.core.parts import check_local, compat
from armillary.models.loss.chunk_labels import SingleLabels, token_labels
from armillary.models.loss.linear_chunks import LinearLoss, LinearLossSpec
from armillary.models.loss.vocabulary_shard import VocabularyShard

Backend = Literal["own", "torch"]


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
    """Computes `token_loss(F.linear(hidden, weight, bias), labels)` chunk by chunk. Can be passed as a model's `head`.

    A chunk's logits are computed once, in the dtype of `hidden` (or of autocast), and softmax in float32 or wider.
    Gradients are computed in the same forward pass, for inputs that require them. Backward multiplies them by the
    upstream gradient, any number of times (`retain_graph`); it cannot be differentiated.

    Memory, with e bytes per element: d(hidden), B T E e bytes, and d(weight) in float32 or wider, at least 4 V E bytes,
    live from forward to backward. For a chunk of C tokens, forward also needs logits, C V e bytes, and of 16-bit logits
    a float32 copy, 4 C V bytes; under autocast a cast copy of the weight. `hidden` and `weight` are not kept.

    With an `axis` of R ranks (tensor parallelism), rank r has V_r of the weight's V rows, and the tokens i R + r of
    each batch row (`interleaved_shard`). A chunk's hidden states are gathered while the previous chunk is computed, and
    their gradients are summed over ranks. Each rank computes the logits of its V_r rows.

    Args:
        hidden: [B, T, E]; with an axis [B, ceil(T / R), E].
        weight: [V, E], of a linear layer or an embedding; under FSDP2 gathered, as within `forward`. With an axis
            [V_r, E], cut as by `torch.chunk` and DTensor's `Shard(0)`: ceil(V / R) rows per rank until none are left.
        labels: integers [B, T], shifted: `labels[b, t]` is predicted by the hidden state of token t of row b. With an
            axis they are also [B, T], for the tokens of all ranks, and equal on all ranks. Or `LabelTriples`: several
            labels per position, with weights; chunks without labels are not computed.
        bias: [V]; with an axis [V_r].
        ignore: labels with this value are not counted.
        chunk: number of tokens in a chunk, which may extend over several rows; by default `loss_chunk_tokens` of these
            shapes. With an axis it counts the tokens of all ranks, and is rounded down to a multiple of R, at least R.
        z_loss: adds `z_loss * logsumexp(logits)**2` for each valid label, times its weight (PaLM, arXiv 2204.02311).
        backend: "own", or "torch" for `F.linear_cross_entropy` of torch 2.13. In float32 torch's is as exact and as
            fast, but its gradients live as long as the sum. In bfloat16 torch's rounds the sum and d(weight) after
            every chunk: with 1024 chunks of 4 tokens the sum was a third of the exact one.
        axis: a 1-D mesh of R ranks. All ranks make the same call, with gradients for the same inputs.
        vocabulary: V, needed with an axis.

    Bytes sent, all in forward, by each of R ranks for its n = B ceil(T / R) tokens, with w = 4 (8 in float64) and e
    bytes per element in the dtype of matmuls. With triples, chunks without labels send nothing.

        "all_gather"       (R - 1) (n E e + w), and (R - 1) n w if any input requires a gradient
        "reduce_scatter"   (R - 1) 2 n w, and (R - 1) n E e if `hidden` requires a gradient

    Returns:
        The sum of the cross entropies, in nats, a scalar in float32 (float64 for float64), and the count of valid
        labels, an integer scalar on the same device. With no valid label the sum is 0, with zero gradients. For triples
        they are the sum of weight times cross entropy, and the sum of weights in float64.

        With an axis both cover all tokens and are bitwise equal on all ranks. It is one loss with a copy on each rank,
        not R losses: each rank calls backward with the same upstream gradient, and gets the gradients of its own tokens
        and of its own rows of weight and bias. They need no sum over the axis.

    Raises:
        ValueError: `hidden` or `labels` is a DTensor (pass its `to_local()`), shapes or dtypes do not match, labels are
            not integers, `vocabulary` is missing with an axis, the number of rows is not this rank's part of it, a
            label of triples is not below V, the chunk is below 1, or the backend does not support the arguments. Raised
            before any communication. Other labels outside of the vocabulary are reported as by `token_loss`.
    """
    ranks = 1 if axis is None else Axis.of(axis).size
    label_lookup = token_labels(labels, ignore, ranks)
    check(hidden, weight, labels.shape, bias, chunk, ranks)
    shard = VocabularyShard.of(len(weight), axis, vocabulary)
    run, dtype = find_backend(backend, z_loss, ranks), matmul_dtype(hidden)
    if backend == "torch" and isinstance(labels, LabelTriples):
        raise ValueError(f"backend 'torch' takes one label per token; got {labels}, which backend='own' takes")
    tokens, dim = prod(label_lookup.shape), hidden.shape[-1]
    chunk = chunk or loss_chunk_tokens(tokens, dim, shard.total_rows, dtype.itemsize, ranks)
    label_lookup.check(shard)
    spec = LinearLossSpec(label_lookup, chunk, dtype, shard, z_loss)
    return run(hidden.flatten(0, 1), weight, bias, spec), label_lookup.count


def loss_chunk_tokens(tokens: int, dim: int, vocabulary: int, itemsize: int = 2, ranks: int = 1) -> int:
    """Returns the default number of tokens in a chunk of the loss. Chunks are as equal as possible.

    A chunk's logits and their float32 copy may take 64 MiB, or half of the bytes of `hidden` [tokens, dim] and `weight`
    [vocabulary, dim], whichever is more. For LLaMA-3-8B, 8192 tokens are in chunks of 683, and 655360 in chunks of
    4148. Smaller chunks cost time, since each one reads the weight and adds to its full gradient.

    With several ranks, the second limit is half of the bytes of a rank's part of both. The tensors in flight count too:
    the hidden states of this chunk and of the next, and the gradient of hidden states before and after its reduction.
    """
    budget = max(2**26, (tokens + vocabulary) * dim * itemsize // (2 * ranks))
    wide_itemsize = 4 if itemsize < 4 else 0  # the float32 copy of 16-bit logits
    logits_bytes = ceil(vocabulary / ranks) * (itemsize + wide_itemsize)  # per token
    exchanged_bytes = 4 * dim * itemsize if ranks > 1 else 0  # per token: four tensors in flight, each [dim]
    chunks = ceil(tokens * (logits_bytes + exchanged_bytes) / budget)
    return max(1, ceil(tokens / max(1, chunks)))


LossBackend = Callable[[Tensor, Tensor, Tensor | None, LinearLossSpec], Tensor]
"""From hidden [n, E] of this rank's n tokens, weight [V_r, E], bias [V_r] and the call's options to the summed loss."""


def torch_linear_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearLossSpec) -> Tensor:
    """Computes the summed loss by `F.linear_cross_entropy`."""
    labels = cast(SingleLabels, spec.labels)
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


@compat.outside_graphs  # traced, the loop would be unrolled into a graph of all chunks
def own_linear_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearLossSpec) -> Tensor:
    """Computes the summed loss chunk by chunk (`linear_chunks`)."""
    # Determined here, because grad mode is off inside of an `autograd.Function`.
    needs_grad = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in (hidden, weight, bias)]
    return cast(Tensor, LinearLoss.apply(hidden, weight, bias, spec, needs_grad))


def find_backend(name: str, z_loss: float, ranks: int) -> LossBackend:
    """Returns the function of a backend.

    Raises:
        ValueError: the name is unknown; or it is "torch", and this torch has no `F.linear_cross_entropy`, `z_loss` is
            not 0, or there are several ranks.
    """
    if name not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}; got {name!r}")
    if name == "torch" and (z_loss or ranks > 1 or not hasattr(nn, "LinearCrossEntropyOptions")):
        raise ValueError(
            "backend 'torch' has no z_loss, and needs torch 2.13 and one rank; "
            f"got z_loss={z_loss}, torch {torch.__version__} and {ranks} ranks"
        )
    return torch_linear_loss if name == "torch" else own_linear_loss


def matmul_dtype(hidden: Tensor) -> torch.dtype:
    """Returns the dtype of `hidden`, or autocast's, which applies to every dtype except float64."""
    is_lowered = autocast_enabled(hidden) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(hidden.device.type) if is_lowered else hidden.dtype


def check(
    hidden: Tensor, weight: Tensor, label_shape: tuple[int, ...], bias: Tensor | None, chunk: int | None, ranks: int
) -> None:
    """Raises ValueError for shapes and dtypes that do not match, or a chunk below 1. Needs no device sync.

    Args:
        label_shape: (B, T) of the labels of all ranks' tokens, with or without padding to a multiple of the ranks.
    """
    check_local("hidden", hidden)
    rank_tokens = (*label_shape[:1], *(ceil(n / ranks) for n in label_shape[1:]))
    expected = rank_tokens, (weight.shape[0], hidden.shape[-1]), weight.shape[:1]
    actual = hidden.shape[:-1], weight.shape, weight.shape[:1] if bias is None else bias.shape
    if hidden.ndim != 3 or actual != expected:
        hidden_shape = f"[B, ceil(T / {ranks}), E], with this rank's rows of V:" if ranks > 1 else "[B, T, E],"
        shapes = [hidden.shape, weight.shape, label_shape, *([] if bias is None else [bias.shape])]
        raise ValueError(
            f"hidden {hidden_shape} weight [V, E], labels [B, T] and bias [V] are needed; "
            f"got {', '.join(str(tuple(shape)) for shape in shapes)}"
        )
    dtypes = [x.dtype for x in (hidden, weight, bias) if x is not None]
    if not autocast_enabled(hidden) and len({*dtypes}) > 1:
        raise ValueError(f"hidden, weight and bias need one dtype outside of autocast; got {dtypes}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 token; got {chunk}")
