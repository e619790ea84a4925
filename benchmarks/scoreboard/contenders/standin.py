"""The stand-in for flash-attn on one rank: its errors would be those of no other contender."""

from contender import BASE, HALVES, Contender
from torch import Tensor


class Standin(Contender):
    name = "flash-attn's stand-in"
    requirements = BASE
    standin = True
    masks = ("full", "causal", "window")
    dtypes = HALVES
    ranks = (1,)
    note = "no contender: `flash_attn_func` of standin/, on one rank, so that no error of others is due to it"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn import flash_attn_func

        window = (-1, -1) if self.setting.window is None else (self.setting.window, 0)
        return flash_attn_func(q, k, v, causal=self.setting.causal, window_size=window)
