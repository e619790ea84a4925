from armillary.core.testing.plugin import one_thread, worlds

__all__ = ["one_thread", "worlds"]
