"""Pictures of masks and layouts, and of the work of each rank. Needs matplotlib."""

from armillary.attention.drawing.draw import draw_mask
from armillary.attention.drawing.shares import BlockWork, shares_of

__all__ = ["BlockWork", "draw_mask", "shares_of"]
