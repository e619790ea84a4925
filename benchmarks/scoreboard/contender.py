"""What a contender says of itself. To add one, subclass `Contender` in a file of contenders/."""

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
"""What our own oracle takes, too."""


class Contender:
    """One way to attend over shards; an instance is for one setting, on one rank. Override `attend`, and what differs.

    What a class does not offer, its library has no way to ask for. Whatever it offers and then raises is a refusal.
    """

    name: ClassVar[str]
    requirements: ClassVar[tuple[str, ...]] = ()
    """Pinned, for a throwaway environment; none: the environment of the workspace."""
    alone: ClassVar[tuple[str, ...]] = ()
    """Likewise, but without what they depend on."""
    modules: ClassVar[tuple[str, ...]] = ()
    """Imported once, before ranks are forked."""
    standin: ClassVar[bool] = False
    """Whether flash-attn's functions come from standin/, on the CPU."""
    masks: ClassVar[tuple[str, ...]] = MASKS[:4]
    layouts: ClassVar[tuple[str, ...]] = ("contiguous",)
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    ranks: ClassVar[tuple[int, ...]] = RANKS
    batch: ClassVar[int] = 2
    forward_only: ClassVar[bool] = False
    note: ClassVar[str] = ""
    """How it is called, and what a reader should know."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @classmethod
    def settings(cls) -> Iterator[Setting]:
        """All that it is run on. An uneven length is tried in one dtype, with as many key/value heads."""
        for mask, layout, heads, dtype, ranks in product(cls.masks, cls.layouts, HEADS, cls.dtypes, cls.ranks):
            if mask != "uneven" or (heads == HEADS[0] and dtype == cls.dtypes[-1] and ranks > 1):
                yield Setting(mask, layout, heads, dtype, ranks)

    def method(self) -> ConformingMethod:
        """What the conformance suite calls."""
        return self

    @property
    def shard(self) -> int:
        return dist.get_rank()

    def layout(self, length: int, kind: str) -> SequenceLayout:
        """Who holds which tokens."""
        return getattr(SequenceLayout, kind)(length, dist.get_world_size())

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """This rank's out [B, T, H, D] of its q [B, T, H, D], k and v [B, T, K, D]; differentiable, if it can be."""
        raise NotImplementedError

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **_: Any) -> Any:
        """As the suite calls a method. No contender is asked for its lse."""
        out = self.attend(q, k, v)
        return (out,) if return_lse else out


def contenders() -> dict[str, type[Contender]]:
    """By name, in the order of the files in contenders/ and of the classes in each."""
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
    """Who sees whom in a whole sequence, bool [N, N]: for contenders that take any mask."""
    positions = torch.arange(length)
    return setting.case().mask.visible(positions, positions)
