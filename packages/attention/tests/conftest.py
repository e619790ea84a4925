from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # no test may depend on timing
settings.load_profile("any machine")
