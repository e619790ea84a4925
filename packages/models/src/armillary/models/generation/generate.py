"""Text generation, also from prompts that exceed the memory of one device.

for token in stream(model, ids, new_tokens=100, temperature=0.8, top_p=0.95): ...    # [B] at a time
tokens = generate(model, ids, new_tokens=100)                                       # [B, 100]
tokens = generate(model, ids, new_tokens=100, temperature=1.0, completions=8)       # [8 B, 100], the prompt cached once
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from armillary.attention import AttentionMask
from armillary.core import SequenceLayout
from armillary.core.validation import integer
from armillary.models.generation.decoding import Decoding
from armillary.models.generation.sampling import Sampling
from armillary.models.gpt import GPT
from armillary.models.llama import Llama


def generate(
    model: Llama | GPT,
    ids: Tensor,
    *,
    new_tokens: int,
    layout: SequenceLayout | None = None,
    mask: AttentionMask | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: Sequence[int] = (),
    completions: int = 1,
) -> Tensor:
    """Returns the tokens that follow each prompt: [B n, new_tokens], the same on every rank.

    All ranks of the attention method must call it with the same arguments. Under FSDP, ranks of other axes must call it
    too, with the same `new_tokens`. Each rank runs its shard of the prompt and caches the shard's keys and values.
    Every rank runs each new token.

    Args:
        model: a plain model, or one on a mesh (`parallelize`). Its attention, checkpoint policy and `training` flags
            are restored afterwards.
        ids: the whole prompts [B, N], integers, the same on every rank. All prompts have N tokens.
        new_tokens: number of tokens to generate.
        layout: layout of the prompt, as in `Decoding.prompt`; by default `attend.layout(N)`.
        mask: causal by default. May have a window, unless the model has layers with a state.
        temperature, top_k, top_p: as in `Sampling`; by default the most likely token is taken.
        seed: seed of random draws. The same seed gives the same tokens on devices of one type.
        stop: ids of tokens that end a row; the rest of the row repeats the id. Under FSDP all ranks must run the same
            number of steps, so pass no ids if ranks have different prompts.
        completions: n, the number of completions of each prompt. They are n consecutive rows of the result. The prompt
            is computed and cached once. Completion j has the tokens of a single completion with seed + j.

    Bytes of an attention layer's cache, on a rank with T tokens of the prompt and room for R new ones:
    2 (B T + B n R) K D e. Of a layer with a state, on every rank: B n (H Dk Dv a + (W - 1) C e), with `a` bytes per
    element of a state, and a convolution of width W over C channels (`CachedStates`).

    Bytes sent over the P ranks of the method, at most: for the prompt those of the layers without a cache,
    (P - 1) B E e, and (P - 1) B (W - 1) C e in each layer with a state; for each new token (P - 1) B n H (D e + 4) in
    each attention layer (8 instead of 4 in float64), and (P - 1) 8 B n.

    Raises:
        ValueError: arguments do not fit, or a GPT has too few learned positions. Raised before any communication.
    """
    columns = list(
        stream(
            model,
            ids,
            new_tokens=new_tokens,
            layout=layout,
            mask=mask,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop,
            completions=completions,
        )
    )
    return torch.stack(columns + columns[-1:] * (new_tokens - len(columns)), dim=1)


def stream(
    model: Llama | GPT,
    ids: Tensor,
    *,
    new_tokens: int,
    layout: SequenceLayout | None = None,
    mask: AttentionMask | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: Sequence[int] = (),
    completions: int = 1,
) -> Iterator[Tensor]:
    """Yields tokens [B n] one by one, and returns early when all rows have ended. Otherwise as `generate`.

    The call checks the arguments. The prompt is computed when the first token is requested. Between tokens, other code
    may call the model.
    """
    check(model, ids, new_tokens)
    sampling = Sampling(temperature, top_k, top_p)
    decoding = Decoding(model, max_new_tokens=new_tokens - 1, mask=mask, completions=completions)
    layout = decoding.layout_for(ids, layout)
    generators = [torch.Generator(ids.device).manual_seed(seed + j) for j in range(completions)]
    ends = torch.tensor(list(stop), dtype=torch.long, device=ids.device)
    return _generate(decoding, ids, layout, new_tokens, sampling, generators, ends)


def _generate(
    decoding: Decoding,
    ids: Tensor,
    layout: SequenceLayout | None,
    new_tokens: int,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    stop: Tensor,
) -> Iterator[Tensor]:
    """The generator behind `stream`, with checked arguments. `generators` has one for each completion of a prompt."""
    # The prompt is computed once; all of its completions start from the same logits.
    logits = decoding.prompt(ids, layout).repeat_interleave(len(generators), 0)
    token = ids[:, -1].repeat_interleave(len(generators))
    ended = torch.zeros_like(token, dtype=torch.bool)
    for remaining in reversed(range(new_tokens)):
        # Kernels of several devices may round logits differently, so all ranks take the first rank's token.
        next_token = decoding.broadcast_token(sampling.choose(logits, generators))
        token = torch.where(ended, token, next_token)  # a row that has ended repeats its last token
        ended = ended | torch.isin(token, stop)
        yield token
        if remaining == 0 or (len(stop) and bool(ended.all())):
            return
        logits = decoding.step(token)


def check(model: Llama | GPT, ids: Tensor, new_tokens: int) -> None:
    """Raises ValueError for an invalid prompt or number of tokens, and for more tokens than a GPT has positions."""
    if ids.ndim != 2 or 0 in ids.shape or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"ids must be integers [B, N] with B and N above 0; got {tuple(ids.shape)} of {ids.dtype}")
    integer("new_tokens", new_tokens, 1)
    low, high = (int(x) for x in ids.aminmax())
    if low < 0 or high >= model.config.vocab_size:
        raise ValueError(f"ids run from {low} to {high}; the vocabulary is 0..{model.config.vocab_size - 1}")
    if isinstance(model, GPT) and ids.shape[1] + new_tokens > model.config.max_positions:
        raise ValueError(
            f"a prompt of {ids.shape[1]} and {new_tokens} new tokens, but the GPT has learned "
            f"max_positions={model.config.max_positions}"
        )
