from armillary.core.testing.plugin import no_group_left, one_thread, worlds

__all__ = ["no_group_left", "one_thread", "worlds"]
