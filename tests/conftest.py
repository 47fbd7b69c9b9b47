"""The same examples every time: a red build must mean that the code changed, not the dice."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
