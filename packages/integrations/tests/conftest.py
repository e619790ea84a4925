import sys

import pytest
from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # no test may depend on timing
settings.load_profile("any machine")


@pytest.fixture(scope="module", autouse=True)
def quiet():
    if transformers := sys.modules.get("transformers"):
        transformers.logging.set_verbosity_error()
