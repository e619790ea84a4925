"""diffusers' context parallelism, called like in its models: `dispatch_attention_fn` with a `ParallelConfig`."""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from contender import BASE, HALVES, Contender
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@cache
def parallel_config(ring: int, ulysses: int, anything: bool) -> Any:
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig

    kinds = {"ring_anything": anything and ulysses == 1, "ulysses_anything": anything and ring == 1}
    config = ParallelConfig(ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, **kinds))
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh_of(ring, ulysses, anything))
    return config


def mesh_of(ring: int, ulysses: int, named: bool) -> DeviceMesh:
    """A mesh ring x ulysses; if `named`, of backend "cpu:gloo", from which diffusers derives the device of sizes."""
    axes, ranks = ("ring", "ulysses"), torch.arange(ring * ulysses).view(ring, ulysses)
    if not named:
        return DeviceMesh("cpu", ranks, mesh_dim_names=axes)
    full = dist.new_group(backend="cpu:gloo")
    alone = [dist.new_group([rank], backend="cpu:gloo") for rank in range(dist.get_world_size())][dist.get_rank()]
    groups = [full, alone] if ulysses == 1 else [alone, full]
    return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=axes)


class Ring(Contender):
    name = "diffusers, ring"
    requirements = (*BASE, "diffusers==0.42.1")
    modules = ("diffusers.models.attention_dispatch",)
    standin = True
    masks = ("full", "causal", "window")
    dtypes = HALVES
    ranks = (2, 4)
    note = '`dispatch_attention_fn(backend="flash")` with `ring_degree`; the window by `attention_kwargs`'
    backend, anything = "flash", False

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        window = None if self.setting.window is None else {"window_size": (self.setting.window, 0)}
        return dispatch_attention_fn(
            *(q, k, v),
            is_causal=self.setting.mask == "causal",  # windows have both sides set
            enable_gqa=q.shape[2] != k.shape[2],
            attention_kwargs=window,
            backend=self.backend,
            parallel_config=parallel_config(*self.degrees(), self.anything),
        )

    def degrees(self) -> tuple[int, int]:
        return dist.get_world_size(), 1


class RingAnything(Ring):
    name = "diffusers, ring anything"
    masks = ("full", "causal", "window", "uneven")
    forward_only = True
    note = "the same with `ring_anything`: any length; forward only, as its backward raises"
    anything = True


class UlyssesFlash(Ring):
    name = "diffusers, ulysses"
    note = "the same with `ulysses_degree`"

    def degrees(self) -> tuple[int, int]:
        return 1, dist.get_world_size()


class UlyssesAnything(UlyssesFlash):
    name = "diffusers, ulysses anything"
    masks = ("full", "causal", "window", "uneven")
    forward_only = True
    note = "the same with `ulysses_anything`: any length, any number of heads; forward only, as its backward raises"
    anything = True


class UlyssesNative(UlyssesFlash):
    name = "diffusers, ulysses native"
    standin = False
    masks = ("full", "causal")
    dtypes = ("float64", "float32", "bfloat16")
    note = 'the same with `backend="native"`: torch\'s own attention, no stand-in'
    backend = "native"


class Unified(Ring):
    name = "diffusers, unified"
    ranks = (4,)
    note = "the same with both degrees 2"

    def degrees(self) -> tuple[int, int]:
        return 2, 2
