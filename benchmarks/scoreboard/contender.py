"""The description of a contender. To add one, subclass `Contender` in a file of contenders/."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from setting import DTYPES, HEADS, MASKS, RANKS, Setting
from torch import Tensor

from armillary.core import SequenceLayout
from conformance import ConformingMethod

HERE = Path(__file__).parent
HALVES = ("float16", "bfloat16")
BASE = ("torch==2.15.0", "numpy==2.4.6", "einops==0.8.2")
"""Requirements of our oracle."""


class Contender:
    """One way to attend over shards. An instance is for one setting on one rank. Subclasses override `attend`.

    A class lists only options that the library's interface has. An exception for a listed option is a refusal.
    """

    name: ClassVar[str]
    requirements: ClassVar[tuple[str, ...]] = ()
    """Pinned requirements of a temporary environment; empty: the environment of the workspace."""
    alone: ClassVar[tuple[str, ...]] = ()
    """Pinned requirements that are installed without their dependencies."""
    modules: ClassVar[tuple[str, ...]] = ()
    """Modules that are imported once, before ranks are forked."""
    standin: ClassVar[bool] = False
    """True if flash-attn's functions come from standin/, on the CPU."""
    masks: ClassVar[tuple[str, ...]] = MASKS[:4]
    layouts: ClassVar[tuple[str, ...]] = ("contiguous",)
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    ranks: ClassVar[tuple[int, ...]] = RANKS
    batch: ClassVar[int] = 2
    forward_only: ClassVar[bool] = False
    note: ClassVar[str] = ""
    """How the library is called, and notes for the reader."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @classmethod
    def settings(cls) -> Iterator[Setting]:
        """All settings of the contender. Uneven lengths run in one dtype, with one number of heads."""
        for mask, layout, heads, dtype, ranks in product(cls.masks, cls.layouts, HEADS, cls.dtypes, cls.ranks):
            if mask != "uneven" or (heads == HEADS[0] and dtype == cls.dtypes[-1] and ranks > 1):
                yield Setting(mask, layout, heads, dtype, ranks)

    def method(self) -> ConformingMethod:
        """The method that the conformance suite calls."""
        return self

    @property
    def shard(self) -> int:
        return dist.get_rank()

    def layout(self, length: int, kind: str) -> SequenceLayout:
        """The positions of each shard."""
        return getattr(SequenceLayout, kind)(length, dist.get_world_size())

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Local out [B, T, H, D] of local q [B, T, H, D], k and v [B, T, K, D]; differentiable if supported."""
        raise NotImplementedError

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **_: Any) -> Any:
        """The suite's call of a method. It never requests a contender's lse."""
        out = self.attend(q, k, v)
        return (out,) if return_lse else out


def contenders() -> dict[str, type[Contender]]:
    """Contenders by name, ordered by file in contenders/ and by class."""
    sys.path[:0] = [] if str(HERE / "contenders") in sys.path else [str(HERE / "contenders")]
    files = sorted((HERE / "contenders").glob("*.py"))
    modules = [import_module(file.stem) for file in files]
    classes = [cls for module in modules for cls in vars(module).values() if _is_contender(cls, module.__name__)]
    return {cls.name: cls for cls in classes}


def _is_contender(value: Any, module: str) -> bool:
    return (
        isinstance(value, type)
        and issubclass(value, Contender)
        and value.__module__ == module
        and "name" in vars(value)
    )


def sees(setting: Setting, length: int) -> Tensor:
    """Visible (query, key) pairs of the full sequence, bool [N, N], for contenders that take any mask."""
    positions = torch.arange(length)
    return setting.case().mask.visible(positions, positions)
