"""Text from a model: enough to look at what was trained, and to read a prompt longer than one device holds.

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
    """What follows the prompt: [B, new_tokens], the same on every rank.

    All ranks of the attention method, with the same arguments, must call it, and under FSDP those of all other axes
    with as many tokens to come. Each computes the prompt's tokens of its shard and keeps their keys and values, and all
    run each new token.

    Args:
        model: on a device, plain or under FSDP. It stays as it is: attention, checkpoint policy, training flags.
        ids: the whole prompt [B, N], integers, the same on every rank; all rows equally long.
        new_tokens: how many.
        layout: of the prompt, over all ranks of the method; `attend.layout(N)` unless given.
        mask: causal unless given; with a window, maybe.
        temperature, top_k, top_p: how to choose, as in `Sampling`; the likeliest token, unless given.
        seed: of what is drawn. The same seed gives the same tokens, on devices of one type.
        stop: ids after which a row has ended; the rest of it is filled with that id. Under FSDP all ranks must come to
            the same number of steps: give none where others have other prompts.

    Bytes sent, at most: for the prompt those of the method, and (P - 1) B E e; for each new token (P - 1) B H (D e + 4)
    a layer (8 for 4 in float64), and (P - 1) 8 B.

    Raises:
        ValueError: any of this does not fit, or GPT has not learned so many positions. Raised before any communication.
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
    """As `generate`, token by token: yields [B] as soon as it is known, and ends early once all rows have ended.

    Arguments are checked at once; the prompt is computed when the first token is asked for. The model is in use only
    meanwhile, not between tokens.
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
    for left in reversed(range(new_tokens)):
        chosen = decoding.broadcast_token(sampling.choose(logits, generator))
        token = torch.where(over, token, chosen)
        over = over | torch.isin(token, stop)
        yield token
        if left == 0 or (len(stop) and bool(over.all())):
            return
        logits = decoding.step(token)


def check(model: Llama | GPT, ids: Tensor, new_tokens: int) -> None:
    """Refuses prompts that are none, and more tokens than GPT has positions for."""
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
