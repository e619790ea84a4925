from hypothesis import settings

from armillary.core.testing.plugin import no_group_left, one_thread, worlds

__all__ = ["no_group_left", "one_thread", "worlds"]

settings.register_profile("any machine", deadline=None)  # no test may depend on how long something takes
settings.load_profile("any machine")
