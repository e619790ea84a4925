"""armillary's methods, on the layouts of other libraries."""

import torch.distributed as dist
from contender import Contender
from setting import MASKS

from armillary.attention import build_attention
from armillary.core.testing import mesh
from conformance import ConformingMethod


class ArmillaryMethod(Contender):
    name = "armillary, ring"
    masks = MASKS
    layouts = ("contiguous", "zigzag")
    dtypes = ("float64", "float32", "bfloat16")
    note = "the method that `build_attention` gives by this name; its lse is held to the oracle too"
    method_name = "ring"

    def method(self) -> ConformingMethod:
        ranks = dist.get_world_size()
        if self.method_name == "usp":
            return build_attention("usp", mesh(ring=ranks // 2, ulysses=2))
        on_heads = self.method_name in ("ulysses", "upipe")
        return build_attention(self.method_name, mesh(ulysses=ranks) if on_heads else mesh(ring=ranks))


class TokenRing(ArmillaryMethod):
    name = "armillary, token_ring"
    method_name = "token_ring"


class WallFacer(ArmillaryMethod):
    name = "armillary, wallfacer"
    method_name = "wallfacer"


class Ulysses(ArmillaryMethod):
    name = "armillary, ulysses"
    method_name = "ulysses"


class UPipe(ArmillaryMethod):
    name = "armillary, upipe"
    method_name = "upipe"


class Usp(ArmillaryMethod):
    name = "armillary, usp"
    method_name = "usp"
    ranks = (4,)
