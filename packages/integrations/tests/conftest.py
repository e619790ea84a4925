from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # no test may depend on how long something takes
settings.load_profile("any machine")
