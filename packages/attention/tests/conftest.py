from hypothesis import settings

from armillary.attention.check.plugin import context_parallel_check

__all__ = ["context_parallel_check"]

settings.register_profile("any machine", deadline=None)  # no test may depend on timing
settings.load_profile("any machine")
