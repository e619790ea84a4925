"""ring-flash-attention: rings over flash-attn, and the all-gather of LLaMA 3 for packed rows."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from contender import BASE, HALVES, Contender
from torch import Tensor

from armillary.core import SequenceLayout


class RingFlash(Contender):
    name = "ring-flash-attention, ring"
    requirements = (*BASE, "transformers==4.57.1")
    alone = ("ring-flash-attn==0.1.8",)
    modules = ("ring_flash_attn",)
    standin = True
    dtypes = HALVES
    ranks = (2, 4)  # a ring of one sends to itself, which gloo does not support
    masks = ("full", "causal", "window")
    note = "`ring_flash_attn_func`; `window_size` is among its arguments"
    function = "ring_flash_attn_func"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.call(q, k, v)

    def call(self, *arguments: Any) -> Any:
        import ring_flash_attn

        window = (-1, -1) if self.setting.window is None else (self.setting.window, 0)
        function: Callable[..., Any] = getattr(ring_flash_attn, self.function)
        return function(*arguments, causal=self.setting.causal, window_size=window, group=dist.group.WORLD)


class ZigzagFlash(RingFlash):
    name = "ring-flash-attention, zigzag"
    masks = ("causal", "window")
    layouts = ("zigzag",)
    note = "`zigzag_ring_flash_attn_func`"
    function = "zigzag_ring_flash_attn_func"


class StripeFlash(RingFlash):
    name = "ring-flash-attention, stripe"
    masks = ("causal", "window")
    layouts = ("striped",)
    note = "`stripe_flash_attn_func`"
    function = "stripe_flash_attn_func"


class RingVarlen(RingFlash):
    """Each document is split over all ranks, so local boundaries are the global ones divided by the ranks."""

    name = "ring-flash-attention, ring varlen"
    masks = ("full", "causal", "window", "documents")
    batch = 1
    note = "`ring_flash_attn_varlen_func`: packed rows, each document cut into equal parts for all ranks"
    function = "ring_flash_attn_varlen_func"
    parts = staticmethod(SequenceLayout.contiguous)

    def layout(self, length: int, kind: str) -> SequenceLayout:
        ends, ranks = self.setting.documents, dist.get_world_size()
        cuts = [(a, self.parts(b - a, ranks)) for a, b in pairwise(ends)]
        return SequenceLayout(
            [[range(a + s.start, a + s.stop) for a, cut in cuts for s in cut.spans(rank)] for rank in range(ranks)]
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        boundaries = torch.tensor(self.setting.documents, dtype=torch.int32) // dist.get_world_size()
        longest = int(boundaries.diff().max())
        return self.call(q[0], k[0], v[0], boundaries, longest)[None]


class ZigzagVarlen(RingVarlen):
    name = "ring-flash-attention, zigzag varlen"
    masks = ("causal", "window", "documents")
    layouts = ("zigzag",)
    note = "`zigzag_ring_flash_attn_varlen_func`: packed rows, each document cut in zigzag"
    function = "zigzag_ring_flash_attn_varlen_func"
    parts = staticmethod(SequenceLayout.zigzag)


class Llama3Varlen(RingFlash):
    name = "ring-flash-attention, llama3 varlen"
    masks = ("full", "causal", "window", "documents")
    ranks = (1, 2, 4)
    batch = 1
    note = "`llama3_flash_attn_varlen_func` with `llama3_flash_attn_prepare_cu_seqlens`: packed rows, cut anywhere"
    function = "llama3_flash_attn_varlen_func"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens as prepare

        boundaries = torch.tensor(self.setting.documents, dtype=torch.int32)
        *prepared, keys = prepare(boundaries, self.setting.causal, dist.get_rank(), dist.get_world_size())
        return self.call(q[0], k[0], v[0], *prepared, 1, keys)[None]
