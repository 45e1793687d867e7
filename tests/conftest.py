"""Property tests: no deadline, since other processes share the machine, and the same examples in every run."""

from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")
