"""yunchang (long-context-attention): USP, its ring and Ulysses parts alone, and its torch backends."""

from functools import cache
from typing import Any

import torch.distributed as dist
from contender import BASE, HALVES, Contender
from torch import Tensor

from armillary.core import SequenceLayout


@cache
def groups(ulysses: int, ring: int) -> None:
    """Sets yunchang's global groups."""
    from yunchang import set_seq_parallel_pg

    set_seq_parallel_pg(ulysses, ring, dist.get_rank(), dist.get_world_size())


class Usp(Contender):
    name = "yunchang, usp zigzag"
    requirements = BASE
    alone = ("yunchang==0.6.4",)
    modules = ("yunchang",)
    standin = True
    dtypes = HALVES
    masks = ("causal", "window")
    layouts = ("zigzag",)
    ranks = (4,)
    note = '`LongContextAttention(ring_impl_type="zigzag", attn_type=FA)` called with `window_size`, ring 2 x ulysses 2'
    ring_type, backend, ulysses = "zigzag", "FA", 2

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = (-1, -1) if self.setting.window is None else (self.setting.window, 0)
        return self.module()(q, k, v, causal=self.setting.causal, window_size=window)

    def module(self) -> Any:
        from yunchang import LongContextAttention
        from yunchang.kernels import AttnType

        groups(self.degree, dist.get_world_size() // self.degree)
        return LongContextAttention(ring_impl_type=self.ring_type, attn_type=AttnType[self.backend])

    @property
    def degree(self) -> int:
        return self.ulysses

    def layout(self, length: int, kind: str) -> SequenceLayout:
        """The layout of `EXTRACT_FUNC_DICT`: sharded over the ring, then each shard over ulysses."""
        return getattr(SequenceLayout, kind)(length, dist.get_world_size() // self.degree).refine(self.degree)


class UspBasic(Usp):
    name = "yunchang, usp"
    masks = ("full", "causal", "window")
    layouts = ("contiguous",)
    note = 'the same with `ring_impl_type="basic"`'
    ring_type = "basic"


class RingZigzag(Usp):
    name = "yunchang, ring zigzag"
    ranks = (2, 4)  # a ring of one sends to itself, which gloo does not support
    note = 'the same with `ring_impl_type="zigzag"`, all ranks on the ring'
    ulysses = 1


class RingStripe(RingZigzag):
    name = "yunchang, ring strip"
    layouts = ("striped",)
    note = 'the same with `ring_impl_type="strip"`'
    ring_type = "strip"


class UlyssesPart(UspBasic):
    name = "yunchang, UlyssesAttention"
    ranks = (1, 2, 4)
    note = "`UlyssesAttention(group, attn_type=FA)`"

    @property
    def degree(self) -> int:
        return dist.get_world_size()

    def module(self) -> Any:
        from yunchang import UlyssesAttention
        from yunchang.kernels import AttnType

        return UlyssesAttention(dist.group.WORLD, attn_type=AttnType[self.backend])


class TorchMath(UspBasic):
    name = "yunchang, ring torch math"
    ranks = (2, 4)
    standin = False
    dtypes = ("float64", "float32", "bfloat16")
    masks = ("full", "causal")
    forward_only = True
    note = "`LongContextAttention(attn_type=TORCH_MATH)`, all ranks on the ring; forward only, as its backward raises"
    backend, ulysses = "TORCH_MATH", 1


class TorchMathTrained(TorchMath):
    name = "yunchang, ring torch math backward"
    dtypes = ("float32",)
    ranks = (2,)
    forward_only = False
    note = "the same with its backward"
