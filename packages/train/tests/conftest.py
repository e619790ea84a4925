from armillary.core.testing.plugin import worlds

__all__ = ["worlds"]
