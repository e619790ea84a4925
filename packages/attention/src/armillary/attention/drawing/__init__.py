"""Pictures of masks, of layouts, and of who computes what; need matplotlib."""

from armillary.attention.drawing.draw import draw_mask
from armillary.attention.drawing.shares import Computed, shares_of

__all__ = ["Computed", "draw_mask", "shares_of"]
