"""Stands in for flash-attn, which needs CUDA: the same functions and the same results, computed plainly in float32.

As flash-attn has it: float16 and bfloat16 only; masks aligned at the bottom right; a query that sees no key gives 0.
"""

from flash_attn.flash_attn_interface import flash_attn_func, flash_attn_varlen_func

__version__ = "2.8.3+standin"
__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
