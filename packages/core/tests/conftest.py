from hypothesis import settings

from armillary.core.testing.plugin import one_thread, worlds

__all__ = ["one_thread", "worlds"]

settings.register_profile("any machine", deadline=None)  # no test may depend on how long something takes
settings.load_profile("any machine")
