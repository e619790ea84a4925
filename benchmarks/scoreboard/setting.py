"""The cases of every contender: the product of masks, layouts, heads, dtypes and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from armillary.attention import AttentionMask
from conformance import Case

LENGTH, UNEVEN_LENGTH, HEAD_DIM, WINDOW = 64, 61, 64, 20
DOCUMENTS = (0, 16, 40, 64)
"""Multiples of 8, so that documents split into two parts for each of four ranks."""
MASKS = ("full", "causal", "window", "documents", "uneven")
"""`window` and `documents` are causal too; `uneven` is full, of a length that no number of ranks but 1 divides."""
HEADS = ((8, 8), (8, 4), (12, 3))
"""(H, K): as many key heads, fewer, and numbers that neither two nor four ranks divide."""
DTYPES = ("float64", "float32", "float16", "bfloat16")
RANKS = (1, 2, 4)


@dataclass(frozen=True)
class Setting:
    """One case: `str` names it, as in "causal/zigzag/8x4/bfloat16/4", and `read` takes that name."""

    mask: str
    layout: str
    heads: tuple[int, int]
    dtype: str
    ranks: int

    @classmethod
    def read(cls, text: str) -> Self:
        mask, layout, heads, dtype, ranks = text.split("/")
        query_heads, key_heads = heads.split("x")
        return cls(mask, layout, (int(query_heads), int(key_heads)), dtype, int(ranks))

    def __str__(self) -> str:
        return f"{self.mask}/{self.layout}/{self.heads[0]}x{self.heads[1]}/{self.dtype}/{self.ranks}"

    @property
    def causal(self) -> bool:
        return self.mask not in ("full", "uneven")

    @property
    def window(self) -> int | None:
        """The number of keys before its own position that a query sees."""
        return WINDOW if self.mask == "window" else None

    @property
    def length(self) -> int:
        return UNEVEN_LENGTH if self.mask == "uneven" else LENGTH

    @property
    def documents(self) -> tuple[int, ...]:
        """Document boundaries; of a single document for masks without documents."""
        return DOCUMENTS if self.mask == "documents" else (0, self.length)

    def case(self, batch: int = 2, forward_only: bool = False) -> Case:
        """The case of the conformance suite."""
        return Case(
            batch=batch,
            length=self.length,
            heads=self.heads[0],
            kv_heads=self.heads[1],
            head_dim=HEAD_DIM,
            value_dim=HEAD_DIM,
            dtype=getattr(torch, self.dtype),
            mask=AttentionMask(
                self.causal,
                window=None if self.window is None else (self.window, None),
                documents=self.documents if self.mask == "documents" else None,
            ),
            kind=self.layout,
            needs="" if forward_only else "qkv",
        )
