"""Text generation with a cache: one forward pass over the whole prompts, then one for each new token.

for token in stream(model, ids, new_tokens=100, temperature=0.8, top_p=0.95): ...    # [B] at a time
tokens = generate(model, ids, new_tokens=100)                                       # [B, 100]

Nothing is sharded: each rank computes whole prompts and has its own cache, so a prompt must fit on one device. For n
completions of each prompt pass n rows: `ids.repeat_interleave(n, 0)`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.attention import AttentionMask, Local, Method
from armillary.core import SequenceLayout, accumulation_dtype, start_all_gather
from armillary.core.internal import check_local, integer, number
from armillary.models.block import AttentionFunction, Block, run_plainly
from armillary.models.gpt import GPT
from armillary.models.layers.state_mixers import Recurrence, StateMixer
from armillary.models.llama import Llama


def generate(
    model: Llama | GPT,
    ids: Tensor,
    *,
    new_tokens: int,
    mask: AttentionMask | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: Sequence[int] = (),
) -> Tensor:
    """Returns the tokens that follow each prompt: [B, new_tokens], the same on every rank.

    All ranks of the attention method must call it with the same arguments. Under FSDP, ranks of other axes must call it
    too, with the same `new_tokens`.

    Args:
        model: a plain model, or one on a mesh (`parallelize`). Its attention, checkpoint policy and `training` flags
            are restored afterwards.
        ids: the whole prompts [B, N], integers. All prompts have N tokens.
        new_tokens: number of tokens to generate.
        mask: causal by default. May have a window, unless the model has layers with a state.
        temperature, top_k, top_p: as in `Sampling`; by default the most likely token is taken.
        seed: seed of random draws. The same seed gives the same tokens on devices of one type.
        stop: ids of tokens that end a row; the rest of the row repeats the id. Under FSDP all ranks must run the same
            number of steps, so pass no ids if ranks have different prompts.

    Bytes of the cache: B (N + new_tokens) K (D + Dv) e in each attention layer, B (H Dk Dv a + (W - 1) C e) in each
    layer with a state, with `a` bytes per element of a state, and a convolution of width W over C channels.

    Bytes sent for each new token, beside those for sharded weights: at most (P - 1) 8 B on each axis of the method.

    Raises:
        ValueError: arguments do not fit, or a GPT has too few learned positions. Raised before any communication.
    """
    tokens = stream(
        model,
        ids,
        new_tokens=new_tokens,
        mask=mask,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop,
    )
    columns = list(tokens)
    return torch.stack(columns + columns[-1:] * (new_tokens - len(columns)), dim=1)


def stream(
    model: Llama | GPT,
    ids: Tensor,
    *,
    new_tokens: int,
    mask: AttentionMask | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: Sequence[int] = (),
) -> Iterator[Tensor]:
    """Yields tokens [B] one by one, and returns early when all rows have ended. Otherwise as `generate`.

    The call checks the arguments. The prompt is computed when the first token is requested. Between tokens, other code
    may call the model.
    """
    sampling = Sampling(temperature, top_k, top_p)
    mask = AttentionMask(causal=True) if mask is None else mask
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    check(model, blocks, ids, new_tokens, mask)
    ends = torch.tensor(list(stop), dtype=torch.long, device=ids.device)

    def tokens() -> Iterator[Tensor]:
        cached = CachedModel(model, blocks, mask, room=ids.shape[1] + new_tokens)
        generator = torch.Generator(ids.device).manual_seed(seed)
        logits, token = cached.logits(ids), ids[:, -1]
        ended = torch.zeros_like(token, dtype=torch.bool)
        for remaining in reversed(range(new_tokens)):
            # A row that has ended repeats its last token.
            token = torch.where(ended, token, cached.agree(sampling.choose(logits, generator)))
            ended = ended | torch.isin(token, ends)
            yield token
            if remaining == 0 or (len(ends) and bool(ended.all())):
                return
            logits = cached.logits(token[:, None])

    return tokens()


def check(model: Llama | GPT, blocks: Sequence[Block], ids: Tensor, new_tokens: int, mask: AttentionMask) -> None:
    """Raises ValueError for a prompt, a mask or a model that `stream` cannot continue."""
    check_local("ids", ids)
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
    # Without causality, a new token would change the outputs of earlier ones. Documents and patterns end with the
    # prompt. A state has seen all earlier tokens.
    has_states = any(isinstance(block.mixer, StateMixer) for block in blocks)
    if not mask.causal or mask.documents is not None or mask.pattern is not None or (mask.window and has_states):
        raise ValueError(f"mask={mask}: only causal masks can be continued, with a window if no layer has a state")
    for block in blocks:
        if not isinstance(block.attention, Method):
            kind = type(block.attention).__name__
            raise ValueError(f"attention {kind} is not an armillary method, so no cache can replace it; use Local()")


@dataclass(frozen=True)
class Sampling:
    """Options for the choice of the next token.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draws only from the `top_k` most likely tokens.
        top_p: draws only from the most likely tokens, as few as have a total probability of at least `top_p` (Holtzman
            et al., 2020).

    Raises:
        ValueError: the temperature is below 0 or not finite, top_k is not an integer of at least 1, or top_p is not
            in (0, 1].
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if number("temperature", self.temperature) < 0:
            raise ValueError(f"temperature={self.temperature}: it must be at least 0 (most likely token)")
        if self.top_k is not None:
            integer("top_k", self.top_k, 1)
        if self.top_p is not None and not 0 < number("top_p", self.top_p) <= 1:
            raise ValueError(f"top_p={self.top_p}: it must be above 0 and at most 1")

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Returns the next token of each row, logits [B, V] -> [B]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator)[:, 0]

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns each token's probability, logits [B, V] -> [B, V], in float32 or wider. Not for temperature 0."""
        # Sorted, the most likely token first. Its logit is subtracted, so that a tiny temperature does not overflow.
        scores, order = logits.to(accumulation_dtype(logits.dtype)).sort(dim=-1, descending=True, stable=True)
        scores = (scores - scores[:, :1]) / self.temperature
        if self.top_k is not None:
            scores[:, self.top_k :] = -torch.inf
        probabilities = scores.softmax(-1)
        if self.top_p is not None:
            # Drops a token if the more likely ones have probability top_p or more together. The first one always stays.
            probabilities = probabilities.masked_fill(probabilities.cumsum(-1) - probabilities >= self.top_p, 0)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter_(-1, order, probabilities)


