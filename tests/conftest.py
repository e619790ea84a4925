from recovery import undisturbed

from armillary.core.testing.plugin import worlds

__all__ = ["undisturbed", "worlds"]
