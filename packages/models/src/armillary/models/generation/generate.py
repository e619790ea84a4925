"""Text generation, also from a prompt longer than one device holds.

for token in stream(model, ids, new_tokens=100, temperature=0.8, top_p=0.95): ...    # [B] at a time
tokens = generate(model, ids, new_tokens=100)                                       # [B, 100]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from armillary.attention import AttentionMask
from armillary.core import SequenceLayout
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
) -> Tensor:
    """Returns the tokens that follow the prompt: [B, new_tokens], the same on every rank.

    All ranks of the attention method must call it with the same arguments, and under FSDP those of all other axes with
    as many new tokens. Each rank computes the prompt's tokens of its shard and caches their keys and values; all run
    each new token.

    Args:
        model: on a device, plain or under FSDP. Attention, checkpoint policy and training flags are unchanged after it.
        ids: the whole prompt [B, N], integers, the same on every rank; all rows equally long.
        new_tokens: number of tokens.
        layout: of the prompt, over all ranks of the method; `attend.layout(N)` by default.
        mask: causal by default; may have a window.
        temperature, top_k, top_p: as in `Sampling`; the most likely token by default.
        seed: of random draws. The same seed gives the same tokens, on devices of one type.
        stop: ids that end a row, whose remaining tokens repeat that id. Under FSDP all ranks must take the same number
            of steps: pass none if other ranks have other prompts.

    Bytes sent, at most: for the prompt those of the method, and (P - 1) B E e; for each new token (P - 1) B H (D e + 4)
    a layer (8 for 4 in float64), and (P - 1) 8 B.

    Raises:
        ValueError: arguments that do not fit, or too few learned positions of a GPT. Raised before any communication.
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
) -> Iterator[Tensor]:
    """Yields tokens [B] as they are generated, and ends early once all rows have ended. Otherwise as `generate`.

    Arguments are checked at once; the prompt is computed when the first token is requested. Between tokens the model is
    free.
    """
    check(model, ids, new_tokens)
    sampling = Sampling(temperature, top_k, top_p)
    decoding = Decoding(model, max_new_tokens=new_tokens - 1, mask=mask)
    layout = decoding.layout_for(ids, layout)
    generator = torch.Generator(ids.device).manual_seed(seed)
    ends = torch.tensor(list(stop), dtype=torch.long, device=ids.device)
    return _tokens(decoding, ids, layout, new_tokens, sampling, generator, ends)


def _tokens(
    decoding: Decoding,
    ids: Tensor,
    layout: SequenceLayout | None,
    new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    stop: Tensor,
) -> Iterator[Tensor]:
    logits = decoding.prompt(ids, layout)
    token = ids[:, -1]
    over = torch.zeros_like(token, dtype=torch.bool)
    for remaining in reversed(range(new_tokens)):
        chosen = decoding.broadcast_token(sampling.choose(logits, generator))
        token = torch.where(over, token, chosen)
        over = over | torch.isin(token, stop)
        yield token
        if remaining == 0 or (len(stop) and bool(over.all())):
            return
        logits = decoding.step(token)


def check(model: Llama | GPT, ids: Tensor, new_tokens: int) -> None:
    """Refuses invalid prompts, and more tokens than a GPT has positions."""
    if ids.ndim != 2 or 0 in ids.shape or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"ids must be integers [B, N], at least one of them; got {tuple(ids.shape)} of {ids.dtype}")
    if new_tokens < 1:
        raise ValueError(f"new_tokens={new_tokens}: it must be at least 1")
    low, high = (int(x) for x in ids.aminmax())
    if low < 0 or high >= model.config.vocab_size:
        raise ValueError(f"ids from {low} to {high}; the model knows 0..{model.config.vocab_size - 1}")
    if isinstance(model, GPT) and ids.shape[1] + new_tokens > model.config.max_positions:
        raise ValueError(
            f"a prompt of {ids.shape[1]} and {new_tokens} new tokens, but max_positions={model.config.max_positions} "
            f"are all that are learned"
        )