class CachedModel:
    """A model with a cache for each layer, which the layers use only during `logits`."""

    def __init__(self, model: Llama | GPT, blocks: Sequence[Block], mask: AttentionMask, room: int) -> None:
        self.model, self.blocks, self.mask = model, blocks, mask
        # `room` is the largest number of tokens of a row, its prompt included.
        self.caches = [CachedStates() if isinstance(x.mixer, StateMixer) else CachedAttention(room) for x in blocks]
        self.axes = dict.fromkeys(axis for block in blocks for axis in cast(Method, block.attention).axes)
        # Number of cached tokens of each row.
        self.tokens = 0

    def logits(self, ids: Tensor) -> Tensor:
        """Runs the tokens that follow the cached ones, ids [B, T]. Returns logits [B, V] of the last one."""
        positions = torch.arange(self.tokens, self.tokens + ids.shape[1], device=ids.device)
        self.tokens += ids.shape[1]
        with self._use_caches():
            return self.model(ids, positions=positions, mask=self.mask, head=last_logits)[:, 0]

    def agree(self, token: Tensor) -> Tensor:
        """Returns the token [B] that the first rank has chosen. Bytes sent: see `generate`."""
        # Devices of several kinds may round logits differently.
        for axis in self.axes:
            sizes = [int(rank == 0) for rank in range(axis.size)]
            token = start_all_gather(token[:, None][:, : sizes[axis.rank]], axis, sizes).wait()[:, 0]
        return token

    @contextmanager
    def _use_caches(self) -> Generator[None]:
        """Context manager for one forward pass: attention through the caches, no dropout, no gradients."""
        original = [(block.attention, block.run) for block in self.blocks]
        training_modules = [module for module in self.model.modules() if module.training]
        # `training` is set module by module: `model.train()` at the end would also set modules that were in eval mode.
        try:
            for module in training_modules:
                module.training = False
            for block, cache in zip(self.blocks, self.caches, strict=True):
                block.attention, block.run = cast(AttentionFunction, cache), run_plainly
            with torch.no_grad():
                yield
        finally:
            for block, (original_attention, original_run) in zip(self.blocks, original, strict=True):
                block.attention, block.run = original_attention, original_run
            for module in training_modules:
                module.training = True


def last_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns logits [B, 1, V] of the last token; a model's `head`. Under tensor parallelism see `sharded_head`."""
    return F.linear(hidden[:, -1:], weight)


class CachedAttention:
    """A layer's attention: over the prompt in the first call, then one query over the cached keys in each call."""

    # [B, room, K, D]
    keys: Tensor
    # [B, room, K, Dv]
    values: Tensor

    def __init__(self, room: int) -> None:
        self.room, self.tokens = room, 0

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor:
        start, self.tokens = self.tokens, self.tokens + k.shape[1]
        if start == 0:
            self.keys, self.values = (x.new_empty((len(x), self.room, *x.shape[2:])) for x in (k, v))
        self.keys[:, start : self.tokens], self.values[:, start : self.tokens] = k, v
        if start == 0:
            return Local()(q, k, v, mask=mask)
        # The newest token sees all cached ones, or those of its window. So its attention needs no mask.
        width = None if mask.window is None else mask.window[0]
        visible = slice(0 if width is None else max(0, start - width), self.tokens)
        q, k, v = (x.transpose(1, 2) for x in (q, self.keys[:, visible], self.values[:, visible]))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


class CachedStates:
    """`StateOperations` that continue from the tokens of earlier calls: a state, and a convolution's last inputs."""

    def __init__(self) -> None:
        # The latest state: [B, H, Dk, Dv], or [B, H, D, Ns] of Mamba-2.
        self.state: Tensor | None = None
        # The convolution's last W - 1 inputs: [B, W - 1, C].
        self.tail: Tensor | None = None

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor:
        channels, width = weight.shape
        tail = x.new_zeros(len(x), width - 1, channels) if self.tail is None else self.tail
        inputs = torch.cat([tail, x], 1)
        self.tail = inputs[:, x.shape[1] :].clone()  # a copy, because a view would keep all inputs alive
        return F.conv1d(inputs.transpose(1, 2), weight[:, None], bias, groups=channels).transpose(1, 2)

    def recur(
        self, recurrence: Recurrence, inputs: Sequence[Tensor], mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor:
        out, self.state = recurrence(*inputs, initial_state=self.state)
        return out
