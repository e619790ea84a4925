from armillary.core.testing.plugin import one_thread

__all__ = ["one_thread"]
